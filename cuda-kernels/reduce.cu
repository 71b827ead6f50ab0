// Reductions of several buffers, whose result is written to several buffers, in one pass over
// memory.
//
// The same entry runs a one-shot reduction (one target), a rank's part of a two-shot all-reduce
// (its chunk of every rank's mapped memory is read, and the result is written to all of them) and a
// copy (one source). Entries are named kolo_reduce_<reduction>_<element>.

// One reduction, as in src/cuda/moves.rs.
struct Move {
    // In the order in which they are combined, each aligned to the element.
    const void *sources[MOST];
    // A target may be one of the sources, but may not overlap one otherwise.
    void *targets[MOST];
    // Elements.
    u64 count;
    u32 source_count;
    u32 target_count;
    // The divisor of an average; 1 if it is divided later.
    u32 divisor;
    // The source that is read first, and those before it last, if there are few: the kernels of other GPUs
    // begin with other sources.
    u32 first;
};
static_assert(sizeof(Move) == 280, "as in src/cuda/moves.rs");

// What a kernel is to do, as in src/cuda/moves.rs. The host writes it to pinned memory while the stream
// waits for it, so a launch does not know it. kolo_take_moves copies it to the GPU before the kernel.
struct Moves {
    // How many moves follow.
    u32 count;
    // How many of them come before the first barrier.
    u32 before;
    Barrier barrier;
};
static_assert(sizeof(Moves) == 176, "as in src/cuda/moves.rs");

// The parameter of an entry, as in src/cuda/kernels/mod.rs.
struct Parameter {
    // What to move, if `moves` is null.
    Move only;
    // On this GPU.
    const Moves *moves;
    // The same in pinned host memory, where its barrier is cancelled.
    Moves *on_host;
};
static_assert(sizeof(Parameter) == 296, "as in src/cuda/kernels/mod.rs");

// The parameter of kolo_take_moves, as in src/cuda/kernels/mod.rs.
struct TakeParameter {
    const Moves *on_host;
    // On this GPU. There is room for as many moves.
    Moves *moves;
};
static_assert(sizeof(TakeParameter) == 16, "as in src/cuda/kernels/mod.rs");

// ---- How two accumulators are combined ----

struct Sum {
    template <class E> __device__ static typename E::Sum combine(typename E::Sum a, typename E::Sum b) {
        using W = typename E::Wrapping;
        return typename E::Sum(W(a) + W(b));
    }
};

struct Product {
    template <class E> __device__ static typename E::Sum combine(typename E::Sum a, typename E::Sum b) {
        using W = typename E::Wrapping;
        return typename E::Sum(W(a) * W(b));
    }
};

// A NaN on either side is the result: on the left by the second test (which is never true of
// integers), on the right because no comparison with a NaN is true. fmax would not do: of zeros
// with different signs the right one is the result, as on the host.
struct Max {
    template <class E> __device__ static typename E::Sum combine(typename E::Sum a, typename E::Sum b) {
        return a > b || a != a ? a : b;
    }
};

struct Min {
    template <class E> __device__ static typename E::Sum combine(typename E::Sum a, typename E::Sum b) {
        return a < b || a != a ? a : b;
    }
};

struct BitAnd {
    template <class E> __device__ static typename E::Sum combine(typename E::Sum a, typename E::Sum b) { return a & b; }
};

struct BitOr {
    template <class E> __device__ static typename E::Sum combine(typename E::Sum a, typename E::Sum b) { return a | b; }
};

struct BitXor {
    template <class E> __device__ static typename E::Sum combine(typename E::Sum a, typename E::Sum b) { return a ^ b; }
};

struct Average : Sum {};

template <class Op> constexpr bool DIVIDES = false;
template <> constexpr bool DIVIDES<Average> = true;

// Whether the compiler uses more registers for the same code: from compute capability 10 on.
#if __CUDA_ARCH__ >= 1000
constexpr bool USES_MORE = true;
#else
constexpr bool USES_MORE = false;
#endif

// Whether a reduction needs registers itself.
template <class Op> constexpr bool NEEDS_REGISTERS = DIVIDES<Op>;
template <> constexpr bool NEEDS_REGISTERS<Max> = USES_MORE;
template <> constexpr bool NEEDS_REGISTERS<Min> = USES_MORE;

// ---- The loop ----

