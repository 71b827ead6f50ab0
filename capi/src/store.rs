//! A store that is made of the caller's functions.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_void};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use kolo::{Store, StoreProblem};

use crate::boundary::boundary;
use crate::codes::{KOLO_OK, kolo_result_t};
use crate::fault::Fault;
use crate::sized::{self, Grows};

/// Where a function of kolo_store_t puts the value that it found, with kolo_store_reply. A handle that is valid until it returns.
pub struct kolo_reply {
    _opaque: [u8; 0],
}
pub type kolo_reply_t = *mut kolo_reply;

/// A key-value store that all ranks share, for kolo_comm_init_callbacks. Keys are printable ASCII of at most 256 bytes, values at most
/// 16 MiB of any bytes. What is stored is small and needed only until all ranks have connected.
///
/// The functions return 0 if they could do what they should, also if `get` found nothing; any other number ends the start with
/// KOLO_ERR_STORE. They must not throw C++ exceptions, and must return by their timeout, in milliseconds.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kolo_store_t {
    /// `sizeof(kolo_store_t)`.
    pub size: usize,
    /// Whatever the functions need; kolo passes it on.
    pub context: *mut c_void,
    /// Sets a key, whether it was there or not.
    pub set: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            key: *const c_char,
            value: *const c_void,
            length: usize,
            timeout_ms: u64,
        ) -> i32,
    >,
    /// Waits until a key is there, at most until the timeout, and gives its value to kolo_store_reply. With a timeout of 0 it looks and
    /// does not wait. If the key is not there by then, it returns 0 without a reply.
    pub get: Option<unsafe extern "C" fn(context: *mut c_void, key: *const c_char, timeout_ms: u64, reply: kolo_reply_t) -> i32>,
    /// Sets a key unless it is there, at once as seen by other ranks, and gives the value that is there afterwards to kolo_store_reply.
    /// May be NULL: then two processes with the same rank are noticed later.
    pub claim: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            key: *const c_char,
            value: *const c_void,
            length: usize,
            timeout_ms: u64,
            reply: kolo_reply_t,
        ) -> i32,
    >,
    /// 1: only the ranks of the job can read or write the store, so ranks that were given no secret share one through it. 0: other
    /// processes may; then the ranks agree on a secret that a process that only reads the store cannot learn. Rank 0's counts.
    pub is_private: i32,
}

// SAFETY: it begins with its size; its functions and their context may be null.
unsafe impl Grows for kolo_store_t {
    const NAMES: (&'static str, &'static str) = ("store", "store->size");
    // `claim`, which may be null, is as large as `get`.
    const FIRST: usize = std::mem::offset_of!(kolo_store_t, claim) + size_of::<usize>();
}

/// The longest value.
const LARGEST: usize = 16 << 20;

thread_local! {
    /// The reply that is being waited for on this thread: its number, and the value once it is there.
    static REPLY: RefCell<(usize, bool, Option<Vec<u8>>)> = const { RefCell::new((1, false, None)) };
}

/// Gives kolo the value that a function of kolo_store_t found; kolo copies it. For use inside that function, by the same thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_store_reply(reply: kolo_reply_t, value: *const c_void, length: usize) -> kolo_result_t {
    boundary(|| {
        if value.is_null() && length > 0 {
            return Err(Fault::Null { what: "value" });
        }
        if length > LARGEST {
            return Err(Fault::value("length", i64::try_from(length).unwrap_or(i64::MAX), "a value has at most 16 MiB"));
        }
        REPLY.with_borrow_mut(|(number, awaited, given)| {
            if !*awaited || reply.addr() != *number {
                return Err(Fault::Handle { what: "reply", is_null: reply.is_null() });
            }
            // SAFETY: the caller's value, which is as long.
            let value = if length == 0 { &[] } else { unsafe { std::slice::from_raw_parts(value.cast::<u8>(), length) } };
            *given = Some(value.to_vec());
            Ok(())
        })
    })
}

