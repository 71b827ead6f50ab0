//! Compression by fewer bits.

use super::hook::{Bucket, Hook};
use crate::comm::Communicator;
use crate::error::Result;

/// Sends gradients of `f32` and `f64` as `f16` or `bf16`: half the bytes of `f32`. Every gradient is divided by the world size
/// as it is converted, so that the sum stays in range.
#[derive(Debug)]
pub struct Compress {
    name: &'static str,
}

impl Compress {
    /// To IEEE half precision.
    pub fn f16() -> Compress {
        Compress { name: "f16" }
    }

    /// To the upper half of an `f32`: fewer digits, but its range.
    pub fn bf16() -> Compress {
        Compress { name: "bf16" }
    }
}

impl Hook for Compress {
    fn name(&self) -> String {
        format!("compress {}", self.name)
    }

    fn reduce(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator) -> Result<()> {
        bucket.average(comm)
    }
}
