//! Handles on operations that run on a communicator's progress thread, or on a thread that waits
//! for them.

use std::cell::UnsafeCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};
use crate::sys::{self, Waiting};
use crate::types::Op;

/// An operation in flight, which owns its buffers. [`Work::wait`] returns them when the operation
/// has ended.
///
/// It is also a [`Future`], which any executor can poll: `work.await` gives what [`Work::wait`]
/// returns. The progress thread runs the operation whether the future is polled or not.
///
/// Dropping it does not stop the operation. The buffers are freed when the operation ends, on a
/// thread of their own. So no buffer is freed, read or written by its owner while it is in flight.
///
/// ```
/// # fn main() -> kolo::Result<()> {
/// # for comm in kolo::Communicator::in_process(1)? {
/// let work = comm.start_all_reduce(vec![1.0f32; 1000], kolo::ReduceOp::Sum)?;
/// // Compute something else.
/// let bucket = work.wait()?;
/// # assert_eq!(bucket.len(), 1000);
/// # }
/// # Ok(())
/// # }
/// ```
#[must_use = "the operation continues, but its buffers and its outcome are lost"]
pub struct Work<B> {
    shared: Arc<WorkState<B>>,
}

/// The operation and whether it has ended, without the buffers, which it may be writing.
impl<B> fmt::Debug for Work<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let op = self.shared.progress.op.get();
        f.debug_struct("Work").field("op", &op).field("is_finished", &self.is_finished()).finish_non_exhaustive()
    }
}

/// What [`Work::wait_timeout`] returns.
#[derive(Debug)]
#[must_use = "it holds the buffers, or the handle on them"]
pub enum Waited<B> {
    /// The operation has completed. These are its buffers.
    Done(B),
    /// The operation is still in flight.
    Pending(Work<B>),
}

/// A failed operation: the error, and the buffers that it owned. A call that is refused, and an
/// operation that fails later, return the same type.
///
/// `?` turns it into an [`Error`] where a function returns [`kolo::Result`](crate::Result). The
/// buffers of a call that was refused are unchanged. After a later failure they hold anything: the
/// input, a part of the result, or a mixture.
///
/// ```
/// # fn main() -> kolo::Result<()> {
/// # for comm in kolo::Communicator::in_process(1)? {
/// # comm.abort();
/// let started = comm.start_all_reduce(vec![1.0f32; 1000], kolo::ReduceOp::Sum);
/// match started.and_then(kolo::Work::wait) {
///     Ok(bucket) => println!("{} elements", bucket.len()),
///     Err(failed) => {
///         let (error, bucket) = failed.into_parts();
///         eprintln!("{error}");
///         assert_eq!(bucket.unwrap().len(), 1000);
///     }
/// }
/// # }
/// # Ok(())
/// # }
/// ```
pub struct WorkError<B> {
    /// Boxed, because results should be small.
    error: Box<Error>,
    buffers: Option<B>,
}

impl<B> WorkError<B> {
    /// Why the operation failed.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// Returns the error and the buffers. There are no buffers if this process was forked while the
    /// operation was in flight: its parent's operation still uses them.
    pub fn into_parts(self) -> (Error, Option<B>) {
        (*self.error, self.buffers)
    }
}

impl<B> From<WorkError<B>> for Error {
    fn from(failed: WorkError<B>) -> Error {
        *failed.error
    }
}

impl<B> fmt::Display for WorkError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

/// The error, without the buffers, which may be large.
impl<B> fmt::Debug for WorkError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error, f)
    }
}

impl<B> std::error::Error for WorkError<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.error)
    }
}

impl<B> Work<B> {
    /// Waits until the operation has ended and returns its buffers. Every operation has a deadline,
    /// so the wait ends. Collectives on host memory that the progress thread has not begun run on
    /// this thread: short ones end sooner than with [`Work::wait_timeout`], which leaves them to the
    /// progress thread.
    ///
    /// # Errors
    ///
    /// The error of the operation, with its buffers.
    pub fn wait(mut self) -> Result<B, WorkError<B>> {
        self.outcome(None);
        self.take()
    }

