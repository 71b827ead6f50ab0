//! Elements of fewer bits, for messages of fewer bytes: halves, or blocks of bytes.
//!
//! A block is a scale and a byte for each of up to 128 elements: the element is what the byte stands
//! for, times the scale, by which the largest of the block becomes the largest that a byte can be. The
//! scale is an `f32` of the machine's order of bytes, as all elements of messages are. (Blocks confine
//! what an outlier costs: Dettmers and others, "8-bit Optimizers via Block-wise Quantization", 2021.)
//!
//! A block with an infinity or NaN is NaN as a whole, so that no byte has to stand for these. A block of
//! magnitudes so small that its scale is no normal number (below 1.5e-36 as whole numbers, 5.3e-36 as
//! floats) is zero.

use super::blocks::{BLOCK, SCALE};
use super::instructions::{BlockLoops, Converters, Finish, Fold};
use super::level::Level;
use crate::types::{DType, ReduceOp, mix};

/// How elements of one type are in messages that have fewer bits for each.
#[derive(Clone, Copy)]
pub(crate) struct Packing {
    loops: Loops,
    /// For rounding at random.
    seed: Option<u64>,
}

#[derive(Clone, Copy)]
enum Loops {
    /// Between f32 and a type of 16 bits; how parts of this type are summed and averaged.
    Halves(Converters, Fold),
    /// Between f32, f16 or bf16 and blocks of bytes.
    Blocks(BlockLoops),
}

impl Packing {
    /// Elements at whose multiples a run of elements can begin in memory for messages.
    pub(crate) const ALIGN: usize = BLOCK;

    /// Returns how elements of `buffers` are packed as `messages`: f32 as halves; f32, f16 and bf16 as
    /// blocks of i8 or f8e4m3. `None` for any other pair.
    pub(crate) fn new(messages: DType, buffers: DType) -> Option<Packing> {
        Packing::of_level(Level::best(), messages, buffers)
    }

    fn of_level(level: Level, messages: DType, buffers: DType) -> Option<Packing> {
        let loops = match (messages, buffers) {
            (DType::F16 | DType::BF16, DType::F32) => {
                Loops::Halves(level.converters(messages), level.kernel(messages, ReduceOp::Sum))
            }
            (DType::I8 | DType::F8E4M3, DType::F32 | DType::F16 | DType::BF16) => Loops::Blocks(level.blocks(messages, buffers)),
            _ => return None,
        };
        Some(Packing { loops, seed: None })
    }

    /// Returns a packing that rounds bytes to either of the two beside an element, so that over all seeds
    /// the error is 0 on average (stochastic rounding). Halves are rounded to the nearest anyway.
    pub(crate) fn at_random(self, seed: u64) -> Packing {
        Packing { seed: Some(seed), ..self }
    }

    fn noise(self, run: u64) -> Option<u32> {
        self.seed.map(|seed| mix(seed, run) as u32)
    }

    /// Returns the bytes of a run of elements in a message.
    #[inline]
    pub(crate) fn bytes(self, count: usize) -> usize {
        match self.loops {
            Loops::Halves(..) => 2 * count,
            Loops::Blocks(_) => count + count.div_ceil(BLOCK) * SCALE,
        }
    }

    /// Rounds `count` elements, to the nearest and of two to the even one, unless [at
    /// random](Packing::at_random): then `run` should differ between runs of one seed. NaN stays NaN.
    /// What is too large for f16 becomes infinite.
    ///
    /// # Safety
    ///
    /// `from` is readable for `count` elements of the buffers' type, to which it is aligned, and `to`
    /// writable for [`Packing::bytes`], aligned to 2. They do not overlap, and nothing else writes
    /// `from` or accesses `to` meanwhile.
    pub(crate) unsafe fn pack(self, from: *const u8, to: *mut u8, count: usize, run: u64) {
        // SAFETY: passed on; a level has only loops whose instructions the processor has.
        unsafe {
            match self.loops {
                Loops::Halves(loops, _) => (loops.narrow)(from, to, count),
                Loops::Blocks(loops) => (loops.pack)(from, to, count, self.noise(run)),
            }
        }
    }

    /// Converts `count` elements of a message back. Those of buffers of 16 bits are rounded once more.
    ///
    /// # Safety
    ///
    /// As for [`Packing::pack`], with `from` and `to` exchanged. The bytes may have any values.
    pub(crate) unsafe fn unpack(self, from: *const u8, to: *mut u8, count: usize) {
        // SAFETY: as above.
        unsafe {
            match self.loops {
                Loops::Halves(loops, _) => (loops.widen)(from, to, count),
                Loops::Blocks(loops) => (loops.unpack)(from, to, count),
            }
        }
    }

