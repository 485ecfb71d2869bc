// Causal attention over paged keys and values, read where they lie.
//
// A sequence's new tokens times the query heads that share a KV head are `rows`; kRowTile of them meet a block of
// kKeyBlock keys at once. The softmax is computed block by block (Milakov & Gimelshein, 2018): the running maximum
// scales what has been summed so far. Blocks start at multiples of kKeyBlock in the sequence: a row's result does not
// depend on the page size, on the other rows or on the chunk that it is computed in.

#pragma once

#include <atomic>

#include "threads.h"
#include "vectors.h"

namespace {

constexpr int kRowTile = 6;
constexpr int kKeyBlock = 64;
static_assert(kKeyBlock % kLanes == 0);

// e^x for x ≤ 0: 2^n by the exponent's bits, times Taylor's polynomial of the rest, which is within ln 2 / 2 of 0.
inline Floats exp_of_negative(Floats x) {
    const Floats lowest = all(-87.0f);      // the smallest normal fp32 is e^-87.3
    x = x < lowest ? lowest : x;            // a NaN stays
    const Floats shift = all(12582912.0f);  // 1.5 * 2^23: adding it leaves an integer in the low bits
    const Floats shifted = x * 1.44269504f + shift;
    const Floats n = shifted - shift;
    const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first exact
    Floats y = r * (1.0f / 720) + 1.0f / 120;
    for (float coefficient : {1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = y * r + coefficient;
    return y * Floats((Words(shifted) << 23) + 0x3f800000u);
}

template <class X, class KV>
struct Attention {
    const X* q;                   // [tokens, heads, dim], tokens q_stride apart
    const KV *keys, *values;      // [slots, kv_heads, dim]
    const int64_t* page_table;    // [batch, pages]
    const int64_t* kv_lens;       // [batch]
    const int64_t* query_starts;  // [batch + 1]
    X* out;                       // [tokens, heads, dim]
    int64_t batch, heads, kv_heads, dim, pages, page_size;
    int64_t q_stride, key_slot, key_head, value_slot, value_head;  // strides in elements
    float scale;
    std::atomic<int64_t> taken{0};

    int64_t group() const { return heads / kv_heads; }
    int64_t width() const { return (dim + kStep - 1) / kStep * kStep; }

    // Threads take tiles as they come: how long one lasts depends on how many keys it sees. The longest go first.
    void run(int, int) {
        int64_t next = taken++, passed = 0;
        for (int64_t b = 0; b < batch; b++) {
            const int64_t rows = (query_starts[b + 1] - query_starts[b]) * group();
            const int64_t tiles = (rows + kRowTile - 1) / kRowTile;
            for (; next < passed + tiles * kv_heads; next = taken++) {
                const int64_t first = (tiles - 1 - (next - passed) / kv_heads) * kRowTile;
                attend(b, (next - passed) % kv_heads, first, std::min<int64_t>(kRowTile, rows - first));
            }
            passed += tiles * kv_heads;
        }
    }

    void attend(int64_t b, int64_t kv_head, int64_t first, int64_t rows) const {
        switch (rows) {
            case 1: return attend<1>(b, kv_head, first);
            case 2: return attend<2>(b, kv_head, first);
            case 3: return attend<3>(b, kv_head, first);
            case 4: return attend<4>(b, kv_head, first);
            case 5: return attend<5>(b, kv_head, first);
            default: return attend<kRowTile>(b, kv_head, first);
        }
    }

    template <int R>
    void attend(int64_t b, int64_t kv_head, int64_t first) const {
        float* const queries = scratch((2 * R + 2 * kKeyBlock) * width() + R * kKeyBlock);
        float* const sums = queries + R * width();           // [R, width], of values by weight
        float* const weights = sums + R * width();           // [R, kKeyBlock], scores at first
        KV* const padded = reinterpret_cast<KV*>(weights + R * kKeyBlock);
        int64_t heads_at[R], visible[R];                     // where the row's head lies in out; how many keys it sees
        float maximum[R], total[R], rescale[R];
        for (int r = 0; r < R; r++) {
            const int64_t i = (first + r) / group(), head = kv_head * group() + (first + r) % group();
            const int64_t token = query_starts[b] + i;
            heads_at[r] = (token * heads + head) * dim;
            visible[r] = kv_lens[b] - (query_starts[b + 1] - query_starts[b]) + i + 1;
            widen<KV>(q + token * q_stride + head * dim, dim, width(), queries + r * width());
            for (int64_t k = 0; k < width(); k++) queries[r * width() + k] *= scale;
            maximum[r] = -INFINITY;
            total[r] = 0;
        }
        std::fill(sums, sums + R * width(), 0.0f);

        for (int64_t start = 0; start < visible[R - 1]; start += kKeyBlock) {
            const int count = int(std::min<int64_t>(kKeyBlock, visible[R - 1] - start));
            const KV *k[kKeyBlock], *v[kKeyBlock];
            locate(b, start, count, keys + kv_head * key_head, key_slot, padded, k);
            locate(b, start, count, values + kv_head * value_head, value_slot, padded + kKeyBlock * width(), v);
            score<R>(queries, k, count, weights);
            for (int r = 0; r < R; r++)
                rescale[r] = soften(weights + r * kKeyBlock, visible[r] - start, count, maximum[r], total[r]);
            add_values<R>(weights, rescale, v, count, sums);
        }
        for (int r = 0; r < R; r++)
            for (int64_t i = 0; i < dim; i++)
                store(out + heads_at[r] + i, sums[r * width() + place_of<KV>(i)] / total[r]);
    }

    // The rows of `count` tokens from `start` on. A head that fills no whole step is copied, with zeros behind it.
    void locate(int64_t b, int64_t start, int count, const KV* base, int64_t stride, KV* padded,
                const KV** rows) const {
        for (int j = 0; j < count; j++) {
            const int64_t page = page_table[b * pages + (start + j) / page_size];
            rows[j] = base + (page * page_size + (start + j) % page_size) * stride;
            for (int64_t i = 0; i < dim; i += 64 / sizeof(KV)) __builtin_prefetch(rows[j] + i);
        }
        if (dim == width()) return;
        std::memset(padded, 0, count * width() * sizeof(KV));
        for (int j = 0; j < count; j++)
            rows[j] = static_cast<const KV*>(std::memcpy(padded + j * width(), rows[j], dim * sizeof(KV)));
    }

    template <int R>
    void score(const float* queries, const KV* const* k, int count, float* scores) const {
        for (int j = 0; j < count; j++) {
            Floats products[R];
            for (int r = 0; r < R; r++) products[r] = Floats{};
            for (int64_t i = 0; i < width(); i += kStep) {
                const Floats low = load_half<0>(k[j] + i), high = load_half<1>(k[j] + i);
                for (int r = 0; r < R; r++) multiply_add(products[r], low, load(queries + r * width() + i));
                for (int r = 0; r < R; r++) multiply_add(products[r], high, load(queries + r * width() + i + kLanes));
            }
            for (int r = 0; r < R; r++) scores[r * kKeyBlock + j] = sum(products[r]);
        }
    }

    // Turns a row's scores into weights relative to its maximum so far; returns by how much earlier sums shrink.
    static float soften(float* row, int64_t visible, int count, float& maximum, float& total) {
        if (visible <= 0) {
            std::fill(row, row + count, 0.0f);
            return 1;
        }
        const int seen = int(std::min<int64_t>(visible, count));
        const float before = maximum;
        for (int j = 0; j < seen; j++) maximum = row[j] > maximum ? row[j] : maximum;
        std::fill(row + seen, row + kKeyBlock, maximum);
        for (int j = 0; j < seen; j += kLanes) {
            const Floats weights = exp_of_negative(load(row + j) - maximum);
            std::memcpy(row + j, &weights, kVectorBytes);
        }
        std::fill(row + seen, row + kKeyBlock, 0.0f);
        Floats added = {};
        for (int j = 0; j < kKeyBlock; j += kLanes) added += load(row + j);
        const float rescale = before == maximum ? 1.0f : std::exp(before - maximum);
        total = total * rescale + sum(added);
        return rescale;
    }

    template <int R>
    void add_values(const float* weights, const float* rescale, const KV* const* v, int count, float* sums) const {
        for (int64_t i = 0; i < width(); i += kStep) {
            Floats low[R], high[R];
            for (int r = 0; r < R; r++) {
                low[r] = load(sums + r * width() + i) * rescale[r];
                high[r] = load(sums + r * width() + i + kLanes) * rescale[r];
            }
            for (int j = 0; j < count; j++) {
                const Floats value_low = load_half<0>(v[j] + i), value_high = load_half<1>(v[j] + i);
                for (int r = 0; r < R; r++) {
                    const Floats weight = all(weights[r * kKeyBlock + j]);
                    multiply_add(low[r], value_low, weight);
                    multiply_add(high[r], value_high, weight);
                }
            }
            for (int r = 0; r < R; r++) {
                std::memcpy(sums + r * width() + i, &low[r], kVectorBytes);
                std::memcpy(sums + r * width() + i + kLanes, &high[r], kVectorBytes);
            }
        }
    }
};

}  // namespace
