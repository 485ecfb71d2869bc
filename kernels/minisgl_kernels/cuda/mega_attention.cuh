// The phase that attends: a block serves a KV head of one row of the batch, or a part of its keys.
//
// The keys are read as in rows.cuh. What lies in the pool depends on no other block, so that a block asks for its first
// keys before it waits for q. The row's own key and value are not in the pool yet: every block that needs them computes
// them, and the one whose part ends with them stores them.

#pragma once

#include "mega_step.cuh"

constexpr int TILE_KEYS = UNROLL * WARPS * ROWS;  // that a block holds at once
constexpr int LEAST = 16;                         // keys of a part

struct Head {  // in shared memory
    alignas(16) Element q[GROUP][HEAD_DIM], k[HEAD_DIM], v[HEAD_DIM];
    Exchange<GROUP> exchange;
    bool last;
};

struct Part {  // of the keys of one row and KV head
    int row, kv_head, split, splits, length, first, end;
    Args pages;  // where the row's layer lies in the pool
};

struct Tile {
    Vector k[UNROLL][PARTS], v[UNROLL][PARTS];
};

// The device alone knows lengths, so that a launch can be captured: short rows leave some of their parts empty.
__device__ __forceinline__ Part part_of(const Step& s, int layer, int item) {
    Part part;
    part.split = item % s.splits, part.kv_head = item / s.splits % KV_HEADS, part.row = item / s.splits / KV_HEADS;
    part.length = (int)s.positions[part.row] + 1;
    const int each = ((part.length + s.splits - 1) / s.splits + LEAST - 1) / LEAST * LEAST;
    part.splits = (part.length + each - 1) / each;
    part.first = part.split * each, part.end = min(part.first + each, part.length);
    part.pages = Args{};
    part.pages.keys = s.keys + layer * s.layer_stride, part.pages.values = s.values + layer * s.layer_stride;
    part.pages.page_table = s.page_table, part.pages.table_stride = s.table_stride, part.pages.page_size = s.page_size;
    part.pages.key_slot = s.key_slot, part.pages.key_head = s.key_head;
    part.pages.value_slot = s.value_slot, part.pages.value_head = s.value_head;
    return part;
}

// The position of this lane's key u in the tile that begins at `start`.
__device__ __forceinline__ int position_of(int start, int u) { return start + u * WARPS * ROWS + threadIdx.x / LANES; }

__device__ __forceinline__ void load(Tile& tile, const Part& part, int start) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const int position = position_of(start, u);
        const bool exists = position < part.end && position < part.length - 1;
        const int slot = exists ? slot_of(part.pages, part.row, position) : 0;
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const int d = vector_of(p) * PER_VECTOR;
            const bool there = exists && has_vector(p);
            tile.k[u][p] = there ? load_early(key_row(part.pages, slot, part.kv_head) + d) : Vector{};
            tile.v[u][p] = there ? load_early(value_row(part.pages, slot, part.kv_head) + d) : Vector{};
        }
    }
}

// Norm and rotation of one head, by a warp: q and k as they are multiplied, rounded once.
__device__ __forceinline__ void prepare(const Step& s, const Element* from, const Element* norm, int row, Element* to) {
    constexpr int PAIRS = HEAD_DIM / 2, SHARE = (PAIRS + 31) / 32;
    const int lane = threadIdx.x % 32;
    float first[SHARE], second[SHARE], squares = 0;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        const int d = lane + 32 * i;
        first[i] = d < PAIRS ? to_float(load_fresh(from + d)) : 0.0f;
        second[i] = d < PAIRS ? to_float(load_fresh(from + d + PAIRS)) : 0.0f;
        squares += first[i] * first[i] + second[i] * second[i];
    }
    const float scale = norm ? rsqrtf(warp_sum<32>(squares) / HEAD_DIM + s.eps) : 1.0f;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        const int d = lane + 32 * i;
        if (d >= PAIRS) continue;
        const float x = first[i] * scale * (norm ? to_float(norm[d]) : 1.0f);
        const float y = second[i] * scale * (norm ? to_float(norm[d + PAIRS]) : 1.0f);
        const float cos = to_float(s.cos[row * PAIRS + d]), sin = to_float(s.sin[row * PAIRS + d]);
        store(to + d, x * cos - y * sin);
        store(to + d + PAIRS, y * cos + x * sin);
    }
}

