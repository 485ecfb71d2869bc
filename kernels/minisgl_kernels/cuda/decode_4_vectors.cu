// Step 4: 16 bytes a load.
//
// A lane holds 16 neighbouring bytes of a row, not 2 here and 2 there: an eighth of the load instructions for the same
// bytes, and a row of 128 16-bit numbers takes 16 lanes, so that a warp reads two rows at once and a score needs four
// shuffles in place of five. See rows.cuh. What is slow: what is in flight occupies registers, and a warp that computes
// has nothing in flight.

#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) decode(const Args a) {
    __shared__ Exchange<GROUP> exchange;
    const int kv_head = blockIdx.x, sequence = blockIdx.z;
    if (!has_one_query(a, sequence)) return;
    const Span keys = visible_keys(a, sequence);

    Lane lane;
    begin(lane, a, sequence, kv_head);
    const int row = threadIdx.x / LANES;  // of the WARPS · ROWS that the block reads at once
    for (int start = keys.first; start < keys.end; start += UNROLL * WARPS * ROWS) {
        Vector k[UNROLL][PARTS], v[UNROLL][PARTS];
        int exist = 0;
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int position = start + u * WARPS * ROWS + row;
            const bool exists = position < keys.end;
            const int slot = exists ? slot_of(a, sequence, position) : 0;
            exist += exists;
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const int d = vector_of(p) * PER_VECTOR;
                const bool load = exists && has_vector(p);
                k[u][p] = load ? load_vector(key_row(a, slot, kv_head) + d) : Vector{};
                v[u][p] = load ? load_vector(value_row(a, slot, kv_head) + d) : Vector{};
            }
        }
        attend_rows(
            lane, [&](int u, int p) { return k[u][p]; }, [&](int u, int p) { return v[u][p]; }, exist, a.scale);
    }
    finish(lane, exchange, [&](int g, int d, float result, float) {
        store(output(a, sequence, kv_head * GROUP + g) + d, result);
    });
}
