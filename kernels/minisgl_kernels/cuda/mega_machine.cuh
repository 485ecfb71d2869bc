// What the megakernel needs of the machine beyond common.cuh: words that blocks hand to each other, and copies by the
// copy engine of a multiprocessor (Hopper's TMA) with the signals that tell when they have landed.
//
// On a CPU the emulator stands in for each of them.

#pragma once

#include "common.cuh"

#ifdef EMULATED
__device__ __forceinline__ void* dynamic_shared() { return emulator::dynamic_shared(); }
#else
extern __shared__ Vector shared_bytes[];
__device__ __forceinline__ void* dynamic_shared() { return shared_bytes; }
#endif

// The threads 0 … THREADS - 1 of a block meet; the warp behind them, which only fetches, does not take part.
template <int THREADS>
__device__ __forceinline__ void meet() {
#ifdef EMULATED
    emulator::meet(THREADS);
#else
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
#endif
}

// Two numbers rounded into 32 bits, the first one low, and back.
__device__ __forceinline__ unsigned pack(float first, float second) {
    Element low, high;
    store(&low, first), store(&high, second);
    return low.bits | (unsigned)high.bits << 16;
}

__device__ __forceinline__ void unpack(unsigned both, float& first, float& second) {
    first = to_float(Element{(unsigned short)(both & 0xffffu)});
    second = to_float(Element{(unsigned short)(both >> 16)});
}

__device__ __forceinline__ float rounded(float x) {
    Element y;
    store(&y, x);
    return to_float(y);
}

// ---- Words between blocks. A word carries its data and the number of the layer to which the data belong, in 8 bytes
// that are written and read at once. So a reader asks for the data until they bear the right number: no barrier, no
// flag, and no fence that would order the two. NCCL's LL protocol does so between GPUs.

struct alignas(8) Word {
    unsigned data, tag;
};

__device__ __forceinline__ void send(Word* to, unsigned data, unsigned tag) {
#ifdef EMULATED
    *to = {data, tag};
#else
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"((unsigned long long)tag << 32 | data) : "memory");
#endif
}

// Two neighbours, from an address that is a multiple of 16.
__device__ __forceinline__ void load(const Word* from, Word (&words)[2]) {
#ifdef EMULATED
    words[0] = from[0], words[1] = from[1];
#else
    unsigned long long low, high;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from) : "memory");
    words[0] = {(unsigned)low, (unsigned)(low >> 32)}, words[1] = {(unsigned)high, (unsigned)(high >> 32)};
#endif
}

__device__ __forceinline__ void load(const Word* from, Word (&words)[1]) {
#ifdef EMULATED
    words[0] = from[0];
#else
    unsigned long long both;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(both) : "l"(from) : "memory");
    words[0] = {(unsigned)both, (unsigned)(both >> 32)};
#endif
}

// Waits until the words at all addresses that are not null bear the tag. All are asked for at once: one trip, not N.
template <int N, int EACH>
__device__ __forceinline__ void receive(const Word* const (&from)[N], unsigned tag, Word (&words)[N][EACH]) {
    for (;;) {
        bool there = true;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (from[i]) load(from[i], words[i]);
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int e = 0; e < EACH; e++) there &= !from[i] || words[i][e].tag == tag;
        if (there) return;
#ifdef EMULATED
        emulator::let_others_run();
#elif defined(PAUSE)
        __nanosleep(PAUSE);
#endif
    }
}

// ---- Memory that nothing writes while the kernel runs.

// 16 bytes, asked for here, not where the compiler finds that they are needed.
__device__ __forceinline__ Vector load_early(const void* from) {
#ifdef EMULATED
    return *static_cast<const Vector*>(from);
#else
    Vector v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "l"(from));
    return v;
#endif
}

// Two numbers, likewise.
__device__ __forceinline__ unsigned load_pair(const Element* from) {
#ifdef EMULATED
    return *reinterpret_cast<const unsigned*>(from);
#else
    unsigned both;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(both) : "l"(from));
    return both;
#endif
}

// Brings the line of 128 bytes at an address to L2.
__device__ __forceinline__ void prefetch(const void* line) {
#ifndef EMULATED
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#endif
}

// ---- Signals in shared memory. A signal is in turns 0, 1, 0 … A turn ends when `arrivals` threads have arrived and
// all bytes that they announced have landed. To wait for the end of turn 1 before it began is not to wait.

#ifdef EMULATED
struct alignas(16) Signal {
    int arrivals, left, bytes, turn;
    void check() {
        if (left == 0 && bytes == 0) left = arrivals, turn ^= 1;
    }
};
__device__ __forceinline__ void begin(Signal* s, int arrivals) { *s = {arrivals, arrivals, 0, 0}; }
__device__ __forceinline__ void arrive(Signal* s) { s->left--, s->check(); }
__device__ __forceinline__ void arrive_and_announce(Signal* s, int bytes) { s->bytes += bytes, arrive(s); }
__device__ __forceinline__ void wait(Signal* s, int turn) {
    while (s->turn == turn) emulator::let_others_run();
}
__device__ __forceinline__ void copy(void* to, const void* from, int bytes, Signal* s) {
    memcpy(to, from, bytes), s->bytes -= bytes, s->check();
}
#else
struct alignas(16) Signal {
    unsigned long long state[2];
};
__device__ __forceinline__ unsigned shared_address(const void* p) {
    unsigned address;
    asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }" : "=r"(address) : "l"(p));
    return address;
}
__device__ __forceinline__ void begin(Signal* s, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(s)), "r"(arrivals) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // the copy engine shall see it, too
}
__device__ __forceinline__ void arrive(Signal* s) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(s)) : "memory");
}
__device__ __forceinline__ void arrive_and_announce(Signal* s, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(s)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(Signal* s, int turn) {
    unsigned ended;
    do
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(ended)
                     : "r"(shared_address(s)), "r"(turn)
                     : "memory");
    while (!ended);
}
// A multiple of 16 bytes from global to shared memory; whoever waits for the signal sees them.
__device__ __forceinline__ void copy(void* to, const void* from, int bytes, Signal* s) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(s))
                 : "memory");
}
#endif
