// How a warp reads rows of K and V by 16-byte vectors, from step 4 on.
//
// A row of HEAD_DIM numbers is VECTORS vectors. LANES lanes share it, each with PARTS of them; so a warp holds ROWS rows
// at once, and UNROLL times as many are in flight. The lanes of a row keep a softmax of their own, over their rows.

#pragma once

#include "decode.cuh"
#include "warp.cuh"

constexpr int VECTORS = HEAD_DIM / PER_VECTOR;
constexpr int LANES = VECTORS <= 4 ? 4 : VECTORS <= 8 ? 8 : VECTORS <= 16 ? 16 : 32;
constexpr int PARTS = (VECTORS + LANES - 1) / LANES;  // 2 for fp32 rows of more than 512 bytes
constexpr int ROWS = 32 / LANES;
constexpr int UNROLL = 4 / PARTS;
constexpr int ELEMENTS = PARTS * PER_VECTOR;  // of a row, in one lane
static_assert(HEAD_DIM % PER_VECTOR == 0 && PARTS <= 2, "HEAD_DIM: a multiple of 8 up to 256");

struct Lane {
    Vector q[GROUP][PARTS];  // as it lies in memory: half as many registers as in fp32
    float top[GROUP], sum[GROUP], acc[GROUP][ELEMENTS];
};

// Which vector of a row a lane's part is.
__device__ __forceinline__ int vector_of(int part) { return threadIdx.x % LANES + part * LANES; }

// Rows of 80 numbers leave lanes without a vector: these hold zeros.
__device__ __forceinline__ bool has_vector(int part) { return VECTORS % LANES == 0 || vector_of(part) < VECTORS; }

// The vectors of a row that read(row, part) gives, in fp32.
template <class Read>
__device__ __forceinline__ void unpack_row(const Read& read, int row, float (&x)[ELEMENTS]) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        float part[PER_VECTOR];
        unpack(has_vector(p) ? read(row, p) : Vector{}, part);
#pragma unroll
        for (int e = 0; e < PER_VECTOR; e++) x[p * PER_VECTOR + e] = part[e];
    }
}

__device__ __forceinline__ void begin(Lane& lane, const Args& a, int sequence, int kv_head) {
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        const Element* row = query(a, sequence, kv_head * GROUP + g);
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            lane.q[g][p] = has_vector(p) ? load_vector(row + vector_of(p) * PER_VECTOR) : Vector{};
        lane.top[g] = LOWEST, lane.sum[g] = 0;
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) lane.acc[g][e] = 0;
    }
}

// Takes in UNROLL rows, of which the first `exist`. k(row, part) and v(row, part) give the lane's vectors, each asked for
// once, when it is needed; zeros for rows that do not exist.
template <class ReadK, class ReadV>
__device__ __forceinline__ void attend_rows(Lane& lane, const ReadK& k, const ReadV& v, int exist, float scale) {
    float scores[UNROLL][GROUP];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        float x[ELEMENTS];
        unpack_row(k, u, x);
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float q[ELEMENTS], dot = 0;
            unpack_row([&](int row, int part) { return lane.q[row][part]; }, g, q);
#pragma unroll
            for (int e = 0; e < ELEMENTS; e++) dot += q[e] * x[e];
            dot = warp_sum<LANES>(dot);
            scores[u][g] = u < exist ? dot * scale : minus_infinity();
        }
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        float top = lane.top[g];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) top = fmaxf(top, scores[u][g]);
        const float correction = fast_exp2(lane.top[g] - top);
        lane.top[g] = top, lane.sum[g] *= correction;
#pragma unroll
        for (int u = 0; u < UNROLL; u++) lane.sum[g] += scores[u][g] = fast_exp2(scores[u][g] - top);
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) lane.acc[g][e] *= correction;
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        float x[ELEMENTS];
        unpack_row(v, u, x);
#pragma unroll
        for (int g = 0; g < GROUP; g++)
#pragma unroll
            for (int e = 0; e < ELEMENTS; e++) lane.acc[g][e] += scores[u][g] * x[e];
    }
}

// Merges the rows of a warp, which its lanes exchange, and then the warps. give: see merge_warps.
template <class Give>
__device__ __forceinline__ void finish(Lane& lane, Exchange<GROUP>& shared, Give give) {
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        const float top = warp_max_from<LANES>(lane.top[g]);
        const float correction = fast_exp2(lane.top[g] - top);
        lane.top[g] = top, lane.sum[g] = warp_sum_from<LANES>(lane.sum[g] * correction);
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) lane.acc[g][e] = warp_sum_from<LANES>(lane.acc[g][e] * correction);
    }
    auto write = [&](int g, float* row) {
        if (threadIdx.x % 32 >= LANES) return;
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            if (!has_vector(p)) continue;
#pragma unroll
            for (int e = 0; e < PER_VECTOR; e++)
                row[vector_of(p) * PER_VECTOR + e] = lane.acc[g][p * PER_VECTOR + e];
        }
    };
    merge_warps(shared, lane.top, lane.sum, write, give);
}
