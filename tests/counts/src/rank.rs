//! The program of a rank: it runs the operations that the tracer asks for.

use std::alloc::Layout;
use std::arch::asm;
use std::ffi::{CStr, CString, c_char, c_int, c_void};

use kolo::{Communicator, ReduceOp, Registered};

use crate::cases::{Api, Kind};

/// Bytes of each buffer.
pub(crate) const BUFFER: usize = 1 << 20;

/// The functions of the C library that are counted as one step each.
pub(crate) const FUNCTIONS: [&CStr; 6] = [c"memcpy", c"memmove", c"memset", c"memcmp", c"bcmp", c"clock_gettime"];

/// What tracer and rank tell each other, in the memory of the rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mailbox {
    /// Of the tracer: the operation ([`Kind::number`]), the bytes of the whole buffer, how often to
    /// run it, and whether in registered buffers.
    pub(crate) kind: u64,
    pub(crate) bytes: u64,
    pub(crate) times: u64,
    pub(crate) registered: u64,
    /// Of the rank: where its private buffers are, and the functions.
    pub(crate) buffers: [u64; 2],
    pub(crate) functions: [u64; FUNCTIONS.len()],
}

/// Where a rank stops, in a register of the stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// It waits for the mailbox to be filled.
    Ready = 1,
    Begin = 2,
    End = 3,
}

/// Stops for the tracer.
#[inline(always)]
fn stop(mailbox: *mut Mailbox, at: Stop) {
    // SAFETY: the tracer handles the trap. At this stop the tracer writes only the mailbox; what it
    // changes elsewhere it restores before this thread runs on.
    unsafe { asm!("int3", in("rdi") mailbox, in("rsi") at as u64) };
}

/// A connection to the library, through one of its interfaces.
trait Rank {
    /// Runs an operation on buffers of this many elements in all, between the two stops.
    fn run(&mut self, kind: Kind, elements: usize, registered: bool, times: u64, mailbox: *mut Mailbox);

    /// The private buffers.
    fn buffers(&self) -> [u64; 2];
}

/// Runs what the tracer asks for, until it ends the process.
pub(crate) fn main(api: Api) {
    let mut rank: Box<dyn Rank> = match api {
        Api::C => Box::new(ThroughC::connect()),
        Api::Rust => Box::new(ThroughRust::connect()),
    };
    let functions = FUNCTIONS.map(|name| {
        // SAFETY: the name ends with a zero.
        let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        assert!(!address.is_null(), "libc has no {name:?}");
        address as u64
    });
    let mailbox = Mailbox { kind: 0, bytes: 0, times: 0, registered: 0, buffers: rank.buffers(), functions };
    let mailbox = Box::into_raw(Box::new(mailbox));
    loop {
        stop(mailbox, Stop::Ready);
        // SAFETY: the mailbox is never freed. The tracer writes it only while this rank is stopped.
        let Mailbox { kind, bytes, times, registered, .. } = unsafe { mailbox.read_volatile() };
        rank.run(Kind::from_number(kind), bytes as usize / size_of::<f32>(), registered != 0, times, mailbox);
    }
}

/// Zeroed private memory that begins with a page, and whose pages exist.
fn private() -> &'static mut [f32] {
    let layout = Layout::from_size_align(BUFFER, 4096).expect("the layout is valid");
    // SAFETY: the layout has a size. The memory is zeroed, which is a value of f32, aligned, and
    // never freed.
    unsafe {
        let start = std::alloc::alloc(layout);
        assert!(!start.is_null());
        start.write_bytes(0, BUFFER);
        std::slice::from_raw_parts_mut(start.cast(), BUFFER / size_of::<f32>())
    }
}