    /// Waits at most for `timeout`, and returns the handle if the operation is still in flight
    /// then.
    ///
    /// # Errors
    ///
    /// The error of the operation, with its buffers.
    ///
    /// ```
    /// # fn main() -> kolo::Result<()> {
    /// # for comm in kolo::Communicator::in_process(1)? {
    /// use std::time::Duration;
    ///
    /// let mut work = comm.start_all_reduce(vec![1.0f32; 1000], kolo::ReduceOp::Sum)?;
    /// let bucket = loop {
    ///     match work.wait_timeout(Duration::from_millis(10))? {
    ///         kolo::Waited::Done(bucket) => break bucket,
    ///         kolo::Waited::Pending(still) => work = still,
    ///     }
    /// };
    /// # assert_eq!(bucket.len(), 1000);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    pub fn wait_timeout(mut self, timeout: Duration) -> Result<Waited<B>, WorkError<B>> {
        match self.outcome(Instant::now().checked_add(timeout)) {
            Some(_) => self.take().map(Waited::Done),
            None => Ok(Waited::Pending(self)),
        }
    }

    /// Waits until the operation has ended, or until a deadline, and returns how it ended. The
    /// buffers stay where they are.
    pub(crate) fn outcome(&self, deadline: Option<Instant>) -> Option<Result<()>> {
        self.shared.progress.outcome(deadline)
    }

    /// Runs the operation, and those before it, on this thread, if the thread can and nothing runs them.
    pub(crate) fn help(&self) {
        self.shared.progress.help();
    }

    /// Calls a function once when the operation has ended, on a thread of its own. It may wait for
    /// anything. Fails in a forked child.
    pub(crate) fn on_done(&self, function: impl FnOnce(Result<()>) + Send + 'static) -> Result<()> {
        self.shared.progress.on_done(Box::new(function))
    }

    /// Has the operation unpark this thread when it ends. Returns false if it has ended, and in a
    /// forked child, where nothing is waited for.
    pub(crate) fn unparks_this_thread(&self) -> bool {
        self.shared.progress.unparks_this_thread()
    }

    /// Returns how long the operation took: from its beginning on the progress thread, after the
    /// operations before it, to its end. Zero if it failed before it began; `None` if it has not
    /// ended.
    pub(crate) fn duration(&self) -> Option<Duration> {
        self.shared.progress.duration()
    }

    /// Whether the operation has ended, so that [`Work::wait`] returns at once.
    pub fn is_finished(&self) -> bool {
        self.shared.progress.is_finished()
    }

    /// The buffers of an operation that has ended, and its error if it failed.
    fn take(&mut self) -> Result<B, WorkError<B>> {
        self.shared.progress.check_process().map_err(|error| WorkError { error: error.into(), buffers: None })?;
        let outcome = self.shared.progress.outcome.lock().ended.clone();
        let outcome = outcome.expect("only called when the operation has ended");
        // SAFETY: the operation has ended, so the progress thread does not touch the buffers any
        // more. This handle is the only one, and it is borrowed mutably.
        let buffers = unsafe { (*self.shared.buffers.get()).take() };
        let buffers = buffers.expect("a work is not polled after it was ready");
        match outcome {
            Ok(()) => Ok(buffers),
            Err(error) => Err(WorkError { error: error.into(), buffers: Some(buffers) }),
        }
    }
}

