//! The library, loaded as a program loads it.

// Each test uses a part of it.
#![allow(dead_code, unreachable_pub, missing_docs, missing_debug_implementations)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::LazyLock;

use libloading::Library;

pub type Comm = *mut c_void;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Id(pub [u8; 128]);

/// The first fields of `ncclConfig_t`, whose size says that it has no others.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    pub blocking: c_int,
    rest: [c_int; 20],
}

impl Config {
    pub fn blocking(blocking: c_int) -> Config {
        Config { size: 24, magic: 0xcafe_beef, version: 22700, blocking, rest: [c_int::MIN; 20] }
    }
}

pub const SUCCESS: c_int = 0;
pub const INVALID_ARGUMENT: c_int = 4;
pub const INVALID_USAGE: c_int = 5;
pub const REMOTE_ERROR: c_int = 6;
pub const IN_PROGRESS: c_int = 7;
pub const INT8: c_int = 0;
pub const INT32: c_int = 2;
pub const FLOAT32: c_int = 7;
pub const SUM: c_int = 0;
pub const AVG: c_int = 4;

static LIBRARY: LazyLock<Library> = LazyLock::new(|| {
    let mut path: PathBuf = std::env::current_exe().expect("this program has a path");
    path.set_file_name(format!("{}kolo_nccl{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX));
    // SAFETY: the library's initialisers have no requirements.
    unsafe { Library::new(&path) }.unwrap_or_else(|error| panic!("{}: {error}", path.display()))
});

macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $type:ty),*);)*) => {$(
        #[allow(non_snake_case)]
        pub fn $name($($argument: $type),*) -> c_int {
            // SAFETY: this is the signature of nccl.h, and the tests give memory that is long enough.
            unsafe { LIBRARY.get::<unsafe extern "C" fn($($type),*) -> c_int>(stringify!($name).as_bytes()).unwrap()($($argument),*) }
        }
    )*};
}

functions! {
    fn ncclGetUniqueId(id: *mut Id);
    fn ncclCommInitRank(comm: *mut Comm, ranks: c_int, id: Id, rank: c_int);
    fn ncclCommInitRankConfig(comm: *mut Comm, ranks: c_int, id: Id, rank: c_int, config: *const Config);
    fn ncclCommInitAll(comms: *mut Comm, ranks: c_int, devices: *const c_int);
    fn ncclCommDestroy(comm: Comm);
    fn ncclCommAbort(comm: Comm);
    fn ncclCommRevoke(comm: Comm, flags: c_int);
    fn ncclCommFinalize(comm: Comm);
    fn ncclCommSplit(comm: Comm, color: c_int, key: c_int, new: *mut Comm, config: *const Config);
    fn ncclCommShrink(comm: Comm, excluded: *const c_int, count: c_int, new: *mut Comm, config: *const Config, flags: c_int);
    fn ncclCommGetUniqueId(comm: Comm, id: *mut Id);
    fn ncclCommGrow(comm: Comm, ranks: c_int, id: *const Id, rank: c_int, new: *mut Comm, config: *const Config);
    fn ncclCommGetAsyncError(comm: Comm, error: *mut c_int);
    fn ncclCommCount(comm: Comm, to: *mut c_int);
    fn ncclCommUserRank(comm: Comm, to: *mut c_int);
    fn ncclAllReduce(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Comm, stream: *mut c_void);
    fn ncclAllGather(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, comm: Comm, stream: *mut c_void);
    fn ncclSend(send: *const c_void, count: usize, dtype: c_int, peer: c_int, comm: Comm, stream: *mut c_void);
    fn ncclRecv(recv: *mut c_void, count: usize, dtype: c_int, peer: c_int, comm: Comm, stream: *mut c_void);
    fn ncclGroupStart();
    fn ncclGroupEnd();
}

/// Returns what ncclGetLastError returns.
pub fn last_error_at(comm: Comm) -> *const c_char {
    // SAFETY: this is the signature of nccl.h.
    unsafe { LIBRARY.get::<unsafe extern "C" fn(Comm) -> *const c_char>(b"ncclGetLastError").unwrap()(comm) }
}

/// Returns the text of ncclGetLastError.
pub fn last_error(comm: Comm) -> String {
    // SAFETY: the text stays until this thread asks again.
    unsafe { CStr::from_ptr(last_error_at(comm)) }.to_string_lossy().into_owned()
}

/// Prints all parameters.
pub fn dump_parameters() {
    // SAFETY: this is the signature of nccl.h.
    unsafe { LIBRARY.get::<unsafe extern "C" fn()>(b"ncclParamDumpAll").unwrap()() }
}

/// Fails with the library's sentence unless a call succeeded.
#[track_caller]
pub fn ok(result: c_int) {
    assert_eq!(result, SUCCESS, "{}", last_error(std::ptr::null_mut()));
}

pub fn unique_id() -> Id {
    let mut id = Id([0; 128]);
    ok(ncclGetUniqueId(&mut id));
    id
}

pub fn state(comm: Comm) -> c_int {
    let mut state = -1;
    ok(ncclCommGetAsyncError(comm, &mut state));
    state
}

/// Adds a number of each rank in one element.
pub fn sum(comm: Comm, number: i32) -> Result<i32, c_int> {
    let mut sum = number;
    let at = (&raw mut sum).cast::<c_void>();
    match ncclAllReduce(at, at, 1, INT32, SUM, comm, std::ptr::null_mut()) {
        SUCCESS => Ok(sum),
        code => Err(code),
    }
}

pub fn init(id: Id, ranks: usize, rank: usize) -> Comm {
    let mut comm = std::ptr::null_mut();
    ok(ncclCommInitRank(&mut comm, ranks as c_int, id, rank as c_int));
    comm
}

/// Runs a function on a thread for each rank.
pub fn on_threads(ranks: usize, body: impl Fn(usize, Comm) + Sync) {
    let id = unique_id();
    std::thread::scope(|scope| {
        for rank in 0..ranks {
            let body = &body;
            scope.spawn(move || {
                let comm = init(id, ranks, rank);
                body(rank, comm);
            });
        }
    });
}
