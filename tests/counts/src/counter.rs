//! Counts what the instructions of a rank do, one by one.

use std::collections::{BTreeSet, HashMap};
use std::io::{Error, Result};
use std::ops::Range;
use std::rc::Rc;

use iced_x86::{Decoder, DecoderOptions, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register, UsedMemory};

use crate::rank::{BUFFER, FUNCTIONS, Mailbox};
use crate::traced::{Registers, Traced};

/// Bytes of a cache line.
const LINE: u64 = 64;

/// Calls of `memcpy` and the like of more bytes are not executed step by step.
const LONG: u64 = 256;

/// What an operation costs on one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// The numbers of the system calls, in their order.
    pub(crate) system_calls: Vec<u64>,
    /// Locked instructions and full fences.
    pub(crate) locked: u64,
    /// Readings of the clock.
    pub(crate) clock: u64,
    /// Cache lines of memory that ranks share.
    pub(crate) loaded_lines: usize,
    pub(crate) stored_lines: usize,
    /// Bytes of that memory, of private buffers, and of what the system copies.
    pub(crate) loaded: u64,
    pub(crate) stored: u64,
}

/// What differs with the compiler and the processor. Not in the table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rough {
    pub(crate) instructions: u64,
    /// Bytes loaded and stored anywhere else, such as on the stack.
    pub(crate) elsewhere: u64,
    /// Whether this rank has waited for a peer.
    pub(crate) waited: bool,
    /// Where the locked instructions are.
    pub(crate) locked_at: Vec<String>,
}

/// An instruction, decoded once.
struct Decoded {
    instruction: Instruction,
    memory: Vec<UsedMemory>,
    is_locked: bool,
}

/// What the instruction that comes next is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// The rank has ended the operation.
    End,
    /// It waits for a peer: it pauses, yields, or would sleep.
    Waits,
    /// It loads at most a word of shared memory, which may be a flag.
    LoadsFlag,
    Other,
}

/// A function of the C library that is being executed step by step, and counts as one step.
struct Inside {
    /// The stack pointer after its return.
    stack: u64,
}

pub(crate) struct Counter {
    decoded: HashMap<u64, Rc<Decoded>>,
    factory: InstructionInfoFactory,
    functions: [u64; FUNCTIONS.len()],
    shared: Vec<Range<u64>>,
    /// Private buffers, and memory to which `process_vm_readv` copies.
    private: Vec<Range<u64>>,
    inside: Option<Inside>,
    loaded_lines: BTreeSet<u64>,
    stored_lines: BTreeSet<u64>,
    locked_at: Vec<u64>,
    counts: Counts,
    rough: Rough,
}

impl Counter {
    /// Begins to count what the rank does next.
    pub(crate) fn new(mailbox: &Mailbox, shared: Vec<Range<u64>>) -> Counter {
        Counter {
            decoded: HashMap::new(),
            factory: InstructionInfoFactory::new(),
            functions: mailbox.functions,
            shared,
            private: mailbox.buffers.map(|start| start..start + BUFFER as u64).to_vec(),
            inside: None,
            loaded_lines: BTreeSet::new(),
            stored_lines: BTreeSet::new(),
            locked_at: Vec::new(),
            counts: Counts::default(),
            rough: Rough::default(),
        }
    }

    /// What the rank has done.
    pub(crate) fn finish(mut self, rank: &Traced) -> (Counts, Rough) {
        self.rough.locked_at = self.locked_at.iter().map(|&at| rank.place(at)).collect();
        self.counts.loaded_lines = self.loaded_lines.len();
        self.counts.stored_lines = self.stored_lines.len();
        (self.counts, self.rough)
    }

    /// Notes that the rank has waited for a peer.
    pub(crate) fn waited(&mut self) {
        self.rough.waited = true;
    }

    fn decode(&mut self, rank: &Traced, address: u64) -> Result<Rc<Decoded>> {
        if let Some(decoded) = self.decoded.get(&address) {
            return Ok(decoded.clone());
        }
        let decoded = Rc::new(decode(&mut self.factory, rank, address)?);
        self.decoded.insert(address, decoded.clone());
        Ok(decoded)
    }

    /// Classifies the rank's next instruction.
    pub(crate) fn next(&mut self, rank: &Traced, registers: &Registers) -> Result<Next> {
        let decoded = self.decode(rank, registers.rip)?;
        Ok(match decoded.instruction.mnemonic() {
            Mnemonic::Int3 => Next::End,
            Mnemonic::Pause => Next::Waits,
            Mnemonic::Syscall if waits(registers) => Next::Waits,
            _ if self.inside.is_some() => Next::Other,
            _ => {
                let is_flag = |memory: &UsedMemory| memory.memory_size().size() <= 8 && is_read(memory.access());
                let is_shared = |memory: &UsedMemory| contains(&self.shared, address(memory, 0, registers));
                match decoded.memory.iter().any(|memory| is_flag(memory) && is_shared(memory)) {
                    true => Next::LoadsFlag,
                    false => Next::Other,
                }
            }
        })
    }

    /// How many bytes have been stored.
    pub(crate) fn stored(&self) -> u64 {
        self.counts.stored
    }

    /// Counts the next instruction of the rank, and executes it: together with others if it repeats
    /// or calls a function that is counted as a whole.
    pub(crate) fn step(&mut self, rank: &mut Traced, registers: &Registers) -> Result<()> {
        if self.inside.as_ref().is_some_and(|inside| registers.rsp >= inside.stack) {
            self.inside = None;
        }
        let decoded = self.decode(rank, registers.rip)?;
        self.rough.instructions += 1;
        if self.inside.is_some() {
            return self.execute(rank, registers, &decoded.instruction);
        }
        if let Some(function) = self.functions.iter().position(|&function| function == registers.rip) {
            return self.call(rank, registers, function);
        }
        if decoded.is_locked {
            self.counts.locked += 1;
            self.locked_at.push(registers.rip);
        }
        let times = if decoded.instruction.has_rep_prefix() { registers.rcx } else { 1 };
        for memory in &decoded.memory {
            self.touch(memory, times, registers);
        }
        match decoded.instruction.mnemonic() {
            Mnemonic::Rdtsc | Mnemonic::Rdtscp => self.counts.clock += 1,
            Mnemonic::Syscall => self.system_call(rank, registers)?,
            _ => {}
        }
        self.execute(rank, registers, &decoded.instruction)
    }

    /// Executes an instruction, and all its repetitions.
    fn execute(&self, rank: &mut Traced, registers: &Registers, instruction: &Instruction) -> Result<()> {
        if instruction.has_rep_prefix() && instruction.is_string_instruction() && registers.rcx > 1 {
            let ends = |registers: Registers| registers.rip != instruction.ip();
            if self.inside.is_none() {
                return rank.run_to(instruction.next_ip());
            }
            while !ends(rank.registers()?) {
                rank.step()?;
            }
            return Ok(());
        }
        rank.step()
    }

    /// Counts a call of a function of the C library.
    fn call(&mut self, rank: &mut Traced, registers: &Registers, function: usize) -> Result<()> {
        let (to, from, bytes) = (registers.rdi, registers.rsi, registers.rdx);
        let mut long = 0;
        match FUNCTIONS[function].to_bytes() {
            b"memcpy" | b"memmove" => {
                self.load(from, bytes);
                self.store(to, bytes);
                long = bytes;
            }
            b"memset" => {
                self.store(to, bytes);
                long = bytes;
            }
            b"memcmp" | b"bcmp" => {
                self.load(to, bytes);
                self.load(from, bytes);
            }
            _ => self.counts.clock += 1,
        }
        // SAFETY: any bytes are a number.
        let back: u64 = unsafe { rank.read_value(registers.rsp)? };
        if long > LONG {
            return rank.run_to(back);
        }
        // Other threads of the process may be there, and must not run into a breakpoint.
        self.inside = Some(Inside { stack: registers.rsp + 8 });
        rank.step()
    }

    fn touch(&mut self, memory: &UsedMemory, times: u64, registers: &Registers) {
        let size = memory.memory_size().size() as u64;
        let backwards = registers.eflags & 1 << 10 != 0;
        assert!(!(backwards && times > 1), "copies run forwards");
        let at = address(memory, 0, registers);
        if is_read(memory.access()) {
            self.load(at, times * size);
        }
        if is_write(memory.access()) {
            self.store(at, times * size);
        }
    }

    fn load(&mut self, at: u64, bytes: u64) {
        if contains(&self.shared, at) {
            self.loaded_lines.extend(lines(at, bytes));
        } else if !contains(&self.private, at) {
            self.rough.elsewhere += bytes;
            return;
        }
        self.counts.loaded += bytes;
    }

    fn store(&mut self, at: u64, bytes: u64) {
        if contains(&self.shared, at) {
            self.stored_lines.extend(lines(at, bytes));
        } else if !contains(&self.private, at) {
            self.rough.elsewhere += bytes;
            return;
        }
        self.counts.stored += bytes;
    }

    /// Counts a system call, and the bytes that it copies from another process.
    fn system_call(&mut self, rank: &Traced, registers: &Registers) -> Result<()> {
        self.counts.system_calls.push(registers.rax);
        if registers.rax != libc::SYS_process_vm_readv as u64 {
            return Ok(());
        }
        for at in (registers.rsi..).step_by(size_of::<[u64; 2]>()).take(registers.rdx as usize) {
            // SAFETY: any bytes are numbers.
            let [to, bytes]: [u64; 2] = unsafe { rank.read_value(at)? };
            // Not a word on the stack.
            if bytes > LINE && !contains(&self.private, to) && !contains(&self.shared, to) {
                self.private.push(to..to + bytes);
            }
            self.counts.loaded += bytes;
            self.store(to, bytes);
        }
        Ok(())
    }
}

/// Executes the instructions of a process up to the next locked one, and that.
pub(crate) fn run_past_locked(process: &mut Traced) -> Result<()> {
    let mut factory = InstructionInfoFactory::new();
    loop {
        let address = process.registers()?.rip;
        let decoded = decode(&mut factory, process, address)?;
        process.step()?;
        if decoded.is_locked {
            return Ok(());
        }
    }
}

fn decode(factory: &mut InstructionInfoFactory, process: &Traced, address: u64) -> Result<Decoded> {
    let mut bytes = [0; 16];
    let read = process.read(address, &mut bytes)?;
    let instruction = Decoder::with_ip(64, &bytes[..read], address, DecoderOptions::NONE).decode();
    if instruction.is_invalid() {
        return Err(Error::other(format!("the instruction at {address:#x} is unknown: {bytes:02x?}")));
    }
    let memory = factory.info(&instruction).used_memory().to_vec();
    let exchanges = instruction.mnemonic() == Mnemonic::Xchg && (0..2).any(|i| instruction.op_kind(i) == OpKind::Memory);
    let is_locked = instruction.has_lock_prefix() || exchanges || instruction.mnemonic() == Mnemonic::Mfence;
    Ok(Decoded { instruction, memory, is_locked })
}

/// Whether a system call waits for another rank, or for time to pass.
pub(crate) fn waits(registers: &Registers) -> bool {
    match registers.rax as i64 {
        libc::SYS_futex => is_futex_wait(registers),
        libc::SYS_sched_yield | libc::SYS_nanosleep | libc::SYS_clock_nanosleep => true,
        libc::SYS_poll | libc::SYS_ppoll | libc::SYS_epoll_wait | libc::SYS_epoll_pwait => true,
        _ => false,
    }
}

pub(crate) fn is_futex_wait(registers: &Registers) -> bool {
    let command = registers.rsi as i32 & libc::FUTEX_CMD_MASK;
    matches!(command, libc::FUTEX_WAIT | libc::FUTEX_WAIT_BITSET)
}

fn lines(at: u64, bytes: u64) -> Range<u64> {
    if bytes == 0 { 0..0 } else { at / LINE..(at + bytes - 1) / LINE + 1 }
}

fn contains(ranges: &[Range<u64>], address: u64) -> bool {
    ranges.iter().any(|range| range.contains(&address))
}

fn is_read(access: OpAccess) -> bool {
    matches!(access, OpAccess::Read | OpAccess::CondRead | OpAccess::ReadWrite | OpAccess::ReadCondWrite)
}

fn is_write(access: OpAccess) -> bool {
    matches!(access, OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite)
}

/// The address at which an instruction accesses memory.
fn address(memory: &UsedMemory, element: usize, registers: &Registers) -> u64 {
    memory
        .virtual_address(element, |register, _, _| Some(value(register, registers)))
        .expect("an instruction of kolo has one address")
}

fn value(register: Register, registers: &Registers) -> u64 {
    let whole = match register.full_register() {
        Register::RAX => registers.rax,
        Register::RBX => registers.rbx,
        Register::RCX => registers.rcx,
        Register::RDX => registers.rdx,
        Register::RSI => registers.rsi,
        Register::RDI => registers.rdi,
        Register::RBP => registers.rbp,
        Register::RSP => registers.rsp,
        Register::R8 => registers.r8,
        Register::R9 => registers.r9,
        Register::R10 => registers.r10,
        Register::R11 => registers.r11,
        Register::R12 => registers.r12,
        Register::R13 => registers.r13,
        Register::R14 => registers.r14,
        Register::R15 => registers.r15,
        Register::RIP => registers.rip,
        Register::FS => return registers.fs_base,
        Register::GS => return registers.gs_base,
        _ => return 0,
    };
    match register.size() {
        8 => whole,
        4 => whole & u64::from(u32::MAX),
        _ => whole & 0xffff,
    }
}
