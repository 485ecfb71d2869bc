// Vectors of fp32, the dtypes in memory, and the arithmetic on them, for whatever width the machine has.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef VECTOR_BYTES  // else set by a test, to try other machines' widths
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16  // SSE, NEON
#endif
#endif

namespace {

constexpr int kVectorBytes = VECTOR_BYTES;
constexpr int kLanes = kVectorBytes / 4;
constexpr int kStep = 2 * kLanes;  // elements of a row that are loaded at once

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));

struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    uint32_t word = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

inline void store(float* y, float value) { *y = value; }

// To nearest, ties to even. A NaN stays one: here it comes from a bf16 or from arithmetic, and its low half is zero.
inline void store(bf16* y, float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    y->bits = uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

inline Floats load(const float* p) {
    Floats v;
    std::memcpy(&v, p, kVectorBytes);
    return v;
}

inline Floats all(float x) { return x - Floats{}; }  // not plus: -0 + 0 would be 0

// Half 0 or 1 of a step. A word of memory holds two bf16: a shift leaves the even elements, a mask the odd ones, each
// as an fp32. So the halves of a bf16 step are its even and its odd elements, and `widen` orders the inputs likewise.
template <int half>
inline Floats load_half(const float* p) {
    return load(p + half * kLanes);
}

template <int half>
inline Floats load_half(const bf16* p) {
    Words words;
    std::memcpy(&words, p, kVectorBytes);
    return half == 0 ? Floats(words << 16) : Floats(words & 0xffff0000u);
}

// GCC would load an input again for each weight row that it meets, and loads, not products, would set the pace.
inline void keep_in_register(Floats& v) {
#if VECTOR_BYTES == 64 && defined(__AVX512F__)
    asm("" : "+v"(v));
#elif VECTOR_BYTES == 32 && defined(__AVX2__)
    asm("" : "+x"(v));
#else
    (void)v;
#endif
}

// sum += a * b with one rounding, where the machine can. Left to itself, GCC does so in some tiles and not in others.
inline void multiply_add(Floats& sum, Floats a, Floats b) {
#if VECTOR_BYTES == 64 && defined(__AVX512F__)
    sum = Floats(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(sum)));
#elif VECTOR_BYTES == 32 && defined(__FMA__)
    sum = Floats(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(sum)));
#elif VECTOR_BYTES == 16 && defined(__aarch64__)
    sum = Floats(vfmaq_f32(float32x4_t(sum), float32x4_t(a), float32x4_t(b)));
#else
    sum += a * b;
#endif
}

inline float sum(Floats v) {
    float lanes[kLanes];
    std::memcpy(lanes, &v, kVectorBytes);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

// Memory that each thread keeps from call to call. It starts a cache line: a load that straddles two costs double.
inline float* scratch(int64_t floats) {
    constexpr int kCacheLine = 64;
    thread_local std::vector<float> memory;
    memory.resize(std::max<int64_t>(memory.size(), floats + kCacheLine / 4));
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (kCacheLine - address % kCacheLine) % kCacheLine / 4;
}

// Where element i of a row comes to lie among the Weights that load_half gives.
template <class Weight>
inline int64_t place_of(int64_t i) {
    return sizeof(Weight) == 4 ? i : i / kStep * kStep + i % kStep / 2 + i % 2 * kLanes;
}

// fp32 copies of k elements, filled up with zeros to `width`, in the order in which load_half<., Weight> gives them.
template <class Weight, class X>
void widen(const X* x, int64_t k, int64_t width, float* out) {
    std::fill(out + (width - kStep), out + width, 0.0f);
    for (int64_t start = 0; start < k; start += kStep) {
        const int64_t count = std::min<int64_t>(kStep, k - start);
        if (sizeof(Weight) == 2)
            for (int64_t i = 0; i < count; i++) out[start + i / 2 + i % 2 * kLanes] = to_float(x[start + i]);
        else
            for (int64_t i = 0; i < count; i++) out[start + i] = to_float(x[start + i]);
    }
}

}  // namespace