/// A store of the caller's functions.
pub(crate) struct Callbacks {
    is_private: bool,
    context: *mut c_void,
    set: unsafe extern "C" fn(*mut c_void, *const c_char, *const c_void, usize, u64) -> i32,
    get: unsafe extern "C" fn(*mut c_void, *const c_char, u64, kolo_reply_t) -> i32,
    claim: Option<unsafe extern "C" fn(*mut c_void, *const c_char, *const c_void, usize, u64, kolo_reply_t) -> i32>,
}

// SAFETY: connecting uses its store by the thread that connects, and drops it before it returns.
unsafe impl Send for Callbacks {}
// SAFETY: as above.
unsafe impl Sync for Callbacks {}

impl Callbacks {
    /// # Safety
    ///
    /// `store` is null or points to as many bytes as its first field says; its functions keep what `kolo_store_t` says, for as long as
    /// this lives.
    pub(crate) unsafe fn new(store: *const kolo_store_t) -> Result<Callbacks, Fault> {
        // SAFETY: passed on.
        let kolo_store_t { context, set, get, claim, is_private, .. } = unsafe { sized::read(store)? };
        let is_private = match is_private {
            0 => false,
            1 => true,
            other => return Err(Fault::value("store->is_private", other, "it is 0 or 1")),
        };
        let set = set.ok_or(Fault::Null { what: "store->set" })?;
        Ok(Callbacks { is_private, context, set, get: get.ok_or(Fault::Null { what: "store->get" })?, claim })
    }
}

fn failed(doing: &'static str, why: String) -> StoreProblem {
    StoreProblem::Io { doing, source: Arc::new(io::Error::other(why)) }
}

/// A function of the caller's has returned.
fn check(doing: &'static str, returned: i32) -> Result<(), StoreProblem> {
    match returned {
        KOLO_OK => Ok(()),
        other => Err(failed(doing, format!("the function returned {other}"))),
    }
}

/// Runs a function that may give a reply.
fn ask(doing: &'static str, call: impl FnOnce(kolo_reply_t) -> i32) -> Result<Option<Vec<u8>>, StoreProblem> {
    let number = REPLY.with_borrow_mut(|(number, awaited, given)| {
        (*number, *awaited, *given) = (number.wrapping_add(1).max(1), true, None);
        *number
    });
    let returned = call(std::ptr::without_provenance_mut(number));
    let value = REPLY.with_borrow_mut(|(_, awaited, given)| {
        *awaited = false;
        given.take()
    });
    check(doing, returned).map(|()| value)
}

fn milliseconds(timeout: Duration) -> u64 {
    timeout.as_millis().try_into().unwrap_or(u64::MAX)
}

fn zero_ended(key: &str) -> CString {
    CString::new(key).expect("kolo's keys have no zeros")
}

impl Store for Callbacks {
    fn is_private(&self) -> bool {
        self.is_private
    }

    fn url(&self) -> String {
        "<functions of the program>".to_owned()
    }

    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreProblem> {
        let key = zero_ended(key);
        let (value, length) = (value.as_ptr().cast(), value.len());
        // SAFETY: the function keeps what it promises; key and value live until it returns.
        check("its function set", unsafe { (self.set)(self.context, key.as_ptr(), value, length, milliseconds(timeout)) })
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreProblem> {
        let key = zero_ended(key);
        // SAFETY: as above.
        ask("its function get", |reply| unsafe { (self.get)(self.context, key.as_ptr(), milliseconds(timeout), reply) })
    }

    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreProblem> {
        let Some(claim) = self.claim else {
            self.set(key, value, timeout)?;
            return Ok(value.to_vec());
        };
        let key = zero_ended(key);
        let (pointer, length) = (value.as_ptr().cast(), value.len());
        let held = ask("its function claim", |reply| {
            // SAFETY: as above.
            unsafe { claim(self.context, key.as_ptr(), pointer, length, milliseconds(timeout), reply) }
        })?;
        held.ok_or_else(|| failed("its function claim", "it gave no reply".to_owned()))
    }
}