// One step of a thread: `PACKS` packs of every source, `stride` elements apart, so that
// neighbouring threads access neighbouring packs. All loads of a source are in flight at once.
// Nothing is written before all sources are read, because a target may be one of them.
template <class E, class Op, u32 LANES, u32 PACKS>
__device__ inline void step(const Move &r, u64 element, u64 stride) {
    using Memory = typename E::Memory;
    Pack<Memory, LANES> packs[PACKS];
    typename E::Sum sums[PACKS][LANES];
#pragma unroll
    for (u32 p = 0; p < PACKS; p++) {
        packs[p] = load<Memory, LANES>(r.sources[0], element + p * stride);
    }
#pragma unroll
    for (u32 i = 0; i < PACKS * LANES; i++) {
        sums[i / LANES][i % LANES] = E::widen(packs[i / LANES].lanes[i % LANES]);
    }
#pragma unroll 1
    for (u32 source = 1; source < r.source_count; source++) {
#pragma unroll
        for (u32 p = 0; p < PACKS; p++) {
            packs[p] = load<Memory, LANES>(r.sources[source], element + p * stride);
        }
#pragma unroll
        for (u32 i = 0; i < PACKS * LANES; i++) {
            typename E::Sum &sum = sums[i / LANES][i % LANES];
            sum = Op::template combine<E>(sum, E::widen(packs[i / LANES].lanes[i % LANES]));
        }
    }
    if constexpr (DIVIDES<Op>) {
        if (r.divisor > 1) {
            typename E::Sum divisor = typename E::Sum(r.divisor);
#pragma unroll
            for (u32 i = 0; i < PACKS * LANES; i++) {
                sums[i / LANES][i % LANES] = sums[i / LANES][i % LANES] / divisor;
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < PACKS * LANES; i++) {
        packs[i / LANES].lanes[i % LANES] = E::narrow(sums[i / LANES][i % LANES]);
    }
#pragma unroll 1
    for (u32 target = 0; target < r.target_count; target++) {
#pragma unroll
        for (u32 p = 0; p < PACKS; p++) {
            store<Memory, LANES>(r.targets[target], element + p * stride, packs[p]);
        }
    }
}

// The most sources of which a part of a line fits into the registers of a thread, as accumulators, and
// how many parts a line then has.
template <class E> constexpr u32 FEW = sizeof(typename E::Memory) == 8 ? 4 : 8;
template <class E> constexpr u32 PARTS = sizeof(typename E::Memory) == 8 ? 2 : 4;

// As `step` for one pack, with all sources in flight at once, beginning with `first`. They are combined in
// the same order as there, so the bits are the same.
template <class E, class Op, u32 LANES> __device__ inline void step_in_turn(const Move &r, u64 element) {
    using Memory = typename E::Memory;
    Whole<Memory, LANES> wholes[FEW<E>];
    typename E::Sum sums[LANES];
#pragma unroll
    for (u32 source = 0; source < FEW<E>; source++) {
        if (source >= r.first && source < r.source_count) {
            wholes[source] = fetch<Memory, LANES>(r.sources[source], element);
        }
    }
#pragma unroll
    for (u32 source = 0; source < FEW<E>; source++) {
        if (source < r.first) {
            wholes[source] = fetch<Memory, LANES>(r.sources[source], element);
        }
    }
    Pack<Memory, LANES> pack = unpack<Memory, LANES>(wholes[0]);
#pragma unroll
    for (u32 i = 0; i < LANES; i++) {
        sums[i] = E::widen(pack.lanes[i]);
    }
#pragma unroll
    for (u32 source = 1; source < FEW<E>; source++) {
        if (source < r.source_count) {
            pack = unpack<Memory, LANES>(wholes[source]);
#pragma unroll
            for (u32 i = 0; i < LANES; i++) {
                sums[i] = Op::template combine<E>(sums[i], E::widen(pack.lanes[i]));
            }
        }
    }
    if constexpr (DIVIDES<Op>) {
        if (r.divisor > 1) {
            typename E::Sum divisor = typename E::Sum(r.divisor);
#pragma unroll
            for (u32 i = 0; i < LANES; i++) {
                sums[i] = sums[i] / divisor;
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < LANES; i++) {
        pack.lanes[i] = E::narrow(sums[i]);
    }
#pragma unroll 1
    for (u32 target = 0; target < r.target_count; target++) {
        store<Memory, LANES>(r.targets[target], element, pack);
    }
}

// How many packs a thread reads at once. Short elements need fewer to fill as many registers with
// accumulators.
__device__ constexpr u32 packs_of(u32 size, bool needs_registers) {
    if (needs_registers && size == 8) {
        return 1;
    }
    u32 packs = size >= 4 ? 4 : size;
    return needs_registers && USES_MORE && packs > 1 ? packs / 2 : packs;
}

// Reduces all lines from element `first` on.
template <class E, class Op, u32 LANES, u32 PACKS> __device__ inline void whole(const Move &r, u64 first, u64 lines) {
    u64 line = thread();
    if (r.first > 0 && r.source_count <= FEW<E>) {
        for (; line < PARTS<E> * lines; line += threads()) {
            step_in_turn<E, Op, LANES / PARTS<E>>(r, first + line * (LANES / PARTS<E>));
        }
        return;
    }
    for (; line + (PACKS - 1) * threads() < lines; line += PACKS * threads()) {
        step<E, Op, LANES, PACKS>(r, first + line * LANES, threads() * LANES);
    }
    for (; line < lines; line += threads()) {
        step<E, Op, LANES, 1>(r, first + line * LANES, 0);
    }
}

template <class E, class Op> __device__ inline void reduce(const Move &r) {
    constexpr u32 SIZE = sizeof(typename E::Memory), LANES = LINE / SIZE;
    constexpr u32 PACKS = packs_of(SIZE, NEEDS_REGISTERS<Op>);
    u64 ways = 0;
    for (u32 i = 1; i < r.source_count; i++) {
        ways |= address(r.sources[0]) ^ address(r.sources[i]);
    }
    for (u32 i = 0; i < r.target_count; i++) {
        ways |= address(r.sources[0]) ^ address(r.targets[i]);
    }
    Lines inner = divide<SIZE>(r.sources[0], ways % LINE == 0, r.count);
    whole<E, Op, LANES, PACKS>(r, inner.head, inner.lines);
    // The elements outside of the lines, one by one: a few at both ends, or all.
    u64 inside = inner.lines * LANES;
    for (u64 i = thread(); i < r.count - inside; i += threads()) {
        step<E, Op, 1, 1>(r, i < inner.head ? i : i + inside, 0);
    }
}

// Has all threads of a block copy words. Volatile: no cache may have what was there at an earlier launch.
__device__ inline void copy_words(void *to, const void *from, u32 words) {
    for (u32 word = threadIdx.x; word < words; word += blockDim.x) {
        static_cast<u64 *>(to)[word] = static_cast<const volatile u64 *>(from)[word];
    }
}

template <class T> __device__ inline void copy(T *to, const T *from) { copy_words(to, from, sizeof(T) / sizeof(u64)); }

// Copies what the next kernel is to do, in one block. If each block of that kernel read it from the host,
// they would wait for each other: reads of one word of host memory come one after the other. On an H100,
// 264 blocks took 0.84 ms.
__device__ inline void take_moves(const TakeParameter &p) {
    __shared__ u32 count;
    // There are none when the driver loads the kernel.
    if (!p.on_host) {
        return;
    }
    // One thread reads the number, because the host may take the moves back meanwhile. It cancels the
    // barrier first, so a kernel that finds no moves also finds that it is cancelled.
    if (threadIdx.x == 0) {
        count = load_acquire(&p.on_host->count);
    }
    __syncthreads();
    copy_words(p.moves, p.on_host, (sizeof(Moves) + count * sizeof(Move)) / sizeof(u64));
    // The thread that has copied this word.
    if (threadIdx.x == 0) {
        p.moves->count = count;
    }
}

// Does all moves. Each block reads one after the other, its threads together.
template <class E, class Op> __device__ inline void run(const Parameter &p) {
#ifdef __CUDA_ARCH__
    // In shared memory, not in registers, which the reductions need.
    __shared__ Move move;
    __shared__ Barrier barrier;
    __shared__ u64 began;
    __shared__ u32 moves, before, next;
    __shared__ bool waits, is_cancelled, is_end;
    if (threadIdx.x == 0) {
        began = nanoseconds();
        next = 0;
        is_end = false;
        const volatile Moves *told = p.moves;
        moves = told ? told->count : 1;
        before = told ? told->before : 0;
        waits = told && told->barrier.ranks > 0;
        is_cancelled = waits && told->barrier.is_cancelled;
    }
    __syncthreads();
    if (is_cancelled) {
        return;
    }
    if (waits) {
        copy(&barrier, &p.moves->barrier);
    }
    for (;;) {
        __syncthreads();
        // One place, because each entry has its own copy of the barrier.
        if (waits && next == (is_end ? moves : before)) {
            // All threads read it before the first one changes it.
            const bool was_end = is_end;
            if (!wait(barrier, &p.on_host->barrier, began, was_end) || was_end) {
                return;
            }
            if (threadIdx.x == 0) {
                is_end = true;
            }
            continue;
        }
        if (next >= moves) {
            return;
        }
        copy(&move, p.moves ? reinterpret_cast<const Move *>(p.moves + 1) + next : &p.only);
        __syncthreads();
        if (threadIdx.x == 0) {
            next++;
        }
        reduce<E, Op>(move);
    }
#else
    u64 moves = p.moves ? p.moves->count : 1;
    const Move *list = p.moves ? reinterpret_cast<const Move *>(p.moves + 1) : &p.only;
    for (u64 i = 0; i < moves; i++) {
        reduce<E, Op>(list[i]);
    }
#endif
}

// ---- The entries ----

#define TAKE_MOVES                                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) kolo_take_moves(const __grid_constant__ TakeParameter p) {   \
        take_moves(p);                                                                                                         \
    }

#define REDUCE(op, Op, element, Element)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) kolo_reduce_##op##_##element(const __grid_constant__ Parameter p) {  \
        run<Element, Op>(p);                                                                                                   \
    }
