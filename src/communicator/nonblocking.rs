//! The nonblocking form of every operation: it owns its buffers and returns a [`Work`] at once,
//! which gives the buffers back.
//!
//! Any type with a slice of elements can be a buffer: `Vec`, `Box<[T]>`, arrays,
//! [`crate::Registered`].

use super::operations::operations;
use super::{Communicator, calls};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Result;
use crate::progress::work::{Work, WorkError};
use crate::types::{Element, Rank, ReduceOp, Tag};

/// The operation, or its buffers with the reason why it was not started.
type Started<B> = Result<Work<B>, WorkError<B>>;

/// The type of an argument. `S` is a buffer that is read, `R` one that is written.
macro_rules! argument {
    (input) => { S };
    (output) => { R };
    (in_place) => { R };
    (root_input) => { Option<S> };
    (root_output) => { Option<R> };
    (counts) => { &[usize] };
    ($value:ident) => { $value };
}

/// What the call holds of a buffer.
macro_rules! raw {
    (input, $buffer:expr) => {
        RawSlice::of::<T>((*$buffer).as_ref())
    };
    (output, $buffer:expr) => {
        RawSliceMut::of::<T>($buffer.as_mut())
    };
    (in_place, $buffer:expr) => {
        RawSliceMut::of::<T>($buffer.as_mut())
    };
    (root_input, $buffer:expr) => {
        $buffer.as_ref().map(|buffer| RawSlice::of::<T>(buffer.as_ref()))
    };
    (root_output, $buffer:expr) => {
        $buffer.as_mut().map(|buffer| RawSliceMut::of::<T>(buffer.as_mut()))
    };
}

/// The documentation of a method that gives these buffers back.
macro_rules! starts {
    ($name:ident, $($buffers:tt)*) => {
        concat!(
            "Starts [`Communicator::", stringify!($name), "`] and returns at once. The [`Work`] owns the buffers until the ",
            "operation has ended; then [`Work::wait`] returns `", stringify!($($buffers)*), "`.\n\n",
            "# Errors\n\nA [`WorkError`] with the buffers, unchanged, if the call is refused: an argument is wrong, this process ",
            "was forked, or the progress thread cannot be started. [`Work::wait`] returns every later failure."
        )
    };
}

/// One method. The buffers are shown to the call where they stay until the operation has ended:
/// nothing else can reach them there.
macro_rules! nonblocking {
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident| () => $call:expr) => {
        #[doc = concat!(
            "Starts [`Communicator::", stringify!($name), "`] and returns at once. [`Work::wait`] waits for its end.\n\n",
            "# Errors\n\nIf this process was forked, or if the progress thread cannot be started. [`Work::wait`] returns every ",
            "later failure."
        )]
        pub fn $start(&self) -> Started<()> {
            self.exec.start((), |()| Ok($call))
        }
    };
    // Two buffers, of which each may be the root's only.
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident|
        ($send:ident: $input:ident, $recv:ident: output $(, $arg:ident: $kind:ident)*) => $call:expr) => {
        nonblocking! { @two $name, $start |$comm| ($send: $input) ($recv: output)
            ($send: $input, $recv: output $(, $arg: $kind)*) => $call }
    };
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident|
        ($send:ident: $input:ident, $recv:ident: root_output $(, $arg:ident: $kind:ident)*) => $call:expr) => {
        nonblocking! { @two $name, $start |$comm| ($send: $input) ($recv: root_output)
            ($send: $input, $recv: root_output $(, $arg: $kind)*) => $call }
    };
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident|
        ($send:ident: $input:ident, $counts:ident: counts, $recv:ident: output $(, $arg:ident: $kind:ident)*) => $call:expr) => {
        nonblocking! { @two $name, $start |$comm| ($send: $input) ($recv: output)
            ($send: $input, $counts: counts, $recv: output $(, $arg: $kind)*) => $call }
    };
    (@two $name:ident, $start:ident |$comm:ident| ($send:ident: $input:ident) ($recv:ident: $output:ident)
        ($($arg:ident: $kind:ident),*) => $call:expr) => {
        #[doc = starts!($name, ($send, $recv))]
        pub fn $start<T: Element, S, R>(
            &self, $($arg: argument!($kind)),*
        ) -> Started<(argument!($input), argument!($output))>
        where
            S: AsRef<[T]> + Send + 'static,
            R: AsMut<[T]> + Send + 'static,
        {
            let $comm = self;
            $comm.exec.start(($send, $recv), |($send, $recv)| {
                let ($send, $recv) = (raw!($input, $send), raw!($output, $recv));
                Ok($call)
            })
        }
    };
    // One buffer.
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident| ($buf:ident: input $(, $arg:ident: $kind:ident)*) => $call:expr) => {
        #[doc = starts!($name, $buf)]
        pub fn $start<T: Element, S>(&self, $buf: S $(, $arg: argument!($kind))*) -> Started<S>
        where
            S: AsRef<[T]> + Send + 'static,
        {
            let $comm = self;
            $comm.exec.start($buf, |$buf| {
                let $buf = raw!(input, $buf);
                Ok($call)
            })
        }
    };
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident| ($buf:ident: $written:ident $(, $arg:ident: $kind:ident)*) => $call:expr) => {
        #[doc = starts!($name, $buf)]
        pub fn $start<T: Element, R>(&self, $buf: R $(, $arg: argument!($kind))*) -> Started<R>
        where
            R: AsMut<[T]> + Send + 'static,
        {
            let $comm = self;
            $comm.exec.start($buf, |$buf| {
                let $buf = raw!($written, $buf);
                Ok($call)
            })
        }
    };
}

impl Communicator {
    operations!(nonblocking);

    /// Starts [`Communicator::recv_any`] and returns at once. The [`Work`] owns the buffer until
    /// the operation has ended; then [`Work::wait`] returns `(buf, source)`, where `source` is the
    /// rank that sent the message.
    ///
    /// # Errors
    ///
    /// As for [`Communicator::start_recv`]. The rank beside the buffer is this rank.
    pub fn start_recv_any<T: Element, R>(&self, buf: R) -> Started<(R, Rank)>
    where
        R: AsMut<[T]> + Send + 'static,
    {
        self.start_recv_any_tagged(buf, 0)
    }

    /// [`Communicator::start_recv_any`] of a message with a tag.
    ///
    /// # Errors
    ///
    /// As for [`Communicator::start_recv_any`].
    pub fn start_recv_any_tagged<T: Element, R>(&self, buf: R, tag: Tag) -> Started<(R, Rank)>
    where
        R: AsMut<[T]> + Send + 'static,
    {
        let rank = self.rank();
        self.exec.start((buf, rank), move |(buf, source)| {
            Ok(calls::tagged(calls::recv_any::<T>(raw!(output, buf), source, rank), tag))
        })
    }
}
