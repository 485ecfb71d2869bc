// The weights of the whole step as one stream.
//
// No weight depends on what the step computes. So one warp of a block does nothing but fetch: it walks over all
// matrices of all layers in the order in which the others will use them, and starts the next copy as soon as a place in
// the ring is free. While blocks wait for each other, or attend, memory goes on to deliver.
//
// A piece is GROUP_ROWS rows of a matrix by WIDTH columns, four columns a thread.

#pragma once

#include "mega_step.cuh"

#ifndef DEPTH
#define DEPTH 12  // pieces in the ring: 16 KB each with 8 warps
#endif
constexpr int GROUP_ROWS = 8, WIDTH = 4 * THREADS;

enum class Use { store, add, gate, logits };  // what becomes of a product

struct Phase {  // output = use(weights · norm(input))
    const Element *weights, *norm;  // [rows, columns], [columns] or null
    const Word* input;              // [batch, columns / 2]
    Word* output;                   // [batch, outputs / 2]
    int outputs, columns;
    Use use;
    const Element *q_norm, *k_norm;  // of the heads of q, k and v, or null

    // A group of gate and up projection is 4 rows of each, INTERMEDIATE apart: both factors of 4 outputs.
    __device__ __forceinline__ int outputs_of_group() const { return use == Use::gate ? GROUP_ROWS / 2 : GROUP_ROWS; }
};

__device__ __forceinline__ int number_of_phases(const Step& s) { return 4 * s.num_layers + 1; }

// All phases in their order, for shared memory: to ask global memory for an address would be a trip.
__device__ __forceinline__ void list_phases(const Step& s, Phase* list) {
    for (int i = threadIdx.x; i <= s.num_layers; i += THREADS) {
        Phase* const phase = list + 4 * i;
        if (i == s.num_layers) {
            phase[0] = {s.head, s.final_norm, s.input, nullptr, s.vocab, HIDDEN, Use::logits};
            continue;
        }
        const Layer layer = s.layers[i];
        phase[0] = {layer.qkv, layer.input_norm, s.input, s.qkv, PROJECTED, HIDDEN, Use::store,
                    layer.q_norm, layer.k_norm};
        phase[1] = {layer.o, nullptr, s.attended, s.middle, HIDDEN, ATTENDED, Use::add};
        phase[2] = {layer.gate_up, layer.post_norm, s.middle, s.activation, INTERMEDIATE, HIDDEN, Use::gate};
        phase[3] = {layer.down, nullptr, s.activation, s.input, HIDDEN, INTERMEDIATE, Use::add};
    }
}

struct alignas(8) Four {  // numbers
    unsigned words[2];
};
struct alignas(16) Piece {
    Four rows[GROUP_ROWS][THREADS];
};

struct Ring {  // in shared memory, and how far one of its users has come
    Piece* pieces;
    Signal *full, *empty;
    int place, turn;

    __device__ __forceinline__ void next() {
        if (++place == DEPTH) place = 0, turn ^= 1;
    }
};

// The fetching warp. ahead(layer) is called before the layer's first weights are fetched.
template <class Ahead>
__device__ __forceinline__ void fetch(const Phase* list, int phases, Ring ring, const Ahead& ahead) {
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < phases; i++) {
        const Phase phase = list[i];
        if (i % 4 == 0 && i < phases - 1) ahead(i / 4);
        if (phase.norm)
            for (int at = lane * 64; at < phase.columns; at += 32 * 64) prefetch(phase.norm + at);
        if (phase.q_norm && lane < 4) prefetch((lane % 2 ? phase.k_norm : phase.q_norm) + lane / 2 * (HEAD_DIM / 2));
        const int outputs = phase.outputs_of_group();
        const Range range = own(phase.outputs);
        for (int first = range.first; first < range.end; first += outputs)
            for (int column = 0; column < phase.columns; column += WIDTH, ring.next()) {
                const int count = min(outputs, range.end - first);
                const int bytes = min(WIDTH, phase.columns - column) * (int)sizeof(Element);
                wait(&ring.empty[ring.place], ring.turn ^ 1);
                if (lane == 0) arrive_and_announce(&ring.full[ring.place], bytes * count * (GROUP_ROWS / outputs));
                __syncwarp();
                if (lane >= GROUP_ROWS || lane % outputs >= count) continue;
                const long long row = first + lane % outputs + lane / outputs * INTERMEDIATE;
                copy(ring.pieces[ring.place].rows[lane], phase.weights + row * phase.columns + column, bytes,
                     &ring.full[ring.place]);
            }
    }
}
