//! Names of values on the command line.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// What others call the values: nccl-tests, PyTorch, NumPy and MPI.
const ALIASES: [(&str, &[&str]); 21] = [
    ("f16", &["half", "float16", "fp16"]),
    ("f32", &["float", "float32", "fp32", "single"]),
    ("f64", &["double", "float64", "fp64"]),
    ("bf16", &["bfloat16"]),
    ("f8e4m3", &["fp8_e4m3", "float8_e4m3", "float8_e4m3fn"]),
    ("f8e5m2", &["fp8_e5m2", "float8_e5m2"]),
    ("i8", &["int8", "char"]),
    ("u8", &["uint8", "byte"]),
    ("i16", &["int16", "short"]),
    ("u16", &["uint16"]),
    ("i32", &["int32", "int"]),
    ("u32", &["uint32"]),
    ("i64", &["int64", "long"]),
    ("u64", &["uint64"]),
    ("product", &["prod", "mul"]),
    ("average", &["avg", "mean"]),
    ("min", &["minimum"]),
    ("max", &["maximum"]),
    ("bitand", &["band"]),
    ("bitor", &["bor"]),
    ("bitxor", &["bxor"]),
];

/// Parses a name of one of the values, or what others call it. The help lists the values without
/// those that `is_hidden`.
pub(crate) fn named<T: Copy + Send + Sync + 'static>(
    all: &'static [T],
    name: fn(T) -> &'static str,
    is_hidden: fn(&str) -> bool,
) -> impl TypedValueParser<Value = T> {
    let aliases = |name| ALIASES.iter().find(|(known, _)| *known == name).map_or(&[][..], |(_, aliases)| *aliases);
    let possible = |value: &T| PossibleValue::new(name(*value)).aliases(aliases(name(*value))).hide(is_hidden(name(*value)));
    PossibleValuesParser::new(all.iter().map(possible)).try_map(move |text| {
        let is_it = |value: &T| name(*value) == text || aliases(name(*value)).contains(&&*text);
        all.iter().copied().find(is_it).ok_or("it is unknown")
    })
}

/// Hides no value.
pub(crate) fn none(_: &str) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use kolo::{DType, ReduceOp};

    use super::*;

    /// An alias of two values would be one of the first.
    #[test]
    fn each_alias_is_of_one_value() {
        let values = DType::ALL.iter().map(|dtype| dtype.name()).chain(ReduceOp::ALL.iter().map(|op| op.name()));
        let mut names: Vec<&str> = values.chain(ALIASES.iter().flat_map(|(_, aliases)| aliases.iter().copied())).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(ALIASES.iter().all(|(name, _)| names.contains(name)));
    }
}