impl<B: Send + 'static> Work<B> {
    /// The handle on an operation that is about to start.
    pub(super) fn new(buffers: B, helper: Weak<dyn Helper>) -> Work<B> {
        Work { shared: Arc::new(WorkState { progress: Progress::new(helper), buffers: UnsafeCell::new(Some(buffers)) }) }
    }

    /// Returns the buffers of an operation that has not been queued. They stay where they are until it has
    /// ended.
    pub(super) fn buffers(&mut self) -> &mut B {
        // SAFETY: nothing but this handle reaches the buffers before the operation is queued.
        unsafe { (*self.shared.buffers.get()).as_mut() }.expect("they were put there")
    }

    /// How the progress thread ends the operation, which is an `op`.
    pub(super) fn completion(&self, op: Op) -> Arc<dyn Completion> {
        _ = self.shared.progress.op.set(op);
        self.shared.clone()
    }

    /// The error of an operation that was not queued, or whose completion has come, with its buffers.
    pub(super) fn refused(self, error: Error) -> WorkError<B> {
        // SAFETY: no operation has the buffers, and this handle is the only one.
        let buffers = unsafe { (*self.shared.buffers.get()).take() };
        WorkError { error: error.into(), buffers }
    }
}

impl<B> Future for Work<B> {
    type Output = Result<B, WorkError<B>>;

    /// # Panics
    ///
    /// If it is polled again after it was ready.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // Not in a forked child, where a thread that is gone may hold the lock.
        if self.shared.progress.check_process().is_ok() && self.shared.progress.register(context.waker()) {
            return Poll::Pending;
        }
        Poll::Ready(self.take())
    }
}

impl<B> Drop for Work<B> {
    fn drop(&mut self) {
        if self.shared.progress.abandon() {
            return;
        }
        // SAFETY: the operation has ended, so the progress thread does not touch the buffers any
        // more. This handle is the only one. It was not abandoned before the end, so the operation
        // has left the buffers where they are.
        drop(unsafe { (*self.shared.buffers.get()).take() });
    }
}

/// What the handle and the progress thread share. It lives until both have dropped it.
struct WorkState<B> {
    progress: Progress,
    buffers: UnsafeCell<Option<B>>,
}

// SAFETY: one side at a time reaches the buffers: the operation, by address, until it has ended,
// and the handle afterwards.
unsafe impl<B: Send> Sync for WorkState<B> {}

/// All of an operation but its buffers: compiled once, and not for each type of them.
struct Progress {
    outcome: Mutex<Outcome>,
    ended: Condvar,
    has_ended: AtomicBool,
    /// When the progress thread began the operation.
    began: OnceLock<Instant>,
    op: OnceLock<Op>,
    /// Forks that led to the process that started the operation: another number in a forked child.
    forks: u32,
    /// What runs the operation, while the communicator exists.
    helper: Weak<dyn Helper>,
}

#[derive(Default)]
struct Outcome {
    /// How the operation ended.
    ended: Option<Result<()>>,
    /// How long it took, once it has ended.
    duration: Duration,
    /// The handle was dropped before that.
    is_abandoned: bool,
    /// The task that polled last.
    waker: Option<Waker>,
    /// The functions to call at the end.
    on_done: Vec<OnDone>,
    /// The threads that wait for one of several operations.
    parked: Vec<Thread>,
}

/// A function that is told how an operation ended.
type OnDone = Box<dyn FnOnce(Result<()>) + Send>;

impl Progress {
    fn new(helper: Weak<dyn Helper>) -> Progress {
        Progress {
            outcome: Mutex::default(),
            ended: Condvar::new(),
            has_ended: AtomicBool::new(false),
            began: OnceLock::new(),
            op: OnceLock::new(),
            forks: sys::forks(),
            helper,
        }
    }

    /// Fails in a forked child, which has none of the threads that end its parent's operations.
    fn check_process(&self) -> Result<()> {
        let op = || self.op.get().copied().unwrap_or(Op::Connect);
        if self.forks == sys::forks() { Ok(()) } else { Err(Error::Forked { op: op() }) }
    }

    /// In a forked child, nothing ends the operation any more, and a wait fails at once.
    fn is_finished(&self) -> bool {
        self.has_ended.load(Ordering::Acquire) || self.check_process().is_err()
    }

