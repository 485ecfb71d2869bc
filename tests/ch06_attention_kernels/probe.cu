// Calls a reduction on one warp or more, a number a thread. Written for the tests of warp_sum.

#include "decode.cuh"
#include "warp.cuh"

extern "C" __global__ void probe(const Args a) {
    const float* in = reinterpret_cast<const float*>(a.q);
    float* out = reinterpret_cast<float*>(a.out);
    out[threadIdx.x] = warp_sum<RUN>(in[threadIdx.x]);
}
