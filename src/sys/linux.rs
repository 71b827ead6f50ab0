//! Linux: memfd, futex, descriptors over abstract Unix sockets, pidfd.

use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use mio::{Interest, Registry, Token};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};
use rustix::process::{Pid, PidfdFlags, Resource, getrlimit, pidfd_open};
use rustix::thread::futex;

/// A memfd, mapped whole.
pub(super) struct Mapping {
    /// `None` once nothing is to be reserved or handed over any more. The lock is held for a moment only: to reserve memory may
    /// take long, and meanwhile the listener hands the descriptor over.
    file: Mutex<Option<Arc<OwnedFd>>>,
    base: NonNull<u8>,
    len: usize,
    /// The process that mapped it. A child that was forked has this value, too, and shares the memory; to give it back is the
    /// parent's.
    owner: u32,
}

impl Mapping {
    pub(super) fn create(len: usize) -> io::Result<Mapping> {
        check_memory(len)?;
        check_file_size(len)?;
        let file = memfd_create("kolo", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len as u64)?;
        // No process can shrink it while others use it. It may grow: see `extend`.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL)?;
        Mapping::map(Arc::new(file), 0..len)
    }

    fn map(file: Arc<OwnedFd>, range: Range<usize>) -> io::Result<Mapping> {
        let (access, len) = (ProtFlags::READ | ProtFlags::WRITE, range.len());
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
        let base = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, range.start as u64)? };
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Mapping { file: Mutex::new(Some(file)), base, len, owner: std::process::id() })
    }

    /// Makes a range of the file that lies behind this mapping, and maps it. Several processes may do so at the same time.
    pub(super) fn extend(&self, range: Range<usize>, deadline: Instant) -> io::Result<Mapping> {
        check_memory(range.len())?;
        check_file_size(range.end)?;
        let file = self.file()?;
        reserve_in_pieces(range.clone(), deadline, |piece| {
            // Makes the file larger if it ends before the piece does, and never smaller.
            fallocate(&file, FallocateFlags::empty(), piece.start as u64, piece.len() as u64)
        })?;
        Mapping::map_extension(file, range)
    }

    /// Maps a range of the file that lies behind this mapping; `NotFound` if the file ends before it does.
    pub(super) fn extension(&self, range: Range<usize>) -> io::Result<Mapping> {
        let file = self.file()?;
        // What lies behind the end of a file kills the process that touches it. A file that no process can shrink keeps its end.
        if u64::try_from(fstat(&file)?.st_size).is_ok_and(|size| range.end as u64 > size) {
            return Err(io::ErrorKind::NotFound.into());
        }
        Mapping::map_extension(file, range)
    }

    fn map_extension(file: Arc<OwnedFd>, range: Range<usize>) -> io::Result<Mapping> {
        let mapping = Mapping::map(file, range)?;
        // Offsets are those of the file only in the first mapping, and the descriptor is open there.
        mapping.close();
        Ok(mapping)
    }

    #[cfg(test)]
    pub(super) fn again(&self) -> io::Result<Mapping> {
        Mapping::map(Arc::new(self.file()?.try_clone()?), 0..self.len)
    }

    fn file(&self) -> io::Result<Arc<OwnedFd>> {
        Ok(self.file.lock().clone().ok_or(Errno::BADF)?)
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(super) fn reserve(&self, range: Range<usize>, deadline: Instant) -> io::Result<()> {
        check_memory(range.len())?;
        let file = self.file()?;
        reserve_in_pieces(range, deadline, |piece| {
            fallocate(&file, FallocateFlags::KEEP_SIZE, piece.start as u64, piece.len() as u64)
        })
    }

    pub(super) fn close(&self) {
        *self.file.lock() = None;
    }

    pub(super) fn release(&self, range: Range<usize>) {
        assert!(range.end <= self.len);
        if !self.is_own() {
            return;
        }
        // SAFETY: within this mapping. What is there reads as zeros afterwards, which the caller asks for.
        let released = unsafe { madvise(self.base.as_ptr().add(range.start).cast(), range.len(), Advice::LinuxRemove) };
        if let Err(error) = released {
            tracing::debug!(%error, "memory could not be given back early");
        }
    }

    fn is_own(&self) -> bool {
        self.owner == std::process::id()
    }

    pub(super) fn make_private(&self, pages: Range<usize>) -> io::Result<()> {
        let file = self.file()?;
        let at = self.base.as_ptr().wrapping_add(pages.start);
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: whole pages of this mapping. The new mapping takes their place at once (a thread that touches them meanwhile
        // waits), shows the same bytes of the same file, and is unmapped with the rest.
        unsafe { mmap(at.cast(), pages.len(), access, flags, &file, pages.start as u64)? };
        // A page stays the file's until it is written; then the system copies it, and no write of another thread is lost. (Mapped a
        // second time it would lose what was written since.)
        // SAFETY: populating changes no byte.
        match rustix::io::retry_on_intr(|| unsafe { madvise(at.cast(), pages.len(), Advice::LinuxPopulateWrite) }) {
            Err(Errno::INVAL) => write_every_page(at, pages.len()),
            populated => populated?,
        }
        Ok(())
    }

    pub(super) fn hand_over(&self, to: &LocalStream) -> io::Result<()> {
        let file = self.file()?;
        let files = [file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&files));
        sendmsg(&to.0, &[IoSlice::new(b"m")], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    pub(super) fn take_over(from: &LocalStream, len: usize, deadline: Instant) -> io::Result<Mapping> {
        from.until(deadline).wait(PollFlags::IN)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let received = rustix::io::retry_on_intr(|| {
            recvmsg(&from.0, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let file = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        let file =
            file.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the rank that makes it for its host has none"))?;
        // Whoever made it must not be able to shrink it: touching what is gone would kill this process.
        let is_sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if fstat(&file)?.st_size != len as i64 || !is_sealed {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Mapping::map(Arc::new(file), 0..len)
    }
}

/// Asked for more memory than there is, the system may kill processes rather than refuse.
fn check_memory(bytes: usize) -> io::Result<()> {
    if available_memory().is_some_and(|available| bytes as u64 > available) { Err(Errno::NOMEM.into()) } else { Ok(()) }
}

/// A process that makes a file larger than allowed gets SIGXFSZ, which ends it.
pub(super) fn check_file_size(bytes: usize) -> io::Result<()> {
    let limit = getrlimit(Resource::Fsize).current;
    if limit.is_some_and(|limit| bytes as u64 > limit) { Err(Errno::FBIG.into()) } else { Ok(()) }
}

/// The most that is reserved by one call, after which the deadline is looked at.
const MOST_RESERVED: usize = 16 << 20;

/// Reserves a range piece by piece, until the deadline. Before Linux 6.10 a signal undoes the call that it interrupts: with a timer
/// that is quicker than a piece, none would ever be reserved. So pieces get smaller when calls are interrupted.
fn reserve_in_pieces(
    range: Range<usize>,
    deadline: Instant,
    mut reserve: impl FnMut(Range<usize>) -> rustix::io::Result<()>,
) -> io::Result<()> {
    let (mut at, mut most) = (range.start, MOST_RESERVED);
    while at < range.end {
        let piece = at..range.end.min(at + most);
        match reserve(piece.clone()) {
            Ok(()) => (at, most) = (piece.end, MOST_RESERVED.min(2 * most)),
            Err(Errno::INTR) => most = page_size().max(most / 2),
            Err(error) => return Err(error.into()),
        }
        if at < range.end && Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

/// Writes to every page what is there, for kernels before 5.14, which cannot be asked to do so.
fn write_every_page(at: *mut u8, len: usize) {
    for offset in (0..len).step_by(page_size()) {
        // SAFETY: within a mapping of the caller's, which other threads may be using: the exchange changes no byte and loses none
        // of their writes.
        let byte = unsafe { AtomicU8::from_ptr(at.add(offset)) };
        let mut seen = byte.load(Ordering::Relaxed);
        while let Err(other) = byte.compare_exchange(seen, seen, Ordering::Relaxed, Ordering::Relaxed) {
            seen = other;
        }
    }
}

/// Bytes of one of the system's pages.
pub(super) fn page_size() -> usize {
    // SAFETY: a question with a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).expect("every system has pages")
}

/// Bytes that could be allocated now, as far as the system and the limits of this process's control group say.
pub(crate) fn available_memory() -> Option<u64> {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let of_system = kibibytes.map_or(u64::MAX, |kibibytes| kibibytes << 10);
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"));
    // Limits of the groups above count as well; these are the ones that containers have.
    let of_group = group.into_iter().flat_map(|group| [group, ""]).filter_map(|group| {
        let folder = format!("/sys/fs/cgroup{group}");
        Some(number(&format!("{folder}/memory.max"))?.saturating_sub(number(&format!("{folder}/memory.current"))?))
    });
    Some(of_group.fold(of_system, u64::min)).filter(|&bytes| bytes < u64::MAX)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // A child that shares its parent's address space, as one of vfork does, would unmap the parent's.
        if !self.is_own() {
            return;
        }
        // SAFETY: mapped in `map` with this length; whoever holds an address into it also holds the segment.
        if let Err(error) = unsafe { munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::debug!(%error, "munmap");
        }
    }
}

/// Sleeps until somebody calls [`wake_all`] on `word`, which must still hold `value`; at most for `timeout`. May return
/// early. The word may be shared between processes: a PRIVATE futex would miss their wakes.
pub(crate) fn sleep_on(word: &AtomicU32, value: u32, timeout: Duration) {
    let timeout = Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
    match futex::wait(word, futex::Flags::empty(), value, Some(&timeout)) {
        Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => {}
        Err(error) => tracing::warn!(%error, "futex"),
    }
}

/// Wakes everybody who sleeps on `word`.
pub(crate) fn wake_all(word: &AtomicU32) {
    if let Err(error) = futex::wake(word, futex::Flags::empty(), i32::MAX as u32) {
        tracing::warn!(%error, "futex");
    }
}

/// A connection inside the host. Reads and writes do not block; those of [`LocalStream::until`] do.
pub(crate) struct LocalStream(mio::net::UnixStream);

impl LocalStream {
    pub(crate) fn connect(name: &str, deadline: Instant) -> io::Result<LocalStream> {
        /// How long before it is tried again to join a queue that is full.
        const AGAIN: Duration = Duration::from_millis(1);
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        // One that blocks would do so for as long as the queue before the listener is full, which strangers can see to.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        loop {
            match rustix::net::connect(&socket, &address) {
                Ok(()) => return Ok(LocalStream(mio::net::UnixStream::from_std(UnixStream::from(socket)))),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(AGAIN),
                Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Whether the other end is a process of this one's user: the one that called, or the one that listens.
    pub(crate) fn is_of_this_user(&self) -> bool {
        rustix::net::sockopt::socket_peercred(&self.0).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
    }

    /// For I/O that waits, until the deadline.
    pub(crate) fn until(&self, deadline: Instant) -> LocalUntil<'_> {
        LocalUntil { stream: self, deadline }
    }
}

impl io::Read for &LocalStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&self.0).read(into)
    }
}

impl io::Write for &LocalStream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(&self.0, from, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl mio::event::Source for LocalStream {
    fn register(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        self.0.register(registry, token, interests)
    }

    fn reregister(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        self.0.reregister(registry, token, interests)
    }

    fn deregister(&mut self, registry: &Registry) -> io::Result<()> {
        self.0.deregister(registry)
    }
}

/// A [`LocalStream`] whose reads and writes wait.
pub(crate) struct LocalUntil<'a> {
    stream: &'a LocalStream,
    deadline: Instant,
}

impl LocalUntil<'_> {
    fn wait(&self, flags: PollFlags) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        match rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(&self.stream.0, flags)], Some(&timeout)))? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }
}

