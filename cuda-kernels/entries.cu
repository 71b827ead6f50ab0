// All entries, for the prebuilt code and the tests. A process compiles each entry that it needs by itself:
// that takes 0.2 s, and all of them 16 s.

TAKE_MOVES

// ---- Reductions ----

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

// ---- Scalings ----

#define HALF(half, Half)                                                                                                       \
    SCALE(half, half, Half, Half)                                                                                              \
    SCALE(f32, half, F32, Half)                                                                                                \
    SCALE(f64, half, F64, Half)                                                                                                \
    SCALE(half, f32, Half, F32)                                                                                                \
    SCALE(half, f64, Half, F64)

SCALE(f32, f32, F32, F32)
SCALE(f64, f64, F64, F64)
HALF(f16, F16)
HALF(bf16, BF16)
