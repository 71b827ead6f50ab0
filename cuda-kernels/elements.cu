// Elements as they lie in memory, what they are accumulated in, and how many of them move at once.
//
// The sources of this folder are one program, compiled in the order elements, reduce, map. CUDA's own headers for halves are not
// part of NVRTC, so nothing is included. Everything compiles as C++ for the host, too (see host.h): there a test runs the
// kernels beside those of src/reduce.
//
// All arithmetic is IEEE 754's, rounded to nearest even, denormals included, as on the host: the program is compiled without
// contraction to fused multiply-adds (--fmad=false) and with exact division, and gives the bits that the host gives. With one
// exception: which NaN a NaN is. In f32 a GPU computes only one, 0x7fffffff (rounded to either half: 0x7fff), where a host keeps the
// payload of an operand or has a NaN of its own, like 0xffc00000 on x86-64; in f64 both keep an operand's, but maybe not the same
// operand's. Minimum and maximum compute nothing in f32, f64 and bf16: they choose an operand with its bits (bf16 with the quiet bit
// set); but f16 passes through a conversion, which has only the one NaN, too.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// Bytes of the widest access to memory.
constexpr u32 LINE = 16;

// Threads of a block, and blocks that fit on a multiprocessor at once: each thread then has 64 registers, and the loads that they
// all have in flight (32 KiB and more on each multiprocessor) cover the latency of its memory.
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
    // A denormal is so many 2^-24.
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
    // From 65520 on, half of the last place above the largest number: infinity.
    if (magnitude >= 0x477ff000) {
        return u16(sign | 0x7c00);
    }
    // Below 2^-14 the last place is 2^-24: that of numbers between a half and one, to which the addition rounds.
    if (magnitude < 0x38800000) {
        return u16(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
    }
    // Half of the last place, less one if the place is even: what carries rounds up.
    u32 rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return u16(sign | (rounded - (112u << 23)) >> 13);
#endif
}

__device__ inline float widen_bf16(u16 half) { return float_of(u32(half) << 16); }

// By bits, because processors before sm_90 lack the instruction.
__device__ inline u16 narrow_bf16(float value) {
    u32 bits = bits_of(value);
    // As above; and a NaN must not be rounded to infinity.
    u32 rounded = bits + 0x7fff + (bits >> 16 & 1);
    return u16((value != value ? bits | 0x00400000 : rounded) >> 16);
}

// ---- Elements ----

// `Memory` is the element in memory, `Sum` its accumulator. Sums of integers are made in `Wrapping`, which has no overflow.
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

// Any byte but zero is true, as in C; what is written is 0 or 1.
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

// So many elements as one access takes in: those of a line, or fewer.
template <class T, u32 LANES> struct Pack {
    T lanes[LANES];
};

// What the compiler moves in one access, of so many bytes. It would take a Pack apart.
template <u32 BYTES> struct Access;
template <> struct Access<1> { using Whole = u8; };
template <> struct Access<2> { using Whole = u16; };
template <> struct Access<4> { using Whole = u32; };
template <> struct Access<8> { using Whole = uint2; };
template <> struct Access<16> { using Whole = uint4; };

template <class T, u32 LANES> __device__ inline Pack<T, LANES> load(const void *from, u64 element) {
    using Whole = typename Access<sizeof(T) * LANES>::Whole;
    Whole whole = *reinterpret_cast<const Whole *>(static_cast<const T *>(from) + element);
    Pack<T, LANES> pack;
    memcpy(&pack, &whole, sizeof pack);
    return pack;
}

// Lines are written by an instruction of our own: the compiler does not put four words together to one access.
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

template <class Whole> __device__ inline void put(Whole *to, Whole whole) { *to = whole; }

template <class T, u32 LANES> __device__ inline void store(void *to, u64 element, const Pack<T, LANES> &pack) {
    using Whole = typename Access<sizeof(T) * LANES>::Whole;
    Whole whole;
    memcpy(&whole, &pack, sizeof whole);
    put(reinterpret_cast<Whole *>(static_cast<T *>(to) + element), whole);
}

__device__ inline u64 address(const void *pointer) { return reinterpret_cast<u64>(pointer); }

// How a buffer divides: `head` elements before the first line, then whole lines, then what remains.
struct Lines {
    u64 head;
    u64 lines;
};

// The division for a buffer from `first`; all others must lie in the same way, or `aligned` is false and there are no lines.
template <u32 SIZE> __device__ inline Lines divide(const void *first, bool aligned, u64 count) {
    u64 head = (0 - address(first)) % LINE / SIZE;
    if (!aligned || head >= count) {
        return {0, 0};
    }
    return {head, (count - head) / (LINE / SIZE)};
}

// The number of this thread and of all threads.
__device__ inline u64 thread() { return u64(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline u64 threads() { return u64(gridDim.x) * blockDim.x; }
