//! Sleeping on a word of memory.
//!
//! Windows wakes threads by an address within a process only. In a section, a thread that is about
//! to sleep takes a slot of the section's table and writes there on which word it sleeps. It looks
//! at the word once more, and waits for the event of its slot. A waker, which has written the word,
//! looks through the table and sets the events of the slots that name the word. All four accesses
//! are sequentially consistent, so the sleeper sees the new word or the waker sees the sleeper.
//!
//! The processes open the event of a slot by a name, which contains the random number of the
//! section.

use std::collections::BTreeMap;
use std::io;
use std::os::windows::io::{AsRawHandle, OwnedHandle};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::RwLock;
use windows_sys::Win32::System::Threading::{CreateEventW, SetEvent, WaitForSingleObject, WaitOnAddress, WakeByAddressAll};

use super::handle::{in_session, own};
use super::security;
use super::view::View;

/// How many threads can sleep in a section at once. A process that is killed while it sleeps keeps
/// its slot.
const SLOTS: usize = 511;

/// Bytes of the table.
pub(super) const TABLE: usize = size_of::<Table>();

/// The table of a section. It starts as zeros.
#[repr(C)]
struct Table {
    /// The number of slots that were ever taken.
    taken: AtomicU64,
    /// 0 for a free slot; otherwise the position of the word in the section's memory, plus 1.
    slots: [AtomicU64; SLOTS],
}

/// How long a thread sleeps if all slots are taken.
const WITHOUT_SLOT: Duration = Duration::from_millis(1);

/// The sleepers of one section, seen from this process.
pub(super) struct Sleepers {
    table: Arc<View>,
    id: [u8; 16],
    /// The events that this process has opened, by slot.
    events: Box<[OnceLock<OwnedHandle>]>,
}

/// Where this process has mapped a section: the end of the mapping, its position in the section's
/// memory, and the sleepers of the section.
type Mapped = (usize, usize, Arc<Sleepers>);

/// The mappings of this process by their addresses.
static MAPPED: RwLock<BTreeMap<usize, Mapped>> = RwLock::new(BTreeMap::new());

impl Sleepers {
    /// `table` is the beginning of the section, and `id` the section's number.
    pub(super) fn new(table: Arc<View>, id: [u8; 16]) -> Sleepers {
        Sleepers { table, id, events: std::iter::repeat_with(OnceLock::new).take(SLOTS).collect() }
    }

    pub(super) fn id(&self) -> [u8; 16] {
        self.id
    }

    /// Notes that this process has mapped memory of the section, which is at `start` in it.
    pub(super) fn add(self: &Arc<Sleepers>, base: NonNull<u8>, len: usize, start: usize) {
        let base = base.addr().get();
        MAPPED.write().insert(base, (base + len, start, self.clone()));
    }

    /// Notes that memory will be unmapped.
    pub(super) fn remove(&self, base: NonNull<u8>) {
        MAPPED.write().remove(&base.addr().get());
    }

    /// Returns the sleepers of the section in which a word lies, and its position there, plus 1.
    fn of(word: &AtomicU32) -> Option<(Arc<Sleepers>, u64)> {
        let at = (&raw const *word).addr();
        let mapped = MAPPED.read();
        let (base, (end, start, sleepers)) = mapped.range(..=at).next_back()?;
        (at < *end).then(|| (sleepers.clone(), (start + at - base) as u64 + 1))
    }

    /// Takes all slots, as processes that were killed in their sleep.
    #[cfg(test)]
    pub(super) fn fill(&self) {
        self.table().slots.iter().for_each(|slot| slot.store(u64::MAX, Ordering::SeqCst));
        self.table().taken.store(u64::MAX, Ordering::SeqCst);
    }

    fn table(&self) -> &Table {
        // SAFETY: the view has a table's bytes, which start as zeros, a valid table, and are
        // accessed through atomics only.
        unsafe { self.table.base().cast::<Table>().as_ref() }
    }

    /// Returns the event of a slot. It stays set until one sleeper has been woken.
    fn event(&self, slot: usize) -> io::Result<&OwnedHandle> {
        if let Some(event) = self.events[slot].get() {
            return Ok(event);
        }
        let id = u128::from_le_bytes(self.id);
        let name = in_session(&format!("kolo-{id:032x}-{slot}"));
        let event = security::with_owner_only(|attributes| {
            // SAFETY: the attributes and the name live until the call returns, which has just made
            // the handle.
            unsafe { own(CreateEventW(attributes, 0, 0, name.as_ptr())) }
        })?;
        Ok(self.events[slot].get_or_init(|| event))
    }

    fn sleep(&self, word: &AtomicU32, position: u64, value: u32, timeout: Duration) {
        let table = self.table();
        let is_taken = |slot: &AtomicU64| slot.compare_exchange(0, position, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        let Some(slot) = table.slots.iter().position(is_taken) else {
            return std::thread::sleep(timeout.min(WITHOUT_SLOT));
        };
        table.taken.fetch_max(slot as u64 + 1, Ordering::SeqCst);
        match self.event(slot) {
            Ok(event) if word.load(Ordering::SeqCst) == value => {
                // SAFETY: the handle is open.
                unsafe { WaitForSingleObject(event.as_raw_handle(), milliseconds(timeout)) };
            }
            Ok(_) => {}
            Err(error) => {
                crate::log::warn!(%error, "cannot sleep on an event");
                std::thread::sleep(timeout.min(WITHOUT_SLOT));
            }
        }
        table.slots[slot].store(0, Ordering::Release);
    }

    fn wake(&self, position: u64) {
        let table = self.table();
        // The number may be too large: a peer writes it.
        let taken = usize::try_from(table.taken.load(Ordering::SeqCst)).unwrap_or(SLOTS).min(SLOTS);
        for (slot, _) in table.slots[..taken].iter().enumerate().filter(|(_, slot)| slot.load(Ordering::SeqCst) == position) {
            let set = self.event(slot).and_then(|event| {
                // SAFETY: the handle is open.
                if unsafe { SetEvent(event.as_raw_handle()) } == 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
            });
            if let Err(error) = set {
                crate::log::warn!(%error, "cannot wake a sleeper");
            }
        }
    }
}

/// Sleeps until [`wake_all`] is called on `word`, at most for `timeout`. Returns at once if the
/// word does not hold `value`, and may return early. The word may be shared between processes.
pub(crate) fn sleep_on(word: &AtomicU32, value: u32, timeout: Duration) {
    match Sleepers::of(word) {
        Some((sleepers, position)) => sleepers.sleep(word, position, value, timeout),
        // SAFETY: both addresses are those of four bytes, and the system only reads there.
        None => _ = unsafe { WaitOnAddress(word.as_ptr().cast(), (&raw const value).cast(), 4, milliseconds(timeout)) },
    }
}

/// Wakes all threads that sleep on `word`.
pub(crate) fn wake_all(word: &AtomicU32) {
    match Sleepers::of(word) {
        Some((sleepers, position)) => sleepers.wake(position),
        // SAFETY: the system uses the address as a number.
        None => unsafe { WakeByAddressAll(word.as_ptr().cast()) },
    }
}

/// Returns a timeout as the system takes it, rounded up.
fn milliseconds(timeout: Duration) -> u32 {
    const DAY: u128 = 24 * 60 * 60 * 1000;
    timeout.as_nanos().div_ceil(1_000_000).min(DAY) as u32
}
