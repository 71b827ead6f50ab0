//! The types that every layer uses: element types, reductions, operations, and the descriptor of
//! one call.

use std::fmt;
use std::sync::Arc;

use half::{bf16, f16};

use crate::float8::{f8e4m3, f8e5m2};

/// The number of a process (or thread) within a communicator, from 0 to the world size less one.
pub type Rank = usize;

/// What a message and the receive that takes it have in common, besides their ranks. Calls without a
/// tag have tag 0.
pub type Tag = u32;

/// The process of a rank, as error messages name it.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) host: Arc<str>,
    pub(crate) pid: u32,
}

/// Defines a fieldless enum with a stable number and a name for each value, and the conversions
/// from both.
macro_rules! numbered {
    ($(#[$meta:meta])* $vis:vis enum $name:ident { $($(#[$vmeta:meta])* $variant:ident = $value:literal, $text:literal;)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        $vis enum $name { $($(#[$vmeta])* $variant = $value,)* }

        impl $name {
            /// Every value, in the order of their numbers.
            pub const ALL: &'static [$name] = &[$($name::$variant,)*];

            /// The name on command lines and in errors.
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)* }
            }

            /// Returns the value with this number, if there is one. Numbers never change: the wire
            /// and the C ABI carry them.
            pub const fn from_number(number: u8) -> Option<Self> {
                match number { $($value => Some($name::$variant),)* _ => None }
            }
        }

        impl $crate::types::Numbered for $name {
            fn values() -> &'static [$name] {
                $name::ALL
            }

            fn number(self) -> u8 {
                self as u8
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::types::UnknownNameError;

            fn from_str(text: &str) -> Result<Self, $crate::types::UnknownNameError> {
                Self::ALL.iter().copied().find(|value| value.name() == text).ok_or_else(|| $crate::types::UnknownNameError {
                    given: text.to_owned(),
                    known: Self::ALL.iter().map(|value| value.name()).collect(),
                })
            }
        }
    };
}
pub(crate) use numbered;

/// An enum by [`numbered`].
pub(crate) trait Numbered: Copy + fmt::Debug + fmt::Display + std::str::FromStr<Err = UnknownNameError> + 'static {
    fn values() -> &'static [Self];

    fn number(self) -> u8;
}

/// A name that is not known, and the names that are.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown name {given:?}; known are {}", known.join(", "))]
#[non_exhaustive]
pub struct UnknownNameError {
    /// The unknown name.
    pub given: String,
    /// The known names.
    pub known: Vec<&'static str>,
}

numbered! {
    /// The type of one element of a buffer.
    #[non_exhaustive]
    pub enum DType {
        /// Signed 8-bit integer.
        I8 = 0, "i8";
        /// Unsigned 8-bit integer.
        U8 = 1, "u8";
        /// Signed 32-bit integer.
        I32 = 2, "i32";
        /// Unsigned 32-bit integer.
        U32 = 3, "u32";
        /// Signed 64-bit integer.
        I64 = 4, "i64";
        /// Unsigned 64-bit integer.
        U64 = 5, "u64";
        /// IEEE 754 half precision. Reductions accumulate in `f32`.
        F16 = 6, "f16";
        /// IEEE 754 single precision.
        F32 = 7, "f32";
        /// IEEE 754 double precision.
        F64 = 8, "f64";
        /// The upper half of an `f32`. Reductions accumulate in `f32`.
        BF16 = 9, "bf16";
        /// Signed 16-bit integer.
        I16 = 10, "i16";
        /// Unsigned 16-bit integer.
        U16 = 11, "u16";
        /// A byte that is 0 or 1. Bytes from a peer are normalised before they reach a `bool`.
        Bool = 12, "bool";
        /// [`f8e4m3`](crate::f8e4m3). Reductions accumulate in `f32`.
        F8E4M3 = 13, "f8e4m3";
        /// [`f8e5m2`](crate::f8e5m2). Reductions accumulate in `f32`.
        F8E5M2 = 14, "f8e5m2";
    }
}

