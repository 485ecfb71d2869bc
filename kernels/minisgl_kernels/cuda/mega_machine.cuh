// What the megakernel needs of the machine beyond common.cuh: tensor cores, memory that other blocks write, counters.
//
// On a CPU the emulator stands in for each of them.

#pragma once

#include "common.cuh"

static_assert(sizeof(Element) == 2, "tensor cores take f16 or bf16");

#ifdef EMULATED
__device__ __forceinline__ Vector* dynamic_shared() { return static_cast<Vector*>(emulator::dynamic_shared()); }
#else
extern __shared__ Vector shared_bytes[];
__device__ __forceinline__ Vector* dynamic_shared() { return shared_bytes; }
#endif

// ---- Tensor cores: c += a · b for a [16, 16], b [16, 8] and c [16, 8], spread over the lanes of a warp.
//
// Lane 4 r + t holds, of a, rows r and r + 8: a[0] and a[1] at columns 2 t and 2 t + 1, a[2] and a[3] at those plus 8. Of
// b it holds column r: b[0] at rows 2 t and 2 t + 1, b[1] at those plus 8. Of c it holds rows r (c[0], c[1]) and r + 8
// (c[2], c[3]) at columns 2 t and 2 t + 1.

#ifdef EMULATED
__device__ __forceinline__ void tensor_core(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    float numbers[12];
    for (int i = 0; i < 12; i++) {
        const unsigned word = i < 8 ? a[i / 2] : b[(i - 8) / 2];
        numbers[i] = to_float(Element{(unsigned short)(i % 2 ? word >> 16 : word & 0xffffu)});
    }
    emulator::tensor_core(c, numbers);
}
#else
#define TENSOR_CORE(TYPE)                                                                              \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
__device__ __forceinline__ void multiply_add(f16, float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    TENSOR_CORE("f16");
}
__device__ __forceinline__ void multiply_add(bf16, float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    TENSOR_CORE("bf16");
}
__device__ __forceinline__ void tensor_core(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    multiply_add(Element{}, c, a, b);
}
#endif

// Two numbers rounded into a word, the first one low.
#ifdef EMULATED
__device__ __forceinline__ unsigned pack(Element, float first, float second) {
    Element low, high;
    store(&low, first), store(&high, second);
    return low.bits | (unsigned)high.bits << 16;
}
#else
__device__ __forceinline__ unsigned pack(f16, float first, float second) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}
__device__ __forceinline__ unsigned pack(bf16, float first, float second) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}
#endif

__device__ __forceinline__ float rounded(float x) {
    Element y;
    store(&y, x);
    return to_float(y);
}

// ---- Memory that other blocks write while the kernel runs: read past L1, which does not notice.

__device__ __forceinline__ Vector load_fresh(const Vector* from) {
#ifdef EMULATED
    return *from;
#else
    Vector v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "l"(from));
    return v;
#endif
}

__device__ __forceinline__ Element load_fresh(const Element* from) {
#ifdef EMULATED
    return *from;
#else
    Element x;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(x.bits) : "l"(from));
    return x;
#endif
}

__device__ __forceinline__ float load_fresh(const float* from) {
#ifdef EMULATED
    return *from;
#else
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from));
    return x;
#endif
}

// 16 bytes that no block writes; asked for here, not where the compiler finds that they are needed.
__device__ __forceinline__ Vector load_early(const void* from) {
#ifdef EMULATED
    return *static_cast<const Vector*>(from);
#else
    Vector v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "l"(from));
    return v;
#endif
}

// Brings a line of 128 bytes to L2.
__device__ __forceinline__ void prefetch(const void* line) {
#ifndef EMULATED
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#endif
}

// ---- Counters in global memory. What a thread wrote before it adds is seen by whoever reads the sum (acquire, release).

__device__ __forceinline__ unsigned add(unsigned* counter, unsigned value) {
#ifdef EMULATED
    return (*counter += value) - value;
#else
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
    return before;
#endif
}

__device__ __forceinline__ void wait_for(const unsigned* counter, unsigned least) {
#ifdef EMULATED
    while (*counter < least) emulator::let_others_run();
#else
    unsigned value;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    while (value < least);
#endif
}
