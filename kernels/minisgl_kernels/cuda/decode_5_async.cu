// Step 5: asynchronous copies, double-buffered.
//
// The block's threads copy a tile of K and V into shared memory together, past the registers, and do not wait for it:
// while they compute on one tile, the next is on its way into the other buffer. What is slow: the whole block waits at
// two barriers a tile; a copy can start only once its page is known, a second trip to memory; and a few long sequences
// do not fill the GPU, for a block serves a sequence from its first key to its last.

#include "rows.cuh"

constexpr int TILE = UNROLL * WARPS * ROWS;

struct Tile {
    Vector k[TILE][VECTORS], v[TILE][VECTORS];
};

struct Keys {
    const Args& a;
    int sequence, kv_head, first, end;  // positions first … end - 1
};

// Starts this thread's share of copying the tile that begins at position `start`, and closes the group. Rows beyond the
// last key become zeros.
__device__ __forceinline__ void start_tile(Tile& tile, const Keys& keys, int start) {
#pragma unroll
    for (int i = threadIdx.x; i < TILE * VECTORS; i += THREADS) {
        const int row = i / VECTORS, vector = i % VECTORS, position = start + row;
        const bool exists = position < keys.end;
        const int slot = exists ? slot_of(keys.a, keys.sequence, position) : 0;
        start_copy(&tile.k[row][vector], key_row(keys.a, slot, keys.kv_head) + vector * PER_VECTOR, exists);
        start_copy(&tile.v[row][vector], value_row(keys.a, slot, keys.kv_head) + vector * PER_VECTOR, exists);
    }
    close_group();
}

// Takes in this lane's part of the tile's rows, whoever copied them.
__device__ __forceinline__ void attend_tile(Lane& lane, const Tile& tile, const Keys& keys, int start) {
    const int first = threadIdx.x / LANES * UNROLL;  // of this lane's rows in the tile
    auto k = [&](int u, int p) { return tile.k[first + u][vector_of(p)]; };
    auto v = [&](int u, int p) { return tile.v[first + u][vector_of(p)]; };
    attend_rows(lane, k, v, keys.end - start - first, keys.a.scale);
}

// Attends to all keys, tile by tile, in two buffers: tile n lies in buffer n % 2, and is attended to while tile n + 1 is
// copied. A wait covers a thread's own copies; a barrier makes those of the others visible, and another one keeps a fast
// thread from copying into the buffer that a slow one still reads.
__device__ __forceinline__ void attend_all(Lane& lane, Tile (&buffers)[2], const Keys& keys) {
    int buffer = 0;
    start_tile(buffers[0], keys, keys.first);
    for (int start = keys.first; start < keys.end; start += TILE) {
        start_tile(buffers[1 - buffer], keys, start + TILE);  // beyond the last key: a group of zeros
        wait_for_copies<1>();
        __syncthreads();
        attend_tile(lane, buffers[buffer], keys, start);
        __syncthreads();
        buffer = 1 - buffer;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) decode(const Args a) {
    __shared__ Tile buffers[2];
    __shared__ Exchange<GROUP> exchange;
    const int kv_head = blockIdx.x, sequence = blockIdx.z;
    if (!has_one_query(a, sequence)) return;
    const Span span = visible_keys(a, sequence);
    const Keys keys{a, sequence, kv_head, span.first, span.end};

    Lane lane;
    begin(lane, a, sequence, kv_head);
    attend_all(lane, buffers, keys);
    finish(lane, exchange, [&](int g, int d, float result, float) {
        store(output(a, sequence, kv_head * GROUP + g) + d, result);
    });
}
