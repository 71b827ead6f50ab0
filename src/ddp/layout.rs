//! Which gradient lies where in the buckets. Pure.

use std::collections::HashMap;
use std::ops::Range;

use super::parameter::Parameter;
use crate::types::DType;

/// Buckets start at multiples of this many bytes, a cache line.
pub(super) const ALIGN: usize = 64;

/// The buckets in the order in which they are launched: one after the other in the host's memory,
/// or in the device's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) buckets: Vec<BucketLayout>,
    /// For each parameter, its bucket and its index among the members.
    pub(super) places: Vec<(usize, usize)>,
    /// Bytes of all buckets of the host.
    pub(super) host_bytes: usize,
    /// Bytes of all buckets of the device.
    pub(super) device_bytes: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BucketLayout {
    pub(super) dtype: DType,
    pub(super) on_device: bool,
    /// Its range in the memory.
    pub(super) bytes: Range<usize>,
    /// The parameters, and the ranges of their gradients among the bucket's elements.
    pub(super) members: Vec<(usize, Range<usize>)>,
}

impl Layout {
    /// Fills buckets in the given order. Parameters of one type in one memory share buckets. A
    /// bucket ends with the parameter that reaches the limit: `limits[0]` bytes for the first
    /// bucket of a kind, `limits[1]` for the others. Buckets are launched in the order in which
    /// they become full when gradients arrive in the given order.
    pub(super) fn new(parameters: &[Parameter], order: impl IntoIterator<Item = usize>, limits: [usize; 2]) -> Layout {
        let [first, rest] = limits;
        struct Filling {
            members: Vec<usize>,
            bytes: usize,
            limit: usize,
            last: usize,
        }
        let mut filling: HashMap<(DType, bool), Filling> = HashMap::new();
        let mut full: Vec<Filling> = Vec::new();
        for (arrival, index) in order.into_iter().enumerate() {
            let parameter = &parameters[index];
            let fresh = |limit| Filling { members: Vec::new(), bytes: 0, limit, last: 0 };
            let bucket = filling.entry((parameter.dtype, parameter.on_device)).or_insert_with(|| fresh(first));
            bucket.members.push(index);
            bucket.bytes += parameter.bytes();
            bucket.last = arrival;
            if bucket.bytes >= bucket.limit {
                full.push(std::mem::replace(bucket, fresh(rest)));
            }
        }
        full.extend(filling.into_values().filter(|bucket| !bucket.members.is_empty()));
        full.sort_by_key(|bucket| bucket.last);

        let places = vec![(0, 0); parameters.len()];
        let mut layout = Layout { buckets: Vec::new(), places, host_bytes: 0, device_bytes: 0 };
        for (number, bucket) in full.into_iter().enumerate() {
            let mut members = Vec::with_capacity(bucket.members.len());
            let mut count = 0;
            for (place, index) in bucket.members.into_iter().enumerate() {
                layout.places[index] = (number, place);
                members.push((index, count..count + parameters[index].count()));
                count += parameters[index].count();
            }
            let Parameter { dtype, on_device, .. } = parameters[members[0].0];
            let end = if on_device { &mut layout.device_bytes } else { &mut layout.host_bytes };
            let start = end.next_multiple_of(ALIGN);
            *end = start + bucket.bytes;
            layout.buckets.push(BucketLayout { dtype, on_device, bytes: start..*end, members });
        }
        layout
    }

    /// Returns the bucket of a parameter's gradient, and its bytes in that bucket.
    pub(super) fn bytes_of(&self, index: usize) -> (&BucketLayout, Range<usize>) {
        let (bucket, place) = self.places[index];
        let bucket = &self.buckets[bucket];
        let elements = &bucket.members[place].1;
        let size = bucket.dtype.size();
        (bucket, elements.start * size..elements.end * size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(layout: &Layout) -> Vec<Vec<usize>> {
        layout.buckets.iter().map(|bucket| bucket.members.iter().map(|(index, _)| *index).collect()).collect()
    }

    #[test]
    fn buckets_are_filled_in_order_and_the_first_is_small() {
        let parameters: Vec<_> = (0..6).map(|i| Parameter::new(format!("p{i}"), [10], DType::F32)).collect();
        let layout = Layout::new(&parameters, (0..6).rev(), [40, 80]);
        assert_eq!(members(&layout), [vec![5], vec![4, 3], vec![2, 1], vec![0]]);
        assert_eq!(layout.buckets[1].bytes, 64..144);
        assert_eq!(layout.bytes_of(3), (&layout.buckets[1], 40..80));
        // A bucket exceeds its limit by less than its last parameter.
        assert_eq!(members(&Layout::new(&parameters, 0..6, [41, 1000])), [vec![0, 1], vec![2, 3, 4, 5]]);
        assert_eq!(members(&Layout::new(&parameters, 0..6, [0, 0])), [[0], [1], [2], [3], [4], [5]]);
    }

    #[test]
    fn types_are_apart_and_buckets_are_in_the_order_in_which_they_become_full() {
        let dtypes = [DType::F32, DType::F16, DType::F32, DType::F16, DType::F32];
        let parameters: Vec<_> = dtypes.iter().map(|&dtype| Parameter::new("p", [8], dtype)).collect();
        let layout = Layout::new(&parameters, 0..5, [64, 64]);
        // The f16 are too few to fill theirs, but all there before the last f32.
        assert_eq!(members(&layout), [vec![0, 2], vec![1, 3], vec![4]]);
        for bucket in &layout.buckets {
            assert!(bucket.members.iter().all(|(index, _)| parameters[*index].dtype == bucket.dtype));
            assert!(bucket.bytes.start.is_multiple_of(ALIGN));
        }
        assert_eq!(layout.places, [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0)]);
        let empty = Layout { buckets: vec![], places: vec![], host_bytes: 0, device_bytes: 0 };
        assert_eq!(Layout::new(&[], [], [1, 1]), empty);
    }

    #[test]
    fn memories_are_apart() {
        let parameter = || Parameter::new("p", [10], DType::F32);
        let parameters: Vec<_> = (0..4).map(|i| if i % 2 == 0 { parameter() } else { parameter().on_device() }).collect();
        let layout = Layout::new(&parameters, 0..4, [1000, 1000]);
        assert_eq!(members(&layout), [vec![0, 2], vec![1, 3]]);
        assert_eq!([layout.buckets[0].on_device, layout.buckets[1].on_device], [false, true]);
        assert_eq!((layout.host_bytes, layout.device_bytes), (80, 80));
        assert_eq!(layout.buckets[1].bytes, 0..80);
    }
}
