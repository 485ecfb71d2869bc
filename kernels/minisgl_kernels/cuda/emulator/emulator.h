// Runs a CUDA kernel on a CPU, to find wrong answers and missing barriers without a GPU. Not fast.
//
// A block's threads are fibers of one CPU thread. Between two points where they meet (a barrier, a shuffle, __syncwarp)
// each runs alone and to the end, in an order that the seed shuffles: what relies on a barrier that is not there reads
// too early. An asynchronous copy lands at once or as late as its wait allows, as the seed decides. Shared memory holds
// NaNs when a block begins. All of this is legal on a GPU; there it happens once in a million launches.
//
// Not emulated: dynamic shared memory, atomics, masks other than the whole warp's, several blocks at once.

#pragma once

#undef _FORTIFY_SOURCE  // its longjmp refuses to go from one stack to another
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700  // macOS: ucontext
#endif
#ifdef __APPLE__
#define _DARWIN_C_SOURCE 1
#endif
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#define EMULATED 1
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

// All shared variables of a file lie together, so that they can be filled with NaNs.
#ifdef __APPLE__
#define __shared__ __attribute__((section("__DATA,emu_shared"))) static
extern char shared_begin[] __asm("section$start$__DATA$emu_shared");
extern char shared_end[] __asm("section$end$__DATA$emu_shared");
#else
#define __shared__ __attribute__((section("emu_shared"))) static
extern char shared_begin[] __asm__("__start_emu_shared") __attribute__((weak, visibility("hidden")));
extern char shared_end[] __asm__("__stop_emu_shared") __attribute__((weak, visibility("hidden")));
#endif

namespace {
namespace emulator {

struct Index {
    unsigned x, y, z;
};
enum class State { ready, at_warp, at_block, done };

struct Copy {
    void* to;
    const void* from;
    bool exists;
    void land() const { exists ? memcpy(to, from, 16) : memset(to, 0, 16); }
};

struct Fiber {
    Index index;
    State state;
    bool started;
    ucontext_t begin;
    jmp_buf resume;
    std::vector<char> stack;
    std::vector<std::vector<Copy>> groups;  // asynchronous copies on their way; the last group is still open
    unsigned exchanges;                     // shuffles so far: two sets of values take turns
};

struct Warp {
    uint64_t values[2][32];
};

Fiber* current;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
jmp_buf scheduler;
void (*body)(const void*);
const void* arguments;
Index block, grid, block_size;
uint32_t random_state;

uint32_t random(uint32_t below) {
    random_state = random_state * 1664525u + 1013904223u;
    return static_cast<uint32_t>((uint64_t(random_state) * below) >> 32);
}

template <class T>
void shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; i--) std::swap(items[i - 1], items[random(i)]);
}

[[noreturn]] void run_body() {
    body(arguments);
    current->state = State::done;
    _longjmp(scheduler, 1);
}

// Runs a fiber to its next meeting point. The jumps save a system call that swapcontext makes each time.
__attribute__((noinline)) void run(Fiber* fiber) {
    current = fiber;
    if (_setjmp(scheduler)) return;
    if (current->started) _longjmp(current->resume, 1);
    current->started = true;
    setcontext(&current->begin);
}

__attribute__((noinline)) void pause_until(State state) {
    current->state = state;
    if (!_setjmp(current->resume)) _longjmp(scheduler, 1);
}

// Runs a warp until its lanes wait for other warps, or now and then until they have met once. False: they wait for each
// other in different places.
bool run_warp(unsigned warp) {
    const unsigned last = warp * 32 + 32 < fibers.size() ? warp * 32 + 32 : fibers.size();
    for (;;) {
        std::vector<Fiber*> alive, ready;
        for (unsigned t = warp * 32; t < last; t++) {
            if (fibers[t].state == State::ready) ready.push_back(&fibers[t]);
        }
        shuffle(ready);
        for (Fiber* fiber : ready) run(fiber);
        size_t meeting = 0;
        for (unsigned t = warp * 32; t < last; t++) {
            if (fibers[t].state != State::done) alive.push_back(&fibers[t]);
            meeting += fibers[t].state == State::at_warp;
        }
        if (meeting == 0) return true;
        if (meeting < alive.size()) return false;
        for (Fiber* fiber : alive) fiber->state = State::ready;
        if (random(16) == 0) return true;
    }
}

