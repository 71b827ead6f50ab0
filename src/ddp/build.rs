//! Makes a reducer of its options, together with the other ranks.

use std::sync::Arc;

use super::agree::{agree_on_options, agree_on_success};
use super::buckets::Buckets;
use super::builder::ReducerBuilder;
use super::core::Core;
use super::float::is_of_gradients;
use super::layout::Layout;
use super::on_device::{BucketDevice, Chosen, DeviceMemory};
use super::parameter::Parameter;
use super::reducer::Reducer;
use super::worker::Worker;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::types::DType;

impl ReducerBuilder {
    /// Builds the reducer: compares the parameters, buffers and options with those of the other
    /// ranks, allocates the buckets and starts the reducer's thread. The reducer communicates on a
    /// communicator of its own, with all ranks of `comm`.
    ///
    /// A collective call.
    ///
    /// # Errors
    ///
    /// - [`ReducerError::Mismatch`](crate::ReducerError::Mismatch) on every rank if the ranks'
    ///   options differ; it names the first difference.
    /// - [`ReducerError::Refused`](crate::ReducerError::Refused) if another rank failed to
    ///   prepare its device, or to start its thread.
    /// - [`Error::NoMemory`] on every rank if one of them has no memory for the buckets.
    /// - [`Error::Setting`] if there are no parameters, if a parameter's elements are not
    ///   floating-point numbers, or if a parameter is on a device and the builder was given none.
    /// - [`Error::Unsupported`] if the communicator has no devices.
    /// - [`Error::Device`] if the device fails.
    pub fn build(self, comm: &Communicator) -> Result<Reducer> {
        let comm = comm.split(0, comm.rank())?;
        agree_on_options(&comm, &self)?;
        // All ranks have the same options from here on, so all of them refuse the same ones.
        check_parameters(&self.parameters, &self.buffers)?;
        let (layout, staging) = layouts(&self);
        let (on, [of_buckets, of_staging]) = prepare(&comm, &self, [&layout, &staging])?;
        let buckets = Buckets::allocate(&comm, layout, of_buckets)?;
        let staging = Buckets::allocate(&comm, staging, of_staging)?;

        let ReducerBuilder { parameters, buffers, unused, uneven, overlap, hook, .. } = self;
        let core = Arc::new(Core::new(comm, parameters, (unused, uneven, overlap), buckets));
        let worker = Worker { core: core.clone(), hook, scratch: None };
        let thread = std::thread::Builder::new().name("kolo-reducer".to_owned()).spawn(move || worker.work());
        let (thread, started) = match thread {
            Ok(thread) => (Some(thread), Ok(())),
            Err(error) => (None, Err(Error::os("starting the reducer's thread")(error))),
        };
        let bucket_bytes = [self.first_bucket_bytes, self.bucket_bytes];
        let reducer = Reducer { core, buffers, staging, on, bucket_bytes, rebuilds: self.rebuild, thread };
        agree_on_success(&reducer.core.comm, started)?;
        Ok(reducer)
    }
}

/// Refuses parameters that cannot be reduced, and models that exceed the address space.
fn check_parameters(parameters: &[Parameter], buffers: &[Parameter]) -> Result<()> {
    let refuse = |name: &str, value: String, expected: &str| Err(Error::setting(name, value, expected));
    if parameters.is_empty() {
        return refuse("parameters", "none".to_owned(), "at least one");
    }
    if let Some(whole) = parameters.iter().find(|parameter| !is_of_gradients(parameter.dtype)) {
        return refuse(&whole.name, whole.dtype.to_string(), "gradients are of f16, bf16, f32 or f64");
    }
    let bytes = |all: &[Parameter]| all.iter().try_fold(0usize, |sum, one| sum.checked_add(one.checked_bytes()?));
    if bytes(parameters).is_none() || bytes(buffers).is_none() {
        return refuse("parameters", "too many elements".to_owned(), "as much as memory can hold");
    }
    Ok(())
}

/// Returns the layout of the gradients' buckets, and that of the memory where buffers are
/// exchanged.
fn layouts(builder: &ReducerBuilder) -> (Layout, Layout) {
    let ReducerBuilder { parameters, buffers, bucket_bytes, first_bucket_bytes, .. } = builder;
    // The backward pass makes the last parameter's gradient first.
    let buckets = Layout::new(parameters, (0..parameters.len()).rev(), [*first_bucket_bytes, *bucket_bytes]);
    (buckets, Layout::new(buffers, 0..buffers.len(), [usize::MAX; 2]))
}

/// The device, if anything is on one, and what both layouts need of its memory.
type Prepared = (Option<Arc<BucketDevice>>, [Option<DeviceMemory>; 2]);

/// Prepares each rank's device, if a parameter or buffer is on one. A collective call in that case.
fn prepare(comm: &Communicator, builder: &ReducerBuilder, layouts: [&Layout; 2]) -> Result<Prepared> {
    let on_device = || builder.parameters.iter().chain(&builder.buffers).filter(|one| one.on_device);
    let Some(first) = on_device().next() else { return Ok((None, [None, None])) };
    let dtypes = on_device().map(|one| one.dtype);
    agree_on_success(comm, prepare_device(comm, builder.device.clone(), first, dtypes, layouts))
}

/// Opens this rank's device and allocates the memory of both layouts there. `first` is the first
/// parameter or buffer on the device, for the error's text.
fn prepare_device(
    comm: &Communicator,
    device: Option<Chosen>,
    first: &Parameter,
    dtypes: impl Iterator<Item = DType>,
    layouts: [&Layout; 2],
) -> Result<Prepared> {
    let Some(chosen) = device else {
        let expected = "in host memory, or a device given to the reducer's builder (with the feature `cuda`)";
        return Err(Error::setting(&first.name, "on a device".to_owned(), expected));
    };
    let on = Arc::new(BucketDevice::new(comm, chosen, dtypes)?);
    let [buckets, staging] = layouts.map(|layout| DeviceMemory::allocate(Some(&on), layout));
    Ok((Some(on), [buckets?, staging?]))
}
