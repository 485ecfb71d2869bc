// Reductions among the lanes of a warp, without shared memory.

#pragma once

#include "common.cuh"

// The sum of `value` over every aligned run of LANES lanes (a power of two up to 32); each of them gets it.
//
// A butterfly: in every round a lane adds the value of the lane whose number differs from its own in one bit, so that
// log2(LANES) rounds are enough. All 32 lanes must call this together.
template <int LANES>
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int bit = LANES / 2; bit > 0; bit /= 2) value += __shfl_xor_sync(WHOLE_WARP, value, bit);
    return value;
}

// Their maximum, likewise, over the runs of lanes that differ in the bits FIRST, 2 FIRST, … 16.
template <int FIRST>
__device__ __forceinline__ float warp_max_from(float value) {
#pragma unroll
    for (int bit = FIRST; bit < 32; bit *= 2) value = fmaxf(value, __shfl_xor_sync(WHOLE_WARP, value, bit));
    return value;
}

// The sum over those.
template <int FIRST>
__device__ __forceinline__ float warp_sum_from(float value) {
#pragma unroll
    for (int bit = FIRST; bit < 32; bit *= 2) value += __shfl_xor_sync(WHOLE_WARP, value, bit);
    return value;
}
