// Products of the elements of one buffer with a factor: in place, or converted between f32 or f64 and
// the halves for gradients that are sent compressed. Entries are named kolo_scale_<from>_<to>.
//
// The product is that of f64. For a half it is rounded to f32 first, as in src/reduce/scale.rs.

// The parameter of an entry, as in src/cuda/kernels/mod.rs.
struct ScaleParameter {
    // Aligned to its element, as is the target.
    const void *source;
    // The source itself if the types are the same, or memory that does not overlap it.
    void *target;
    // Elements.
    u64 count;
    double factor;
};
static_assert(sizeof(ScaleParameter) == 32, "as in src/cuda/kernels/mod.rs");

// Scales LANES elements: a line of the longer type, or one element.
template <class From, class To, u32 LANES> __device__ inline void scale(const ScaleParameter &p, u64 element) {
    Pack<typename From::Memory, LANES> from = load<typename From::Memory, LANES>(p.source, element);
    Pack<typename To::Memory, LANES> to;
#pragma unroll
    for (u32 i = 0; i < LANES; i++) {
        to.lanes[i] = To::narrow(typename To::Sum(double(From::widen(from.lanes[i])) * p.factor));
    }
    store<typename To::Memory, LANES>(p.target, element, to);
}

template <class From, class To> __device__ inline void scale_all(const ScaleParameter &p) {
    constexpr u32 FROM = sizeof(typename From::Memory), TO = sizeof(typename To::Memory), SIZE = FROM > TO ? FROM : TO;
    constexpr u32 LANES = LINE / SIZE, SHORT = SIZE == FROM ? TO : FROM;
    const void *longer = FROM == SIZE ? p.source : p.target, *shorter = FROM == SIZE ? p.target : p.source;
    // An access to the shorter type begins where a line of the longer one does, and is aligned to
    // itself.
    u64 head = (0 - address(longer)) % LINE / SIZE;
    Lines inner = divide<SIZE>(longer, (address(shorter) + head * SHORT) % (LANES * SHORT) == 0, p.count);
    for (u64 line = thread(); line < inner.lines; line += threads()) {
        scale<From, To, LANES>(p, inner.head + line * LANES);
    }
    // The elements outside of the lines, one by one: a few at both ends, or all.
    u64 inside = inner.lines * LANES;
    for (u64 i = thread(); i < p.count - inside; i += threads()) {
        scale<From, To, 1>(p, i < inner.head ? i : i + inside);
    }
}

#define SCALE(from, to, From, To)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) kolo_scale_##from##_##to(const __grid_constant__ ScaleParameter p) { \
        scale_all<From, To>(p);                                                                                                \
    }
