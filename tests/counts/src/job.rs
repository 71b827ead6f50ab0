//! The ranks of a job: one is counted, and its peers are ahead of it.

use std::io::{Error, Result};
use std::ops::Range;
use std::path::Path;
use std::process::Command;

use crate::cases::{Api, Case, First, Mode};
use crate::counter::{self, Counter, Counts, Next, Rough};
use crate::rank::{Mailbox, Stop};
use crate::traced::{Registers, Stopped, Traced};

/// The variable with the path of the C library.
pub(crate) const LIBRARY: &str = "KOLO_COUNTS_LIBRARY";

/// The argument with which this program is a rank.
pub(crate) const RANK: &str = "--rank";

/// Operations before the first one that is counted: buffers are mapped, and choices are made.
const WARM_UP: u64 = 20;

/// The longest memory that is flags and no data, in bytes.
const LONGEST_FLAG_MEMORY: u64 = 256 << 10;

/// How often all peers run on at most, before they are as far as they can come.
const ROUNDS: usize = 1000;

/// A rank that is traced, and what the tracer knows of it.
struct Rank {
    traced: Traced,
    /// The address of its mailbox.
    mailbox: u64,
    /// Whether it is stopped at the begin of a system call.
    in_system_call: bool,
    has_ended: bool,
}

pub(crate) struct Job {
    ranks: Vec<Rank>,
    /// The memory that the counted rank shares with its peers.
    shared: Vec<Range<u64>>,
    /// Of what the ranks have run last.
    last: Option<Case>,
}

impl Job {
    /// Starts ranks that find each other in a folder.
    pub(crate) fn start(api: Api, ranks: usize, mode: Mode, folder: &Path, library: &Path) -> Result<Job> {
        let store = folder.join(format!("{api}-{ranks}-{mode}"));
        let start = |rank: usize| {
            let mut command = Command::new(std::env::current_exe()?);
            for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("KOLO_")) {
                command.env_remove(name);
            }
            command.args([RANK, &api.to_string()]);
            command.envs([("KOLO_RANK", rank.to_string()), ("KOLO_WORLD_SIZE", ranks.to_string())]);
            command.env("KOLO_STORE", format!("file://{}", store.display()));
            command.env("KOLO_COPY_MODE", mode.to_string());
            command.env("KOLO_START_TIMEOUT", "120").env(LIBRARY, library);
            Ok(Rank { traced: Traced::start(command)?, mailbox: 0, in_system_call: false, has_ended: false })
        };
        let mut job = Job { ranks: (0..ranks).map(start).collect::<Result<_>>()?, shared: Vec::new(), last: None };
        job.all_run_to(Stop::Ready)?;
        for rank in &mut job.ranks {
            rank.mailbox = rank.traced.registers()?.rdi;
        }
        Ok(job)
    }

    /// Lets all ranks run to a stop, side by side.
    fn all_run_to(&mut self, stop: Stop) -> Result<()> {
        self.ranks.iter_mut().try_for_each(|rank| rank.traced.go())?;
        for rank in &mut self.ranks {
            rank.traced.wait_for_trap()?;
            is_at(stop, &rank.traced.registers()?)?;
        }
        Ok(())
    }

    /// Has all ranks prepare an operation.
    fn prepare(&mut self, case: Case, times: u64) -> Result<()> {
        for rank in &mut self.ranks {
            let registered = u64::from(case.is_registered());
            rank.traced.write(rank.mailbox, &[case.kind.number(), case.bytes as u64, times, registered])?;
        }
        self.all_run_to(Stop::Begin)
    }

    /// Runs an operation until what it costs does not change any more.
    pub(crate) fn warm_up(&mut self, case: Case) -> Result<()> {
        if self.last.is_some_and(|last| last.is_same_call(&case)) {
            return Ok(());
        }
        self.prepare(case, WARM_UP)?;
        self.all_run_to(Stop::End)?;
        self.all_run_to(Stop::Ready)?;
        self.last = Some(case);
        Ok(())
    }

    /// Runs an operation once and counts what it costs one rank.
    pub(crate) fn count(&mut self, case: Case) -> Result<(Counts, Rough)> {
        self.prepare(case, 1)?;
        for rank in &mut self.ranks {
            (rank.in_system_call, rank.has_ended) = (false, false);
        }
        // SAFETY: any bytes are a mailbox.
        let mailbox: Mailbox = unsafe { self.ranks[case.rank].traced.read_value(self.ranks[case.rank].mailbox)? };
        self.shared = self.ranks[case.rank].traced.shared_memory()?;
        let mut counter = Counter::new(&mailbox, self.shared.clone());
        let shared_processor = self.ranks[case.rank].traced.share_processor()?;
        let mut stored = Some(u64::MAX);
        if case.first == First::This {
            stored = None;
        }
        loop {
            let registers = self.ranks[case.rank].traced.registers()?;
            match counter.next(&self.ranks[case.rank].traced, &registers)? {
                Next::End => break,
                // The peers see what this rank has stored, and answer before it looks.
                Next::LoadsFlag if stored.is_some_and(|stored| stored != counter.stored()) => {
                    stored = Some(counter.stored());
                    self.run_peers(case.rank)?;
                }
                Next::Waits => {
                    counter.waited();
                    self.run_peers(case.rank)?;
                }
                Next::LoadsFlag | Next::Other => {}
            }
            counter.step(&mut self.ranks[case.rank].traced, &registers)?;
        }
        drop(shared_processor);
        self.ranks[case.rank].has_ended = true;
        let rank = &mut self.ranks[case.rank].traced;
        rank.go()?;
        rank.wait_for_trap()?;
        is_at(Stop::End, &rank.registers()?)?;
        while self.ranks.iter().any(|rank| !rank.has_ended) {
            self.run_peers(case.rank)?;
        }
        self.all_run_to(Stop::Ready)?;
        Ok(counter.finish(&self.ranks[case.rank].traced))
    }

    /// Lets the peers of a rank run until each has ended the operation or waits, and none of them
    /// changes a flag any more.
    fn run_peers(&mut self, counted: usize) -> Result<()> {
        let mut before = self.flags(counted)?;
        for _ in 0..ROUNDS {
            for rank in (0..self.ranks.len()).filter(|&rank| rank != counted) {
                self.ranks[rank].run_until_it_waits()?;
            }
            let now = self.flags(counted)?;
            if now == before {
                return Ok(());
            }
            before = now;
        }
        Err(Error::other("the peers do not come to a stop"))
    }

    /// The flags that all ranks share, and whether they have ended.
    fn flags(&self, counted: usize) -> Result<(Vec<Vec<u8>>, Vec<bool>)> {
        let mut all = Vec::new();
        for range in self.shared.iter().filter(|range| range.end - range.start <= LONGEST_FLAG_MEMORY) {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            self.ranks[counted].traced.read(range.start, &mut bytes)?;
            all.push(bytes);
        }
        Ok((all, self.ranks.iter().map(|rank| rank.has_ended).collect()))
    }
}

