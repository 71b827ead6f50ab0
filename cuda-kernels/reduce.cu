// Reductions of several buffers, whose result is written to several buffers, in one pass over
// memory.
//
// The same entry runs a one-shot reduction (one target), a rank's part of a two-shot all-reduce
// (its chunk of every rank's mapped memory is read, and the result is written to all of them) and a
// copy (one source). Entries are named kolo_reduce_<reduction>_<element>.

constexpr u32 MOST = 16;

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
    u32 unused;
};
static_assert(sizeof(Move) == 280, "as in src/cuda/moves.rs");

// The parameter of an entry, as in src/cuda/kernels/mod.rs.
struct Parameter {
    // What to move, if `moves` is null.
    Move only;
    // A number and as many moves, in pinned host memory. The host writes them while the stream waits
    // for it, so a launch does not know them.
    const u64 *moves;
};
static_assert(sizeof(Parameter) == 288, "as in src/cuda/kernels/mod.rs");

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

// Reduces all lines from element `first` on.
template <class E, class Op, u32 LANES, u32 PACKS> __device__ inline void whole(const Move &r, u64 first, u64 lines) {
    u64 line = thread();
    for (; line + (PACKS - 1) * threads() < lines; line += PACKS * threads()) {
        step<E, Op, LANES, PACKS>(r, first + line * LANES, threads() * LANES);
    }
    for (; line < lines; line += threads()) {
        step<E, Op, LANES, 1>(r, first + line * LANES, 0);
    }
}

template <class E, class Op> __device__ inline void reduce(const Move &r) {
    constexpr u32 SIZE = sizeof(typename E::Memory), LANES = LINE / SIZE;
    // Short elements need fewer packs to fill as many registers with accumulators, and a division of
    // f64 needs registers itself.
    constexpr u32 PACKS = SIZE == 8 && DIVIDES<Op> ? 2 : SIZE >= 4 ? 4 : SIZE;
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

// Does all moves. Each block reads one after the other from the host, its threads together.
template <class E, class Op> __device__ inline void run(const Parameter &p) {
    constexpr u32 WORDS = sizeof(Move) / sizeof(u64);
#ifdef __CUDA_ARCH__
    __shared__ Move move;
    __shared__ u64 moves;
    // Volatile: no cache may have what was there at an earlier launch.
    const volatile u64 *list = p.moves;
    const u64 *only = reinterpret_cast<const u64 *>(&p.only);
    // One thread of each block reads the number, because the host may take the moves back meanwhile.
    if (threadIdx.x == 0) {
        moves = list ? list[0] : 1;
    }
    __syncthreads();
    for (u64 i = 0; i < moves; i++) {
        __syncthreads();
        for (u32 word = threadIdx.x; word < WORDS; word += blockDim.x) {
            reinterpret_cast<u64 *>(&move)[word] = list ? list[1 + i * WORDS + word] : only[word];
        }
        __syncthreads();
        reduce<E, Op>(move);
    }
#else
    u64 moves = p.moves ? p.moves[0] : 1;
    const Move *list = p.moves ? reinterpret_cast<const Move *>(p.moves + 1) : &p.only;
    for (u64 i = 0; i < moves; i++) {
        reduce<E, Op>(list[i]);
    }
#endif
}

// ---- The entries ----

#define REDUCE(op, Op, element, Element)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) kolo_reduce_##op##_##element(const __grid_constant__ Parameter p) {  \
        run<Element, Op>(p);                                                                                                   \
    }

#define ORDERED(element, Element)                                                                                              \
    REDUCE(max, Max, element, Element)                                                                                         \
    REDUCE(min, Min, element, Element)

#define NUMBER(element, Element)                                                                                               \
    REDUCE(sum, Sum, element, Element)                                                                                         \
    REDUCE(product, Product, element, Element)                                                                                 \
    ORDERED(element, Element)

#define BITS(element, Element)                                                                                                 \
    REDUCE(bitand, BitAnd, element, Element)                                                                                   \
    REDUCE(bitor, BitOr, element, Element)                                                                                     \
    REDUCE(bitxor, BitXor, element, Element)

#define INTEGER(element, Element) NUMBER(element, Element) BITS(element, Element)

#define REAL(element, Element) NUMBER(element, Element) REDUCE(average, Average, element, Element)

INTEGER(i8, I8)
INTEGER(u8, U8)
INTEGER(i16, I16)
INTEGER(u16, U16)
INTEGER(i32, I32)
INTEGER(u32, U32)
INTEGER(i64, I64)
INTEGER(u64, U64)
REAL(f16, F16)
REAL(bf16, BF16)
REAL(f8e4m3, F8E4M3)
REAL(f8e5m2, F8E5M2)
REAL(f32, F32)
REAL(f64, F64)
ORDERED(bool, Bool)
BITS(bool, Bool)
