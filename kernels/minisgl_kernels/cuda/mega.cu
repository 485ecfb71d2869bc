// A decode step of a whole model in one kernel, for up to 4 rows.
//
// A step of many kernels pays for each: its launch, the time until its first bytes arrive, and the time in which its
// last blocks leave the rest of the GPU idle. Here one block a multiprocessor stays from the first layer to the logits,
// and the weights stream in without a stop (mega_stream.cuh). A phase begins when the words arrive that others have
// sent (mega_machine.cuh). The idea is that of Hazy Research's megakernel (Spector et al., 2025).
//
// All blocks must run at once, or one would wait for ever: one a multiprocessor, and nothing else on the GPU that waits
// for this kernel. Words are overwritten in the next layer without asking whether they have been read. They have: a
// block can only be there when it has received a part of each block's activation, and whoever sent that had read all
// before it.

#include "mega_attention.cuh"
#include "mega_product.cuh"

struct Shared {
    Piece pieces[DEPTH];
    Inputs inputs;
    Sums sums;
    Head head;
    Signal full[DEPTH], empty[DEPTH];
    float residual[BATCH][2 * ((HIDDEN / 2 + BLOCKS - 1) / BLOCKS)];  // this block's part of the hidden state
};

__device__ __forceinline__ float silu(float x) { return x / (1 + fast_exp2(-1.44269504f * x)); }

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) step(const Step s) {
    Shared& shared = *static_cast<Shared*>(dynamic_shared());
    Phase* const list = reinterpret_cast<Phase*>(&shared + 1);
    const int phases = number_of_phases(s);
    Ring ring{shared.pieces, shared.full, shared.empty, 0, 0};
    if (threadIdx.x < THREADS) list_phases(s, list);
    if (threadIdx.x < DEPTH) begin(&ring.full[threadIdx.x], 1), begin(&ring.empty[threadIdx.x], WARPS);
    __syncthreads();
    const Part part = part_of(s);
    if (threadIdx.x >= THREADS)
        return fetch(list, phases, ring, [&](int layer) { fetch_keys(s, part, layer); });

    const unsigned launch = s.launches[blockIdx.x], base = launch * (s.num_layers + 1) + 1;
    Clock clock{s.clocks + (long long)blockIdx.x * (MARKS * s.num_layers + 3)};
    clock.mark();
    // The embedding is what the phase before the first one would have sent.
    const Range range = own(HIDDEN);
    for (int row = threadIdx.x / 32; row < s.batch; row += WARPS)
        for (int at = range.first + 2 * (threadIdx.x % 32); at < range.end; at += 64) {
            const unsigned both = load_pair(s.embedding + s.input_ids[row] * HIDDEN + at);
            float* const kept = &shared.residual[row][at - range.first];
            unpack(both, kept[0], kept[1]);
            send(s.input + (row * HIDDEN + at) / 2, both, base);
        }

    for (int i = 0; i < phases; i++) {
        const Phase phase = list[i];
        const unsigned tag = base + i / 4, next = base + (i + 1) / 4;
        take_in(s, phase, tag, shared.inputs, shared.sums);
        clock.mark();
        product(s, ring, phase, shared.inputs, shared.sums, [&](int row, int output, auto total) {
            float result[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                result[e] = total(e);
                if (phase.use == Use::add) {
                    float& kept = shared.residual[row][output - range.first + e];
                    result[e] = kept = rounded(kept + rounded(result[e]));
                } else if (phase.use == Use::gate) {
                    result[e] = rounded(silu(rounded(result[e]))) * rounded(total(GROUP_ROWS / 2 + e));
                }
            }
            const long long at = (long long)row * phase.outputs + output;
            const unsigned both = pack(result[0], result[1]);
            if (phase.use == Use::logits) *reinterpret_cast<unsigned*>(s.logits + at) = both;
            else send(phase.output + at / 2, both, next);
        });
        clock.mark();
        if (i % 4 == 0 && i < phases - 1 && part.first < part.end)
            attend(s, phase, part, i / 4, tag, shared.head, clock);
        else if (i % 4 == 0 && i < phases - 1)
            clock.next += 3;
    }
    if (threadIdx.x == 0) s.launches[blockIdx.x] = launch + 1;
}
