// Element types: their form in memory, their accumulators, and how memory is accessed.
//
// The sources of this folder are one program, compiled in the order elements, barrier, reduce, scale. NVRTC
// does not include CUDA's headers for halves, so the sources include nothing. They also compile as C++
// for the host (see host.h), where a test compares the kernels with those of src/reduce.
//
// All arithmetic is that of IEEE 754, rounded to nearest even, with denormals, as on the host. The
// program is compiled without contraction to fused multiply-adds (--fmad=false) and with exact
// division, and gives the bits that the host gives. The exception is the payload of a NaN. In f32 a
// GPU computes only the NaN 0x7fffffff (rounded to either half: 0x7fff). A host keeps the payload
// of an operand or has a NaN of its own, such as 0xffc00000 on x86-64. In f64 both keep the payload
// of an operand, but not always of the same one. Minimum and maximum compute nothing in f32, f64
// and bf16: they choose an operand with its bits (bf16 with the quiet bit set). In f16 they pass
// through a conversion, which has only the one NaN.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// Bytes of the widest access to memory.
constexpr u32 LINE = 16;

// The most sources, targets, and ranks: MOST_PARTS in src/cuda/device.rs.
constexpr u32 MOST = 16;

// Threads of a block, and blocks that fit on a multiprocessor at once. Each thread then has 64
// registers, and the loads in flight (32 KiB and more on each multiprocessor) hide the latency of
// memory.
constexpr u32 THREADS = 512;
constexpr u32 BLOCKS = 2;

// ---- Bits ----

