//! The parameters that a program can ask for: the variables that have an effect.

use std::collections::BTreeSet;
use std::ffi::{CString, c_char, c_int, c_void};
use std::str::FromStr;
use std::sync::LazyLock;

use kolo::raw::between_forks;
use parking_lot::Mutex;

use crate::codes::{SUCCESS, ncclResult_t};
use crate::environment::{HONOURED, variable, write_line};
use crate::fault::Fault;
use crate::pointers::{place, text};

/// The handle of a parameter: its place in the list, from 1.
pub(crate) type Handle = *mut c_void;

/// The texts that were returned. They are never freed, because programs keep the pointers; values seldom change.
static TOLD: Mutex<BTreeSet<CString>> = Mutex::new(BTreeSet::new());

/// Returns a text to C.
fn tell(value: String) -> *const c_char {
    let value = CString::new(value).unwrap_or_default();
    between_forks(|| {
        let mut told = TOLD.lock();
        if !told.contains(&value) {
            told.insert(value.clone());
        }
        told.get(&value).expect("it is there now").as_ptr()
    })
}

fn name(handle: Handle) -> Result<&'static str, Fault> {
    let found = handle.addr().checked_sub(1).and_then(|place| HONOURED.get(place));
    found.copied().ok_or_else(|| Fault::argument("the handle is none of ncclParamBind"))
}

fn unknown(key: &str) -> Fault {
    Fault::argument(format!("kolo has no parameter {key:?}; it has {}", HONOURED.join(", ")))
}

/// # Safety
///
/// `to` is null or valid for writing, and `key` is null or ends with a zero.
pub(crate) unsafe fn bind(to: *mut Handle, key: *const c_char) -> Result<ncclResult_t, Fault> {
    // SAFETY: passed on.
    let (to, key) = unsafe { (place(to, "out")?, text(key, "key")?.ok_or(Fault::Null { what: "key" })?) };
    let place = HONOURED.iter().position(|name| *name == key).ok_or_else(|| unknown(key))?;
    to.write(std::ptr::without_provenance_mut(place + 1));
    Ok(SUCCESS)
}

/// Writes a number.
///
/// # Safety
///
/// `to` is null or valid for writing.
pub(crate) unsafe fn number<T: FromStr>(handle: Handle, to: *mut T) -> Result<ncclResult_t, Fault> {
    let name = name(handle)?;
    // SAFETY: passed on.
    let to = unsafe { place(to, "out")? };
    let value = variable(name).ok_or_else(|| Fault::usage(format!("{name} is not set")))?;
    to.write(value.parse().map_err(|_| Fault::usage(format!("{name} is {value:?}, no number of this type")))?);
    Ok(SUCCESS)
}

/// # Safety
///
/// `to` is null or valid for writing.
pub(crate) unsafe fn string(handle: Handle, to: *mut *const c_char) -> Result<ncclResult_t, Fault> {
    let name = name(handle)?;
    // SAFETY: passed on.
    unsafe { place(to, "out")? }.write(tell(variable(name).unwrap_or_default()));
    Ok(SUCCESS)
}

/// # Safety
///
/// `to` is null or valid for writing `most` bytes, and `len` is null or valid for writing.
pub(crate) unsafe fn bytes(handle: Handle, to: *mut c_void, most: c_int, len: *mut c_int) -> Result<ncclResult_t, Fault> {
    let value = variable(name(handle)?).unwrap_or_default();
    // SAFETY: passed on.
    let (to, len) = unsafe { (place(to.cast::<u8>(), "out")?, place(len, "len")?) };
    if value.len() > usize::try_from(most).unwrap_or(0) {
        return Err(Fault::argument(format!("maxLen is {most}, and the value has {} bytes", value.len())));
    }
    // SAFETY: the caller has room for as many bytes.
    unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), to.as_mut_ptr(), value.len()) };
    len.write(value.len() as c_int);
    Ok(SUCCESS)
}

/// # Safety
///
/// `key` is null or ends with a zero, and the others are null or valid for writing.
pub(crate) unsafe fn by_key(key: *const c_char, to: *mut *const c_char, len: *mut c_int) -> Result<ncclResult_t, Fault> {
    // SAFETY: passed on.
    let key = unsafe { text(key, "key")? }.ok_or(Fault::Null { what: "key" })?;
    if !HONOURED.contains(&key) {
        return Err(unknown(key));
    }
    let value = variable(key).unwrap_or_default();
    // SAFETY: passed on.
    let (to, len) = unsafe { (place(to, "value")?, place(len, "valueLen")?) };
    len.write(value.len() as c_int);
    to.write(tell(value));
    Ok(SUCCESS)
}

/// # Safety
///
/// Both are null or valid for writing.
pub(crate) unsafe fn keys(table: *mut *const *const c_char, len: *mut c_int) -> Result<ncclResult_t, Fault> {
    /// The names as C has them, by [`tell`].
    struct Names(Vec<*const c_char>);
    // SAFETY: the texts are constant.
    unsafe impl Send for Names {}
    // SAFETY: nothing writes to the texts or to the table of them.
    unsafe impl Sync for Names {}
    static NAMES: LazyLock<Names> = LazyLock::new(|| Names(HONOURED.iter().map(|name| tell((*name).to_owned())).collect()));
    // SAFETY: passed on.
    let (table, len) = unsafe { (place(table, "table")?, place(len, "tableLen")?) };
    table.write(NAMES.0.as_ptr());
    len.write(NAMES.0.len() as c_int);
    Ok(SUCCESS)
}

/// Prints all parameters to standard error.
pub(crate) fn dump() {
    for name in HONOURED {
        write_line(&format!("{name}={}", variable(name).unwrap_or_default()));
    }
}
