//! The error type.

use burn_core::tensor::DType;

/// What every fallible call returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The most dimensions of a tensor in burn's optimizers.
pub(crate) const MOST_DIMENSIONS: usize = 8;

/// Why a call failed. `{}` prints a sentence for users.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call of kolo failed. The error names the rank at fault, if a rank is.
    #[error(transparent)]
    Kolo(#[from] kolo::Error),
    /// No parameter of the model requires a gradient.
    #[error(
        "no parameter of the model requires a gradient; make the model on a device with autodiff, as Device::flex().autodiff()"
    )]
    NoGradients,
    /// Ranks cannot exchange elements of this type.
    #[error("{name} has elements of {dtype:?}, which ranks cannot exchange")]
    Elements {
        /// The parameter.
        name: String,
        /// Its element type.
        dtype: DType,
    },
    /// A parameter has more dimensions than burn's optimizers accept.
    #[error("{name} has {dimensions} dimensions; at most {most} are possible", most = MOST_DIMENSIONS)]
    Dimensions {
        /// The parameter.
        name: String,
        /// The number of its dimensions.
        dimensions: usize,
    },
    /// Gradients of unknown parameters were given.
    #[error(
        "{count} of the gradients belong to no parameter that the model had in DataParallel::new; call it again after adding, \
         replacing or unfreezing parameters"
    )]
    Unknown {
        /// How many.
        count: usize,
    },
    /// The model is not the one from which the [`DataParallel`](crate::DataParallel) was made.
    #[error("the model has {given} {what}, but had {expected} in DataParallel::new; call it again after changing the model")]
    Model {
        /// `parameters` or `buffers`.
        what: &'static str,
        /// How many it had.
        expected: usize,
        /// How many it has.
        given: usize,
    },
    /// burn cannot read the values of a tensor.
    #[error("cannot read {name}: {why}")]
    Read {
        /// The parameter.
        name: String,
        /// burn's error.
        why: String,
    },
}
