//! Scalings, as in the tests of reductions.

use super::super::{ScaleParameter, scale_entry};
use super::{Buffer, Host, LINE, source};
use crate::cuda::device::Scaling;
use crate::reduce::{scale_to, scales};
use crate::types::DType;

/// Scales with the kernel and on the host, and returns the first difference. The source and the
/// target begin some elements after a line.
fn difference(host: &Host, dtypes: (DType, DType), count: usize, places: (usize, usize), factor: f64) -> Option<String> {
    let (from, to) = dtypes;
    let mut source = Buffer::new(places.0 * from.size(), count * from.size());
    source.fill(from, count, count as u64);
    let target = Buffer::new(places.1 * to.size(), count * to.size());
    for in_place in [false, true] {
        if in_place && from != to {
            continue;
        }
        let mut expected = if in_place { source.clone() } else { target.clone() };
        // SAFETY: both are buffers of `count` elements, apart or the same.
        unsafe { scale_to(dtypes, source.clone().pointer(), expected.pointer(), count, factor) };
        for is_backwards in [false, true] {
            let (mut read, mut written) = (source.clone(), target.clone());
            let at = if in_place { read.address() } else { written.address() };
            let scaling = Scaling { dtypes, source: read.address(), target: at, count, factor };
            host.run(&scale_entry(from, to).unwrap(), ScaleParameter::of(&scaling), is_backwards);
            let got = if in_place { &mut read } else { &mut written }.content(to, count, true);
            if got != expected.content(to, count, true) {
                return Some(format!("{count} {from} at {places:?} to {to}, in place {in_place}, backwards {is_backwards}"));
            }
        }
    }
    None
}

fn every_pair() -> impl Iterator<Item = (DType, DType)> {
    let all = DType::ALL.iter().flat_map(|&from| DType::ALL.iter().map(move |&to| (from, to)));
    all.filter(|&(from, to)| scales(from, to))
}

#[test]
fn entries_scale_as_the_host() {
    let Some(host) = Host::get() else { return };
    let mut compared = 0;
    for dtypes in every_pair() {
        let lanes = LINE as usize / dtypes.0.size().max(dtypes.1.size());
        for count in [0, 1, lanes - 1, lanes, 5 * lanes + 3, 130 * lanes + 1] {
            // On lines, both beside lines, and one beside a line.
            for places in [(0, 0), (lanes - 1, lanes - 1), (1, 0), (0, 1)] {
                for factor in [1.0, 1.0 / 3.0, 4.0 / 3.0] {
                    assert_eq!(difference(host, dtypes, count, places, factor), None);
                    compared += 1;
                }
            }
        }
    }
    assert_eq!(compared, 12 * 6 * 4 * 3);
}

#[test]
fn wrong_scalings_are_noticed() {
    if Host::get().is_none() {
        return;
    }
    // Without the reductions, which take long to compile.
    let whole = source();
    let parts = ["#line 1 \"reduce.cu\"", "#line 1 \"scale.cu\"", "#line 1 \"entries.cu\"", "// ---- Scalings ----"];
    let [reductions, scalings, entries, of_scalings] = parts.map(|part| whole.find(part).unwrap());
    let source = [&whole[..reductions], &whole[scalings..entries], &whole[of_scalings..]].concat();
    let product = "double(From::widen(from.lanes[i])) * p.factor";
    let rest = "scale<From, To, 1>(p, i < inner.head ? i : i + inside)";
    for (right, wrong, dtypes) in [
        (product, "float(From::widen(from.lanes[i])) * float(p.factor)", (DType::F32, DType::F32)),
        (product, "double(From::widen(from.lanes[i]))", (DType::F64, DType::BF16)),
        (rest, "scale<From, To, 1>(p, i)", (DType::F16, DType::F32)),
    ] {
        assert_eq!(source.matches(right).count(), 1, "{right}");
        let host = Host::build(&source.replace(right, wrong)).unwrap();
        assert!(difference(&host, dtypes, 2001, (0, 0), 1.0 / 3.0).is_some(), "no test notices a change of {right}");
    }
}
