// The weights of the whole step as one stream.
//
// No weight depends on what the step computes, so a warp need not wait for a phase to begin to fetch its weights. It
// walks over all matrices of all layers in the order in which it will use them, DEPTH chunks ahead, and does not stop at
// a barrier: while blocks wait for each other, or attend, memory goes on to deliver.
//
// A block owns units of 8 rows of each matrix: unit n is block n mod grid's. The warps of the block share a row's
// columns: chunk n, of 64 columns, is warp n mod WARPS's. A lane copies the bytes that it will use itself, so nothing but
// its own wait stands between copy and use.

#pragma once

#include "mega_step.cuh"

#ifndef DEPTH
#define DEPTH 10  // chunks of a warp on their way: WARPS · DEPTH KB of shared memory
#endif
#ifndef TOGETHER
#define TOGETHER 6  // units for which a block's inputs are read once
#endif
constexpr int UNIT = 8, CHUNK = 64;

// How many of a matrix's units are this block's.
__device__ __forceinline__ int units_of_block(int units) {
    return (unsigned)(units - (int)blockIdx.x + BLOCKS - 1) / BLOCKS;
}

enum class Use { store, add, gate };  // what becomes of a product: an output, a part of the hidden state, an activation

struct Phase {  // output = use(weights · norm(input))
    const Element *weights, *input, *norm;  // [rows, 64 · chunks], [batch, 64 · chunks], [64 · chunks] or null
    Element* output;                        // [batch, units · outputs of a unit]
    int units, chunks;
    Use use;
};

__device__ __forceinline__ int number_of_phases(const Step& s) { return 4 * s.num_layers + 1; }

// All phases in their order, for shared memory: to ask global memory for an address would be a stop.
__device__ __forceinline__ void list_phases(const Step& s, Phase* list) {
    constexpr int WIDTH = HIDDEN / CHUNK;
    for (int i = threadIdx.x; i <= s.num_layers; i += THREADS) {
        Phase* const phase = list + 4 * i;
        if (i == s.num_layers) {
            phase[0] = {s.head, s.hidden, s.final_norm, s.logits, s.vocab / UNIT, WIDTH, Use::store};
            continue;
        }
        const Layer layer = s.layers[i];
        phase[0] = {layer.qkv, s.hidden, layer.input_norm, s.qkv, PROJECTED / UNIT, WIDTH, Use::store};
        phase[1] = {layer.o, s.attended, nullptr, s.hidden, HIDDEN / UNIT, ATTENDED / CHUNK, Use::add};
        phase[2] = {layer.gate_up, s.hidden, layer.post_norm, s.activation, 2 * INTERMEDIATE / UNIT, WIDTH, Use::gate};
        phase[3] = {layer.down, s.activation, nullptr, s.hidden, HIDDEN / UNIT, INTERMEDIATE / CHUNK, Use::add};
    }
}

struct Chunk {  // lane 4 r + t: row r of the unit, columns 8 t … and 32 + 8 t … of the chunk
    Vector half[2][32];
};

struct Stream {
    const Phase *phase, *end;  // in shared memory; where the next copy is from
    Chunk* ring;               // this warp's
    const Element* origin;     // the lane's place in the block's first unit
    long long stride;          // from one of the block's units to the next
    int units, chunks, first, chunk, unit;
    int slot, used;            // the ring's oldest place; it and those behind it that are to be filled again

    __device__ __forceinline__ void begin(const Phase* list, const Phase* behind, Chunk* own) {
        phase = list, end = behind, ring = own, slot = 0, used = DEPTH;
        open();
        refill();
    }

    // Opens the phase, or the next one that has something for this warp. A unit of gate and up projection is 4 rows of
    // each, which lie INTERMEDIATE apart: so it has both factors of 4 outputs.
    __device__ __forceinline__ void open() {
        const int lane = threadIdx.x % 32, row = lane / 4;
        for (; phase < end; phase++) {
            units = units_of_block(phase->units), chunks = phase->chunks;
            first = unit = 0, chunk = threadIdx.x / 32;
            if (units == 0 || chunk >= chunks) continue;
            const bool gate = phase->use == Use::gate;
            const int rows = gate ? UNIT / 2 : UNIT, place = gate ? row % 4 + row / 4 * INTERMEDIATE : row;
            const int columns = chunks * CHUNK;
            origin = phase->weights + (long long)((int)blockIdx.x * rows + place) * columns + lane % 4 * PER_VECTOR;
            stride = (long long)BLOCKS * rows * columns;
            return;
        }
    }

    // The order is that of `product` in mega_product.cuh: for every TOGETHER units, for every chunk, for each of the units.
    __device__ __forceinline__ void advance() {
        if (++unit < min(first + TOGETHER, units)) return;
        unit = first, chunk += WARPS;
        if (chunk < chunks) return;
        chunk = threadIdx.x / 32, unit = first += TOGETHER;
        if (first >= units) phase++, open();
    }

    // Starts as many copies as chunks have been used, into their places.
    __device__ __forceinline__ void refill() {
#pragma unroll 1
        for (; used > 0; used--) {
            if (phase < end) {
                const Element* from = origin + unit * stride + chunk * CHUNK;
                start_copy(&ring[slot].half[0][threadIdx.x % 32], from, true);
                start_copy(&ring[slot].half[1][threadIdx.x % 32], from + CHUNK / 2, true);
                advance();
            }
            close_group();  // an empty one at the end: the count of groups goes on
            slot = slot == DEPTH - 1 ? 0 : slot + 1;
        }
    }

    // After this the TOGETHER oldest chunks are there, used ones among them.
    __device__ __forceinline__ void wait() const { wait_for_copies<DEPTH - TOGETHER>(); }

    // The chunk that is `ahead` of the first unused one.
    __device__ __forceinline__ void read(int ahead, Vector (&weights)[2]) const {
        const int place = slot + used + ahead;
        const Chunk& next = ring[place < DEPTH ? place : place - DEPTH];
        weights[0] = next.half[0][threadIdx.x % 32];
        weights[1] = next.half[1][threadIdx.x % 32];
    }
};
static_assert(TOGETHER % 2 == 0 && DEPTH >= TOGETHER, "the units of a block that are used together lie in the ring together");
