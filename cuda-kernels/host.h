// CUDA's keywords for a test that compiles the kernels as C++. An entry is then a function that
// does the work of one thread, whose place in the grid is a variable. Entries have no barriers there, so
// the threads may run one after the other. Those of barrier.cu are for a grid of one thread.

#include <chrono>
#include <cstring>
#include <thread>

using std::memcpy;

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads, blocks)

struct Place {
    unsigned x;
};

static thread_local Place threadIdx, blockIdx, blockDim, gridDim;

extern "C" void kolo_host_place(unsigned thread, unsigned threads, unsigned block, unsigned blocks) {
    threadIdx = {thread};
    blockDim = {threads};
    blockIdx = {block};
    gridDim = {blocks};
}

#define __shared__ static thread_local
inline void __syncthreads() {}
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline unsigned atomicAdd(unsigned *word, unsigned value) { return __atomic_fetch_add(word, value, __ATOMIC_RELAXED); }
inline unsigned atomicExch(unsigned *word, unsigned value) { return __atomic_exchange_n(word, value, __ATOMIC_RELAXED); }

inline unsigned long long kolo_host_nanoseconds() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

inline void kolo_host_yield() { std::this_thread::yield(); }

struct alignas(8) uint2 {
    unsigned x, y;
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
