// One decode step of a whole model: its sizes, its arguments, and the barrier of the grid.
//
// HIDDEN, INTERMEDIATE, KV_HEADS, GROUP, HEAD_DIM, BATCH (at most 16 rows) and BLOCKS, the grid, are macros: a kernel is
// compiled for a model and a GPU.

#pragma once

#include "rows.cuh"
#include "mega_machine.cuh"

constexpr int HEADS = KV_HEADS * GROUP;
constexpr int ATTENDED = HEADS * HEAD_DIM;                        // numbers of a row's attention
constexpr int PROJECTED = (HEADS + 2 * KV_HEADS) * HEAD_DIM;      // of its q, k and v

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
    Element *hidden, *qkv, *attended, *activation;  // [batch, …], between the phases
    float *partials, *lse;                   // [batch, HEADS, splits, HEAD_DIM], and the same without HEAD_DIM
    unsigned *arrivals, *counter;            // zeros, and zeros again at the end: [batch, KV_HEADS] and [1]
    Element* logits;                         // [batch, vocab]
    long long* clocks;                       // with CLOCKS: [2 · barriers + 1]
    long long layer_stride, table_stride;    // in elements
    int key_slot, key_head, value_slot, value_head;
    int batch, num_layers, vocab, page_size, splits;
    float eps, scale;
};

// A barrier of all blocks, in two halves: a block says that its writes are done, does what does not depend on those of
// others, and waits. The counter only grows; the last block to leave puts it back to 0 for the next launch.
struct Grid {
    unsigned *counter, target;
    long long* clocks;

    __device__ __forceinline__ void arrive() {
        __syncthreads();
        mark();
        if (threadIdx.x == 0) add(counter, 1);
        target += BLOCKS;
    }
    __device__ __forceinline__ void wait() {
        if (threadIdx.x == 0) wait_for(counter, target);
        __syncthreads();
        mark();
    }
    __device__ __forceinline__ void leave() {
        __syncthreads();
        mark();
        if (threadIdx.x == 0 && add(counter, 1) == target + BLOCKS - 1) *counter = 0;
    }
    __device__ __forceinline__ void mark() {
#ifdef CLOCKS
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            asm volatile("mov.u64 %0, %%clock64;" : "=l"(*clocks)::"memory");
            clocks++;
        }
#endif
    }
};