impl DType {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        // As a power of two, by which the compiler divides without a division.
        1 << match self {
            DType::I8 | DType::U8 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 => 0,
            DType::I16 | DType::U16 | DType::F16 | DType::BF16 => 1,
            DType::I32 | DType::U32 | DType::F32 => 2,
            DType::I64 | DType::U64 | DType::F64 => 3,
        }
    }

    /// Whether elements are floating-point numbers.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F16 | DType::BF16 | DType::F32 | DType::F64 | DType::F8E4M3 | DType::F8E5M2)
    }
}

numbered! {
    /// How the elements of several ranks are reduced to one.
    ///
    /// Integer sums and products wrap. `Min` and `Max` propagate NaN: if any rank has a NaN, the
    /// result is NaN.
    #[non_exhaustive]
    pub enum ReduceOp {
        /// The sum; integers wrap around.
        Sum = 0, "sum";
        /// The product; integers wrap around.
        Product = 1, "product";
        /// The largest; NaN if any is NaN. Logical or on `bool`.
        Max = 2, "max";
        /// The smallest; NaN if any is NaN. Logical and on `bool`.
        Min = 3, "min";
        /// The sum divided by the number of ranks; floating-point types only.
        Average = 4, "average";
        /// Bitwise and; integers and `bool` only.
        BitAnd = 5, "bitand";
        /// Bitwise or; integers and `bool` only.
        BitOr = 6, "bitor";
        /// Bitwise exclusive or; integers and `bool` only.
        BitXor = 7, "bitxor";
    }
}

impl ReduceOp {
    /// Whether this reduction is defined on these elements.
    pub const fn applies_to(self, dtype: DType) -> bool {
        match self {
            ReduceOp::Sum | ReduceOp::Product => !matches!(dtype, DType::Bool),
            ReduceOp::Max | ReduceOp::Min => true,
            ReduceOp::Average => dtype.is_float(),
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => !dtype.is_float(),
        }
    }
}

/// What an operation reads or writes on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Nothing,
    /// The buffer, or one rank's block.
    One,
    /// A block for each rank.
    All,
    /// On the root; other ranks have nothing.
    OneAtRoot,
    AllAtRoot,
    /// This rank's block, where each rank's has its own count in this list.
    OwnOf(List),
    /// All blocks, whose counts are in this list.
    AllOf(List),
}

/// A list of counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum List {
    Sent,
    Received,
}

/// The table of operations: for each its number, which never changes, its name, what a rank
/// gives `=>` gets, and whether it `reduces`. Passes the rows to a macro.
macro_rules! operations {
    ($then:ident! { $($with:tt)* }) => {
        $then! { $($with)*
            /// Every rank gets the reduction of all ranks' buffers.
            AllReduce = 0, "all_reduce", One => One, reduces;
            /// Every rank gets the root's buffer.
            Broadcast = 1, "broadcast", OneAtRoot => One;
            /// Every rank waits until all ranks have called it.
            Barrier = 2, "barrier", Nothing => Nothing;
            /// The root gets the reduction of all ranks' buffers.
            Reduce = 3, "reduce", One => OneAtRoot, reduces;
            /// Every rank gets all ranks' buffers, one after the other.
            AllGather = 4, "all_gather", One => All;
            /// As `AllGather`, with a count for each rank.
            AllGatherV = 5, "all_gather_v", OwnOf(Received) => AllOf(Received);
            /// Rank `r` gets block `r` of the reduction.
            ReduceScatter = 6, "reduce_scatter", All => One, reduces;
            /// As `ReduceScatter`, with a count for each rank.
            ReduceScatterV = 7, "reduce_scatter_v", AllOf(Sent) => OwnOf(Sent), reduces;
            /// Block `j` of rank `i` becomes block `i` of rank `j`.
            AllToAll = 8, "all_to_all", All => All;
            /// As `AllToAll`, with a count for each pair.
            AllToAllV = 9, "all_to_all_v", AllOf(Sent) => AllOf(Received);
            /// The root gets all ranks' buffers, one after the other.
            Gather = 10, "gather", One => AllAtRoot;
            /// Rank `r` gets block `r` of the root's buffer.
            Scatter = 11, "scatter", AllAtRoot => One;
            /// A buffer goes to one peer, which calls `recv`.
            Send = 12, "send", One => Nothing;
            /// A buffer comes from one peer, which calls `send`.
            Recv = 13, "recv", Nothing => One;
            /// The communicator is split by colour.
            Split = 14, "split", Nothing => Nothing;
            /// Every rank gets memory that all ranks of its host map.
            Alloc = 15, "alloc", Nothing => Nothing;
            /// Ranks connect with each other.
            Connect = 16, "connect", Nothing => Nothing;
            /// Newcomers are admitted to a larger communicator.
            Grow = 17, "grow", Nothing => Nothing;
        }
    };
}
pub(crate) use operations;