    /// See [`Work::help`].
    fn help(&self) {
        if self.check_process().is_ok()
            && let Some(waiting) = self.helped()
            && self.is_finished()
        {
            self.has_waited(waiting);
        }
    }

    /// Helps, unless the communicator has ended, which nothing here keeps alive.
    fn helped(&self) -> Option<Waiting> {
        Some(self.helper.upgrade()?.help(&|| self.is_finished()))
    }

    fn has_waited(&self, waiting: Waiting) {
        if let Some(helper) = self.helper.upgrade() {
            helper.has_waited(waiting);
        }
    }

    /// See [`Work::outcome`].
    fn outcome(&self, deadline: Option<Instant>) -> Option<Result<()>> {
        if let Err(forked) = self.check_process() {
            return Some(Err(forked));
        }
        let waiting = if deadline.is_none() { self.helped() } else { None };
        let mut outcome = self.outcome.lock();
        while outcome.ended.is_none() {
            match deadline {
                Some(deadline) if self.ended.wait_until(&mut outcome, deadline).timed_out() => break,
                Some(_) => {}
                None => self.ended.wait(&mut outcome),
            }
        }
        let ended = outcome.ended.clone();
        drop(outcome);
        if let Some(waiting) = waiting {
            self.has_waited(waiting);
        }
        ended
    }

    /// See [`Work::on_done`].
    fn on_done(&self, function: OnDone) -> Result<()> {
        self.check_process()?;
        let mut outcome = self.outcome.lock();
        match outcome.ended.clone() {
            None => outcome.on_done.push(function),
            Some(ended) => {
                drop(outcome);
                tell(function, ended);
            }
        }
        Ok(())
    }

    /// See [`Work::unparks_this_thread`].
    fn unparks_this_thread(&self) -> bool {
        if self.check_process().is_err() {
            return false;
        }
        let mut outcome = self.outcome.lock();
        let thread = thread::current();
        let is_pending = outcome.ended.is_none();
        if is_pending && !outcome.parked.iter().any(|parked| parked.id() == thread.id()) {
            outcome.parked.push(thread);
        }
        is_pending
    }

    /// See [`Work::duration`].
    fn duration(&self) -> Option<Duration> {
        // In a forked child, a thread that is gone may hold the lock.
        if self.check_process().is_err() {
            return None;
        }
        let outcome = self.outcome.lock();
        outcome.ended.as_ref().map(|_| outcome.duration)
    }

    /// Has the operation wake a task when it ends. Returns false if it has ended.
    ///
    /// Cloning and dropping a waker runs code of the executor, which may end a communicator: never
    /// under the lock, for which the progress thread waits.
    fn register(&self, waker: &Waker) -> bool {
        {
            let outcome = self.outcome.lock();
            if outcome.ended.is_some() {
                return false;
            }
            if outcome.waker.as_ref().is_some_and(|registered| registered.will_wake(waker)) {
                return true;
            }
        }
        let waker = waker.clone();
        let mut outcome = self.outcome.lock();
        let is_pending = outcome.ended.is_none();
        let unused = if is_pending { outcome.waker.replace(waker) } else { Some(waker) };
        drop(outcome);
        drop(unused);
        is_pending
    }

    /// The handle is dropped. Returns whether its buffers are the operation's, which has not ended
    /// in this process.
    fn abandon(&self) -> bool {
        if self.check_process().is_err() {
            // The parent's thread ends the operation, and may have held the lock at the fork:
            // nothing is touched.
            return true;
        }
        let mut outcome = self.outcome.lock();
        if outcome.ended.is_some() {
            return false;
        }
        outcome.is_abandoned = true;
        let waker = outcome.waker.take();
        drop(outcome);
        // Code of the executor, like all that a waker does: outside the lock.
        drop(waker);
        true
    }