impl io::Read for LocalUntil<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.wait(PollFlags::IN)?;
        (&mut &*self.stream).read(into)
    }
}

impl io::Write for LocalUntil<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.wait(PollFlags::OUT)?;
        (&mut &*self.stream).write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Takes connections from processes of this host, under a name that is not in the file system: nothing is left behind.
pub(crate) struct LocalListener(mio::net::UnixListener);

impl LocalListener {
    pub(crate) fn bind(name: &str) -> io::Result<LocalListener> {
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
        listener.set_nonblocking(true)?;
        Ok(LocalListener(mio::net::UnixListener::from_std(listener)))
    }

    /// The next connection; `WouldBlock` if there is none.
    pub(crate) fn accept(&self) -> io::Result<LocalStream> {
        self.0.accept().map(|(stream, _)| LocalStream(stream))
    }

    pub(crate) fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        registry.register(&mut self.0, token, Interest::READABLE)
    }
}

/// Notices the end of another process.
pub(crate) struct ProcessWatch(OwnedFd);

impl ProcessWatch {
    /// `None` if there is no such process any more.
    pub(crate) fn open(pid: u32) -> io::Result<Option<ProcessWatch>> {
        let pid = Pid::from_raw(pid as i32).ok_or(io::ErrorKind::InvalidInput)?;
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(file) => Ok(Some(ProcessWatch(file))),
            Err(Errno::SRCH) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&now)), Ok(count) if count > 0)
    }
}

