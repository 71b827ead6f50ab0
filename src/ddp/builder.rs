//! Options of a reducer.

use super::hook::{Average, Hook};
use super::on_device::Chosen;
use super::parameter::Parameter;
use crate::cuda::device::StreamId;

/// What becomes of parameters that get no gradient in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unused {
    /// It is an error: [`Step::finish`](super::Step::finish) names the first of them. Those that [`Step::unused`](super::Step::unused)
    /// was called for are not meant.
    #[default]
    Error,
    /// `finish()` takes those that are not ready as unused: they count as zeros in the average, and ranks tell each other
    /// which ones nobody used ([`Reducer::is_used`]). Their buckets start no earlier than `finish()`.
    Find,
    /// As [`Unused::Find`] in the first step; later ones use the same parameters ("static graph"), so that no bucket waits for
    /// what does not come. A step that uses others is an error.
    Static,
}

/// Whether ranks may have different numbers of steps, and what an average is divided by when some have no more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Uneven {
    /// They may not: all make the same number of steps.
    #[default]
    No,
    /// Ranks that have no more call [`Reducer::join`]. Averages are still divided by the world size, so that every sample
    /// counts the same whatever the number of ranks that have some.
    ByWorldSize,
    /// The same, but averages are divided by the number of ranks that made the step.
    ByRanksWithInput,
}

/// Options of a [`Reducer`], from [`Reducer::builder`]. All ranks must give the same, but each its own device.
pub struct ReducerBuilder {
    pub(super) parameters: Vec<Parameter>,
    pub(super) buffers: Vec<Parameter>,
    pub(super) bucket_bytes: usize,
    pub(super) first_bucket_bytes: usize,
    pub(super) unused: Unused,
    pub(super) uneven: Uneven,
    pub(super) overlap: bool,
    pub(super) rebuild: bool,
    pub(super) hook: Box<dyn Hook>,
    /// Where parameters are that are on a device.
    pub(super) device: Option<Chosen>,
}

impl Default for ReducerBuilder {
    fn default() -> Self {
        ReducerBuilder {
            parameters: Vec::new(),
            buffers: Vec::new(),
            bucket_bytes: 25 << 20,
            first_bucket_bytes: 1 << 20,
            unused: Unused::Error,
            uneven: Uneven::No,
            overlap: true,
            rebuild: true,
            hook: Box::new(Average),
            device: None,
        }
    }
}

impl ReducerBuilder {
    /// The parameters, in the order in which the forward pass uses them. From now on their numbers are their places here.
    pub fn parameters(mut self, parameters: impl IntoIterator<Item = Parameter>) -> Self {
        self.parameters = parameters.into_iter().collect();
        self
    }

    /// What the model has besides, and [`Reducer::sync_buffers`] makes equal. Default: nothing.
    pub fn buffers(mut self, buffers: impl IntoIterator<Item = Parameter>) -> Self {
        self.buffers = buffers.into_iter().collect();
        self
    }

    /// How many bytes of gradients go together, at least (a bucket ends with the parameter that fills it). Default: 25 MiB.
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.bucket_bytes = bytes;
        self
    }

    /// The same of the first bucket, which is small so that communication begins early. Default: 1 MiB.
    pub fn first_bucket_bytes(mut self, bytes: usize) -> Self {
        self.first_bucket_bytes = bytes;
        self
    }

    /// What becomes of parameters that get no gradient. Default: [`Unused::Error`].
    pub fn unused(mut self, unused: Unused) -> Self {
        self.unused = unused;
        self
    }

    /// Whether ranks may have different numbers of steps. Costs one small collective a step. Default: [`Uneven::No`].
    pub fn uneven(mut self, uneven: Uneven) -> Self {
        self.uneven = uneven;
        self
    }

    /// Whether buckets start as soon as they are full, or all in `finish()`, to see what overlapping gains. Default: yes.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// Whether buckets are made anew after the first step, in the order in which gradients arrived on rank 0. Default: yes.
    pub fn rebuild(mut self, rebuild: bool) -> Self {
        self.rebuild = rebuild;
        self
    }

    /// How a bucket is reduced. Default: [`Average`].
    pub fn hook(mut self, hook: impl Hook + 'static) -> Self {
        self.hook = Box::new(hook);
        self
    }

    /// Where parameters are that are [on a device](Parameter::on_device): the device's number in this process, and a stream there.
    pub(crate) fn on_device(mut self, ordinal: usize, stream: impl Into<StreamId>) -> Self {
        let stream = stream.into();
        self.device = Some(Chosen {
            ordinal,
            stream,
            #[cfg(feature = "cuda")]
            keeps: None,
        });
        self
    }
}