    /// The operation has ended. `abandoned` is called if the handle is gone, before another thread
    /// learns of the end.
    fn complete(&self, ended: Result<()>, abandoned: &mut dyn FnMut() -> Option<Box<dyn FnOnce() + Send>>) {
        let duration = self.began.get().map_or(Duration::ZERO, Instant::elapsed);
        let mut outcome = self.outcome.lock();
        outcome.duration = duration;
        outcome.ended = Some(ended.clone());
        self.has_ended.store(true, Ordering::Release);
        self.ended.notify_all();
        outcome.parked.drain(..).for_each(|thread| thread.unpark());
        let waker = outcome.waker.take();
        let on_done = std::mem::take(&mut outcome.on_done);
        let free = outcome.is_abandoned.then(abandoned).flatten();
        drop(outcome);
        // Both are done here if the system has no more threads: a task that is not woken would wait
        // forever.
        if let Some(Err(free)) = free.map(|free| run_elsewhere("kolo-free", free)) {
            free();
        }
        if let Some(waker) = waker
            && let Err(wake) = run_elsewhere("kolo-wake", Box::new(move || waker.wake()))
        {
            wake();
        }
        for function in on_done {
            tell(function, ended.clone());
        }
    }
}

/// What the progress thread sees of a handle.
pub(crate) trait Completion: Send + Sync {
    /// The operation begins, after those that were queued before it.
    fn begin(&self);

    /// The operation has ended: it does not touch the buffers any more.
    fn complete(&self, outcome: Result<()>);
}

/// How a thread that waits for an operation shortens the wait.
pub(super) trait Helper: Send + Sync {
    /// Runs operations of the queue on this thread, which waits for one of them without a deadline:
    /// until `has_ended` says that it has ended, or until it is time to sleep. The thread is awake,
    /// and the progress thread may take several microseconds to wake: longer than a short operation.
    fn help(&self, has_ended: &dyn Fn() -> bool) -> Waiting;

    /// The operation has ended for which this thread has waited since [`Helper::help`].
    fn has_waited(&self, waiting: Waiting);
}

impl<B: Send + 'static> Completion for WorkState<B> {
    fn begin(&self) {
        _ = self.progress.began.set(Instant::now());
    }

    fn complete(&self, outcome: Result<()>) {
        self.progress.complete(outcome, &mut || {
            // SAFETY: the operation has ended, and there is no handle any more.
            let buffers = unsafe { (*self.buffers.get()).take() };
            std::mem::needs_drop::<B>().then(|| Box::new(move || drop(buffers)) as Box<_>)
        });
    }
}

/// Tells a function of the user the outcome of an operation. Not without a thread for it: the
/// function may wait for another operation.
fn tell(function: OnDone, outcome: Result<()>) {
    if run_elsewhere("kolo-done", Box::new(move || function(outcome))).is_err() {
        crate::log::error!("there is no thread for a function that is told of the end of an operation: it is not called");
    }
}

/// Runs code of the user on a thread of its own: what frees the buffers of an abandoned operation,
/// and what wakes a task. That code may wait for the thread that ends operations, or end its
/// communicator: a buffer or a task may hold the last reference to one, whose end waits for its
/// progress thread. A panic of that code stays on the thread. Gives the code back if the system
/// starts no thread.
fn run_elsewhere(name: &str, code: Box<dyn FnOnce() + Send>) -> Result<(), impl FnOnce() + use<>> {
    let code = Arc::new(Mutex::new(Some(code)));
    let theirs = code.clone();
    let run = move |code: &Mutex<Option<Box<dyn FnOnce() + Send>>>| {
        let code = code.lock().take();
        code.into_iter().for_each(|code| code());
    };
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(move || run(&theirs));
    spawned.map(drop).map_err(|error| {
        crate::log::warn!(%error, thread = name, "cannot start a thread");
        move || _ = catch_unwind(AssertUnwindSafe(|| run(&code)))
    })
}
