// The phase that attends: a block serves a part of the keys of one row of the batch and one KV head.
//
// The keys are read as in rows.cuh. What lies in the pool depends on no other block, so that a block asks for its first
// keys before it waits for q. The row's own key and value are not in the pool yet: the block whose part ends with them
// computes and stores them. Then the blocks of a row and KV head exchange what they have found, and each weighs the
// parts for its share of the result.

#pragma once

#include "mega_stream.cuh"

constexpr int TILE_KEYS = UNROLL * WARPS * ROWS;  // that a block holds at once
constexpr int LEAST = 16;                         // keys of a part
static_assert(HEAD_DIM <= 128, "a lane has four numbers of a head");

struct Head {  // in shared memory
    alignas(16) Element q[GROUP][HEAD_DIM], k[HEAD_DIM], v[HEAD_DIM];
    float top[WARPS][GROUP], sum[WARPS][GROUP], acc[WARPS][GROUP][HEAD_DIM];
};

struct Part {  // this block's, the same in every layer; none if first == end
    int row, kv_head, split, splits, length, first, end;
    int slots[UNROLL], newest;  // of this lane's keys in the first tile; of the row's own
};

struct Tile {
    Vector k[UNROLL][PARTS], v[UNROLL][PARTS];
};

__device__ __forceinline__ int slot_of(const Step& s, int row, int position) {
    const unsigned page = (unsigned)position / (unsigned)s.page_size;
    return (int)s.page_table[row * s.table_stride + page] * s.page_size + position - (int)page * s.page_size;
}
__device__ __forceinline__ Element* key_at(const Step& s, int layer, int slot, int kv_head) {
    return s.keys + layer * s.layer_stride + (long long)slot * s.key_slot + (long long)kv_head * s.key_head;
}
__device__ __forceinline__ Element* value_at(const Step& s, int layer, int slot, int kv_head) {
    return s.values + layer * s.layer_stride + (long long)slot * s.value_slot + (long long)kv_head * s.value_head;
}

// The position of this lane's key u in the tile that begins at `start`.
__device__ __forceinline__ int position_of(int start, int u) { return start + u * WARPS * ROWS + threadIdx.x / LANES; }

__device__ __forceinline__ bool in_pool(const Part& part, int position) {
    return position < part.end && position < part.length - 1;
}

// The device alone knows lengths, so that a launch can be captured: short rows leave some of their parts empty.
__device__ __forceinline__ Part part_of(const Step& s) {
    Part part{};
    part.split = blockIdx.x % s.splits, part.kv_head = blockIdx.x / s.splits % KV_HEADS;
    part.row = blockIdx.x / s.splits / KV_HEADS;
    if (part.row >= s.batch) return part;
    part.length = (int)s.positions[part.row] + 1;
    const int each = ((part.length + s.splits - 1) / s.splits + LEAST - 1) / LEAST * LEAST;
    part.splits = (part.length + each - 1) / each;
    part.first = min(part.split * each, part.length), part.end = min(part.first + each, part.length);
    part.newest = slot_of(s, part.row, part.length - 1);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const int position = position_of(part.first, u);
        part.slots[u] = in_pool(part, position) ? slot_of(s, part.row, position) : 0;
    }
    return part;
}

// Brings a layer's keys and values of the part to L2; by one warp.
__device__ __forceinline__ void fetch_keys(const Step& s, const Part& part, int layer) {
    for (int position = part.first + threadIdx.x % 32; in_pool(part, position); position += 32) {
        const int slot = slot_of(s, part.row, position);
        for (int d = 0; d < HEAD_DIM; d += 64) {
            prefetch(key_at(s, layer, slot, part.kv_head) + d);
            prefetch(value_at(s, layer, slot, part.kv_head) + d);
        }
    }
}

__device__ __forceinline__ void load(Tile& tile, const Step& s, const Part& part, int layer, int start) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const int position = position_of(start, u);
        const bool exists = in_pool(part, position);
        const int slot = !exists ? 0 : start == part.first ? part.slots[u] : slot_of(s, part.row, position);
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const int d = vector_of(p) * PER_VECTOR;
            const bool there = exists && has_vector(p);
            tile.k[u][p] = there ? load_early(key_at(s, layer, slot, part.kv_head) + d) : Vector{};
            tile.v[u][p] = there ? load_early(value_at(s, layer, slot, part.kv_head) + d) : Vector{};
        }
    }
}

