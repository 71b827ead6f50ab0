// A barrier of the kernels of several GPUs: see src/cuda/barrier.rs. Each GPU has a flag for each rank in
// its memory. A kernel that arrives writes its rank's flag on all GPUs, and waits until its own GPU
// has the flags of all ranks.
//
// A rank's flag says that all blocks of its kernel have arrived: the last one writes it. All of them
// are on the GPU at once, because the grid is small.

// A kernel that stops waiting says so on all GPUs, in the word behind its flag. Its stream goes on then, and
// its buffers change. So a kernel that has found all flags also looks whether a rank has given up: if
// none has, all buffers were intact until then.

// Words from one flag to the next.
constexpr u32 FLAG_WORDS = 16;

// In `missing`: the rank has given up.
constexpr u32 HAS_GIVEN_UP = 1u << 31;

// How often a thread looks at a flag before it looks at the clock, and whether the host has cancelled
// the barrier, which it reads from the host's memory.
constexpr u32 LOOKS = 256;

// As in src/cuda/barrier.rs.
struct Barrier {
    // Where this rank's flag is on the GPU of each rank.
    u32 *theirs[MOST];
    // The flags of all ranks on this GPU.
    u32 *own;
    // How many blocks of this kernel have arrived.
    u32 *blocks;
    // How many nanoseconds a kernel waits at most, from its beginning.
    u64 limit;
    // What a flag has reached when its rank has arrived at the first barrier of a kernel. At the second
    // one, at its end, it is one more.
    u32 value;
    // 0 if the kernel waits for no other.
    u32 ranks;
    // The host sets it: the kernel stops waiting.
    u32 is_cancelled;
    // The kernel writes it: 1 + the rank that did not arrive in time, or that has given up.
    u32 missing;
};
static_assert(sizeof(Barrier) == 168, "as in src/cuda/barrier.rs");

#ifdef __CUDA_ARCH__

__device__ inline u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// What was written before a word was, by any GPU or the host, is seen by a thread that sees the word.
__device__ inline u32 load_acquire(const u32 *word) {
    u32 value;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ inline void store_release(u32 *word, u32 value) {
    asm volatile("st.release.sys.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
}

__device__ inline void relax() {}

#else

// For a fake GPU, whose kernels run as one block of one thread.
inline u64 nanoseconds() { return kolo_host_nanoseconds(); }

inline u32 load_acquire(const u32 *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

inline void store_release(u32 *word, u32 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

inline void relax() { kolo_host_yield(); }

#endif

// Says on all GPUs that this rank has arrived, if this block is the last one of the kernel. Called by
// one thread, after a barrier of its block. Returns whether it is the last one.
__device__ inline bool arrive(const Barrier &b, u32 value) {
    // What the other threads of this block have written is before this thread by the barrier, and
    // before the flag by the fences and the count.
    __threadfence_system();
    if (atomicAdd(b.blocks, 1) + 1 < gridDim.x) {
        return false;
    }
    // No block counts again before it has seen this rank's own flag.
    atomicExch(b.blocks, 0);
    __threadfence_system();
#pragma unroll 1
    for (u32 rank = 0; rank < b.ranks; rank++) {
        store_release(b.theirs[rank], value);
    }
    return true;
}

// Says on all GPUs that this rank does not wait any more.
__device__ inline void give_up(const Barrier &b) {
#pragma unroll 1
    for (u32 rank = 0; rank < b.ranks; rank++) {
        store_release(b.theirs[rank] + 1, 1);
    }
    __threadfence_system();
}

// Waits for the flags of all ranks, in a kernel that began at `began`. Gives up, and returns false, if the
// host cancels the barrier, if a rank does not arrive in time, or if one has given up. `on_host` is
// where the host has the barrier.
__device__ inline bool await(const Barrier &b, Barrier *on_host, u64 began, u32 value) {
#pragma unroll 1
    for (u32 rank = 0; rank < b.ranks; rank++) {
        u32 looks = 0;
        while (int(load_acquire(b.own + rank * FLAG_WORDS) - value) < 0) {
            if (++looks % LOOKS > 0) {
                continue;
            }
            bool is_late = nanoseconds() - began > b.limit;
            if (is_late) {
                store_release(&on_host->missing, 1 + rank);
            }
            if (is_late || load_acquire(&on_host->is_cancelled)) {
                give_up(b);
                return false;
            }
            relax();
        }
    }
#pragma unroll 1
    for (u32 rank = 0; rank < b.ranks; rank++) {
        const u32 *own = b.own + rank * FLAG_WORDS;
        // Another block of this rank may have given up: its reason stands.
        if (own != b.theirs[rank] && load_acquire(own + 1)) {
            store_release(&on_host->missing, (1 + rank) | HAS_GIVEN_UP);
            give_up(b);
            return false;
        }
    }
    return true;
}

// Has all blocks of the kernel wait until all ranks have arrived; at the end of the kernel, only the last
// block. Returns false if they do not.
__device__ inline bool wait(const Barrier &b, Barrier *on_host, u64 began, bool is_end) {
    __shared__ bool have_arrived;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 value = b.value + is_end;
        bool is_last = arrive(b, value);
        have_arrived = (is_end && !is_last) || await(b, on_host, began, value);
    }
    __syncthreads();
    return have_arrived;
}
