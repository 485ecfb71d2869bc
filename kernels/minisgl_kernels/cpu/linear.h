// y = x · Wᵀ + b for a few rows of x, at the rate at which memory gives W.
//
// A decode step reads every weight once and uses it for a handful of tokens: memory sets its pace. So each weight is
// read once, in the order of memory, and what comes next is fetched while the processor computes. A tile of kRows rows
// of W and kTokens tokens keeps its sums in registers.

#pragma once

#include "threads.h"
#include "vectors.h"

namespace {

#if VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int kRows = 4;  // 32 vector registers: 4 x 6 sums, 4 weights, 1 input
#else
constexpr int kRows = 2;  // 16 vector registers: 2 x 6 sums, 2 weights, 1 input, 1 mask
#endif
constexpr int kTokens = 6;
constexpr int kCacheLine = 64;
constexpr int64_t kTokenBlock = 60;         // tokens whose inputs stay in the second-level cache
constexpr int64_t kPanelBytes = 48 * 1024;  // weights that stay there beside them
constexpr int64_t kSerialWork = 16 * 1024;  // products that take less time than waking the other threads

// y[t, r] = x[t] · w[r] + bias[r] for a few rows of weights and a few tokens.
template <class X, class W>
struct Tile {
    const float* x;    // the tokens, `width` apart
    int64_t width;
    const W* w;        // the rows, k apart
    int64_t k;
    const W* bias;     // or null
    X* y;              // the tokens, n apart
    int64_t n;
    const char* next;  // weights to bring nearer meanwhile: 1 / share of as many as the rows hold
    int64_t share;

    void forward(int64_t rows) {
        w += rows * k;
        y += rows;
        if (bias) bias += rows;
    }
};

template <int R, int T, class X, class W>
void compute(const Tile<X, W>& tile) {
    constexpr int64_t kStepBytes = R * kStep * sizeof(W);
    const auto [x, width, w, k, bias, y, n, next, share] = tile;
    Floats sums[R][T];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) sums[r][t] = Floats{};

    // One sum for each pair, whatever R and T: a token's result does not depend on how many others are computed.
    auto step = [&](const W* rows, int64_t stride, const float* inputs) {
        auto half = [&](auto load_weights, const float* half_inputs) {
            Floats weights[R];
            for (int r = 0; r < R; r++) weights[r] = load_weights(rows + r * stride);
            for (int t = 0; t < T; t++) {
                Floats input = load(half_inputs + t * tile.width);
                keep_in_register(input);
                for (int r = 0; r < R; r++) multiply_add(sums[r][t], weights[r], input);
            }
        };
        half([](const W* p) { return load_half<0>(p); }, inputs);
        half([](const W* p) { return load_half<1>(p); }, inputs + kLanes);
    };

    const char* ahead = next;
    int64_t i = 0;
    for (; i + kStep <= k; i += kStep, ahead += kStepBytes / share) {
        for (int64_t line = 0; line < kStepBytes; line += kCacheLine) __builtin_prefetch(ahead + line);
        step(w + i, k, x + i);
    }
    if (i < k) {  // what is left of the rows, filled up with zeros as the inputs are
        W rest[R][kStep] = {};
        for (int r = 0; r < R; r++) std::memcpy(rest[r], w + r * k + i, (k - i) * sizeof(W));
        step(rest[0], kStep, x + i);
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) store(y + t * n + r, sum(sums[r][t]) + (bias ? to_float(bias[r]) : 0.0f));
}

template <class X, class W>
void compute(int64_t tokens, const Tile<X, W>& tile) {
    static_assert(kTokens == 6);
    switch (tokens) {
        case 1: return compute<kRows, 1>(tile);
        case 2: return compute<kRows, 2>(tile);
        case 3: return compute<kRows, 3>(tile);
        case 4: return compute<kRows, 4>(tile);
        case 5: return compute<kRows, 5>(tile);
        default: return compute<kRows, 6>(tile);
    }
}

template <class X, class W>
struct Linear {
    const X* x;     // [tokens, k]
    const W* w;     // [n, k]
    const W* bias;  // [n] or null
    X* y;           // [tokens, n]
    int64_t tokens, k, n;

    void run(int thread, int threads) const {  // each thread takes a run of rows of w
        const int64_t groups = (n + kRows - 1) / kRows;
        const int64_t first = groups * thread / threads * kRows;
        const int64_t last = std::min(n, groups * (thread + 1) / threads * kRows);
        const int64_t width = (k + kStep - 1) / kStep * kStep;
        const int64_t blocks = (tokens + kTokenBlock - 1) / kTokenBlock;
        float* inputs = scratch(std::min(tokens, kTokenBlock) * width);
        for (int64_t i = 0; i < blocks; i++) {
            const int64_t start = tokens * i / blocks, count = tokens * (i + 1) / blocks - start;
            for (int64_t t = 0; t < count; t++) widen<W>(x + (start + t) * k, k, width, inputs + t * width);
            block(inputs, width, count, first, last, y + start * n);
        }
    }

    void block(const float* inputs, int64_t width, int64_t count, int64_t first, int64_t last, X* out) const {
        const int64_t tiles = (count + kTokens - 1) / kTokens;
        const bool few = tiles <= 2;  // memory sets the pace: all tokens meet a group of rows before the next group
        const int64_t panel = few ? kRows : std::max<int64_t>(1, kPanelBytes / (k * sizeof(W) * kRows)) * kRows;
        for (int64_t start = first; start < last; start += panel) {
            const int64_t end = std::min(last, start + panel);
            for (int64_t i = 0; i < tiles; i++) {
                const int64_t t = count * i / tiles, size = count * (i + 1) / tiles - t;  // even shares
                Tile<X, W> tile = {inputs + t * width, width, w + start * k, k, bias ? bias + start : nullptr,
                                   out + t * n + start, n, reinterpret_cast<const char*>(w), few ? tiles : 1};
                for (int64_t row = start; row + kRows <= end; row += kRows, tile.forward(kRows)) {
                    tile.next = reinterpret_cast<const char*>(tile.w + kRows * k);
                    if (few) tile.next += kRows * k * sizeof(W) * i / tiles;
                    compute(size, tile);
                }
                for (int64_t row = end - (end - start) % kRows; row < end; row++, tile.forward(1))
                    for (Tile<X, W> one = tile; one.y < tile.y + size * n; one.x += width, one.y += n)
                        compute<1, 1>(one);
            }
        }
    }
};

}  // namespace