// Waits for q, k and v, one head a warp; norm, rotation, and the newest key and value into the pool. A lane has four
// numbers of a head: 2 l, 2 l + 1, and those they are rotated with, HEAD_DIM / 2 behind.
__device__ __forceinline__ void take_in_heads(const Step& s, const Phase& phase, const Part& part, int layer,
                                              unsigned tag, Head& head) {
    constexpr int HALF = HEAD_DIM / 2;
    const int lane = threadIdx.x % 32, newest = part.end == part.length ? 2 : 0;
    const bool has = 2 * lane < HALF;
    for (int i = threadIdx.x / 32; i < GROUP + newest; i += WARPS) {
        const int of_all = i < GROUP ? part.kv_head * GROUP + i : HEADS + (i - GROUP) * KV_HEADS + part.kv_head;
        const Element* const norm = i < GROUP ? phase.q_norm : i == GROUP ? phase.k_norm : nullptr;
        Element* const to = i < GROUP ? head.q[i] : i == GROUP ? head.k : head.v;
        unsigned angles[2] = {}, weights[2] = {}, results[2];
        if (has) {
            angles[0] = load_pair(s.cos + part.row * HALF + 2 * lane);
            angles[1] = load_pair(s.sin + part.row * HALF + 2 * lane);
            if (norm) weights[0] = load_pair(norm + 2 * lane), weights[1] = load_pair(norm + HALF + 2 * lane);
        }
        const Word* const words = s.qkv + (part.row * PROJECTED + of_all * HEAD_DIM) / 2 + lane;
        const Word* const from[2] = {has ? words : nullptr, has ? words + HALF / 2 : nullptr};
        Word got[2][1] = {};
        receive(from, tag, got);
        float x[2][2], cos[2], sin[2];
        unpack(got[0][0].data, x[0][0], x[0][1]), unpack(got[1][0].data, x[1][0], x[1][1]);
        unpack(angles[0], cos[0], cos[1]), unpack(angles[1], sin[0], sin[1]);
        if (norm) {
            float squares = 0, w[2][2];
            for (int e = 0; e < 4; e++) squares += x[e / 2][e % 2] * x[e / 2][e % 2];
            const float scale = rsqrtf(warp_sum<32>(squares) / HEAD_DIM + s.eps);
            unpack(weights[0], w[0][0], w[0][1]), unpack(weights[1], w[1][0], w[1][1]);
            for (int e = 0; e < 4; e++) x[e / 2][e % 2] *= scale * w[e / 2][e % 2];
        }
        if (i <= GROUP) {
            results[0] = pack(x[0][0] * cos[0] - x[1][0] * sin[0], x[0][1] * cos[1] - x[1][1] * sin[1]);
            results[1] = pack(x[1][0] * cos[0] + x[0][0] * sin[0], x[1][1] * cos[1] + x[0][1] * sin[1]);
        } else {
            results[0] = got[0][0].data, results[1] = got[1][0].data;
        }
        if (!has) continue;
        Element* const pool = i == GROUP  ? key_at(s, layer, part.newest, part.kv_head)
                              : i > GROUP ? value_at(s, layer, part.newest, part.kv_head)
                                          : nullptr;
        for (int h = 0; h < 2; h++) {
            *reinterpret_cast<unsigned*>(to + h * HALF + 2 * lane) = results[h];
            if (pool) *reinterpret_cast<unsigned*>(pool + h * HALF + 2 * lane) = results[h];
        }
    }
    meet<THREADS>();
}

__device__ __forceinline__ void attend_tile(Lane& lane, const Tile& tile, const Part& part, const Head& head, int start,
                                            float scale) {
    int exist = 0;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) exist += position_of(start, u) < part.end;
    auto newest = [&](int u) {
        return part.end == part.length && position_of(start, u) == part.length - 1;
    };
    auto own = [&](const Element* row, int p) { return reinterpret_cast<const Vector*>(row)[vector_of(p)]; };
    attend_rows(
        lane, [&](int u, int p) { return newest(u) ? own(head.k, p) : tile.k[u][p]; },
        [&](int u, int p) { return newest(u) ? own(head.v, p) : tile.v[u][p]; }, exist, scale);
}

