// Step 3: a softmax in every warp.
//
// A warp takes keys of its own, UNROLL at a time. Its lanes share a row: each multiplies its elements, and shuffles add up
// the score, so that all lanes know it. Weights, maximum and sum stay in registers and no warp waits for another; they
// merge once, at the end. The rows are read straight into registers, all UNROLL of them before the first is used.
// What is slow: a lane loads 2 bytes at a time, and a row takes as many load instructions as it has 64-byte pieces.

#include "decode.cuh"
#include "warp.cuh"

constexpr int SHARE = (HEAD_DIM + 31) / 32;  // elements of a row in one lane: lane, lane + 32, …
constexpr int UNROLL = 4;

// A lane's elements of a row in fp32; zeros beyond the row's end, and for a row that does not exist.
__device__ __forceinline__ void load_row(float (&x)[SHARE], const Element* row, bool exists) {
#pragma unroll
    for (int s = 0; s < SHARE; s++) {
        const int d = threadIdx.x % 32 + 32 * s;
        x[s] = exists && d < HEAD_DIM ? to_float(row[d]) : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) decode(const Args a) {
    __shared__ Exchange<GROUP> exchange;
    const int kv_head = blockIdx.x, sequence = blockIdx.z, warp = threadIdx.x / 32;
    if (!has_one_query(a, sequence)) return;
    const Span keys = visible_keys(a, sequence);

    float q[GROUP][SHARE], top[GROUP], sum[GROUP] = {}, acc[GROUP][SHARE] = {};
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        load_row(q[g], query(a, sequence, kv_head * GROUP + g), true);
        top[g] = LOWEST;
    }
    for (int start = keys.first + warp * UNROLL; start < keys.end; start += WARPS * UNROLL) {
        float k[UNROLL][SHARE], v[UNROLL][SHARE];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const bool exists = start + u < keys.end;
            const int slot = exists ? slot_of(a, sequence, start + u) : 0;
            load_row(k[u], key_row(a, slot, kv_head), exists);
            load_row(v[u], value_row(a, slot, kv_head), exists);
        }
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float scores[UNROLL], before = top[g];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                float dot = 0;
#pragma unroll
                for (int s = 0; s < SHARE; s++) dot += q[g][s] * k[u][s];
                dot = warp_sum<32>(dot);
                scores[u] = start + u < keys.end ? dot * a.scale : minus_infinity();
                top[g] = fmaxf(top[g], scores[u]);
            }
            const float correction = fast_exp2(before - top[g]);
            sum[g] *= correction;
#pragma unroll
            for (int s = 0; s < SHARE; s++) acc[g][s] *= correction;
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                const float weight = fast_exp2(scores[u] - top[g]);
                sum[g] += weight;
#pragma unroll
                for (int s = 0; s < SHARE; s++) acc[g][s] += weight * v[u][s];
            }
        }
    }
    auto write = [&](int g, float* row) {
#pragma unroll
        for (int s = 0; s < SHARE; s++) {
            const int d = threadIdx.x % 32 + 32 * s;
            if (d < HEAD_DIM) row[d] = acc[g][s];
        }
    };
    auto give = [&](int g, int d, float result, float) {
        store(output(a, sequence, kv_head * GROUP + g) + d, result);
    };
    merge_warps(exchange, top, sum, write, give);
}
