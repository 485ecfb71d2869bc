// One decode step of a whole model: its sizes, its arguments, and how its work is dealt to the blocks.
//
// HIDDEN, INTERMEDIATE, KV_HEADS, GROUP, HEAD_DIM, BATCH (the most rows) and BLOCKS, the grid, are macros: a kernel is
// compiled for a model and a GPU.

#pragma once

#include "rows.cuh"
#include "mega_machine.cuh"

constexpr int HEADS = KV_HEADS * GROUP;
constexpr int ATTENDED = HEADS * HEAD_DIM;                    // numbers of a row's attention
constexpr int PROJECTED = (HEADS + 2 * KV_HEADS) * HEAD_DIM;  // of its q, k and v

struct Layer {  // weights [outputs, inputs]
    const Element *input_norm, *qkv, *q_norm, *k_norm, *o, *post_norm, *gate_up, *down;
};

struct Step {  // mega.py holds the same struct
    const Layer* layers;
    const Element *embedding, *final_norm, *head;
    const long long *input_ids, *positions;  // [batch]
    const Element *cos, *sin;                // [batch, HEAD_DIM / 2]
    const long long* page_table;             // [batch, pages], rows table_stride apart
    Element *keys, *values;                  // of layer 0: [slots, KV_HEADS, HEAD_DIM]
    Word *input, *qkv, *attended, *middle, *activation;  // [batch, …], two numbers a word, between the phases
    Word *partials, *lse;                    // fp32: [batch, HEADS, splits, HEAD_DIM] and [batch, HEADS, splits, 2]
    unsigned* launches;                      // [BLOCKS]: how often a block has run
    Element* logits;                         // [batch, vocab]
    long long* clocks;                       // with CLOCKS: [BLOCKS, MARKS · layers + 3]
    long long layer_stride, table_stride;    // in elements
    int key_slot, key_head, value_slot, value_head;
    int batch, num_layers, vocab, page_size, splits;
    float eps, scale;
};

struct Range {
    int first, end;
};

// This block's part of a phase's outputs: an even number, as two of them share a word.
__device__ __forceinline__ Range own(int outputs) {
    const unsigned pairs = outputs / 2, block = blockIdx.x;  // a vocabulary times blocks is far below 2^32
    return {(int)(2 * (pairs * block / BLOCKS)), (int)(2 * (pairs * (block + 1) / BLOCKS))};
}

// With CLOCKS each block notes when it has finished a part of its work.
constexpr int MARKS = 11;  // a layer
struct Clock {
    long long* next;
    __device__ __forceinline__ void mark() {
#ifdef CLOCKS
        if (threadIdx.x == 0) asm volatile("mov.u64 %0, %%clock64;" : "=l"(*next)::"memory");
        next++;
#endif
    }
};
