//! Which gradient lies where: parameters are put into buckets. Pure.

use std::collections::HashMap;
use std::ops::Range;

use super::parameter::Parameter;
use crate::types::DType;

/// Buckets start at multiples of this many bytes: a line of the cache.
pub(super) const ALIGN: usize = 64;

/// The buckets in the order in which they are launched, one after the other in one piece of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) buckets: Vec<Place>,
    /// For each parameter, its bucket and its place among the members.
    pub(super) places: Vec<(usize, usize)>,
    /// Bytes of all buckets.
    pub(super) bytes: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) dtype: DType,
    /// Where it lies.
    pub(super) bytes: Range<usize>,
    /// Parameters, and where their gradients lie among its elements.
    pub(super) members: Vec<(usize, Range<usize>)>,
}

impl Layout {
    /// Fills buckets in the order given: a bucket takes parameters of one type until it has as many bytes as the first limit says
    /// if it is the first of its type, or the second. They are launched in the order in which they become full if gradients arrive in that order.
    pub(super) fn new(parameters: &[Parameter], order: impl IntoIterator<Item = usize>, limits: [usize; 2]) -> Layout {
        let [first, rest] = limits;
        struct Filling {
            members: Vec<usize>,
            bytes: usize,
            limit: usize,
            last: usize,
        }
        let mut filling: HashMap<DType, Filling> = HashMap::new();
        let mut full: Vec<Filling> = Vec::new();
        for (arrival, index) in order.into_iter().enumerate() {
            let parameter = &parameters[index];
            let fresh = |limit| Filling { members: Vec::new(), bytes: 0, limit, last: 0 };
            let bucket = filling.entry(parameter.dtype).or_insert_with(|| fresh(first));
            bucket.members.push(index);
            bucket.bytes += parameter.bytes();
            bucket.last = arrival;
            if bucket.bytes >= bucket.limit {
                full.push(std::mem::replace(bucket, fresh(rest)));
            }
        }
        full.extend(filling.into_values().filter(|bucket| !bucket.members.is_empty()));
        full.sort_by_key(|bucket| bucket.last);

        let mut layout = Layout { buckets: Vec::new(), places: vec![(0, 0); parameters.len()], bytes: 0 };
        for (number, bucket) in full.into_iter().enumerate() {
            let mut members = Vec::with_capacity(bucket.members.len());
            let mut count = 0;
            for (place, index) in bucket.members.into_iter().enumerate() {
                layout.places[index] = (number, place);
                members.push((index, count..count + parameters[index].count()));
                count += parameters[index].count();
            }
            let start = layout.bytes.next_multiple_of(ALIGN);
            layout.bytes = start + bucket.bytes;
            let dtype = parameters[members[0].0].dtype;
            layout.buckets.push(Place { dtype, bytes: start..layout.bytes, members });
        }
        layout
    }

    /// Where a parameter's gradient lies.
    pub(super) fn bytes_of(&self, index: usize) -> Range<usize> {
        let (bucket, place) = self.places[index];
        let bucket = &self.buckets[bucket];
        let elements = &bucket.members[place].1;
        let size = bucket.dtype.size();
        bucket.bytes.start + elements.start * size..bucket.bytes.start + elements.end * size
    }
}