__device__ inline float float_of(u32 bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

__device__ inline u32 bits_of(float value) {
    u32 bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

__device__ inline float widen_f16(u16 half) {
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
#else
    u32 sign = u32(half & 0x8000) << 16, exponent = half >> 10 & 0x1f, fraction = half & 0x3ff;
    if (exponent == 0x1f) {
        return float_of(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x00400000 : 0));
    }
    // A denormal is a multiple of 2^-24.
    float magnitude = exponent ? float_of((exponent + 112) << 23 | fraction << 13) : float(fraction) / 16777216.0f;
    return float_of(sign | bits_of(magnitude));
#endif
}

__device__ inline u16 narrow_f16(float value) {
#ifdef __CUDA_ARCH__
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
#else
    u32 bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return u16(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    }
    // Numbers from 65520 on, which is half a unit in the last place above the largest one, round to
    // infinity.
    if (magnitude >= 0x477ff000) {
        return u16(sign | 0x7c00);
    }
    // Below 2^-14 the unit in the last place is 2^-24. Numbers between a half and one have the same
    // unit in f32, so adding a half rounds to it.
    if (magnitude < 0x38800000) {
        return u16(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
    }
    // Adds half a unit in the last place, less one if the last place is even. A carry rounds up.
    u32 rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return u16(sign | (rounded - (112u << 23)) >> 13);
#endif
}

__device__ inline float widen_bf16(u16 half) { return float_of(u32(half) << 16); }

// Rounds by bit arithmetic, because GPUs before sm_90 lack the instruction.
__device__ inline u16 narrow_bf16(float value) {
    u32 bits = bits_of(value);
    // As above. A NaN must not be rounded to infinity.
    u32 rounded = bits + 0x7fff + (bits >> 16 & 1);
    return u16((value != value ? bits | 0x00400000 : rounded) >> 16);
}

// Floats of eight bits. As src/float8.rs, and PyTorch: what rounds to more than the largest number
// becomes that number in E4M3, which has no infinities, and an infinity in E5M2. GPUs before sm_89
// lack the instructions, which have no infinities in either.
template <u32 MANTISSA, u32 BIAS, u32 TOO_LARGE, u32 OVERFLOW> __device__ inline u8 narrow_f8(float value) {
    constexpr u32 DROPPED = 23 - MANTISSA;
    // The bits of the number whose unit in the last place, in f32, is that of the least number here.
    // Adding it rounds to that unit.
    constexpr u32 UNIT = (127 + 23 + 1 - BIAS - MANTISSA) << 23;
    u32 bits = bits_of(value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    u32 denormal = bits_of(float_of(magnitude) + float_of(UNIT)) - UNIT;
    // As above. Everything is computed, because branches would take more code.
    u32 rounded = magnitude + (1u << (DROPPED - 1)) - 1 + (magnitude >> DROPPED & 1);
    u32 normal = (rounded - ((127 - BIAS) << 23)) >> DROPPED;
    u32 finite = magnitude < (127 + 1 - BIAS) << 23 ? denormal : normal;
    u32 large = magnitude > 0x7f800000 ? 0x7f : OVERFLOW;
    return u8(sign | (magnitude < TOO_LARGE ? finite : large));
}

__device__ inline float widen_f8e4m3(u8 byte) {
    u32 sign = u32(byte & 0x80) << 24, magnitude = byte & 0x7f;
    // The bits at the place of those of an f32, with an exponent that is too small by 120. The
    // product is exact, and a denormal of f32 becomes a normal number.
    float scaled = float_of(magnitude << 20) * float_of((120u + 127) << 23);
    return float_of(sign | (magnitude == 0x7f ? 0x7fc00000 : bits_of(scaled)));
}

// It is the upper half of an f16.
__device__ inline float widen_f8e5m2(u8 byte) { return widen_f16(u16(byte << 8)); }

// ---- Elements ----

// `Memory` is the element in memory, `Sum` its accumulator. Sums of integers use `Wrapping`, whose
// overflow is defined.
template <class T, class W = T> struct Plain {
    using Memory = T;
    using Sum = T;
    using Wrapping = W;
    __device__ static Sum widen(Memory element) { return element; }
    __device__ static Memory narrow(Sum sum) { return sum; }
};

struct F16 {
    using Memory = u16;
    using Sum = float;
    using Wrapping = float;
    __device__ static Sum widen(Memory element) { return widen_f16(element); }
    __device__ static Memory narrow(Sum sum) { return narrow_f16(sum); }
};

struct BF16 {
    using Memory = u16;
    using Sum = float;
    using Wrapping = float;
    __device__ static Sum widen(Memory element) { return widen_bf16(element); }
    __device__ static Memory narrow(Sum sum) { return narrow_bf16(sum); }
};

struct F8E4M3 {
    using Memory = u8;
    using Sum = float;
    using Wrapping = float;
    __device__ static Sum widen(Memory element) { return widen_f8e4m3(element); }
    __device__ static Memory narrow(Sum sum) { return narrow_f8<3, 7, 0x43e80000, 0x7e>(sum); }
};

struct F8E5M2 {
    using Memory = u8;
    using Sum = float;
    using Wrapping = float;
    __device__ static Sum widen(Memory element) { return widen_f8e5m2(element); }
    __device__ static Memory narrow(Sum sum) { return narrow_f8<2, 15, 0x47800000, 0x7c>(sum); }
};

// Any byte but zero is true, as in C. The kernels write 0 or 1.
struct Bool {
    using Memory = u8;
    using Sum = u8;
    using Wrapping = u32;
    __device__ static Sum widen(Memory element) { return element != 0; }
    __device__ static Memory narrow(Sum sum) { return sum; }
};

using F32 = Plain<float>;
using F64 = Plain<double>;
using I8 = Plain<signed char, u32>;
using U8 = Plain<u8, u32>;
using I16 = Plain<short, u32>;
using U16 = Plain<u16, u32>;
using I32 = Plain<int, u32>;
using U32 = Plain<u32, u32>;
using I64 = Plain<long long, u64>;
using U64 = Plain<u64, u64>;

// ---- Accesses to memory ----

// The elements of one access to memory: those of a line, or fewer.
template <class T, u32 LANES> struct Pack {
    T lanes[LANES];
};

// The type that the compiler moves in one access of BYTES bytes. It would split a Pack into several
// accesses.
template <u32 BYTES> struct Access;
template <> struct Access<1> { using Whole = u8; };
template <> struct Access<2> { using Whole = u16; };
template <> struct Access<4> { using Whole = u32; };
template <> struct Access<8> { using Whole = uint2; };
template <> struct Access<16> { using Whole = uint4; };

template <class T, u32 LANES> using Whole = typename Access<sizeof(T) * LANES>::Whole;

template <class T, u32 LANES> __device__ inline Whole<T, LANES> fetch(const void *from, u64 element) {
#ifdef __CUDA_ARCH__
    // The compiler does not see where the pointer comes from.
    __builtin_assume(__isGlobal(from));
#endif
    return *reinterpret_cast<const Whole<T, LANES> *>(static_cast<const T *>(from) + element);
}

template <class T, u32 LANES> __device__ inline Pack<T, LANES> unpack(const Whole<T, LANES> &whole) {
    Pack<T, LANES> pack;
    memcpy(&pack, &whole, sizeof pack);
    return pack;
}

template <class T, u32 LANES> __device__ inline Pack<T, LANES> load(const void *from, u64 element) {
    return unpack<T, LANES>(fetch<T, LANES>(from, element));
}

// Lines are written by an explicit instruction: the compiler does not join four words to one
// access.
__device__ inline void put(uint4 *to, uint4 line) {
#ifdef __CUDA_ARCH__
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(__cvta_generic_to_global(to)), "r"(line.x), "r"(line.y), "r"(line.z), "r"(line.w)
                 : "memory");
#else
    *to = line;
#endif
}

template <class W> __device__ inline void put(W *to, W whole) { *to = whole; }

template <class T, u32 LANES> __device__ inline void store(void *to, u64 element, const Pack<T, LANES> &pack) {
    Whole<T, LANES> whole;
    memcpy(&whole, &pack, sizeof whole);
    put(reinterpret_cast<Whole<T, LANES> *>(static_cast<T *>(to) + element), whole);
}

__device__ inline u64 address(const void *pointer) { return reinterpret_cast<u64>(pointer); }

// The division of a buffer: `head` elements before the first line, then `lines` whole lines, then
// the remaining elements.
struct Lines {
    u64 head;
    u64 lines;
};

// Returns the division of a buffer that begins at `first`. `aligned` says whether all buffers are
// congruent to it modulo a line; otherwise there are no lines.
template <u32 SIZE> __device__ inline Lines divide(const void *first, bool aligned, u64 count) {
    u64 head = (0 - address(first)) % LINE / SIZE;
    if (!aligned || head >= count) {
        return {0, 0};
    }
    return {head, (count - head) / (LINE / SIZE)};
}

// The number of this thread, and the number of threads.
__device__ inline u64 thread() { return u64(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline u64 threads() { return u64(gridDim.x) * blockDim.x; }
