// Norm, rotation and activation of a few rows: one pass each, where torch makes up to eight. What costs there is not
// the arithmetic but the calls.

#pragma once

#include <cmath>

#include "attention.h"

namespace {

// y = x / rms(x) · weight for rows of n. Rounded before the product with the weight, as the reference does.
template <class X>
void rms_norm(const X* x, const X* weight, X* y, int64_t rows, int64_t n, float eps) {
    for (int64_t r = 0; r < rows; r++, x += n, y += n) {
        float lanes[kStep] = {};
        int64_t i = 0;
        for (; i + kStep <= n; i += kStep)
            for (int j = 0; j < kStep; j++) lanes[j] += to_float(x[i + j]) * to_float(x[i + j]);
        for (int j = 0; i + j < n; j++) lanes[j] += to_float(x[i + j]) * to_float(x[i + j]);
        float squares = 0;
        for (float lane : lanes) squares += lane;
        const float scale = 1 / std::sqrt(squares / float(n) + eps);
        for (int64_t j = 0; j < n; j++) {
            X normal;
            store(&normal, to_float(x[j]) * scale);
            store(y + j, to_float(normal) * to_float(weight[j]));
        }
    }
}

// Pairs of elements i and i + half of each head, turned by the angles of the head's token.
template <class X>
void apply_rope(const X* x, const X* cos, const X* sin, X* y, int64_t tokens, int64_t heads, int64_t half,
                int64_t token_stride) {
    for (int64_t t = 0; t < tokens; t++, cos += half, sin += half) {
        const X* head = x + t * token_stride;
        for (int64_t h = 0; h < heads; h++, head += 2 * half, y += 2 * half) {
            for (int64_t i = 0; i < half; i++) {
                const float first = to_float(head[i]), second = to_float(head[i + half]);
                const float c = to_float(cos[i]), s = to_float(sin[i]);
                store(y + i, first * c - second * s);
                store(y + i + half, second * c + first * s);
            }
        }
    }
}

// y = silu(gate) · up for `count` ≤ kLanes elements. e^-|gate| never overflows: it serves both signs.
template <class X>
inline __attribute__((always_inline)) void silu_block(const X* gates, const X* ups, X* y, int64_t count) {
    float gate[kLanes] = {}, small[kLanes];
    for (int64_t j = 0; j < count; j++) gate[j] = to_float(gates[j]);
    for (int j = 0; j < kLanes; j++) small[j] = -std::fabs(gate[j]);
    const Floats power = exp_of_negative(load(small));
    const Floats x = load(gate);
    const Floats silu = x * (x < all(0) ? power : all(1)) / (1 + power);
    for (int64_t j = 0; j < count; j++) {
        X rounded;
        store(&rounded, silu[j]);
        store(y + j, to_float(rounded) * to_float(ups[j]));
    }
}

template <class X>
void silu_and_mul(const X* gate_up, X* y, int64_t rows, int64_t n) {
    for (int64_t r = 0; r < rows; r++, gate_up += 2 * n, y += n) {
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) silu_block(gate_up + i, gate_up + n + i, y + i, kLanes);
        if (i < n) silu_block(gate_up + i, gate_up + n + i, y + i, n - i);
    }
}

}  // namespace
