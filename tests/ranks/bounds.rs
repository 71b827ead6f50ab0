//! Which public types threads may share, that all of them can be printed, and some other traits.
//! These are promises of each version, and a private field could break one unseen.

use std::fmt::Debug;

use kolo::ddp::*;
use kolo::doctor::{Cost, Finding, Severity};
use kolo::plan::{Candidate, Choice, CostModel, Layout, LinkCost};
use kolo::raw::{PreparedCall, RawCall, RawReducer, RawWork, Stopper};
use kolo::*;

fn shared<T: Send + Sync + Debug>() {}

/// A hook is `Send` alone, and its builder owns it.
fn sent<T: Send + Debug>() {}

fn printed<T: Debug>() {}

#[test]
fn threads_may_share_public_types() {
    shared::<Communicator>();
    shared::<Builder>();
    shared::<Scope<'_, '_>>();
    shared::<Registered<f32>>();
    shared::<Pooled<f32>>();
    shared::<Work<Vec<f32>>>();
    shared::<Waited<Vec<f32>>>();
    shared::<WorkError<Vec<f32>>>();
    shared::<TcpStoreServer>();
    shared::<Box<dyn Shared>>();

    shared::<Error>();
    shared::<ArgumentError>();
    shared::<Cause>();
    shared::<CallMismatch>();
    shared::<Elsewhere>();
    shared::<ReducerError>();
    shared::<StoreError>();
    shared::<UnknownNameError>();

    shared::<Algorithm>();
    shared::<CopyMode>();
    shared::<DevicePath>();
    shared::<DType>();
    shared::<Descriptor>();
    shared::<Op>();
    shared::<ReduceOp>();
    shared::<Transport>();
    shared::<(Candidate, Choice, CostModel, Layout, LinkCost)>();
    shared::<(Cost, Finding, Severity)>();

    shared::<Reducer>();
    shared::<Step<'_>>();
    shared::<View<'_, f32>>();
    shared::<Bucket<'_>>();
    shared::<Parameter>();
    shared::<TensorMut<'_>>();
    shared::<(BufferSync, Joined, Uneven, Unused)>();
    shared::<(StepStatistics, BucketStatistics)>();
    shared::<(Average, Compress, ErrorFeedback, LocalSgd, PowerSgd)>();
    sent::<ReducerBuilder>();

    shared::<RawReducer>();
    shared::<RawWork>();
    shared::<PreparedCall>();
    shared::<Stopper>();
    // It holds the pointers of the caller as they are.
    printed::<RawCall>();
}

#[test]
fn names_are_parsed_with_the_question_mark() {
    let parse = |name: &str| -> Result<Algorithm> { Ok(name.parse()?) };
    assert_eq!(parse("ring").unwrap(), Algorithm::Ring);
    let error = parse("rign").unwrap_err();
    assert!(matches!(&error, Error::Setting { value, .. } if value == "rign"), "{error:?}");
    assert!(error.to_string().contains("double-tree"), "{error}");
    assert_eq!((Transport::default(), CopyMode::default()), (Transport::Auto, CopyMode::Auto));
    assert!(Severity::Fine < Severity::Warning && Severity::Warning < Severity::Failure);
}

/// Stores of the program.
trait Shared: Store + Debug {}

#[cfg(feature = "cuda")]
#[test]
fn threads_may_share_device_memory() {
    shared::<OnStream<'_>>();
    shared::<DeviceBuffer<f32>>();
    shared::<(DeviceView<'_, f32>, DeviceViewMut<'_, f32>)>();
    shared::<(DeviceGradient<'_, f32>, DeviceGradientMut<'_, f32>)>();
    shared::<DeviceGradientView<'_, f32>>();
}