struct ThroughRust {
    comm: Communicator,
    private: [&'static mut [f32]; 2],
    registered: [Registered<f32>; 2],
}

impl ThroughRust {
    fn connect() -> ThroughRust {
        let comm = Communicator::from_env().expect("the ranks find each other");
        let alloc = || comm.alloc(BUFFER / size_of::<f32>()).expect("the ranks allocate registered buffers");
        let registered = [alloc(), alloc()];
        ThroughRust { comm, private: [private(), private()], registered }
    }
}

impl Rank for ThroughRust {
    fn run(&mut self, kind: Kind, elements: usize, registered: bool, times: u64, mailbox: *mut Mailbox) {
        let comm = &self.comm;
        let (rank, block) = (comm.rank(), elements / comm.world_size());
        let [a, b] = &mut self.private;
        let [c, d] = &mut self.registered;
        let (a, b): (&mut [f32], &mut [f32]) = if registered { (c, d) } else { (a, b) };
        stop(mailbox, Stop::Begin);
        for _ in 0..times {
            let result = match kind {
                Kind::Barrier => comm.barrier(),
                Kind::AllReduce => comm.all_reduce(&mut a[..elements], ReduceOp::Sum),
                Kind::Reduce => comm.reduce(&mut a[..elements], ReduceOp::Sum, 0),
                Kind::Broadcast => comm.broadcast(&mut a[..elements], 0),
                Kind::AllGather => comm.all_gather(&a[..block], &mut b[..elements]),
                Kind::ReduceScatter => comm.reduce_scatter(&a[..elements], &mut b[..block], ReduceOp::Sum),
                Kind::AllToAll => comm.all_to_all(&a[..elements], &mut b[..elements]),
                Kind::Message if rank == 0 => comm.send(&a[..elements], 1),
                Kind::Message if rank == 1 => comm.recv(&mut a[..elements], 0),
                Kind::Message => Ok(()),
            };
            result.expect("the operation succeeds");
        }
        stop(mailbox, Stop::End);
    }

