//! Options of a reducer.

use std::fmt;

use super::hook::{Average, Hook};
use super::on_device::Chosen;
use super::parameter::Parameter;
use crate::buffer::StreamId;

/// What happens with parameters that get no gradient in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Unused {
    /// It is an error: [`Step::finish`](super::Step::finish) names the first of them. Parameters
    /// given to [`Step::unused`](super::Step::unused) are exempt.
    #[default]
    Error,
    /// `finish()` treats parameters that are not ready as unused. Their gradients count as zeros in
    /// the average, and the ranks exchange which parameters no rank used
    /// ([`Reducer::is_used`](super::Reducer::is_used)). Buckets with unused parameters start no
    /// earlier than `finish()`.
    Find,
    /// As [`Unused::Find`] in the first step. Later steps use the same parameters ("static graph"),
    /// so no bucket waits for a gradient that does not come. A step that uses others is an error.
    Static,
}

/// Whether ranks may make different numbers of steps, and by what averages are divided when some
/// ranks have run out of input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Uneven {
    /// All ranks make the same number of steps.
    #[default]
    No,
    /// Ranks without more input call [`Reducer::join`](super::Reducer::join). Averages are still
    /// divided by the world size: every sample counts the same.
    ByWorldSize,
    /// As [`Uneven::ByWorldSize`], but averages are divided by the number of ranks that made the
    /// step.
    ByRanksWithInput,
}

/// Options of a [`Reducer`](super::Reducer), from [`Reducer::builder`](super::Reducer::builder).
/// All ranks must give the same options, except the device.
#[must_use = "options do nothing before a reducer is built"]
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
    /// The device of the parameters that are on one.
    pub(super) device: Option<Chosen>,
}

impl fmt::Debug for ReducerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReducerBuilder { parameters, buffers, bucket_bytes, first_bucket_bytes, unused, uneven, overlap, .. } = self;
        let ReducerBuilder { rebuild, hook, device, .. } = self;
        f.debug_struct("ReducerBuilder")
            .field("parameters", parameters)
            .field("buffers", buffers)
            .field("bucket_bytes", bucket_bytes)
            .field("first_bucket_bytes", first_bucket_bytes)
            .field("unused", unused)
            .field("uneven", uneven)
            .field("overlap", overlap)
            .field("rebuild", rebuild)
            .field("hook", &hook.name())
            .field("device", &device.as_ref().map(|device| device.ordinal))
            .finish()
    }
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
    /// Sets the parameters, in the order in which the forward pass uses them. Other calls refer to
    /// a parameter by its index in this list.
    pub fn parameters(mut self, parameters: impl IntoIterator<Item = Parameter>) -> Self {
        self.parameters = parameters.into_iter().collect();
        self
    }

    /// Sets the model's buffers, which [`Reducer::sync_buffers`](super::Reducer::sync_buffers)
    /// makes equal. Default: none.
    pub fn buffers(mut self, buffers: impl IntoIterator<Item = Parameter>) -> Self {
        self.buffers = buffers.into_iter().collect();
        self
    }

    /// Sets the least bytes of a bucket: the parameter that reaches the limit ends the bucket.
    /// Default: 25 MiB.
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.bucket_bytes = bytes;
        self
    }

    /// Sets the least bytes of the first bucket, which is small so that communication starts early.
    /// Default: 1 MiB.
    pub fn first_bucket_bytes(mut self, bytes: usize) -> Self {
        self.first_bucket_bytes = bytes;
        self
    }

    /// Sets what happens with parameters that get no gradient. Default: [`Unused::Error`].
    pub fn unused(mut self, unused: Unused) -> Self {
        self.unused = unused;
        self
    }

    /// Sets whether ranks may make different numbers of steps. Costs one small collective a step.
    /// Default: [`Uneven::No`].
    pub fn uneven(mut self, uneven: Uneven) -> Self {
        self.uneven = uneven;
        self
    }

    /// Sets whether a bucket starts as soon as it is full, or all start in `finish()`, which shows
    /// what the overlap gains. Default: yes.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// Sets whether the buckets are rebuilt after the first step, in the order in which gradients
    /// became ready on rank 0. Default: yes.
    pub fn rebuild(mut self, rebuild: bool) -> Self {
        self.rebuild = rebuild;
        self
    }

    /// Sets how a bucket is reduced. Default: [`Average`].
    pub fn hook(mut self, hook: impl Hook + 'static) -> Self {
        self.hook = Box::new(hook);
        self
    }

    /// Sets the device of parameters that are [on a device](Parameter::on_device): its ordinal in
    /// this process, and a stream on it.
    pub(crate) fn on_device(mut self, ordinal: usize, stream: impl Into<StreamId>) -> Self {
        self.device = Some(Chosen::new(ordinal, stream.into()));
        self
    }
}