/// Whether a process that this one sees is stopped, by a signal or a debugger.
pub(crate) fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name, in parentheses, may hold anything.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    let is_ours = || fs::read_link(format!("/proc/{pid}/ns/pid")).ok() == fs::read_link("/proc/self/ns/pid").ok();
    matches!(state, Some('T' | 't')) && is_ours()
}

/// Copies memory of another process of this machine, which may change meanwhile. `address` is that process's: the system looks
/// there, nobody follows it here.
///
/// # Safety
///
/// `to` is writable for `len` bytes, and nobody else touches it meanwhile.
pub(crate) unsafe fn read_process(pid: u32, address: u64, to: *mut u8, len: usize) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let local = libc::iovec { iov_base: to.wrapping_add(done).cast(), iov_len: len - done };
        let remote = libc::iovec { iov_base: (address as usize).wrapping_add(done) as *mut _, iov_len: len - done };
        // SAFETY: one vector each; the caller vouches for `to`, and the system checks the other's address.
        match unsafe { libc::process_vm_readv(pid as i32, &local, 1, &remote, 1, 0) } {
            count @ 1.. => done += count as usize,
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            _ => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}

/// The name of this machine, for people.
pub(crate) fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Equal for processes that may be able to share memory: same running kernel, same network namespace (in which abstract
/// sockets live). Whether they can is found out by doing it.
pub(crate) fn boot_identity() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let network = fs::read_link("/proc/self/ns/net").ok()?;
    Some(format!("{} {}", boot.trim(), network.display()))
}

