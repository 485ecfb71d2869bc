// Step 6: split-KV, and nobody waits for anybody. The engine's `cuda` backend.
//
// The keys of a sequence are cut into up to num_splits chunks, a block each (Dao et al., "Flash-Decoding", 2023), so that
// a few long sequences fill the GPU as well. Each block leaves a result over its chunk and the log2 of its softmax's sum;
// `combine` weighs the results by these. How long a chunk is follows from the sequence's length, here, on the device:
// the launch is the same for every step and can be captured in a graph.
//
// A lane copies the very bytes that it will use, so the loop has no barrier. The pages of a tile are looked up while the
// tile before it is on its way, a lane a row.

#include "rows.cuh"

#ifndef STAGES
#define STAGES 2  // tiles of a warp in shared memory: one in use, the others on their way
#endif
#ifndef BLOCKS  // on one multiprocessor at once: how many registers a thread may have follows from it
#define BLOCKS (GROUP * ELEMENTS <= 16 ? 5 : GROUP * ELEMENTS <= 32 ? 4 : 2)
#endif

constexpr int TILE = UNROLL * ROWS;  // rows that a warp takes at once
static_assert(TILE <= 32, "a lane looks up the page of one row");

struct Tile {
    Vector k[UNROLL][PARTS][32], v[UNROLL][PARTS][32];  // by lane
};

// The keys of one split. Chunks are whole tiles of the block; the last ones may be empty.
__device__ __forceinline__ Span chunk_of(Span keys, int split, int num_splits) {
    const int step = WARPS * TILE, each = (keys.end - keys.first + num_splits - 1) / num_splits;
    const int chunk = (each + step - 1) / step * step, first = keys.first + split * chunk;
    return {first, min(first + chunk, keys.end)};
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) decode(const Args a) {
    __shared__ Tile tiles[WARPS][STAGES];
    __shared__ Exchange<GROUP> exchange;
    const int kv_head = blockIdx.x, split = blockIdx.y, sequence = blockIdx.z;
    const int warp = threadIdx.x / 32, in_warp = threadIdx.x % 32;
    if (!has_one_query(a, sequence)) return;
    const Span keys = chunk_of(visible_keys(a, sequence), split, a.num_splits);
    if (split > 0 && keys.first >= keys.end) return;  // the first writes, even of a sequence without keys

    auto look_up = [&](int start) {
        const int position = start + in_warp;
        return in_warp < TILE && position < keys.end ? slot_of(a, sequence, position) : 0;
    };
    auto start_tile = [&](Tile& tile, int start, int slot_of_lane) {
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int row = u * ROWS + in_warp / LANES;
            const int slot = __shfl_sync(WHOLE_WARP, slot_of_lane, row);
            const bool exists = start + row < keys.end;
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                if (!has_vector(p)) continue;
                start_copy(&tile.k[u][p][in_warp], key_row(a, slot, kv_head) + vector_of(p) * PER_VECTOR, exists);
                start_copy(&tile.v[u][p][in_warp], value_row(a, slot, kv_head) + vector_of(p) * PER_VECTOR, exists);
            }
        }
        close_group();
    };

    Tile* const mine = tiles[warp];
    int next = keys.first + warp * TILE;  // the tile whose copy starts next
    int slot = look_up(next), stage = 0;
    Lane lane;
    begin(lane, a, sequence, kv_head);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++, next += WARPS * TILE) {
        start_tile(mine[s], next, slot);
        slot = look_up(next + WARPS * TILE);
    }
    for (int start = keys.first + warp * TILE; start < keys.end; start += WARPS * TILE, next += WARPS * TILE) {
        start_tile(mine[stage == 0 ? STAGES - 1 : stage - 1], next, slot);
        slot = look_up(next + WARPS * TILE);
        wait_for_copies<STAGES - 1>();

        const Tile& tile = mine[stage];
        int exist = 0;
#pragma unroll
        for (int u = 0; u < UNROLL; u++) exist += start + u * ROWS + in_warp / LANES < keys.end;
        auto k = [&](int u, int p) { return tile.k[u][p][in_warp]; };
        auto v = [&](int u, int p) { return tile.v[u][p][in_warp]; };
        attend_rows(lane, k, v, exist, a.scale);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    finish(lane, exchange, [&](int g, int d, float result, float lse) {
        const int head = kv_head * GROUP + g;
        if (a.num_splits == 1) return store(output(a, sequence, head) + d, result);
        const long long at = ((long long)sequence * a.kv_heads * GROUP + head) * a.num_splits + split;
        a.partials[at * HEAD_DIM + d] = result;
        if (d == 0) a.lse[at] = lse;
    });
}

// One block a query head: the results of the splits, weighed by their share of the whole softmax's sum.
extern "C" __global__ void __launch_bounds__(THREADS) combine(const Args a) {
    constexpr int SHARE = (HEAD_DIM + 31) / 32;
    __shared__ Exchange<1> exchange;
    const int head = blockIdx.x, sequence = blockIdx.z, warp = threadIdx.x / 32, in_warp = threadIdx.x % 32;
    if (!has_one_query(a, sequence)) return;
    const Span keys = visible_keys(a, sequence), chunk = chunk_of(keys, 0, a.num_splits);
    const int length = chunk.end - chunk.first, splits = length > 0 ? (keys.end - keys.first + length - 1) / length : 1;
    const long long at = ((long long)sequence * a.kv_heads * GROUP + head) * a.num_splits;

    float top[1] = {LOWEST}, sum[1] = {0}, acc[SHARE] = {};
    for (int s = in_warp; s < splits; s += 32) top[0] = fmaxf(top[0], a.lse[at + s]);
    top[0] = warp_max_from<1>(top[0]);
#pragma unroll 8  // the weights depend on nothing in the loop: eight splits are read at once
    for (int s = warp; s < splits; s += WARPS) {
        const float weight = fast_exp2(a.lse[at + s] - top[0]);
        sum[0] += weight;
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            const int d = in_warp + 32 * i;
            if (d < HEAD_DIM) acc[i] += weight * a.partials[(at + s) * HEAD_DIM + d];
        }
    }
    auto write = [&](int, float* row) {
#pragma unroll
        for (int i = 0; i < SHARE; i++)
            if (in_warp + 32 * i < HEAD_DIM) row[in_warp + 32 * i] = acc[i];
    };
    merge_warps(exchange, top, sum, write, [&](int, int d, float result, float) {
        store(output(a, sequence, head) + d, result);
    });
}