impl Rank {
    /// Lets this rank run until it has ended the operation, or yields or would sleep.
    fn run_until_it_waits(&mut self) -> Result<()> {
        while !self.has_ended {
            if self.traced.run_to_system_call()? == Stopped::Trap {
                is_at(Stop::End, &self.traced.registers()?)?;
                self.has_ended = true;
                return Ok(());
            }
            self.in_system_call = !self.in_system_call;
            let mut registers = self.traced.registers()?;
            registers.rax = registers.orig_rax;
            if !self.in_system_call || !counter::waits(&registers) {
                continue;
            }
            if counter::is_futex_wait(&registers) {
                self.leave_out_sleep(registers)?;
            }
            return Ok(());
        }
        Ok(())
    }

    /// Leaves out the system call of a sleep that the rank has announced, and lets it take the
    /// announcement back: a peer would wake it by a system call. The rank waits for the same as
    /// before.
    fn leave_out_sleep(&mut self, mut registers: Registers) -> Result<()> {
        registers.orig_rax = u64::MAX;
        self.traced.set_registers(&registers)?;
        self.traced.run_to_system_call()?;
        self.in_system_call = false;
        let mut registers = self.traced.registers()?;
        registers.rax = -i64::from(libc::EAGAIN) as u64;
        self.traced.set_registers(&registers)?;
        counter::run_past_locked(&mut self.traced)
    }
}

fn is_at(stop: Stop, registers: &Registers) -> Result<()> {
    match registers.rsi == stop as u64 {
        true => Ok(()),
        false => Err(Error::other(format!("a rank stopped at {:#x} in place of {stop:?}", registers.rip))),
    }
}