__device__ __forceinline__ void prepare_heads(const Step& s, const Layer& layer, const Part& part, Head& head) {
    const Element* const qkv = s.qkv + (long long)part.row * PROJECTED;
    const bool newest = part.end == part.length;
    for (int i = threadIdx.x / 32; i < (newest ? GROUP + 2 : GROUP); i += WARPS) {
        if (i < GROUP) {
            prepare(s, qkv + (part.kv_head * GROUP + i) * HEAD_DIM, layer.q_norm, part.row, head.q[i]);
        } else if (i == GROUP) {
            prepare(s, qkv + (HEADS + part.kv_head) * HEAD_DIM, layer.k_norm, part.row, head.k);
        } else {
            for (int d = threadIdx.x % 32; d < HEAD_DIM; d += 32)
                head.v[d] = load_fresh(qkv + (HEADS + KV_HEADS + part.kv_head) * HEAD_DIM + d);
        }
    }
    __syncthreads();
    if (!newest) return;
    const int slot = slot_of(part.pages, part.row, part.length - 1);
    for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
        const_cast<Element*>(key_row(part.pages, slot, part.kv_head))[d] = head.k[d];
        const_cast<Element*>(value_row(part.pages, slot, part.kv_head))[d] = head.v[d];
    }
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

// The block that finishes the last part of a row's KV head weighs the parts by their share of the softmax's sum.
__device__ __forceinline__ void combine(const Step& s, const Part& part, Head& head) {
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned* arrivals = s.arrivals + part.row * KV_HEADS + part.kv_head;
        head.last = add(arrivals, 1) == (unsigned)part.splits - 1;
        if (head.last) *arrivals = 0;
    }
    __syncthreads();
    if (!head.last) return;
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS) {
        const long long h = (long long)part.row * HEADS + part.kv_head * GROUP + i / HEAD_DIM, at = h * s.splits;
        float top = LOWEST, sum = 0, result = 0;
        for (int p = 0; p < part.splits; p++) top = fmaxf(top, load_fresh(s.lse + at + p));
#pragma unroll 4
        for (int p = 0; p < part.splits; p++) {
            const float weight = fast_exp2(load_fresh(s.lse + at + p) - top);
            sum += weight, result += weight * load_fresh(s.partials + (at + p) * HEAD_DIM + i % HEAD_DIM);
        }
        store(s.attended + h * HEAD_DIM + i % HEAD_DIM, result / sum);
    }
}

// meet() is called once, when the block has asked for its first keys; after it q, k and v of the layer are there.
template <class Meet>
__device__ __forceinline__ void attend(const Step& s, int number, Head& head, const Meet& meet) {
    const Layer& layer = s.layers[number];
    const int items = s.batch * KV_HEADS * s.splits;
    bool waited = false;
    if (layer.q_norm && threadIdx.x < 2) prefetch(threadIdx.x == 0 ? layer.q_norm : layer.k_norm);
    for (int item = blockIdx.x; item < items; item += BLOCKS) {
        const Part part = part_of(s, number, item);
        if (part.split >= part.splits) continue;
        Tile tile;
        load(tile, part, part.first);
        if (!waited) meet();
        waited = true;
        prepare_heads(s, layer, part, head);

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
        for (int start = part.first;; load(tile, part, start)) {
            attend_tile(lane, tile, part, head, start, s.scale);
            start += TILE_KEYS;
            if (start >= part.end) break;
        }
        finish(lane, head.exchange, [&](int g, int d, float result, float lse) {
            const long long h = (long long)part.row * HEADS + part.kv_head * GROUP + g;
            if (part.splits == 1) return store(s.attended + h * HEAD_DIM + d, result);
            s.partials[(h * s.splits + part.split) * HEAD_DIM + d] = result;
            if (d == 0) s.lse[h * s.splits + part.split] = lse;
        });
        if (part.splits > 1) combine(s, part, head);
        __syncthreads();  // before the next item's heads
    }
    if (!waited) meet();
}
