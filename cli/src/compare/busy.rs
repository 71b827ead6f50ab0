//! How busy other programs keep the machine during a comparison.

use std::time::Instant;

/// The processor time since the start of the machine, in ticks of the system.
struct Ticks {
    /// Of all processors.
    all: u64,
    /// While programs ran, or the hypervisor let this machine wait.
    used: u64,
    /// Of the processes that this one has started and that have ended.
    own: u64,
}

impl Ticks {
    /// Reads the counters of Linux.
    fn now() -> Option<Ticks> {
        let stat = std::fs::read_to_string("/proc/stat").ok()?;
        let numbers = |text: &str| text.split_whitespace().map_while(|word| word.parse().ok()).collect::<Vec<u64>>();
        let cpu = numbers(stat.lines().next()?.strip_prefix("cpu ")?);
        let [user, nice, system, _idle, _wait, _interrupts, _softly, steal] = *cpu.first_chunk()?;
        let own = std::fs::read_to_string("/proc/self/stat").ok()?;
        // After the name of the program, which may contain anything.
        let words: Vec<&str> = own.rsplit_once(')')?.1.split_whitespace().collect();
        let ended = |at: usize| words.get(at)?.parse::<u64>().ok();
        let guests = 8..cpu.len();
        let all = cpu.iter().sum::<u64>() - cpu[guests].iter().sum::<u64>();
        Some(Ticks { all, used: user + nice + system + steal, own: ended(13)? + ended(14)? })
    }
}

/// Measures from its start on.
pub(super) struct Busy {
    began: Instant,
    from: Option<Ticks>,
}

impl Busy {
    pub(super) fn start() -> Busy {
        Busy { began: Instant::now(), from: Ticks::now() }
    }

    /// Returns how many processors other programs have used since the start, if the system says so.
    /// All processes that this one has started have ended.
    pub(super) fn processors(&self) -> Option<f64> {
        let (from, to) = (self.from.as_ref()?, Ticks::now()?);
        // The counters go on in steps of some milliseconds.
        let all = to.all.checked_sub(from.all).filter(|all| *all >= 20)?;
        let others = to.used.saturating_sub(from.used).saturating_sub(to.own.saturating_sub(from.own));
        let processors = std::fs::read_to_string("/proc/stat").ok()?.lines().filter(|line| is_processor(line)).count();
        (self.began.elapsed().as_millis() >= 100).then(|| others as f64 / all as f64 * processors as f64)
    }
}

fn is_processor(line: &str) -> bool {
    line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|letter: char| letter.is_ascii_digit()))
}
