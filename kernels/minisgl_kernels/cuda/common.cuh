// What the kernels need of the machine: 16-bit numbers, 16-byte vectors, asynchronous copies.
//
// NVRTC comes without CUDA's headers, so the types are ours. On a CPU `EMULATED` is defined, and the emulator brings its
// own copies: everything written in PTX stands here, once, beside what it means.

#pragma once

#define WHOLE_WARP 0xffffffffu

struct f16 {
    unsigned short bits;
};
struct bf16 {
    unsigned short bits;
};
using Element = DTYPE;  // float, f16 or bf16

struct alignas(16) Vector {  // the most that one thread loads at once
    unsigned words[4];
};
constexpr int PER_VECTOR = 16 / sizeof(Element);

// What a maximum starts from. Finite, so that the difference of two of them is 0 and not NaN.
constexpr float LOWEST = -1e30f;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// ---- Numbers: fp32 from and to what lies in memory, rounded to the nearest, ties to even.

__device__ __forceinline__ float to_float(float x) { return x; }

// A bf16 is the upper half of an fp32.
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

__device__ __forceinline__ void store(float* to, float x) { *to = x; }

__device__ __forceinline__ void store(bf16* to, float x) {
    const unsigned bits = __float_as_uint(x);
    const unsigned rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    to->bits = x == x ? rounded >> 16 : 0x7fffu;  // a NaN must not round up to a number
}

#ifdef EMULATED
__device__ __forceinline__ float to_float(f16 x) { return emulator::from_half(x.bits); }
__device__ __forceinline__ void store(f16* to, float x) { to->bits = emulator::to_half(x); }
__device__ __forceinline__ float fast_exp2(float x) { return exp2f(x); }
#else
__device__ __forceinline__ float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ __forceinline__ void store(f16* to, float x) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(x));
}
// 2^x to within two units in the last place, in one instruction; 2^-inf is 0.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// ---- Vectors

__device__ __forceinline__ void unpack(Vector v, float (&x)[PER_VECTOR]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (sizeof(Element) == 4) {
            x[i] = __uint_as_float(v.words[i]);
        } else {  // two numbers in a word, the first one low
            x[2 * i] = to_float(Element{(unsigned short)(v.words[i] & 0xffffu)});
            x[2 * i + 1] = to_float(Element{(unsigned short)(v.words[i] >> 16)});
        }
    }
}

// 16 bytes from an address that is a multiple of 16 and that nothing writes while the kernel runs.
__device__ __forceinline__ Vector load_vector(const void* from) {
#ifdef EMULATED
    return *static_cast<const Vector*>(from);
#else
    Vector v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
        : "l"(from));
    return v;
#endif
}

// ---- Asynchronous copies from global to shared memory, past the registers. A thread starts copies, closes a group of
// them, and waits until all but the last PENDING groups have landed. That makes its own copies visible to it alone: to
// read those of others takes a barrier after the wait.

__device__ __forceinline__ void start_copy(Vector* shared, const void* global, bool exists) {
#if defined(EMULATED)
    emulator::start_copy(shared, global, exists);
#elif __CUDA_ARCH__ >= 800
    unsigned address;
    asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }" : "=r"(address) : "l"(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(exists ? 16 : 0)
                 : "memory");  // 0 bytes read: zeros are written
#else  // Turing copies through registers, at once
    *shared = exists ? load_vector(global) : Vector{};
#endif
}

__device__ __forceinline__ void close_group() {
#if defined(EMULATED)
    emulator::close_group();
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
#if defined(EMULATED)
    emulator::wait_for_copies(PENDING);
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