    /// Sums `count` elements of messages in `f32`, in the order of the parts, divides by `divisor` and
    /// rounds once, as [`Packing::pack`] does.
    ///
    /// # Safety
    ///
    /// Every part is readable and `to` writable for [`Packing::bytes`], all aligned to 2. `to` is one
    /// of the parts or overlaps none of them. During the call nothing else writes the parts or accesses
    /// `to`.
    pub(crate) unsafe fn fold(self, parts: &[*const u8], to: *mut u8, count: usize, divisor: usize, run: u64) {
        // SAFETY: passed on, as above.
        unsafe {
            match self.loops {
                Loops::Halves(_, fold) if count > 0 => fold(parts, to, count, Finish { divisor, streams: false }),
                Loops::Halves(..) => {}
                Loops::Blocks(loops) => (loops.fold)(parts, to, count, divisor, self.noise(run)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::super::instructions::Lane;
    use super::*;
    use crate::float8::f8e4m3;

    const BLOCKS: [DType; 2] = [DType::I8, DType::F8E4M3];

    /// Returns a message of these elements.
    fn packed<T>(packing: Packing, elements: &[T], run: u64) -> Vec<u8> {
        let mut message = vec![0u16; packing.bytes(elements.len()).div_ceil(2)];
        // SAFETY: the message has room for them, and words are aligned to 2.
        unsafe { packing.pack(elements.as_ptr().cast(), message.as_mut_ptr().cast(), elements.len(), run) };
        let bytes = message.iter().flat_map(|word| word.to_ne_bytes());
        bytes.take(packing.bytes(elements.len())).collect()
    }

    fn unpacked<T: Lane>(packing: Packing, message: &[u8], count: usize) -> Vec<T> {
        assert_eq!(message.len(), packing.bytes(count));
        // Aligned to 2.
        let words: Vec<u16> = message.chunks(2).map(|pair| u16::from_ne_bytes([pair[0], *pair.get(1).unwrap_or(&0)])).collect();
        let mut elements = vec![T::ZERO; count];
        // SAFETY: the message is that long.
        unsafe { packing.unpack(words.as_ptr().cast(), elements.as_mut_ptr().cast(), count) };
        elements
    }

    fn packings(messages: DType, buffers: DType) -> impl Iterator<Item = (Level, Packing)> {
        Level::available().map(move |level| (level, Packing::of_level(level, messages, buffers).unwrap()))
    }

    /// Numbers of every kind: those of `halves`, their neighbours in f32, ties, and random bits.
    fn numbers(halves: impl Fn(u16) -> f32) -> Vec<f32> {
        let mut numbers = Vec::new();
        for bits in (0..=u16::MAX).step_by(if cfg!(miri) { 4099 } else { 1 }) {
            let half = halves(bits);
            numbers.extend([half, f32::from_bits(half.to_bits() ^ 1), half * (1.0 + 1.0 / 256.0), half * (1.0 + 1.0 / 2048.0)]);
            numbers.push(f32::from_bits(mix(u64::from(bits), 3) as u32));
        }
        numbers.extend([65504.0, 65519.99, 65520.0, f32::MAX, f32::MIN_POSITIVE, f32::INFINITY, f32::NAN]);
        numbers
    }

    fn check_halves(half: DType, numbers: &[f32], narrowed: impl Fn(f32) -> (u16, f32)) {
        for (level, packing) in packings(half, DType::F32) {
            for count in [0, 1, 63, 64, 65, 1000.min(numbers.len()), numbers.len()] {
                let numbers = &numbers[numbers.len() - count..];
                let message = packed(packing, numbers, 0);
                let wide: Vec<f32> = unpacked(packing, &message, count);
                for ((&number, half), wide) in numbers.iter().zip(message.as_chunks::<2>().0).zip(wide) {
                    let (bits, value) = narrowed(number);
                    let is_same = if value.is_nan() { wide.is_nan() } else { u16::from_ne_bytes(*half) == bits && wide == value };
                    assert!(is_same, "{level:?}: {number:e} became {half:x?} and {wide:e}, not {bits:#x}");
                }
            }
        }
    }

    #[test]
    fn halves_round_to_nearest_on_every_level() {
        let of_f16 = |x| (f16::from_f32(x).to_bits(), f16::from_f32(x).to_f32());
        let of_bf16 = |x| (bf16::from_f32(x).to_bits(), bf16::from_f32(x).to_f32());
        check_halves(DType::F16, &numbers(|bits| f16::from_bits(bits).to_f32()), of_f16);
        check_halves(DType::BF16, &numbers(|bits| bf16::from_bits(bits).to_f32()), of_bf16);
    }

    /// A block by the definition: its scale, and what its bytes stand for.
    fn block(codes: DType, elements: &[f32]) -> (f32, Vec<f32>) {
        let largest = elements.iter().fold(0.0, |largest: f32, x| if x.is_nan() { f32::INFINITY } else { largest.max(x.abs()) });
        let most = if codes == DType::I8 { 127.0 } else { 448.0 };
        if largest.is_infinite() {
            return (f32::NAN, vec![0.0; elements.len()]);
        }
        let scale = if largest / most < f32::MIN_POSITIVE { 0.0 } else { largest / most };
        let code = |&x: &f32| match codes {
            _ if scale == 0.0 => 0.0,
            DType::I8 => (x * (most / largest)).round_ties_even(),
            _ => f8e4m3::from_f32(x * (most / largest)).to_f32(),
        };
        (scale, elements.iter().map(code).collect())
    }

    fn message(codes: DType, elements: &[f32]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for elements in elements.chunks(BLOCK) {
            let (scale, values) = block(codes, elements);
            bytes.extend(scale.to_ne_bytes());
            bytes.extend(values.iter().map(|&value| match codes {
                DType::I8 => value as i8 as u8,
                _ => f8e4m3::from_f32(value).to_bits(),
            }));
        }
        bytes
    }

    fn value(codes: DType, elements: &[f32]) -> Vec<f32> {
        let blocks = elements.chunks(BLOCK).map(|elements| block(codes, elements));
        blocks.flat_map(|(scale, values)| values.into_iter().map(move |value| value * scale)).collect()
    }

    /// Numbers of magnitudes that differ from block to block, and in a block.
    fn various(seed: u64, count: usize) -> Vec<f32> {
        let number = |i: usize| {
            let word = mix(seed, i as u64);
            let fraction = (word & 0xff_ffff) as f32 / (1 << 23) as f32 - 1.0;
            fraction * 2f32.powi((word >> 32) as i32 % 6 - (i / BLOCK) as i32 % 300 + 100)
        };
        (0..count).map(number).collect()
    }

    /// Whole numbers have no zero with a sign.
    fn assert_same(got: &[f32], expected: &[f32], what: &str) {
        assert_eq!(got.len(), expected.len());
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            let is_same = got == expected || got.is_nan() && expected.is_nan();
            assert!(is_same, "{what}: {got:e} at {i}, not {expected:e}");
        }
    }

    #[test]
    fn blocks_are_what_the_definition_says_on_every_level() {
        // So many that the largest of some blocks are too small for a scale.
        for count in [0, 1, 127, 128, 129, 300 * BLOCK + 77] {
            let mut elements = various(count as u64, count);
            for (at, special) in [(5, f32::NAN), (200, f32::INFINITY), (300, f32::NEG_INFINITY), (128 * 9, f32::MAX)] {
                if at < count {
                    elements[at] = special;
                }
            }
            if count > 6 * BLOCK {
                elements[5 * BLOCK..6 * BLOCK].fill(-0.0);
                elements[BLOCK * 6] = f32::MIN_POSITIVE;
                elements[BLOCK * 6 + 1..BLOCK * 7].fill(0.0);
            }
            for codes in BLOCKS {
                let (expected, values) = (message(codes, &elements), value(codes, &elements));
                for (level, packing) in packings(codes, DType::F32) {
                    let got = packed(packing, &elements, 0);
                    let what = format!("{level:?}, {codes}, {count} elements");
                    // NaN has many forms.
                    for (at, (got, expected)) in got.chunks(SCALE + BLOCK).zip(expected.chunks(SCALE + BLOCK)).enumerate() {
                        let scale = |bytes: &[u8]| f32::from_ne_bytes(bytes[..SCALE].try_into().unwrap());
                        let is_nan = scale(got).is_nan() && scale(expected).is_nan();
                        assert!(is_nan || got == expected, "{what}: block {at} is {got:?}, not {expected:?}");
                    }
                    assert_same(&unpacked::<f32>(packing, &got, count), &values, &what);
                }
            }
        }
    }

    #[test]
    fn parts_are_summed_in_their_order_and_rounded_once() {
        for codes in BLOCKS {
            for count in [0, 3, 1000] {
                let parts: Vec<Vec<f32>> = (0..5).map(|part| various(part, count)).collect();
                for divisor in [1, 3] {
                    let values: Vec<Vec<f32>> = parts.iter().map(|part| value(codes, part)).collect();
                    let sums: Vec<f32> =
                        (0..count).map(|i| values.iter().map(|part| part[i]).reduce(|a, b| a + b).unwrap()).collect();
                    let expected = value(codes, &sums.iter().map(|sum| sum / divisor as f32).collect::<Vec<f32>>());
                    for (level, packing) in packings(codes, DType::F32) {
                        let mut messages: Vec<Vec<u8>> = parts.iter().map(|part| packed(packing, part, 0)).collect();
                        // Into one of the parts.
                        let into = messages[2].as_mut_ptr();
                        let addresses: Vec<*const u8> = messages.iter().map(|message| message.as_ptr()).collect();
                        // SAFETY: all have the bytes of `count` elements, and blocks need no alignment.
                        unsafe { packing.fold(&addresses, into, count, divisor, 0) };
                        let got = unpacked::<f32>(packing, &messages[2], count);
                        assert_same(&got, &expected, &format!("{level:?}, {codes}, {count} elements over {divisor}"));
                    }
                }
            }
        }
    }

    #[test]
    fn halves_in_buffers_are_packed_as_their_values() {
        for codes in BLOCKS {
            let halves: Vec<bf16> = various(8, 1000).into_iter().map(bf16::from_f32).collect();
            let wide: Vec<f32> = halves.iter().map(|half| half.to_f32()).collect();
            for (level, packing) in packings(codes, DType::BF16) {
                let message = packed(packing, &halves, 0);
                assert_eq!(message, packed(Packing::new(codes, DType::F32).unwrap(), &wide, 0), "{level:?}, {codes}");
                let expected: Vec<f32> = value(codes, &wide).into_iter().map(|x| bf16::from_f32(x).to_f32()).collect();
                let got: Vec<f32> = unpacked::<bf16>(packing, &message, 1000).into_iter().map(bf16::to_f32).collect();
                assert_same(&got, &expected, &format!("{level:?}, {codes}"));
            }
        }
    }

    /// The average over many seeds is much closer to an element than its two neighbours are.
    #[test]
    fn rounding_at_random_is_right_on_average() {
        let elements: Vec<f32> = (0..BLOCK).map(|i| (i as f32 - 60.3) * 1.37 / (1 + i % 50 * 20) as f32).collect();
        let rounds = if cfg!(miri) { 4 } else { 2000 };
        for codes in BLOCKS {
            let nearest = value(codes, &elements);
            let scale = block(codes, &elements).0;
            let mut first: Vec<Vec<u8>> = Vec::new();
            for (level, packing) in packings(codes, DType::F32) {
                let mut sums = [0f64; BLOCK];
                for run in 0..rounds {
                    let message = packed(packing.at_random(7), &elements, run);
                    let got: Vec<f32> = unpacked(packing, &message, BLOCK);
                    for (i, (sum, got)) in sums.iter_mut().zip(got).enumerate() {
                        *sum += f64::from(got);
                        // The distance of the neighbours of an element, at most.
                        let step = if codes == DType::I8 { scale } else { (elements[i].abs() / 8.0).max(scale / 512.0) };
                        assert!((got - elements[i]).abs() <= step * 1.001, "{codes}: {got} for {}", elements[i]);
                    }
                    if run == 0 {
                        first.push(message);
                    }
                }
                if rounds < 100 {
                    continue;
                }
                for (i, sum) in sums.into_iter().enumerate() {
                    let step = if codes == DType::I8 { scale } else { (elements[i].abs() / 8.0).max(scale / 512.0) };
                    let off = (sum / rounds as f64 - f64::from(elements[i])).abs();
                    // Six standard deviations of the average.
                    let bound = 3.0 * f64::from(step) / (rounds as f64).sqrt();
                    assert!(off <= bound, "{level:?}, {codes}: off by {off:e} at {}, nearest {}", elements[i], nearest[i]);
                }
            }
            assert!(first.windows(2).all(|pair| pair[0] == pair[1]), "{codes}: levels round in different ways");
            let packing = Packing::new(codes, DType::F32).unwrap();
            assert_ne!(packed(packing.at_random(7), &elements, 0), packed(packing.at_random(8), &elements, 0));
        }
    }
}