    fn buffers(&self) -> [u64; 2] {
        [&self.private[0], &self.private[1]].map(|buffer| buffer.as_ptr().addr() as u64)
    }
}

const KOLO_FLOAT32: i32 = 7;
const KOLO_SUM: i32 = 0;

type Pointer = *mut c_void;

/// The functions of `libkolo.so` that are used here, as `kolo.h` declares them.
struct Functions {
    barrier: unsafe extern "C" fn(Pointer, Pointer) -> i32,
    all_reduce: unsafe extern "C" fn(Pointer, Pointer, usize, i32, i32, Pointer, Pointer) -> i32,
    reduce: unsafe extern "C" fn(Pointer, Pointer, usize, i32, i32, i32, Pointer, Pointer) -> i32,
    broadcast: unsafe extern "C" fn(Pointer, Pointer, usize, i32, i32, Pointer, Pointer) -> i32,
    all_gather: unsafe extern "C" fn(Pointer, Pointer, usize, i32, Pointer, Pointer) -> i32,
    reduce_scatter: unsafe extern "C" fn(Pointer, Pointer, usize, i32, i32, Pointer, Pointer) -> i32,
    all_to_all: unsafe extern "C" fn(Pointer, Pointer, usize, i32, Pointer, Pointer) -> i32,
    send: unsafe extern "C" fn(Pointer, usize, i32, i32, Pointer, Pointer) -> i32,
    recv: unsafe extern "C" fn(Pointer, usize, i32, i32, Pointer, Pointer) -> i32,
}

struct ThroughC {
    functions: Functions,
    comm: Pointer,
    rank: i32,
    ranks: usize,
    private: [&'static mut [f32]; 2],
    registered: [Pointer; 2],
}

/// Loads the library and returns the address of a function of it.
fn symbol(library: Pointer, name: &CStr) -> Pointer {
    // SAFETY: the library is loaded, and the name ends with a zero.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!address.is_null(), "libkolo.so has no {name:?}");
    address
}

impl ThroughC {
    fn connect() -> ThroughC {
        let path = std::env::var(crate::job::LIBRARY).expect("the tracer names the library");
        let path = CString::new(path).expect("a path has no zeros");
        // SAFETY: the path ends with a zero. What the library does as it is loaded is its own
        // matter.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null(), "{path:?} cannot be loaded");
        let find = |name| symbol(library, name);
        // SAFETY: `kolo.h` declares the functions with these arguments and results.
        #[expect(clippy::missing_transmute_annotations, reason = "the fields say what each function is")]
        unsafe {
            use std::mem::transmute;
            let functions = Functions {
                barrier: transmute::<Pointer, _>(find(c"kolo_barrier")),
                all_reduce: transmute::<Pointer, _>(find(c"kolo_all_reduce")),
                reduce: transmute::<Pointer, _>(find(c"kolo_reduce")),
                broadcast: transmute::<Pointer, _>(find(c"kolo_broadcast")),
                all_gather: transmute::<Pointer, _>(find(c"kolo_all_gather")),
                reduce_scatter: transmute::<Pointer, _>(find(c"kolo_reduce_scatter")),
                all_to_all: transmute::<Pointer, _>(find(c"kolo_all_to_all")),
                send: transmute::<Pointer, _>(find(c"kolo_send")),
                recv: transmute::<Pointer, _>(find(c"kolo_recv")),
            };
            let init: unsafe extern "C" fn(*mut Pointer, *const c_char) -> c_int = transmute(find(c"kolo_comm_init_env"));
            let number: unsafe extern "C" fn(Pointer, *mut i32) -> c_int = transmute(find(c"kolo_comm_rank"));
            let count: unsafe extern "C" fn(Pointer, *mut i32) -> c_int = transmute(find(c"kolo_comm_count"));
            let alloc: unsafe extern "C" fn(*mut Pointer, usize, Pointer) -> c_int = transmute(find(c"kolo_mem_alloc"));
            let (mut comm, mut rank, mut ranks) = (std::ptr::null_mut(), 0, 0);
            assert_eq!(init(&mut comm, std::ptr::null()), 0, "the ranks find each other");
            assert_eq!((number(comm, &mut rank), count(comm, &mut ranks)), (0, 0));
            let mut registered = [std::ptr::null_mut(); 2];
            for buffer in &mut registered {
                assert_eq!(alloc(buffer, BUFFER, comm), 0, "the ranks allocate registered buffers");
            }
            ThroughC { functions, comm, rank, ranks: ranks as usize, private: [private(), private()], registered }
        }
    }
}

impl Rank for ThroughC {
    fn run(&mut self, kind: Kind, elements: usize, registered: bool, times: u64, mailbox: *mut Mailbox) {
        let (f, comm, none, block) = (&self.functions, self.comm, std::ptr::null_mut(), elements / self.ranks);
        let [private_a, private_b] = &mut self.private;
        let private = [private_a.as_mut_ptr().cast(), private_b.as_mut_ptr().cast()];
        let [a, b] = if registered { self.registered } else { private };
        stop(mailbox, Stop::Begin);
        for _ in 0..times {
            // SAFETY: both buffers have room for the elements, and are used by nothing else.
            let result = unsafe {
                match kind {
                    Kind::Barrier => (f.barrier)(comm, none),
                    Kind::AllReduce => (f.all_reduce)(a, a, elements, KOLO_FLOAT32, KOLO_SUM, comm, none),
                    Kind::Reduce => (f.reduce)(a, a, elements, KOLO_FLOAT32, KOLO_SUM, 0, comm, none),
                    Kind::Broadcast => (f.broadcast)(a, a, elements, KOLO_FLOAT32, 0, comm, none),
                    Kind::AllGather => (f.all_gather)(a, b, block, KOLO_FLOAT32, comm, none),
                    Kind::ReduceScatter => (f.reduce_scatter)(a, b, block, KOLO_FLOAT32, KOLO_SUM, comm, none),
                    Kind::AllToAll => (f.all_to_all)(a, b, block, KOLO_FLOAT32, comm, none),
                    Kind::Message if self.rank == 0 => (f.send)(a, elements, KOLO_FLOAT32, 1, comm, none),
                    Kind::Message if self.rank == 1 => (f.recv)(a, elements, KOLO_FLOAT32, 0, comm, none),
                    Kind::Message => 0,
                }
            };
            assert_eq!(result, 0, "the operation succeeds");
        }
        stop(mailbox, Stop::End);
    }

    fn buffers(&self) -> [u64; 2] {
        [&self.private[0], &self.private[1]].map(|buffer| buffer.as_ptr().addr() as u64)
    }
}
