// What is done to each element of one buffer: scaling in place, and conversion between f32 and the halves for gradients that are
// sent compressed. Entries are named kolo_scale_<element> and kolo_cast_<from>_<to>.

// What an entry is told; src/cuda/kernels.rs has the same.
struct Mapping {
    // Aligned to its element, as is the target.
    const void *source;
    // The source itself where the element stays the same, or apart from it.
    void *target;
    // Elements.
    u64 count;
    // What every element is multiplied by, in f64 for f64 and else in f32, before it is rounded to the target's element.
    double factor;
};
static_assert(sizeof(Mapping) == 32, "as in src/cuda/kernels.rs");

template <class From, class To, u32 LANES> __device__ inline void map(const Mapping &m, typename To::Sum factor, u64 element) {
    // A line of the longer element; of the shorter one, half of a line.
    Pack<typename From::Memory, LANES> from = load<typename From::Memory, LANES>(m.source, element);
    Pack<typename To::Memory, LANES> to;
#pragma unroll
    for (u32 i = 0; i < LANES; i++) {
        to.lanes[i] = To::narrow(From::widen(from.lanes[i]) * factor);
    }
    store<typename To::Memory, LANES>(m.target, element, to);
}

template <class From, class To> __device__ inline void map_all(const Mapping &m) {
    constexpr u32 FROM = sizeof(typename From::Memory), TO = sizeof(typename To::Memory), SIZE = FROM > TO ? FROM : TO;
    constexpr u32 LANES = LINE / SIZE, SHORT = SIZE == FROM ? TO : FROM;
    const void *longer = FROM == SIZE ? m.source : m.target, *shorter = FROM == SIZE ? m.target : m.source;
    typename To::Sum factor = typename To::Sum(m.factor);
    // Where a line of the longer begins, an access of the shorter must.
    u64 head = (0 - address(longer)) % LINE / SIZE;
    Lines inner = divide<SIZE>(longer, (address(shorter) + head * SHORT) % (LANES * SHORT) == 0, m.count);
    for (u64 line = thread(); line < inner.lines; line += threads()) {
        map<From, To, LANES>(m, factor, inner.head + line * LANES);
    }
    u64 inside = inner.lines * LANES;
    for (u64 i = thread(); i < m.count - inside; i += threads()) {
        map<From, To, 1>(m, factor, i < inner.head ? i : i + inside);
    }
}

#define MAP(name, From, To)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) kolo_##name(const __grid_constant__ Mapping m) { map_all<From, To>(m); }

MAP(scale_f16, F16, F16)
MAP(scale_bf16, BF16, BF16)
MAP(scale_f32, F32, F32)
MAP(scale_f64, F64, F64)
MAP(cast_f32_f16, F32, F16)
MAP(cast_f32_bf16, F32, BF16)
MAP(cast_f16_f32, F16, F32)
MAP(cast_bf16_f32, BF16, F32)