const char* run_block() {
    memset(shared_begin, 0xff, shared_end - shared_begin);  // NaN in fp32, bf16 and fp16
    for (Fiber& fiber : fibers) {
        fiber.state = State::ready;
        fiber.started = false;
        fiber.exchanges = 0;
        fiber.groups.assign(1, {});
        getcontext(&fiber.begin);
        fiber.begin.uc_stack.ss_sp = fiber.stack.data();
        fiber.begin.uc_stack.ss_size = fiber.stack.size();
        fiber.begin.uc_link = nullptr;
        makecontext(&fiber.begin, reinterpret_cast<void (*)()>(run_body), 0);
    }
    for (;;) {
        std::vector<unsigned> ready;
        bool alive = false;
        for (unsigned t = 0; t < fibers.size(); t++) {
            alive |= fibers[t].state != State::done;
            if (fibers[t].state == State::ready && (ready.empty() || ready.back() != t / 32)) ready.push_back(t / 32);
        }
        if (!alive) return nullptr;
        if (ready.empty()) {
            for (Fiber& fiber : fibers) {
                if (fiber.state == State::at_block) fiber.state = State::ready;
            }
        } else if (!run_warp(ready[random(ready.size())])) {
            return "lanes of one warp wait in different places: at a shuffle, and at a barrier or not at all";
        }
    }
}

const char* launch(void (*kernel)(const void*), const void* args, Index blocks, unsigned threads, unsigned seed) {
    body = kernel;
    arguments = args;
    grid = blocks;
    block_size = {threads, 1, 1};
    random_state = seed * 2654435761u + 1;
    warps.resize((threads + 31) / 32);
    fibers.resize(threads);
    for (unsigned t = 0; t < threads; t++) {
        fibers[t].index = {t, 0, 0};
        fibers[t].stack.resize(128 * 1024);
    }
    std::vector<unsigned> order(blocks.x * blocks.y * blocks.z);
    for (unsigned i = 0; i < order.size(); i++) order[i] = i;
    shuffle(order);
    for (unsigned number : order) {
        block = {number % blocks.x, number / blocks.x % blocks.y, number / blocks.x / blocks.y};
        if (const char* error = run_block()) return error;
    }
    return nullptr;
}

template <class T>
T exchange(T value, unsigned source) {
    static_assert(sizeof(T) <= 8, "a shuffle moves 4 or 8 bytes");
    uint64_t(&values)[32] = warps[current->index.x / 32].values[current->exchanges++ % 2];
    memcpy(&values[current->index.x % 32], &value, sizeof(T));
    pause_until(State::at_warp);
    memcpy(&value, &values[source % 32], sizeof(T));
    return value;
}

inline void start_copy(void* to, const void* from, bool exists) {
    const Copy copy{to, from, exists};
    random(2) ? copy.land() : current->groups.back().push_back(copy);
}

inline void close_group() { current->groups.emplace_back(); }

inline void wait_for_copies(int pending) {
    auto& groups = current->groups;
    const int landed = static_cast<int>(groups.size()) - 1 - pending;
    if (landed <= 0) return;
    for (int i = 0; i < landed; i++) {
        for (const Copy& copy : groups[i]) copy.land();
    }
    groups.erase(groups.begin(), groups.begin() + landed);
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline float from_half(uint16_t half) {
    const uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
    float x = exponent == 31 ? float_of(0x7f800000u | fraction << 13)
              : exponent     ? float_of((exponent + 112) << 23 | fraction << 13)
                             : std::ldexp(static_cast<float>(fraction), -24);
    return half & 0x8000 ? -x : x;
}

inline uint16_t to_half(float x) {
    const uint16_t sign = bits_of(x) >> 16 & 0x8000;
    const float size = std::fabs(x);
    if (size != size) return 0x7fff;
    if (size >= 65520) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(size, 24)));  // subnormal
    const uint32_t bits = bits_of(size), rounded = bits + 0xfff + (bits >> 13 & 1);
    return sign | static_cast<uint16_t>((rounded - (112u << 23)) >> 13);
}

}  // namespace emulator
}  // namespace

#define threadIdx (emulator::current->index)
#define blockIdx emulator::block
#define blockDim emulator::block_size
#define gridDim emulator::grid

inline void __syncthreads() { emulator::pause_until(emulator::State::at_block); }
inline void __syncwarp(unsigned = ~0u) { emulator::pause_until(emulator::State::at_warp); }

template <class T>
T __shfl_sync(unsigned, T value, int source) {
    return emulator::exchange(value, source);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int bits) {
    return emulator::exchange(value, emulator::current->index.x % 32 ^ bits);
}
template <class T>
T __shfl_down_sync(unsigned, T value, int by) {
    const unsigned lane = emulator::current->index.x % 32;
    return emulator::exchange(value, lane + by < 32 ? lane + by : lane);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int by) {
    const unsigned lane = emulator::current->index.x % 32;
    return emulator::exchange(value, lane >= unsigned(by) ? lane - by : lane);
}

inline float __uint_as_float(unsigned bits) { return emulator::float_of(bits); }
inline unsigned __float_as_uint(float x) { return emulator::bits_of(x); }
inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }
