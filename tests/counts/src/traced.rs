//! A process that this one traces (ptrace): its registers, its memory, and how it runs.

use std::ffi::c_void;
use std::io::{Error, Result};
use std::ops::Range;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

/// The instruction `int3`, which stops a traced process.
const INT3: u8 = 0xcc;

pub(crate) type Registers = libc::user_regs_struct;

/// Why a process stopped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// At an instruction: after a step, or after `int3`.
    Trap,
    /// At the begin or the end of a system call.
    SystemCall,
}

/// A traced process, which is stopped except within the functions that let it run.
#[derive(Debug)]
pub(crate) struct Traced {
    child: Child,
    pid: libc::pid_t,
    /// A signal that it gets when it runs on.
    signal: i32,
}

impl Traced {
    /// Starts a process that is stopped at its first instruction. Permission is denied where the
    /// system does not let one process trace another.
    pub(crate) fn start(mut command: Command) -> Result<Traced> {
        // SAFETY: the function makes one system call.
        unsafe {
            command.pre_exec(|| match libc::ptrace(libc::PTRACE_TRACEME, 0_u64, 0_u64, 0_u64) {
                0 => Ok(()),
                _ => Err(Error::last_os_error()),
            });
        }
        let child = command.spawn()?;
        let pid = child.id() as libc::pid_t;
        let mut traced = Traced { child, pid, signal: 0 };
        traced.wait()?;
        let options = libc::PTRACE_O_EXITKILL | libc::PTRACE_O_TRACESYSGOOD;
        traced.request(libc::PTRACE_SETOPTIONS, options as u64)?;
        Ok(traced)
    }

    fn request(&self, request: libc::c_uint, data: u64) -> Result<i64> {
        // SAFETY: the requests here take a number, or the address of registers that are valid.
        match unsafe { libc::ptrace(request, self.pid, 0_u64, data) } {
            -1 => Err(Error::last_os_error()),
            result => Ok(result),
        }
    }

    pub(crate) fn registers(&self) -> Result<Registers> {
        // SAFETY: zeros are a value of registers.
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        self.request(libc::PTRACE_GETREGS, &raw mut registers as u64)?;
        Ok(registers)
    }

    pub(crate) fn set_registers(&self, registers: &Registers) -> Result<()> {
        self.request(libc::PTRACE_SETREGS, std::ptr::from_ref(registers) as u64).map(drop)
    }

    /// Waits until the process stops. Signals that it would have got are given to it later.
    fn wait(&mut self) -> Result<Stopped> {
        let mut status = 0;
        // SAFETY: the status is valid.
        if unsafe { libc::waitpid(self.pid, &mut status, libc::__WALL) } < 0 {
            return Err(Error::last_os_error());
        }
        if !libc::WIFSTOPPED(status) {
            return Err(Error::other(format!("the rank of process {} has ended; its output says why", self.pid)));
        }
        match libc::WSTOPSIG(status) {
            libc::SIGTRAP => Ok(Stopped::Trap),
            signal if signal == libc::SIGTRAP | 0x80 => Ok(Stopped::SystemCall),
            signal => {
                self.signal = signal;
                Ok(Stopped::Trap)
            }
        }
    }

    /// Lets the process run without waiting for it.
    fn resume(&mut self, request: libc::c_uint) -> Result<()> {
        let signal = std::mem::take(&mut self.signal);
        self.request(request, signal as u64).map(drop)
    }

    /// Lets the process run until it stops, and again if a signal stopped it.
    fn run(&mut self, request: libc::c_uint) -> Result<Stopped> {
        loop {
            self.resume(request)?;
            let stopped = self.wait()?;
            if self.signal == 0 {
                return Ok(stopped);
            }
        }
    }

    /// Executes one instruction.
    pub(crate) fn step(&mut self) -> Result<()> {
        self.run(libc::PTRACE_SINGLESTEP).map(drop)
    }

    /// Lets the process run until the begin or the end of a system call, or `int3`.
    pub(crate) fn run_to_system_call(&mut self) -> Result<Stopped> {
        self.run(libc::PTRACE_SYSCALL)
    }

    /// Lets the process run; [`Traced::wait_for_trap`] waits for it.
    pub(crate) fn go(&mut self) -> Result<()> {
        self.resume(libc::PTRACE_CONT)
    }

    /// Waits until the process executes `int3`.
    pub(crate) fn wait_for_trap(&mut self) -> Result<()> {
        while self.wait()? != Stopped::Trap || self.signal != 0 {
            self.go()?;
        }
        Ok(())
    }

    /// Lets the process run until it reaches an address, which it reaches by the present thread
    /// alone.
    pub(crate) fn run_to(&mut self, address: u64) -> Result<()> {
        let word = self.peek(address)?;
        self.poke(address, word & !0xff | u64::from(INT3))?;
        self.go()?;
        self.wait_for_trap()?;
        self.poke(address, word)?;
        let mut registers = self.registers()?;
        if registers.rip != address + 1 {
            return Err(Error::other(format!("the rank stopped at {:#x} in place of {address:#x}", registers.rip)));
        }
        registers.rip = address;
        self.set_registers(&registers)
    }

    fn peek(&self, address: u64) -> Result<u64> {
        let mut word = [0; 8];
        self.read(address, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    /// Writes a word, also where the process itself may not.
    fn poke(&self, address: u64, word: u64) -> Result<()> {
        // SAFETY: the request writes in the other process.
        match unsafe { libc::ptrace(libc::PTRACE_POKEDATA, self.pid, address, word) } {
            -1 => Err(Error::last_os_error()),
            _ => Ok(()),
        }
    }

    /// Reads memory. Returns how many bytes were there.
    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<usize> {
        let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let remote = libc::iovec { iov_base: address as *mut c_void, iov_len: bytes.len() };
        // SAFETY: the local memory is valid; the remote memory is not of this process.
        match unsafe { libc::process_vm_readv(self.pid, &local, 1, &remote, 1, 0) } {
            -1 => Err(Error::last_os_error()),
            read => Ok(read as usize),
        }
    }

    /// Reads a value that any bytes make.
    ///
    /// # Safety
    ///
    /// Any bytes are a value of `T`.
    pub(crate) unsafe fn read_value<T: Copy>(&self, address: u64) -> Result<T> {
        let mut value = std::mem::MaybeUninit::<T>::zeroed();
        // SAFETY: the bytes are those of the value, and nothing else uses them.
        let bytes = unsafe { std::slice::from_raw_parts_mut(value.as_mut_ptr().cast(), size_of::<T>()) };
        self.read(address, bytes)?;
        // SAFETY: the caller promises that any bytes are a value.
        Ok(unsafe { value.assume_init() })
    }

    /// Moves the process to the processor on which this one is, until the result is dropped. Then a
    /// step costs no message between processors, and takes a twentieth of the time.
    pub(crate) fn share_processor(&self) -> Result<SharedProcessor> {
        let before = [0, self.pid].map(|pid| (pid, affinity(pid)));
        // SAFETY: the function has no conditions. Zeros are a set of processors.
        let own = unsafe {
            let mut own: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(libc::sched_getcpu() as usize, &mut own);
            own
        };
        let shared = SharedProcessor { before: before.map(|(pid, set)| set.map(|set| (pid, set))) };
        [0, self.pid].into_iter().try_for_each(|pid| set_affinity(pid, &own))?;
        Ok(shared)
    }

    /// Says in which file of the process an address lies, and where there, as `addr2line` takes it.
    pub(crate) fn place(&self, address: u64) -> String {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid)).unwrap_or_default();
        let mut first: Option<(&str, u64)> = None;
        for line in maps.lines() {
            let (range, path) = (line.split(' ').next().unwrap_or(""), line.split(' ').next_back().unwrap_or(""));
            let Some((from, to)) = range.split_once('-') else { continue };
            let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16)) else { continue };
            if first.is_none_or(|(file, _)| file != path) {
                first = Some((path, from));
            }
            if let Some((path, base)) = first
                && (from..to).contains(&address)
            {
                return format!("{}+{:#x}", path.rsplit('/').next().unwrap_or(path), address - base);
            }
        }
        format!("{address:#x}")
    }

    /// Writes words.
    pub(crate) fn write(&self, address: u64, words: &[u64]) -> Result<()> {
        (address..).step_by(8).zip(words).try_for_each(|(address, &word)| self.poke(address, word))
    }

    /// The addresses of memory that the process shares with other ranks.
    pub(crate) fn shared_memory(&self) -> Result<Vec<Range<u64>>> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid))?;
        let mut shared = Vec::new();
        let is_shared = |line: &&str| line.contains("memfd:kolo") && line.split(' ').nth(1).unwrap_or("").ends_with('s');
        for line in maps.lines().filter(is_shared) {
            let (from, to) = line.split(' ').next().and_then(|range| range.split_once('-')).expect("each line has a range");
            let number = |text| u64::from_str_radix(text, 16).expect("addresses are hexadecimal");
            shared.push(number(from)..number(to));
        }
        Ok(shared)
    }
}

/// Two threads that run on one processor, with the processors on which they may run later.
pub(crate) struct SharedProcessor {
    before: [Result<(libc::pid_t, libc::cpu_set_t)>; 2],
}

impl Drop for SharedProcessor {
    fn drop(&mut self) {
        for (pid, set) in self.before.iter().flatten() {
            // The process may have ended.
            let _ = set_affinity(*pid, set);
        }
    }
}

/// The processors on which a thread may run; 0 is this thread.
fn affinity(pid: libc::pid_t) -> Result<libc::cpu_set_t> {
    // SAFETY: zeros are a set of processors, and the function writes one.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        match libc::sched_getaffinity(pid, size_of::<libc::cpu_set_t>(), &mut set) {
            0 => Ok(set),
            _ => Err(Error::last_os_error()),
        }
    }
}

fn set_affinity(pid: libc::pid_t, set: &libc::cpu_set_t) -> Result<()> {
    // SAFETY: the set is valid.
    match unsafe { libc::sched_setaffinity(pid, size_of::<libc::cpu_set_t>(), set) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
