//! Compression by low rank.

use super::hook::{Bucket, Hook};
use crate::comm::Communicator;
use crate::error::Result;

/// PowerSGD: sends gradients of matrices as products of two of low rank, and adds to the next step's what was not sent
/// (Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019).
#[derive(Debug)]
pub struct PowerSgd {
    rank: usize,
    start_after: u64,
}

impl PowerSgd {
    /// With matrices of this rank: 1, 2 or 4 are usual.
    pub fn new(rank: usize) -> PowerSgd {
        PowerSgd { rank, start_after: 0 }
    }

    /// Averages as usual for so many steps first, in which gradients change most. Default: 0.
    pub fn start_after(mut self, steps: u64) -> PowerSgd {
        self.start_after = steps;
        self
    }
}

impl Hook for PowerSgd {
    fn name(&self) -> String {
        format!("PowerSGD of rank {} after {} steps", self.rank, self.start_after)
    }

    fn reduce(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator) -> Result<()> {
        bucket.average(comm)
    }
}
