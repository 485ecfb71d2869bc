// What Python calls (__init__.py), compiled by build.py at first use. Plain C++17 with the vector extensions of GCC and
// Clang, and no header of torch: Python hands over addresses and sizes. Sums are kept in fp32 whatever the dtype.
// A name ends with the dtype of the inputs and outputs, then of the weights or of the KV cache.

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

extern "C" {

void use_runtime(decltype(Runtime::parallel) parallel, int (*thread_num)(), int (*num_threads)()) {
    runtime = {parallel, thread_num, num_threads};
}

#define EXPORT(suffix, X, W)                                                                                         \
    void linear_##suffix(const X* x, const W* w, const W* bias, X* y, int64_t tokens, int64_t k, int64_t n,          \
                         int threads) {                                                                              \
        Linear<X, W> task = {x, w, bias, y, tokens, k, n};                                                           \
        run_parallel(task, tokens * k * n < kSerialWork ? 1 : threads);                                              \
    }                                                                                                                \
    void attention_##suffix(const X* q, const W* keys, const W* values, const int64_t* page_table,                   \
                            const int64_t* kv_lens, const int64_t* query_starts, X* out, int64_t batch,              \
                            int64_t heads, int64_t kv_heads, int64_t dim, int64_t pages, int64_t page_size,          \
                            int64_t q_stride, int64_t key_slot, int64_t key_head, int64_t value_slot,                \
                            int64_t value_head, float scale, int threads) {                                          \
        Attention<X, W> task = {q, keys, values, page_table, kv_lens, query_starts, out, batch, heads, kv_heads,     \
                                dim, pages, page_size, q_stride, key_slot, key_head, value_slot, value_head, scale}; \
        run_parallel(task, threads);                                                                                 \
    }

EXPORT(f32_f32, float, float)
EXPORT(f32_bf16, float, bf16)
EXPORT(bf16_bf16, bf16, bf16)

#define EXPORT_ELEMENTWISE(suffix, X)                                                                                \
    void rms_norm_##suffix(const X* x, const X* weight, X* y, int64_t rows, int64_t n, float eps) {                  \
        rms_norm(x, weight, y, rows, n, eps);                                                                        \
    }                                                                                                                \
    void apply_rope_##suffix(const X* x, const X* cos, const X* sin, X* y, int64_t tokens, int64_t heads,            \
                             int64_t half, int64_t token_stride) {                                                   \
        apply_rope(x, cos, sin, y, tokens, heads, half, token_stride);                                               \
    }                                                                                                                \
    void silu_and_mul_##suffix(const X* gate_up, X* y, int64_t rows, int64_t n) { silu_and_mul(gate_up, y, rows, n); }

EXPORT_ELEMENTWISE(f32_f32, float)
EXPORT_ELEMENTWISE(bf16_bf16, bf16)

}
