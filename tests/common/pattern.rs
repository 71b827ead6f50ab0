//! Contents of long buffers that cost little to make.

use std::ops::Range;

/// What ranks give repeats after this many elements: a prime number, so that no chunk or segment that is
/// out of place has the elements of its place.
pub(crate) const PERIOD: usize = 1021;

/// Returns elements that repeat after [`PERIOD`], of which only the first ones are computed.
pub(crate) fn repeated<T: Copy>(range: Range<usize>, of: impl Fn(usize) -> T) -> Vec<T> {
    let len = range.len();
    let mut elements: Vec<T> = range.take(PERIOD).map(of).collect();
    while elements.len() < len {
        elements.extend_from_within(..elements.len().min(len - elements.len()));
    }
    elements
}
