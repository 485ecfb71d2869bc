// A phase that multiplies: every block computes its part of an output, for all rows of the batch.
//
// A thread has the same four of WIDTH columns in every piece, and adds up its columns' share of each row of weights.
// The inputs of these columns it has received itself, so that nobody waits for another thread's.

#pragma once

#include "mega_stream.cuh"

#ifndef TOGETHER
#define TOGETHER 6  // groups of rows whose sums are added up over the block at once
#endif
constexpr int MOST_COLUMNS = HIDDEN > INTERMEDIATE ? (HIDDEN > ATTENDED ? HIDDEN : ATTENDED)
                                                   : (INTERMEDIATE > ATTENDED ? INTERMEDIATE : ATTENDED);

struct alignas(16) Floats {
    float x[4];
};
struct Inputs {  // in shared memory
    Floats row[BATCH][MOST_COLUMNS / 4];
};
struct Sums {  // what each warp has found
    float parts[WARPS][BATCH][TOGETHER * GROUP_ROWS], squares[WARPS][BATCH];
};

// The sums of 8 numbers over a warp; lane l gets that of number l % 8. Lanes exchange the half that they do not keep: 9
// shuffles where 8 sums would take 40.
__device__ __forceinline__ float warp_sums(float (&x)[GROUP_ROWS]) {
    static_assert(GROUP_ROWS == 8, "three rounds");
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
        const bool upper = threadIdx.x & half;
#pragma unroll
        for (int i = 0; i < half; i++)
            x[i] = (upper ? x[i + half] : x[i]) + __shfl_xor_sync(WHOLE_WARP, upper ? x[i] : x[i + half], half);
    }
    return warp_sum_from<8>(x[0]);
}

// Waits for this thread's columns of the input. An RMSNorm scales a row by one number, 1 / rms: that may as well be
// done to the products. So only the norm's weights are multiplied here, and the squares are summed, while nobody waits
// for them.
__device__ __forceinline__ void take_in(const Step& s, const Phase& phase, unsigned tag, Inputs& inputs, Sums& sums) {
    constexpr int AHEAD = BATCH == 1 ? 4 : 8;  // trips at once
    float squares[BATCH] = {};
    for (int start = 4 * threadIdx.x; start < phase.columns; start += AHEAD / BATCH * WIDTH) {
        const Word* from[AHEAD];
        Word words[AHEAD][2];
        Four weights[AHEAD / BATCH];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int row = a % BATCH, column = start + a / BATCH * WIDTH;
            const bool exists = row < s.batch && column < phase.columns;
            from[a] = exists ? phase.input + (row * phase.columns + column) / 2 : nullptr;
            if (row == 0 && phase.norm && column < phase.columns)
                for (int i = 0; i < 2; i++) weights[a / BATCH].words[i] = load_pair(phase.norm + column + 2 * i);
        }
        receive(from, tag, words);
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (!from[a]) continue;
            Floats x;
#pragma unroll
            for (int i = 0; i < 4; i += 2) unpack(words[a][i / 2].data, x.x[i], x.x[i + 1]);
            if (phase.norm) {
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    float first, second;
                    unpack(weights[a / BATCH].words[i / 2], first, second);
                    squares[a % BATCH] += x.x[i] * x.x[i] + x.x[i + 1] * x.x[i + 1];
                    x.x[i] *= first, x.x[i + 1] *= second;
                }
            }
            inputs.row[a % BATCH][(start + a / BATCH * WIDTH) / 4] = x;
        }
    }
    if (!phase.norm) return;
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
        const float sum = warp_sum<32>(squares[b]);
        if (threadIdx.x % 32 == 0) sums.squares[threadIdx.x / 32][b] = sum;
    }
}

// The products of one group of rows, from the ring, over this warp's columns: lane l gets those of row l % 8.
__device__ __forceinline__ void multiply(Ring& ring, int columns, const Inputs& inputs, float (&sums)[BATCH]) {
    float acc[BATCH][GROUP_ROWS] = {};
    for (int begin = 0; begin < columns; begin += WIDTH, ring.next()) {
        wait(&ring.full[ring.place], ring.turn);
        const int column = begin + 4 * threadIdx.x;
        if (column < columns) {
            Floats x[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; b++) x[b] = inputs.row[b][column / 4];
#pragma unroll
            for (int r = 0; r < GROUP_ROWS; r++) {
                const Four weights = ring.pieces[ring.place].rows[r][threadIdx.x];
                Floats w;
                unpack(weights.words[0], w.x[0], w.x[1]), unpack(weights.words[1], w.x[2], w.x[3]);
#pragma unroll
                for (int b = 0; b < BATCH; b++)
#pragma unroll
                    for (int i = 0; i < 4; i++) acc[b][r] += w.x[i] * x[b].x[i];
            }
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&ring.empty[ring.place]);
    }
#pragma unroll
    for (int b = 0; b < BATCH; b++) sums[b] = warp_sums(acc[b]);
}

// Multiplies a phase's input by this block's rows of its weights. For every row of the batch and two neighbouring
// outputs one thread calls give(row, output, total); total(i) is the sum of the weights' row that is i behind the
// output's.
template <class Give>
__device__ __forceinline__ void product(const Step& s, Ring& ring, const Phase& phase, const Inputs& inputs, Sums& sums,
                                        const Give& give) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, of_group = phase.outputs_of_group();
    const Range range = own(phase.outputs);
    for (int first = range.first; first < range.end; first += TOGETHER * of_group) {
        const int count = min(TOGETHER * of_group, range.end - first);
        for (int group = 0; group * of_group < count; group++) {
            float sum[BATCH];
            multiply(ring, phase.columns, inputs, sum);
            if (lane < GROUP_ROWS)
#pragma unroll
                for (int b = 0; b < BATCH; b++) sums.parts[warp][b][group * GROUP_ROWS + lane] = sum[b];
        }
        meet<THREADS>();
        for (int row = warp; row < s.batch; row += WARPS) {
            float square = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) square += phase.norm ? sums.squares[w][row] : 0;
            const float scale = phase.norm ? rsqrtf(square / phase.columns + s.eps) : 1;
            for (int output = 2 * lane; output < count; output += 64) {
                const int group = phase.use == Use::gate ? output / 4 : output / GROUP_ROWS;  // constants: no division
                const int place = output + group * (GROUP_ROWS - of_group);
                give(row, first + output, [&](int behind) {
                    float total = 0;
#pragma unroll
                    for (int w = 0; w < WARPS; w++) total += sums.parts[w][row][place + behind];
                    return total * scale;
                });
            }
        }
        meet<THREADS>();
    }
}
