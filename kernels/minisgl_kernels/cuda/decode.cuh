// The problem that every step of the ladder solves: one query a sequence attends to keys and values in pages.
//
// A block serves a head of one sequence; blockIdx.x is the head, blockIdx.z the sequence. Says where things lie and how
// the warps of a block merge what each has found; knows nothing of how the keys are read.

#pragma once

#include "common.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;

struct Args {  // driver.py holds the same struct
    const Element* q;           // [tokens, heads, HEAD_DIM], tokens q_stride apart
    const Element *keys, *values;  // [slots, kv_heads, HEAD_DIM]
    const long long* page_table;   // [sequences, pages], rows table_stride apart
    const long long *kv_lens, *query_starts;
    Element* out;              // [tokens, heads, HEAD_DIM]
    float *partials, *lse;     // step 6: [sequences, heads, num_splits, HEAD_DIM] and the same without HEAD_DIM
    long long q_stride, table_stride;
    int key_slot, key_head, value_slot, value_head;  // strides in elements
    int kv_heads, page_size, window, num_splits;
    float scale;  // times log2(e): the softmax is computed with powers of two
};

struct Span {
    int first, end;  // positions of keys in the sequence
};

// Other sequences are chunks of prompts: not for these kernels.
__device__ __forceinline__ bool has_one_query(const Args& a, int sequence) {
    return a.query_starts[sequence + 1] - a.query_starts[sequence] == 1;
}

// The keys that the query sees. It is the last token; with a window, it sees that many, itself among them.
__device__ __forceinline__ Span visible_keys(const Args& a, int sequence) {
    const int length = (int)a.kv_lens[sequence];
    return {a.window > 0 && length > a.window ? length - a.window : 0, length};
}

__device__ __forceinline__ const Element* query(const Args& a, int sequence, int head) {
    return a.q + a.query_starts[sequence] * a.q_stride + head * HEAD_DIM;
}

__device__ __forceinline__ Element* output(const Args& a, int sequence, int head) {
    return a.out + (a.query_starts[sequence] * a.kv_heads * GROUP + head) * HEAD_DIM;
}

// Where the token at a position lies in the pool.
__device__ __forceinline__ int slot_of(const Args& a, int sequence, int position) {
    const unsigned page = (unsigned)position / (unsigned)a.page_size;
    const int place = position - (int)page * a.page_size;
    return (int)a.page_table[sequence * a.table_stride + page] * a.page_size + place;
}

// A pool holds more than 2^31 elements: offsets are 64 bits wide.
__device__ __forceinline__ const Element* key_row(const Args& a, int slot, int kv_head) {
    return a.keys + (long long)slot * a.key_slot + (long long)kv_head * a.key_head;
}

__device__ __forceinline__ const Element* value_row(const Args& a, int slot, int kv_head) {
    return a.values + (long long)slot * a.value_slot + (long long)kv_head * a.value_head;
}

// What merge_warps exchanges, for HEADS query heads.
template <int HEADS>
struct Exchange {
    float top[WARPS][HEADS], sum[WARPS][HEADS], acc[2][WARPS][HEAD_DIM];
};

// Each warp has seen some of the keys: the highest score `top`, and over its keys the `sum` of 2^(score - top) and of
// 2^(score - top) · value. Gives for every head and element the softmax's result over all of them, and the log2 of the
// whole sum; without any key 0, and minus infinity.
//
// write(head, row) puts the warp's [HEAD_DIM] values into row; give(head, element, result, lse) takes the result.
template <int HEADS, class Write, class Give>
__device__ __forceinline__ void merge_warps(Exchange<HEADS>& shared, const float (&top)[HEADS],
                                            const float (&sum)[HEADS], Write write, Give give) {
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) shared.top[warp][h] = top[h], shared.sum[warp][h] = sum[h];
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        write(h, shared.acc[h % 2][warp]);  // two rows in turn: one barrier a head is enough
        __syncthreads();
        float highest = LOWEST, total = 0;
        for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, shared.top[w][h]);
        for (int w = 0; w < WARPS; w++) total += shared.sum[w][h] * fast_exp2(shared.top[w][h] - highest);
        for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
            float result = 0;
            for (int w = 0; w < WARPS; w++) result += shared.acc[h % 2][w][d] * fast_exp2(shared.top[w][h] - highest);
            const bool empty = total == 0;
            give(h, d, empty ? 0.0f : result / total, empty ? minus_infinity() : highest + log2f(total));
        }
    }
}
