// A phase that multiplies: every block computes its units of an output, for all rows of the batch, on tensor cores.
//
// The rows of the batch are the 16 rows of the tensor core's first operand (those that the batch lacks are zeros), 8 rows
// of weights are the columns of the second. Which 16 of the inputs a tensor core sums over, in which order, is free as
// long as both operands agree: so a lane's 16 bytes are the operands of two products as they lie in memory.

#pragma once

#include "mega_stream.cuh"

constexpr int HALVES = BATCH > 8 ? 2 : 1;  // of the 16 rows

struct Sums {  // in shared memory: what each warp has found over its columns
    float parts[WARPS][TOGETHER][BATCH][UNIT], squares[WARPS][BATCH];
};

struct Input {  // of lane 4 r + t: the batch's rows r and r + 8, null if there is none; and a norm's weight, or null
    const Element *row[HALVES], *norm;
};

struct Fragment {  // the input's chunk, laid out like Chunk
    Vector row[HALVES][2];
};

__device__ __forceinline__ Input input(const Step& step, const Element* x, int width, const Element* norm = nullptr) {
    Input in;
    in.norm = norm;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        const int row = threadIdx.x % 32 / 4 + 8 * h;
        in.row[h] = row < step.batch ? x + row * width : nullptr;
    }
    return in;
}

__device__ __forceinline__ Fragment read(const Input& in, int chunk) {
    Fragment x;
    const int column = chunk * CHUNK + threadIdx.x % 4 * PER_VECTOR;
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int v = 0; v < 2; v++)
            x.row[h][v] = in.row[h] ? load_fresh((const Vector*)(in.row[h] + column + v * (CHUNK / 2))) : Vector{};
    return x;
}

// An RMSNorm scales a row by one number, 1 / rms: that may as well be done to the products. So only the weight of the
// norm is multiplied here, and the squares are summed, while nobody waits for the sum.
__device__ __forceinline__ void apply_norm(Fragment& x, const Element* norm, int chunk, float (&squares)[HALVES]) {
    const int column = chunk * CHUNK + threadIdx.x % 4 * PER_VECTOR;
#pragma unroll
    for (int v = 0; v < 2; v++) {
        float weight[PER_VECTOR], number[PER_VECTOR];
        unpack(load_vector(norm + column + v * (CHUNK / 2)), weight);
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            unpack(x.row[h][v], number);
#pragma unroll
            for (int i = 0; i < PER_VECTOR; i++) squares[h] += number[i] * number[i];
#pragma unroll
            for (int i = 0; i < 4; i++)
                x.row[h][v].words[i] = pack(Element{}, number[2 * i] * weight[2 * i], number[2 * i + 1] * weight[2 * i + 1]);
        }
    }
}

// Two units at once: a tensor core need not wait for its sum before it begins the other one.
__device__ __forceinline__ void multiply(float (&acc)[2][4], const Fragment& x, const Vector (&weights)[2][2]) {
#pragma unroll
    for (int v = 0; v < 2; v++)
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const unsigned *low = x.row[0][v].words, *high = x.row[HALVES - 1][v].words;
            const unsigned a[4] = {low[i], HALVES == 2 ? high[i] : 0u, low[i + 1], HALVES == 2 ? high[i + 1] : 0u};
#pragma unroll
            for (int u = 0; u < 2; u++) {
                const unsigned b[2] = {weights[u][v].words[i], weights[u][v].words[i + 1]};
                tensor_core(acc[u], a, b);
            }
        }
}

// Multiplies a phase's input by this block's units of its weights, which the stream brings. For each unit, row and output
// of the unit one thread calls give(unit, row, output, total); total(column) is a column's sum, 0 ≤ column < UNIT.
template <class Give>
__device__ __forceinline__ void product(const Step& step, Stream& stream, Sums& sums, const Phase& phase, const Input& in,
                                        const Give& give) {
    constexpr int PAIRS = TOGETHER / 2, AHEAD = HALVES == 1 ? 4 : 3;  // chunks of the input in registers
    const int warp = threadIdx.x / 32, r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int chunks = phase.chunks, units = units_of_block(phase.units), log_outputs = phase.use == Use::gate ? 2 : 3;
    // Copies that a phase need not start for itself are started behind it, where the block would only wait for others.
    const bool few = units * ((chunks + WARPS - 1) / WARPS) <= TOGETHER;
    Fragment x[AHEAD];
    float squares[HALVES];
    for (int first = 0; first < units; first += TOGETHER) {
        const int count = min(TOGETHER, units - first);
        const bool read_again = first == 0 || chunks > AHEAD * WARPS;  // or all of it is in registers
        float acc[PAIRS][2][4] = {};
        if (read_again)
#pragma unroll
            for (int h = 0; h < HALVES; h++) squares[h] = 0;
        for (int start = warp; start < chunks; start += AHEAD * WARPS) {
            if (read_again) {
#pragma unroll
                for (int a = 0; a < AHEAD; a++)
                    if (start + a * WARPS < chunks) x[a] = read(in, start + a * WARPS);
                if (in.norm)
#pragma unroll
                    for (int a = 0; a < AHEAD; a++)
                        if (start + a * WARPS < chunks) apply_norm(x[a], in.norm, start + a * WARPS, squares);
            }
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                if (start + a * WARPS >= chunks) break;
                stream.wait();
#pragma unroll
                for (int pair = 0; pair < PAIRS; pair++) {
                    if (2 * pair >= count) break;
                    Vector weights[2][2];  // of an odd unit the other one is anything, and so is its sum
                    stream.read(2 * pair, weights[0]);
                    stream.read(2 * pair + 1, weights[1]);
                    multiply(acc[pair], x[a], weights);
                }
                stream.used += count;
                if (!few) stream.refill();
            }
        }
        // Now the warps' sums are added up.
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            const int row = r + 8 * h;
            const float sum = warp_sum<4>(squares[h]);
            if (row >= BATCH) continue;
            if (t == 0) sums.squares[warp][row] = sum;
#pragma unroll
            for (int u = 0; u < TOGETHER; u++) {
                if (u >= count) break;
                sums.parts[warp][u][row][2 * t] = acc[u / 2][u % 2][2 * h];
                sums.parts[warp][u][row][2 * t + 1] = acc[u / 2][u % 2][2 * h + 1];
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < (count * BATCH) << log_outputs; i += THREADS) {
            const int u = (i >> log_outputs) / BATCH, row = (i >> log_outputs) % BATCH;
            if (row >= step.batch) continue;
            float scale = 1;
            if (in.norm) {
                float square = 0;
#pragma unroll
                for (int w = 0; w < WARPS; w++) square += sums.squares[w][row];
                scale = rsqrtf(square / (chunks * CHUNK) + step.eps);
            }
            give(first + u, row, i & ((1 << log_outputs) - 1), [&](int column) {
                float total = 0;
#pragma unroll
                for (int w = 0; w < WARPS; w++) total += sums.parts[w][u][row][column];
                return total * scale;
            });
        }
        __syncthreads();
    }
}
