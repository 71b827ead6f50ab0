// How the kernels of several GPUs wait for each other: see src/cuda/meeting.rs. Each GPU has a flag for
// each rank in its memory. A kernel that has come to a point writes its rank's flag on all GPUs, and
// waits until its own GPU has the flags of all ranks.
//
// A rank's flag says that all blocks of its kernel have come: the last one writes it. All of them are
// on the GPU at once, because the grid is small.

constexpr u32 MOST = 16;

// Words from one flag to the next.
constexpr u32 FLAG = 16;

// How often a thread looks at a flag before it looks at the clock, and whether the host has called
// the meeting off, which it reads from the host's memory.
constexpr u32 LOOKS = 256;

// As in src/cuda/meeting.rs.
struct Meeting {
    // Where this rank's flag is on the GPU of each rank.
    u32 *theirs[MOST];
    // The flags of all ranks on this GPU.
    u32 *own;
    // How many blocks of this kernel have come.
    u32 *blocks;
    // How many nanoseconds a kernel waits at most.
    u64 limit;
    // What a flag has reached when its rank has come. At the end of the kernel it is one more.
    u32 value;
    // 0 if the kernel meets no other.
    u32 ranks;
    // The host sets it: the kernel stops waiting.
    u32 is_off;
    // The kernel writes it: 1 + the rank that did not come in time.
    u32 missing;
};
static_assert(sizeof(Meeting) == 168, "as in src/cuda/meeting.rs");

#ifdef __CUDA_ARCH__

__device__ inline u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// What was written before it, by any GPU, is seen by a thread that sees a flag.
__device__ inline u32 seen(const u32 *flag) {
    u32 value;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

__device__ inline void show(u32 *flag, u32 value) {
    asm volatile("st.release.sys.u32 [%0], %1;" : : "l"(flag), "r"(value) : "memory");
}

// Says on all GPUs that this rank has come, if this block is the last one of the kernel. Called by
// one thread, after a barrier of its block. Returns whether it is the last one.
__device__ inline bool announce(const Meeting &m, u32 value) {
    // What the other threads of this block have written is before this thread by the barrier, and
    // before the flag by the fences and the count.
    __threadfence_system();
    if (atomicAdd(m.blocks, 1) + 1 < gridDim.x) {
        return false;
    }
    // No block counts again before it has seen this rank's own flag.
    atomicExch(m.blocks, 0);
    __threadfence_system();
    for (u32 rank = 0; rank < m.ranks; rank++) {
        show(m.theirs[rank], value);
    }
    return true;
}

// Waits for the flags of all ranks. Returns false if the host calls the meeting off, or if a rank
// does not come in time.
__device__ inline bool await(const Meeting &m, volatile Meeting *on_host, u32 value) {
    u64 began = nanoseconds();
    for (u32 rank = 0; rank < m.ranks; rank++) {
        u32 looks = 0;
        while (int(seen(m.own + rank * FLAG) - value) < 0) {
            if (++looks % LOOKS > 0) {
                continue;
            }
            if (on_host->is_off) {
                return false;
            }
            if (nanoseconds() - began > m.limit) {
                on_host->missing = 1 + rank;
                __threadfence_system();
                return false;
            }
        }
    }
    return true;
}

// Waits with all blocks of the kernel until all ranks have come. Returns false if they do not.
__device__ inline bool begin_meeting(const Meeting &m, volatile Meeting *on_host) {
    __shared__ bool have_come;
    __syncthreads();
    if (threadIdx.x == 0) {
        announce(m, m.value);
        have_come = await(m, on_host, m.value);
    }
    __syncthreads();
    return have_come;
}

// Keeps the kernel from ending before all ranks have come to their ends.
__device__ inline void end_meeting(const Meeting &m, volatile Meeting *on_host) {
    __syncthreads();
    if (threadIdx.x == 0 && announce(m, m.value + 1)) {
        await(m, on_host, m.value + 1);
    }
}

#endif
