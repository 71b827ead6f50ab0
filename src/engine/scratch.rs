//! Memory for partial results.

use crate::buffer::RawSliceMut;

/// Bytes of scratch that are kept between operations.
const KEPT: usize = 16 << 20;

/// Memory for partial results, aligned for every element type.
#[derive(Default)]
pub(super) struct Scratch {
    memory: Vec<Aligned>,
    /// Outgrown memory, which messages of the running operations may still read.
    outgrown: Vec<Vec<Aligned>>,
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Aligned([u8; 64]);

impl Scratch {
    fn len(&self) -> usize {
        self.memory.len() * size_of::<Aligned>()
    }

    /// Makes room for `len` bytes, and keeps the content.
    #[inline]
    pub(super) fn grow(&mut self, len: usize) {
        if len > self.len() {
            let enough = if len <= KEPT { len.next_power_of_two() } else { len };
            let mut grown = vec![Aligned([0; 64]); enough.div_ceil(size_of::<Aligned>())];
            grown[..self.memory.len()].copy_from_slice(&self.memory);
            self.outgrown.push(std::mem::replace(&mut self.memory, grown));
        }
    }

    /// Frees what small operations do not need. Called when no operation is running.
    pub(super) fn tidy(&mut self) {
        self.outgrown.clear();
        if self.len() > KEPT {
            self.memory = Vec::new();
        }
    }

    #[inline]
    pub(super) fn memory(&mut self) -> RawSliceMut {
        RawSliceMut { ptr: self.memory.as_mut_ptr().cast(), len: self.len() }
    }
}