macro_rules! define_op {
    ($($(#[$meta:meta])* $name:ident = $number:literal, $text:literal, $gives:expr => $gets:expr $(, $reduces:ident)?;)*) => {
        numbered! {
            /// An operation.
            #[non_exhaustive]
            pub enum Op {
                $($(#[$meta])* $name = $number, $text;)*
            }
        }

        impl Op {
            /// What a rank gives and gets.
            pub(crate) const fn form(self) -> [Part; 2] {
                use List::{Received, Sent};
                use Part::{All, AllAtRoot, AllOf, Nothing, One, OneAtRoot, OwnOf};
                match self {
                    $(Op::$name => [$gives, $gets],)*
                }
            }

            /// Whether the operation reduces.
            pub const fn reduces(self) -> bool {
                match self {
                    $(Op::$name => !{ const SAID: &[&str] = &[$(stringify!($reduces))?]; SAID }.is_empty(),)*
                }
            }
        }
    };
}

operations! { define_op! {} }

impl Op {
    /// Whether the operation is between two ranks instead of all.
    pub const fn is_point_to_point(self) -> bool {
        matches!(self, Op::Send | Op::Recv)
    }

    /// The operation that both ranks of a message have in common: its send.
    pub(crate) const fn of_pair(self) -> Op {
        match self {
            Op::Recv => Op::Send,
            op => op,
        }
    }

    /// Whether the operation has a root.
    pub(crate) const fn has_root(self) -> bool {
        matches!(self.form(), [Part::OneAtRoot | Part::AllAtRoot, _] | [_, Part::OneAtRoot | Part::AllAtRoot])
    }

    /// Whether a buffer has a block for each rank.
    pub(crate) const fn has_blocks(self) -> bool {
        use Part::{All, AllAtRoot, AllOf};
        matches!(self.form(), [All | AllAtRoot | AllOf(_), _] | [_, All | AllAtRoot | AllOf(_)])
    }

    /// Whether the operation has a count for each rank.
    pub(crate) const fn has_counts(self) -> bool {
        use Part::{AllOf, OwnOf};
        matches!(self.form(), [OwnOf(_) | AllOf(_), _] | [_, OwnOf(_) | AllOf(_)])
    }

    /// The list of counts that all ranks give alike, if there is one.
    pub(crate) const fn common_counts(self) -> Option<List> {
        match self.form() {
            [Part::OwnOf(list), _] | [_, Part::OwnOf(list)] => Some(list),
            _ => None,
        }
    }
}

/// The types whose buffers kolo moves and reduces: `f32 f64 f16 bf16 i8 u8 i16 u16 i32 u32 i64 u64
/// bool f8e4m3 f8e5m2`. The trait is sealed: no other type can implement it.
///
/// # Safety
///
/// The type has the size, alignment and bit patterns that [`Element::DTYPE`] says, has no padding,
/// and every pattern of bits is a value of it (except for `bool`, which kolo normalises before a
/// caller sees it).
pub unsafe trait Element: Copy + Send + Sync + 'static + private::Sealed {
    /// The [`DType`] of this type.
    const DTYPE: DType;
}

mod private {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),*) => {$(
        impl private::Sealed for $rust {}
        // SAFETY: a primitive (or a transparent wrapper of one) of the size that DType::size gives,
        // without padding.
        unsafe impl Element for $rust {
            const DTYPE: DType = {
                assert!(size_of::<$rust>() == DType::$dtype.size() && align_of::<$rust>() == size_of::<$rust>());
                DType::$dtype
            };
        }
    )*};
}

elements! {
    f32 => F32, f64 => F64, f16 => F16, bf16 => BF16, i8 => I8, u8 => U8, i16 => I16, u16 => U16,
    i32 => I32, u32 => U32, i64 => I64, u64 => U64, bool => Bool, f8e4m3 => F8E4M3, f8e5m2 => F8E5M2
}

/// What all ranks must agree on in one call. An [`Error`](crate::Error) about calls that do not
/// match shows two of them.
///
/// It precedes the first bytes of every operation. A rank whose own descriptor differs refuses the
/// bytes and reports both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Descriptor {
    pub(crate) op: Op,
    /// `U8` for a barrier.
    pub(crate) dtype: DType,
    pub(crate) redop: Option<ReduceOp>,
    pub(crate) root: Option<u32>,
    pub(crate) count: u64,
    /// A hash of the counts of all ranks, for an operation where all ranks give the same ones. The tag of
    /// a message.
    pub(crate) shape: u32,
    pub(crate) seq: u64,
}

