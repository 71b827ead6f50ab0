//! The scoped form of every operation: it is nonblocking and borrows its buffers until the scope
//! ends.

use std::marker::PhantomData;

use parking_lot::Mutex;

use super::blocking::raw;
use super::operations::operations;
use super::{Communicator, calls};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::call::Call;
use crate::error::Result;
use crate::progress::work::Work;
use crate::types::{Element, Rank, ReduceOp, Tag};

/// Starts operations that borrow their buffers until the scope ends; see [`Communicator::scope`].
///
/// Its methods are named as those of [`Communicator`] and return as soon as the operation is
/// queued. Threads that the body starts, as by [`std::thread::scope`], may call them, too; then the
/// program orders the calls, as on a communicator. There is no `send_recv`: a [`Scope::send`] and a
/// [`Scope::recv`] that follow each other progress side by side.
#[derive(Debug)]
pub struct Scope<'scope, 'env: 'scope> {
    comm: &'env Communicator,
    /// Under a lock, so that several threads of the body can start operations.
    started: Mutex<Vec<Work<()>>>,
    // Invariant, as in std::thread::scope: otherwise 'scope could be shortened, and a buffer used
    // before the scope has ended.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl Communicator {
    /// Runs `body`, which starts operations on buffers that outlive the scope, and waits for all of
    /// them before it returns.
    ///
    /// Operations take effect in the order in which they were started. Sends and receives that
    /// follow each other progress side by side.
    ///
    /// # Errors
    ///
    /// The error of `body`, otherwise the first error of its operations.
    ///
    /// ```
    /// # fn main() -> kolo::Result<()> {
    /// # use kolo::ReduceOp::Sum;
    /// # for comm in kolo::Communicator::in_process(1)? {
    /// let (mut a, mut b) = (vec![1.0f32; 8], vec![2u64; 8]);
    /// comm.scope(|s| {
    ///     s.all_reduce(&mut a, Sum)?;
    ///     s.broadcast(&mut b, 0)
    /// })?;
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    pub fn scope<'env, R>(&'env self, body: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<R>) -> Result<R> {
        let scope = Scope { comm: self, started: Mutex::default(), scope: PhantomData, env: PhantomData };
        // Also if the body fails or panics, no buffer is returned to its owner before its operation
        // has ended.
        let wait = WaitOnDrop(&scope.started);
        let result = body(&scope)?;
        wait.wait().map(|()| result)
    }
}

struct WaitOnDrop<'a>(&'a Mutex<Vec<Work<()>>>);

impl WaitOnDrop<'_> {
    fn wait(&self) -> Result<()> {
        let started = std::mem::take(&mut *self.0.lock());
        let outcomes: Vec<Result<()>> = started.into_iter().map(|work| Ok(work.wait()?)).collect();
        outcomes.into_iter().collect()
    }
}

impl Drop for WaitOnDrop<'_> {
    fn drop(&mut self) {
        // The body's own error or panic is what the caller gets.
        let _ = self.wait();
    }
}

/// The type of an argument.
macro_rules! argument {
    (input) => { &'scope [T] };
    (output) => { &'scope mut [T] };
    (in_place) => { &'scope mut [T] };
    (root_input) => { Option<&'scope [T]> };
    (root_output) => { Option<&'scope mut [T]> };
    (counts) => { &[usize] };
    ($value:ident) => { $value };
}

macro_rules! scoped {
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident| () => $call:expr) => {
        #[doc = concat!("Starts [`Communicator::", stringify!($name), "`] and returns at once. The scope waits for its end.\n\n",
            "# Errors\n\nIf the call is refused, as by an argument. [`Communicator::scope`] returns every later failure.")]
        pub fn $name(&'scope self) -> Result<()> {
            self.start($call)
        }
    };
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident| ($($arg:ident: $kind:ident),*) => $call:expr) => {
        #[doc = concat!(
            "Starts [`Communicator::", stringify!($name), "`] and returns at once. The buffers are borrowed until the scope ends.\n\n",
            "# Errors\n\nIf the call is refused, as by an argument. [`Communicator::scope`] returns every later failure."
        )]
        pub fn $name<T: Element>(&'scope self, $($arg: argument!($kind)),*) -> Result<()> {
            let $comm = self.comm;
            _ = $comm;
            $(let $arg = raw!($kind, $arg);)*
            self.start($call)
        }
    };
}

impl<'scope> Scope<'scope, '_> {
    /// Starts a call whose buffers are borrowed for `'scope`: [`Communicator::scope`] waits for its
    /// end before that.
    fn start(&'scope self, call: Call) -> Result<()> {
        let work = self.comm.exec.start((), |()| Ok(call))?;
        self.started.lock().push(work);
        Ok(())
    }

    operations!(scoped);
}