/// Equal for processes that see each other under the same process numbers.
pub(crate) fn process_namespace() -> Option<u64> {
    Some(fstat(fs::File::open("/proc/self/ns/pid").ok()?).ok()?.st_ino)
}

/// Who listens on a TCP port of this machine, if that can be seen.
pub(crate) fn port_holder(port: u16) -> Option<String> {
    const LISTEN: &str = "0A";
    let inode = ["/proc/net/tcp", "/proc/net/tcp6"].iter().find_map(|table| {
        let table = fs::read_to_string(table).ok()?;
        table.lines().skip(1).find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let local = fields.get(1)?.rsplit(':').next()?;
            let is_it = u16::from_str_radix(local, 16) == Ok(port) && fields.get(3) == Some(&LISTEN);
            is_it.then(|| fields.get(9).map(|inode| format!("socket:[{inode}]"))).flatten()
        })
    })?;
    fs::read_dir("/proc").ok()?.flatten().find_map(|process| {
        let pid: u32 = process.file_name().to_str()?.parse().ok()?;
        let holds = fs::read_dir(process.path().join("fd"))
            .ok()?
            .flatten()
            .any(|file| fs::read_link(file.path()).is_ok_and(|target| target.as_os_str() == inode.as_str()));
        let name = holds.then(|| fs::read_to_string(process.path().join("comm")).ok()).flatten()?;
        Some(format!("process {pid} ({})", name.trim()))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64};

    use super::*;

    /// Two mappings of the same memory, as two processes have them.
    fn twice(len: usize) -> [Mapping; 2] {
        let one = Mapping::create(len).unwrap();
        let other = one.again().unwrap();
        [one, other]
    }

    fn read(mapping: &Mapping, at: usize) -> u8 {
        assert!(at < mapping.len);
        // SAFETY: within the mapping, which no other thread knows.
        unsafe { mapping.base.as_ptr().add(at).read_volatile() }
    }

    fn write(mapping: &Mapping, at: usize, value: u8) {
        assert!(at < mapping.len);
        // SAFETY: as above.
        unsafe { mapping.base.as_ptr().add(at).write_volatile(value) }
    }

    /// Whoever calls at a listener whose queue is full gives up in time.
    #[test]
    fn a_full_queue_keeps_nobody_waiting_for_long() {
        let name = format!("kolo-queue-{}", std::process::id());
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let mut waiting = Vec::new();
        let error = loop {
            match LocalStream::connect(&name, Instant::now() + Duration::from_millis(50)) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
            assert!(waiting.len() < 100, "the queue is never full");
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let nobody = LocalStream::connect(&format!("{name}-other"), Instant::now() + Duration::from_secs(60));
        assert_eq!(nobody.err().unwrap().kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn a_process_finds_an_extension_whose_maker_has_gone() {
        let page = page_size();
        let soon = || Instant::now() + Duration::from_secs(60);
        let [one, other] = twice(page);
        let [near, far] = [page..2 * page, 3 * page..4 * page];
        assert_eq!(other.extension(far.clone()).err().map(|error| error.kind()), Some(io::ErrorKind::NotFound));
        let made = one.extend(far.clone(), soon()).unwrap();
        write(&made, 7, 1);
        drop((one, made));
        let found = other.extension(far.clone()).unwrap();
        assert_eq!(read(&found, 7), 1);
        // A range before it takes nothing away.
        let before = other.extend(near, soon()).unwrap();
        write(&before, 7, 2);
        assert_eq!((read(&found, 7), read(&other.extension(far).unwrap(), 7)), (1, 1));
    }

    #[test]
    fn private_memory_keeps_its_content_and_others_do_not_reach_it() {
        let page = page_size();
        let [mine, theirs] = twice(3 * page);
        (0..3).for_each(|n| write(&theirs, n * page, 1));
        mine.make_private(page..2 * page).unwrap();
        assert_eq!([0, 1, 2].map(|n| read(&mine, n * page)), [1; 3]);
        (0..3).for_each(|n| write(&theirs, n * page, 2));
        assert_eq!([0, 1, 2].map(|n| read(&mine, n * page)), [2, 1, 2]);
        write(&mine, page, 3);
        assert_eq!(read(&theirs, page), 2);
    }

    #[test]
    fn writing_every_page_copies_it_where_populating_cannot() {
        let page = page_size();
        let [mine, theirs] = twice(2 * page);
        write(&theirs, page, 7);
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: as in `make_private`.
        unsafe { mmap(mine.base.as_ptr().cast(), 2 * page, access, flags, mine.file().unwrap(), 0).unwrap() };
        write_every_page(mine.base.as_ptr(), 2 * page);
        (0..2).for_each(|n| write(&theirs, n * page, 9));
        assert_eq!([0, 1].map(|n| read(&mine, n * page)), [0, 7]);
    }

    /// A thread loses no write, and sees no other value than its own.
    #[test]
    fn other_threads_use_memory_while_it_is_made_private() {
        let page = page_size();
        let len = 512 * page;
        let [mine, _theirs] = twice(len);
        // SAFETY: within the mapping, which outlives the scope; only the bystander uses what it holds.
        let memory = unsafe { std::slice::from_raw_parts(mine.base.as_ptr().cast::<AtomicU64>(), len / 8) };
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let bystander = scope.spawn(|| {
                let (mut wrong, mut rounds) = (0, 0);
                while !is_over.load(Ordering::Relaxed) || rounds < 2 {
                    rounds += 1;
                    memory.iter().for_each(|word| word.store(rounds, Ordering::Relaxed));
                    wrong += memory.iter().filter(|word| word.load(Ordering::Relaxed) != rounds).count();
                }
                wrong
            });
            (0..len).step_by(page).for_each(|at| mine.make_private(at..at + page).unwrap());
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(bystander.join().unwrap(), 0);
        });
    }

    /// As before Linux 6.10: a call that a signal interrupts has reserved nothing.
    #[test]
    fn reserving_goes_on_when_signals_interrupt_and_ends_at_the_deadline() {
        let (page, late) = (page_size(), Instant::now() + Duration::from_secs(600));
        let range = 3 * page..MOST_RESERVED * 5 / 2 + 7;
        for longest in [page, 10 * page, usize::MAX] {
            let mut end = range.start;
            let reserved = reserve_in_pieces(range.clone(), late, |piece| {
                assert!(piece.start == end && piece.len() <= MOST_RESERVED);
                if piece.len() > longest {
                    return Err(Errno::INTR);
                }
                end = piece.end;
                Ok(())
            });
            assert!(reserved.is_ok() && end == range.end, "{reserved:?}, {end}");
        }
        let mut calls = 0;
        let mut now = |outcome: rustix::io::Result<()>| {
            reserve_in_pieces(range.clone(), Instant::now(), |_| {
                calls += 1;
                outcome
            })
        };
        assert_eq!(now(Err(Errno::INTR)).unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(now(Ok(())).unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(now(Err(Errno::NOSPC)).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(calls, 3);
    }

    /// The listener's thread hands memory over. Were it to wait for the reservation, the rank would answer no peer meanwhile.
    #[test]
    fn memory_is_handed_over_while_it_is_reserved() {
        const LEN: usize = 256 << 20;
        let name = format!("kolo-test-{}-handed-over", std::process::id());
        let listener = LocalListener::bind(&name).unwrap();
        let deadline = Instant::now() + Duration::from_secs(600);
        let caller = LocalStream::connect(&name, deadline).unwrap();
        let stream = listener.accept().unwrap();
        struct Shared(Mapping);
        // SAFETY: what the test calls touches no memory, and `Segment` shares mappings in the same way.
        unsafe impl Sync for Shared {}
        let shared = Shared(Mapping::create(LEN).unwrap());
        let (shared, mapping) = (&shared, &shared.0);
        let reserved = || fstat(mapping.file().unwrap()).unwrap().st_blocks as usize * 512;
        // On a busy machine, this thread may not run before the memory is reserved.
        let was_done_meanwhile = (0..50).any(|_| {
            mapping.release(0..LEN);
            let seen = std::thread::scope(|scope| {
                scope.spawn(move || {
                    let Shared(mapping) = shared;
                    mapping.reserve(0..LEN, deadline).unwrap();
                });
                while reserved() == 0 {}
                mapping.hand_over(&stream).unwrap();
                reserved()
            });
            Mapping::take_over(&caller, LEN, deadline).unwrap();
            seen < LEN
        });
        assert!(was_done_meanwhile, "it is handed over when all of it has been reserved");
    }

    /// The warning of a rank to which no memory came says so, and not that it is wrong.
    #[test]
    fn memory_that_its_maker_does_not_have_is_told_from_wrong_memory() {
        use std::io::Write as _;
        let name = format!("kolo-test-{}-none-to-hand-over", std::process::id());
        let listener = LocalListener::bind(&name).unwrap();
        let deadline = Instant::now() + Duration::from_secs(600);
        let caller = LocalStream::connect(&name, deadline).unwrap();
        listener.accept().unwrap().until(deadline).write_all(b"n").unwrap();
        let error = Mapping::take_over(&caller, 4096, deadline).err().expect("no memory came");
        assert_eq!(error.to_string(), "the rank that makes it for its host has none");
    }

    /// A copy of the value in another process, as a fork makes one, neither empties the memory nor unmaps it.
    #[test]
    fn only_the_process_that_mapped_memory_gives_it_back() {
        let page = page_size();
        let [mine, theirs] = twice(page);
        write(&mine, 0, 5);
        let mut of_a_child = mine.again().unwrap();
        of_a_child.owner += 1;
        let at = of_a_child.base;
        of_a_child.release(0..page);
        drop(of_a_child);
        assert_eq!(read(&theirs, 0), 5);
        // SAFETY: it is still mapped, which is what is tested, and is unmapped once.
        unsafe {
            assert_eq!(at.as_ptr().read_volatile(), 5);
            munmap(at.as_ptr().cast(), page).unwrap();
        }
        mine.release(0..page);
        assert_eq!(read(&theirs, 0), 0);
    }

    #[test]
    fn more_than_there_is_is_refused() {
        assert!(available_memory().unwrap() > 1 << 20);
        let error = Mapping::create(1 << 50).err().expect("nobody has a pebibyte");
        assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
        let page = page_size();
        assert!(twice(page)[0].reserve(0..page, Instant::now()).is_ok());
    }
}
