//! A store that consists of the caller's functions.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_void};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use kolo::{Store, StoreError};

use crate::boundary::boundary;
use crate::codes::{KOLO_OK, kolo_result_t};
use crate::fault::Fault;
use crate::sized::{self, Grows};

/// A handle with which a function of kolo_store_t returns a value, by kolo_store_reply. It is valid
/// until the function returns.
pub struct kolo_reply {
    _opaque: [u8; 0],
}
pub type kolo_reply_t = *mut kolo_reply;

/// A key-value store of the program that all ranks share, for kolo_comm_init_callbacks. A key has
/// at most 256 bytes of printable ASCII, a value at most 16 MiB of any bytes. Values are needed
/// until all ranks have connected.
///
/// The functions return 0 on success, also if `get` found nothing. Any other number ends the start
/// with KOLO_ERR_STORE. They must not throw C++ exceptions, and must return before their timeout,
/// in milliseconds.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kolo_store_t {
    /// `sizeof(kolo_store_t)`.
    pub size: usize,
    /// An argument that kolo passes to each function.
    pub context: *mut c_void,
    /// Sets a key, whether it is set already or not.
    pub set: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            key: *const c_char,
            value: *const c_void,
            length: usize,
            timeout_ms: u64,
        ) -> i32,
    >,
    /// Waits until a key is set, at most until the timeout, and passes its value to
    /// kolo_store_reply. With a timeout of 0 it does not wait. If the key is not set by then, it
    /// returns 0 without a reply.
    pub get: Option<unsafe extern "C" fn(context: *mut c_void, key: *const c_char, timeout_ms: u64, reply: kolo_reply_t) -> i32>,
    /// Sets a key unless it is set, atomically, and passes the value that it has afterwards to
    /// kolo_store_reply. May be NULL: then two processes with the same rank are detected later.
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
    /// 1: only the ranks of the job can read or write the store. Ranks without a secret then share
    /// one through it. 0: other processes may read or write it. Ranks without a secret then agree
    /// on one that a process that only reads the store cannot learn. All ranks use rank 0's value.
    pub is_private: i32,
}

// SAFETY: the struct begins with its size; its functions and their context may be null.
unsafe impl Grows for kolo_store_t {
    const NAMES: (&'static str, &'static str) = ("store", "store->size");
    // `claim`, which may be null, has the size of a pointer.
    const FIRST: usize = std::mem::offset_of!(kolo_store_t, claim) + size_of::<usize>();
}

/// The most bytes of a value.
const LARGEST: usize = 16 << 20;

thread_local! {
    /// The reply that a function on this thread may give: its number, whether it is open, and the
    /// value once it is given.
    static REPLY: RefCell<(usize, bool, Option<Vec<u8>>)> = const { RefCell::new((1, false, None)) };
}

/// Passes the value that a function of kolo_store_t found to kolo, which copies it. Only for use
/// inside that function, by the same thread.
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
            // SAFETY: the caller's value has that length.
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

// SAFETY: only the thread that connects uses the store, and drops it before it returns.
unsafe impl Send for Callbacks {}
// SAFETY: as above.
unsafe impl Sync for Callbacks {}

impl Callbacks {
    /// # Safety
    ///
    /// `store` is null or points to as many bytes as its first field says. As long as this lives,
    /// its functions behave as `kolo_store_t` says.
    pub(crate) unsafe fn new(store: *const kolo_store_t) -> Result<Callbacks, Fault> {
        // SAFETY: passed on.
        let kolo_store_t { context, set, get, claim, is_private, .. } = unsafe { sized::read(store)? };
        let is_private = match is_private {
            0 => false,
            1 => true,
            other => return Err(Fault::value("store->is_private", other, "it must be 0 or 1")),
        };
        let set = set.ok_or(Fault::Null { what: "store->set" })?;
        Ok(Callbacks { is_private, context, set, get: get.ok_or(Fault::Null { what: "store->get" })?, claim })
    }
}

fn failed(doing: &'static str, why: String) -> StoreError {
    StoreError::Io { doing, source: Arc::new(io::Error::other(why)) }
}

/// Makes an error of what a function of the caller returned.
fn check(doing: &'static str, returned: i32) -> Result<(), StoreError> {
    match returned {
        KOLO_OK => Ok(()),
        other => Err(failed(doing, format!("the function returned {other}"))),
    }
}

/// Calls a function that may give a reply.
fn ask(doing: &'static str, call: impl FnOnce(kolo_reply_t) -> i32) -> Result<Option<Vec<u8>>, StoreError> {
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
    CString::new(key).expect("keys of kolo contain no zeros")
}

impl Store for Callbacks {
    fn is_private(&self) -> bool {
        self.is_private
    }

    fn url(&self) -> String {
        "<functions of the program>".to_owned()
    }

    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
        let key = zero_ended(key);
        let (value, length) = (value.as_ptr().cast(), value.len());
        // SAFETY: the function behaves as `kolo_store_t` says; key and value live until it returns.
        check("its function set", unsafe { (self.set)(self.context, key.as_ptr(), value, length, milliseconds(timeout)) })
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        let key = zero_ended(key);
        // SAFETY: as above.
        ask("its function get", |reply| unsafe { (self.get)(self.context, key.as_ptr(), milliseconds(timeout), reply) })
    }

    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
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
