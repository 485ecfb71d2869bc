// Step 1: one thread a score.
//
// A block serves one query head. It takes the keys THREADS at a time: thread t computes the score of key t, alone, and
// then the elements of the result t, t + THREADS, … over all these keys, with the online softmax of Milakov & Gimelshein
// (2018). What is slow: the query heads of a group read the same K and V, each on its own; and neighbouring threads read
// K in different rows, so that one load instruction touches 32 places in memory and uses 2 bytes of each.

#include "decode.cuh"

constexpr int SHARE = (HEAD_DIM + THREADS - 1) / THREADS;  // elements of the result a thread

extern "C" __global__ void __launch_bounds__(THREADS) decode(const Args a) {
    __shared__ float q[HEAD_DIM], scores[THREADS];
    const int head = blockIdx.x, sequence = blockIdx.z, kv_head = head / GROUP;
    if (!has_one_query(a, sequence)) return;
    const Span keys = visible_keys(a, sequence);

    for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) q[d] = to_float(query(a, sequence, head)[d]);
    __syncthreads();

    float top = LOWEST, sum = 0, acc[SHARE] = {};
    for (int start = keys.first; start < keys.end; start += THREADS) {
        const int position = start + threadIdx.x, count = min(THREADS, keys.end - start);
        if (position < keys.end) {
            const Element* k = key_row(a, slot_of(a, sequence, position), kv_head);
            float score = 0;
            for (int d = 0; d < HEAD_DIM; d++) score += q[d] * to_float(k[d]);
            scores[threadIdx.x] = score * a.scale;
        }
        __syncthreads();

        const float before = top;
        for (int i = 0; i < count; i++) top = fmaxf(top, scores[i]);
        const float correction = fast_exp2(before - top);  // what was summed so far refers to the old maximum
        sum *= correction;
        for (int s = 0; s < SHARE; s++) acc[s] *= correction;
        for (int i = 0; i < count; i++) {
            const float weight = fast_exp2(scores[i] - top);
            const Element* v = value_row(a, slot_of(a, sequence, start + i), kv_head);
            sum += weight;
            for (int s = 0; s < SHARE; s++) {
                const int d = threadIdx.x + s * THREADS;
                if (d < HEAD_DIM) acc[s] += weight * to_float(v[d]);
            }
        }
        __syncthreads();  // the next scores go where others may still read these
    }
    for (int s = 0; s < SHARE; s++) {
        const int d = threadIdx.x + s * THREADS;
        if (d < HEAD_DIM) store(output(a, sequence, head) + d, sum == 0 ? 0.0f : acc[s] / sum);
    }
}