// What the lanes of a warp and then the warps have found, put together: see merge_warps in decode.cuh. All heads meet
// once.
template <class Give>
__device__ __forceinline__ void put_together(Lane& lane, Head& head, const Give& give) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        const float top = warp_max_from<LANES>(lane.top[g]), correction = fast_exp2(lane.top[g] - top);
        const float sum = warp_sum_from<LANES>(lane.sum[g] * correction);
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            const float x = warp_sum_from<LANES>(lane.acc[g][e] * correction);
            if (threadIdx.x % 32 < LANES && has_vector(e / PER_VECTOR))
                head.acc[warp][g][vector_of(e / PER_VECTOR) * PER_VECTOR + e % PER_VECTOR] = x;
        }
        if (threadIdx.x % 32 == 0) head.top[warp][g] = top, head.sum[warp][g] = sum;
    }
    meet<THREADS>();
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS) {
        const int g = i / HEAD_DIM, d = i % HEAD_DIM;
        float top = LOWEST, total = 0, result = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, head.top[w][g]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float weight = fast_exp2(head.top[w][g] - top);
            total += weight * head.sum[w][g], result += weight * head.acc[w][g][d];
        }
        give(g, d, result / total, top + log2f(total));
    }
}

// The parts weighed by their share of the softmax's sum. A warp makes two numbers at a time: each lane brings a part's.
__device__ __forceinline__ void weigh(const Step& s, const Part& part, unsigned tag) {
    const int lane = threadIdx.x % 32;
    for (int i = part.split * WARPS + threadIdx.x / 32; i < GROUP * HEAD_DIM / 2; i += part.splits * WARPS) {
        const int h = part.row * HEADS + part.kv_head * GROUP + 2 * i / HEAD_DIM, d = 2 * i % HEAD_DIM;
        const bool has = lane < part.splits;
        const int at = h * s.splits + lane;
        const Word* const from[2] = {has ? s.lse + 2 * at : nullptr, has ? s.partials + at * HEAD_DIM + d : nullptr};
        Word got[2][2];
        receive(from, tag, got);
        const float log = has ? __uint_as_float(got[0][0].data) : LOWEST, top = warp_max_from<1>(log);
        const float weight = has ? fast_exp2(log - top) : 0;
        const float total = warp_sum<32>(weight);
        const float first = warp_sum<32>(has ? weight * __uint_as_float(got[1][0].data) : 0);
        const float second = warp_sum<32>(has ? weight * __uint_as_float(got[1][1].data) : 0);
        if (lane == 0) send(s.attended + (h * HEAD_DIM + d) / 2, pack(first / total, second / total), tag);
    }
}

__device__ __forceinline__ void attend(const Step& s, const Phase& phase, const Part& part, int layer, unsigned tag,
                                       Head& head, Clock& clock) {
    Tile tile;
    load(tile, s, part, layer, part.first);
    take_in_heads(s, phase, part, layer, tag, head);
    clock.mark();
    Lane lane;
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            lane.q[g][p] = has_vector(p) ? reinterpret_cast<const Vector*>(head.q[g])[vector_of(p)] : Vector{};
        lane.top[g] = LOWEST, lane.sum[g] = 0;
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) lane.acc[g][e] = 0;
    }
    for (int start = part.first;; load(tile, s, part, layer, start)) {
        attend_tile(lane, tile, part, head, start, s.scale);
        start += TILE_KEYS;
        if (start >= part.end) break;
    }
    put_together(lane, head, [&](int g, int d, float result, float lse) {
        const int h = part.row * HEADS + part.kv_head * GROUP + g, at = h * s.splits + part.split;
        send(s.partials + at * HEAD_DIM + d, __float_as_uint(result), tag);
        if (d < 2) send(s.lse + 2 * at + d, __float_as_uint(lse), tag);  // twice: all of a lane's words come in pairs
    });
    clock.mark();
    weigh(s, part, tag);
    clock.mark();
}
