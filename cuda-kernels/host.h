// CUDA's keywords for a test that compiles the kernels as C++. An entry is then a function that
// does the work of one thread, whose place in the grid is a variable. The kernels have no barriers,
// so the threads may run one after the other.

#include <cstring>

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

struct alignas(8) uint2 {
    unsigned x, y;
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
