//! Copies a gradient to its place in a bucket, in one pass.

use super::float::Float;

/// Copies `from` to `to`, or adds it to `to`.
pub(super) fn contiguous<T: Float>(from: &[T], to: &mut [T], adds: bool) {
    if adds {
        for (to, &from) in to.iter_mut().zip(from) {
            *to = to.sum(from);
        }
    } else {
        to.copy_from_slice(from);
    }
}

/// Returns how many elements of memory a tensor spans, or `None` on overflow.
pub(super) fn span(shape: &[usize], strides: &[usize]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    let reach = |&(&extent, &stride): &(&usize, &usize)| (extent - 1).checked_mul(stride);
    shape.iter().zip(strides).try_fold(1usize, |sum, pair| sum.checked_add(reach(&pair)?))
}

/// As [`contiguous`], for a tensor with strides. `from` has the tensor's span.
pub(super) fn strided<T: Float>(from: &[T], shape: &[usize], strides: &[usize], to: &mut [T], adds: bool) {
    let Some((&columns, outer)) = shape.split_last() else { return contiguous(&from[..1], to, adds) };
    let (&step, outer_strides) = strides.split_last().expect("as many strides as dimensions");
    if to.is_empty() {
        return;
    }
    // The index of the row, and its offset in memory.
    let mut index = vec![0; outer.len()];
    let mut start = 0;
    for row in to.chunks_exact_mut(columns) {
        if step == 1 {
            contiguous(&from[start..start + columns], row, adds);
        } else {
            for (column, to) in row.iter_mut().enumerate() {
                let from = from[start + column * step];
                *to = if adds { to.sum(from) } else { from };
            }
        }
        for dimension in (0..outer.len()).rev() {
            index[dimension] += 1;
            start += outer_strides[dimension];
            if index[dimension] < outer[dimension] {
                break;
            }
            start -= outer[dimension] * outer_strides[dimension];
            index[dimension] = 0;
        }
    }
}
