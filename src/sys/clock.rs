//! A clock that costs as little as possible to read: the processor's counter, where it runs at one
//! rate in all cores. Ticks are converted to time later, from two readings of the counter beside
//! the system's clock.

use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

/// Returns the processor's counter; without a counter, nanoseconds.
#[inline]
pub(crate) fn ticks() -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if *IS_INVARIANT {
        // SAFETY: every x86-64 processor has the instruction, and every system that kolo runs on
        // lets programs use it.
        return unsafe { std::arch::x86_64::_rdtsc() };
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    {
        let ticks: u64;
        // SAFETY: every program may read the virtual counter, which by definition runs at one rate.
        unsafe { std::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack, preserves_flags)) };
        return ticks;
    }
    #[cfg_attr(all(target_arch = "aarch64", not(miri)), expect(unreachable_code, reason = "this architecture has a counter"))]
    {
        monotonic().as_nanos() as u64
    }
}

/// Whether the counter runs at one rate in all states of the processor ("invariant TSC").
#[cfg(all(target_arch = "x86_64", not(miri)))]
static IS_INVARIANT: LazyLock<bool> = LazyLock::new(|| {
    const LEAF: u32 = 0x8000_0007;
    // SAFETY: every x86-64 processor has the instruction.
    #[allow(unused_unsafe, reason = "the function is unsafe before Rust 1.94")]
    let cpuid = |leaf| unsafe { std::arch::x86_64::__cpuid(leaf) };
    cpuid(0x8000_0000).eax >= LEAF && cpuid(LEAF).edx & 1 << 8 != 0
});

/// Returns a time that steps of the wall clock do not change. On Unix, the processes of a machine
/// share it; see [`clock_identity`].
pub(crate) fn monotonic() -> Duration {
    #[cfg(all(unix, not(miri)))]
    {
        // From libc, because rustix reads the vDSO directly, and crashes where valgrind has hidden
        // it.
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call writes to `now`. Every Unix has this clock, so it cannot fail.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    }
    #[cfg(any(not(unix), miri))]
    {
        static BEGAN: LazyLock<(std::time::Instant, Duration)> = LazyLock::new(|| (std::time::Instant::now(), wall()));
        BEGAN.1 + BEGAN.0.elapsed()
    }
}

/// Returns the time since 1970, by the machine's clock.
pub(crate) fn wall() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Returns a text that is equal for processes with the same monotonic clock; `None` if unknown.
pub(crate) fn clock_identity() -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    // A container may have a clock of its own.
    let namespace = std::fs::read_link("/proc/self/ns/time").map(|path| path.display().to_string()).unwrap_or_default();
    Some(format!("{} {namespace}", boot.trim()).trim_end().to_owned())
}

/// The counter beside the clock.
#[derive(Clone, Copy)]
struct Reading {
    ticks: u64,
    time: Duration,
}

impl Reading {
    fn now() -> Reading {
        // The thread may lose its processor between the counter and the clock. The quickest of
        // several readings is the best.
        let once = || {
            let before = monotonic();
            let reading = Reading { ticks: ticks(), time: monotonic() };
            (reading.time.saturating_sub(before), reading)
        };
        let (_, quickest) =
            std::iter::repeat_with(once).take(5).min_by_key(|(took, _)| *took).expect("five readings have a minimum");
        quickest
    }
}

static FIRST: LazyLock<Reading> = LazyLock::new(Reading::now);

/// Converts ticks up to now into times.
pub(crate) struct Timeline {
    last: Reading,
}

impl Timeline {
    /// Takes the first reading. To be called before the first ticks that will be converted.
    pub(crate) fn begin() {
        LazyLock::force(&FIRST);
    }

    /// Takes the last reading.
    pub(crate) fn up_to_now() -> Timeline {
        let first = *FIRST;
        let mut last = Reading::now();
        // Two readings that are closer than this do not reveal the rate of the counter.
        while last.time.saturating_sub(first.time) < Duration::from_micros(100) {
            last = Reading::now();
        }
        Timeline { last }
    }

    /// Returns the time that this many ticks take.
    pub(crate) fn span(&self, ticks: u64) -> Duration {
        let first = FIRST.ticks;
        self.time(first.saturating_add(ticks)).saturating_sub(FIRST.time)
    }

    /// Returns when the counter had this value, by [`monotonic`].
    pub(crate) fn time(&self, ticks: u64) -> Duration {
        let first = *FIRST;
        let (elapsed, counted) = ((self.last.time - first.time).as_nanos(), self.last.ticks.saturating_sub(first.ticks).max(1));
        let since = u128::from(ticks.saturating_sub(first.ticks));
        first.time + Duration::from_nanos((since * elapsed / u128::from(counted)) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_become_the_time_at_which_they_were_read() {
        Timeline::begin();
        let mut noted = Vec::new();
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(1));
            let before = monotonic();
            noted.push((before, ticks(), monotonic()));
        }
        let timeline = Timeline::up_to_now();
        for (before, ticks, after) in noted {
            let time = timeline.time(ticks);
            // A thread may lose its processor between any two readings, but rarely between the
            // first or the last two.
            let slack = Duration::from_millis(20);
            assert!(before <= time + slack && time <= after + slack, "{before:?} {time:?} {after:?}");
        }
    }
}
