// Step 2: tiles of K and V in shared memory.
//
// A block serves all GROUP query heads of a KV head. Its threads first copy TILE rows of K and V together, neighbours
// reading neighbouring numbers, and then each reads what it needs from shared memory: every byte of the cache comes from
// device memory once. What is slow: the block stops at three barriers a tile, with nothing in flight behind them.

#include "decode.cuh"

constexpr int ROW_BYTES = HEAD_DIM * sizeof(Element);
constexpr int TILE = ROW_BYTES <= 512 ? 32 : 16;
constexpr int PAD = 4 / sizeof(Element);  // one bank on: else the threads of a warp, a row each, all meet in one bank
constexpr int SHARE = (HEAD_DIM + THREADS - 1) / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS) decode(const Args a) {
    __shared__ float q[GROUP][HEAD_DIM], scores[GROUP][TILE];
    __shared__ Element k[TILE][HEAD_DIM + PAD], v[TILE][HEAD_DIM];
    const int kv_head = blockIdx.x, sequence = blockIdx.z;
    if (!has_one_query(a, sequence)) return;
    const Span keys = visible_keys(a, sequence);

    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS)
        q[i / HEAD_DIM][i % HEAD_DIM] = to_float(query(a, sequence, kv_head * GROUP)[i]);

    float top[GROUP], sum[GROUP] = {}, acc[GROUP][SHARE] = {};
    for (int g = 0; g < GROUP; g++) top[g] = LOWEST;
    for (int start = keys.first; start < keys.end; start += TILE) {
        const int count = min(TILE, keys.end - start);
        for (int i = threadIdx.x; i < count * HEAD_DIM; i += THREADS) {
            const int row = i / HEAD_DIM, d = i % HEAD_DIM, slot = slot_of(a, sequence, start + row);
            k[row][d] = key_row(a, slot, kv_head)[d];
            v[row][d] = value_row(a, slot, kv_head)[d];
        }
        __syncthreads();

        for (int i = threadIdx.x; i < GROUP * TILE; i += THREADS) {  // one thread a score, still
            const int g = i / TILE, row = i % TILE;
            float score = 0;
            for (int d = 0; d < HEAD_DIM && row < count; d++) score += q[g][d] * to_float(k[row][d]);
            scores[g][row] = score * a.scale;
        }
        __syncthreads();

#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            const float before = top[g];
            for (int row = 0; row < count; row++) top[g] = fmaxf(top[g], scores[g][row]);
            const float correction = fast_exp2(before - top[g]);
            sum[g] *= correction;
            for (int s = 0; s < SHARE; s++) acc[g][s] *= correction;
            for (int row = 0; row < count; row++) {
                const float weight = fast_exp2(scores[g][row] - top[g]);
                sum[g] += weight;
                for (int s = 0; s < SHARE; s++) {
                    const int d = threadIdx.x + s * THREADS;
                    if (d < HEAD_DIM) acc[g][s] += weight * to_float(v[row][d]);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        for (int s = 0; s < SHARE; s++) {
            const int d = threadIdx.x + s * THREADS;
            Element* out = output(a, sequence, kv_head * GROUP + g);
            if (d < HEAD_DIM) store(out + d, sum[g] == 0 ? 0.0f : acc[g][s] / sum[g]);
        }
    }
}
