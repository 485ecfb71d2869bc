// A decode step of a whole model in one kernel, for up to 16 rows.
//
// A step of many kernels pays for each: its launch, the time until its first bytes arrive, and the time in which its last
// blocks leave the rest of the GPU idle. Here one block a multiprocessor stays from the first layer to the logits. Blocks
// meet at a barrier where one phase needs what another has written, five times a layer, and the weights stream on through
// the barriers (mega_stream.cuh). The idea is that of Hazy Research's megakernel (Spector et al., 2025).
//
// All blocks must run at once, or a barrier would wait for ever: one a multiprocessor, and nothing else on the GPU that
// waits for this kernel.

#include "mega_attention.cuh"
#include "mega_product.cuh"

union Scratch {
    Sums sums;
    Head head;
};

// Norms are small and used once a step: fetched when they are needed, each would be a trip to memory.
__device__ __forceinline__ void warm(const Element* numbers, int count) {
    const int at = threadIdx.x * (128 / (int)sizeof(Element));
    if (numbers && at < count) prefetch(numbers + at);
}

__device__ __forceinline__ float silu(float x) { return x / (1 + fast_exp2(-1.44269504f * x)); }

extern "C" __global__ void __launch_bounds__(THREADS, 1) step(const Step s) {
    // Shared memory: the rings, what a phase computes with, the list of phases, this block's part of the hidden state.
    const int phases = number_of_phases(s);
    Chunk* const rings = reinterpret_cast<Chunk*>(dynamic_shared());
    Scratch& scratch = *reinterpret_cast<Scratch*>(rings + WARPS * DEPTH);
    Phase* const list = reinterpret_cast<Phase*>(reinterpret_cast<Vector*>(&scratch) + (sizeof(Scratch) + 15) / 16);
    float(*const residual)[BATCH][UNIT] = reinterpret_cast<float(*)[BATCH][UNIT]>(list + phases);

    list_phases(s, list);
    __syncthreads();
    Stream stream;
    stream.begin(list, list + phases, rings + threadIdx.x / 32 * DEPTH);
    Grid grid{s.counter, 0, s.clocks};
    grid.mark();

    // The first input is the embedding's rows. A block keeps the columns of the hidden state that it will add to.
    Input in = input(s, s.embedding, 0, list[0].norm);
#pragma unroll
    for (int h = 0; h < HALVES; h++)
        if (in.row[h]) in.row[h] += s.input_ids[threadIdx.x % 32 / 4 + 8 * h] * HIDDEN;
    for (int i = threadIdx.x; i < units_of_block(HIDDEN / UNIT) * s.batch * UNIT; i += THREADS) {
        const int unit = i / UNIT / s.batch, row = i / UNIT % s.batch, column = i % UNIT;
        const int place = (blockIdx.x + unit * BLOCKS) * UNIT + column;
        residual[unit][row][column] = to_float(s.embedding[s.input_ids[row] * HIDDEN + place]);
    }

    for (int i = 0; i < phases; i++) {
        const Phase& phase = list[i];
        if (i > 0) in = input(s, phase.input, phase.chunks * CHUNK, phase.norm);
        if (i + 2 < phases) warm(list[i + 2].norm, HIDDEN);
        product(s, stream, scratch.sums, phase, in, [&](int unit, int row, int column, auto total) {
            const int outputs = phase.use == Use::gate ? UNIT / 2 : UNIT;
            const int place = ((int)blockIdx.x + unit * BLOCKS) * outputs + column;
            float result = total(column);
            if (phase.use == Use::add) {
                float& sum = residual[unit][row][column];
                result = sum = rounded(sum + rounded(result));
            } else if (phase.use == Use::gate) {
                result = rounded(silu(rounded(result))) * rounded(total(column + outputs));
            }
            store(phase.output + (long long)row * phase.units * outputs + place, result);
        });
        if (i == phases - 1) break;
        grid.arrive();
        auto meet = [&] {
            stream.refill();
            grid.wait();
        };
        if (i % 4 == 0) {  // q, k and v are there
            attend(s, i / 4, scratch.head, meet);
            grid.arrive();
        }
        meet();
    }
    grid.leave();
}
