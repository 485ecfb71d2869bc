// Threads: those of the OpenMP runtime that torch has loaded. A second pool would fight it for the cores.

#pragma once

namespace {

struct Runtime {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel
    int (*thread_num)();
    int (*num_threads)();
} runtime;

template <class Task>
void run_thread(void* task) {
    static_cast<Task*>(task)->run(runtime.thread_num(), runtime.num_threads());
}

// Calls task.run(i, n) on n threads, i from 0 to n - 1. n may be less than asked for.
template <class Task>
void run_parallel(Task& task, int threads) {
    if (threads <= 1 || runtime.parallel == nullptr) return task.run(0, 1);
    runtime.parallel(run_thread<Task>, &task, unsigned(threads), 0);
}

}  // namespace