impl Descriptor {
    /// The operation. A receive is described as the send that it waits for.
    pub fn op(&self) -> Op {
        self.op
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The reduction of an operation that reduces.
    pub fn reduce_op(&self) -> Option<ReduceOp> {
        self.redop
    }

    /// The root of an operation that has one.
    pub fn root(&self) -> Option<Rank> {
        self.root.map(|root| root as Rank)
    }

    /// The number of elements: of the buffer for `all_reduce`, `broadcast`, `reduce`, `send` and
    /// `recv`, of all blocks together for operations with a count for each rank, of one rank's
    /// block otherwise.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The sequence number, from 1: of the communicator's collectives, or of the messages from the
    /// sender to the receiver.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    /// The tag of a message; 0 for one without a tag, and for collectives.
    pub fn tag(&self) -> Tag {
        if self.op.is_point_to_point() { self.shape } else { 0 }
    }

    const NONE: u8 = u8::MAX;
    /// Words of the encoded form.
    pub(crate) const WORDS: usize = 4;
    /// The word that is the sequence number.
    pub(crate) const SEQ: usize = 3;

    /// The descriptor of a message that belongs to no operation.
    pub(crate) const fn nothing() -> Self {
        Descriptor { op: Op::Connect, dtype: DType::U8, redop: None, root: None, count: 0, shape: 0, seq: 0 }
    }

    /// The encoded form, for the wire and for shared memory.
    pub(crate) fn encode(&self) -> [u64; Self::WORDS] {
        let redop = self.redop.map_or(Self::NONE, |redop| redop as u8);
        let kinds = u32::from_le_bytes([self.op as u8, self.dtype as u8, redop, 0]);
        let root = self.root.unwrap_or(u32::MAX);
        [pair(kinds, 0), pair(root, self.shape), self.count, self.seq]
    }

    /// Decodes a descriptor; `None` if the words are not one.
    pub(crate) fn decode(words: [u64; Self::WORDS]) -> Option<Self> {
        let ([kinds, reserved], [root, shape]) = (halves(words[0]), halves(words[1]));
        let [op, dtype, redop, zero] = kinds.to_le_bytes();
        if zero != 0 || reserved != 0 {
            return None;
        }
        Some(Descriptor {
            op: Op::from_number(op)?,
            dtype: DType::from_number(dtype)?,
            redop: if redop == Self::NONE { None } else { Some(ReduceOp::from_number(redop)?) },
            root: (root != u32::MAX).then_some(root),
            count: words[2],
            shape,
            seq: words[3],
        })
    }

    /// A 64-bit hash of an encoded descriptor. Peers wait for it, so it takes only two independent
    /// multiplications.
    pub(crate) const fn fingerprint([a, b, c, d]: [u64; Self::WORDS]) -> u64 {
        folded(a ^ SECRETS[0], b ^ SECRETS[1]) ^ folded(c ^ SECRETS[2], d ^ SECRETS[3])
    }

    /// The fingerprint of a chain of operations: that of the operations `before`, followed by one
    /// more. It is injective in `before`: call chains that diverge stay different while the
    /// following calls are the same.
    pub(crate) const fn chained(before: u64, fingerprint: u64) -> u64 {
        (before.rotate_left(23) ^ fingerprint).wrapping_mul(SECRETS[1])
    }
}

const fn pair(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

const fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

/// The constants of wyhash for [`folded`]: odd, with as many ones as zeros.
const SECRETS: [u64; 4] = [0xa076_1d64_78bd_642f, 0xe703_7ed1_a0b4_28db, 0x8ebc_6af0_9c88_c6e3, 0x5899_65cc_7537_4cc3];

/// Hashes two words: both halves of their product (Wang Yi's wyhash,
/// <https://github.com/wangyi-fudan/wyhash>). Like [`mix`] it protects against mistakes, not
/// against malice, and takes a third of the time.
const fn folded(a: u64, b: u64) -> u64 {
    let product = a as u128 * b as u128;
    product as u64 ^ (product >> 64) as u64
}

/// Folds one more word into a hash. A multiply-xorshift (the finaliser of SplitMix64): every input
/// bit reaches every output bit, in a few cycles. It protects against mistakes, not against malice.
pub const fn mix(hash: u64, word: u64) -> u64 {
    let mut z = hash.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ word;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The [`Descriptor::shape`] of a list of counts.
pub(crate) fn shape_of(counts: &[usize]) -> u32 {
    let hash = counts.iter().fold(counts.len() as u64, |hash, &count| mix(hash, count as u64));
    (hash ^ (hash >> 32)) as u32
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} seq={}", self.op, self.seq)?;
        if self.op != Op::Barrier {
            write!(f, " {} x {}", self.dtype, self.count)?;
        }
        if let Some(redop) = self.redop {
            write!(f, " {redop}")?;
        }
        if let Some(root) = self.root {
            write!(f, " root={root}")?;
        }
        match (self.shape, self.op.is_point_to_point()) {
            (0, _) => {}
            (tag, true) => write!(f, " tag={tag}")?,
            (shape, false) => write!(f, " counts#{shape:08x}")?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_lead_back() {
        for &dtype in DType::ALL {
            assert_eq!(DType::from_number(dtype as u8), Some(dtype));
            assert_eq!(dtype.name().parse(), Ok(dtype));
        }
        let error = "float".parse::<DType>().unwrap_err();
        assert!(error.to_string().contains("bf16"), "{error}");
    }

    #[test]
    fn descriptors_survive_the_wire_and_differ_in_every_field() {
        let base = Descriptor {
            op: Op::AllReduce,
            dtype: DType::F32,
            redop: Some(ReduceOp::Sum),
            root: None,
            count: 1 << 40,
            shape: 0,
            seq: 812,
        };
        let others = [
            Descriptor { op: Op::Reduce, ..base },
            Descriptor { dtype: DType::I32, ..base },
            Descriptor { redop: None, ..base },
            Descriptor { root: Some(0), ..base },
            Descriptor { count: 1, ..base },
            Descriptor { shape: 1, ..base },
            Descriptor { seq: 813, ..base },
        ];
        for other in others {
            assert_eq!(Descriptor::decode(other.encode()), Some(other));
            assert_ne!(Descriptor::fingerprint(other.encode()), Descriptor::fingerprint(base.encode()), "{other}");
        }
        assert_eq!(Descriptor::decode([u64::MAX; 4]), None);
    }

    /// Programs go wrong by one: calls that are nearly the same must not look the same, nor two in
    /// another order.
    #[test]
    fn fingerprints_of_neighbours_differ() {
        let most = if cfg!(miri) { 20 } else { 300 };
        let call = |seq, count| Descriptor { seq, count, ..Descriptor::nothing() }.encode();
        let mut seen: Vec<u64> =
            (0..most).flat_map(|seq| (0..most).map(move |count| Descriptor::fingerprint(call(seq, count)))).collect();
        let prints = seen.clone();
        // Once different, always different.
        let all_chained = |first| prints.iter().fold(first, |before, &print| Descriptor::chained(before, print));
        assert!((0..64).all(|bit| all_chained(1 << bit) != all_chained(0)));
        seen.extend(prints.iter().map(|&print| Descriptor::chained(0, print)));
        seen.extend(prints.windows(2).map(|two| Descriptor::chained(two[0], two[1])));
        seen.extend(prints.windows(2).map(|two| Descriptor::chained(two[1], two[0])));
        let all = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), all);
    }

    #[test]
    fn shapes_tell_orders_apart() {
        assert_ne!(shape_of(&[1, 2]), shape_of(&[2, 1]));
        assert_ne!(shape_of(&[0, 0]), shape_of(&[0]));
    }
}
