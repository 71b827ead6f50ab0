//! Jobs in flight, oldest first.

use std::collections::VecDeque;

/// As many ended jobs may keep their slots, whatever is in flight.
const SPARE: usize = 32;

/// Jobs in flight, or what belongs to them. The key of a job is the number of those that began before
/// it.
pub(crate) struct InFlight<T> {
    /// In the order of the keys. `None` once the job has ended; the first slot is never `None`.
    slots: VecDeque<(u64, Option<T>)>,
    len: usize,
    next_key: u64,
}

impl<T> Default for InFlight<T> {
    fn default() -> InFlight<T> {
        InFlight { slots: VecDeque::new(), len: 0, next_key: 0 }
    }
}

impl<T> InFlight<T> {
    /// Returns the key of the job that begins next.
    pub(crate) fn next_key(&self) -> u64 {
        self.next_key
    }

    /// Adds a job that begins, and returns its key.
    pub(crate) fn push(&mut self, job: T) -> u64 {
        let key = self.next_key;
        self.slots.push_back((key, Some(job)));
        self.len += 1;
        self.next_key += 1;
        key
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the slot of a job that has not ended, or has not given it up.
    fn slot_of(&self, key: u64) -> Option<usize> {
        let (first, _) = self.slots.front()?;
        // Where it is if no slot before it was given up.
        let at = usize::try_from(key.checked_sub(*first)?).ok()?;
        match self.slots.get(at) {
            Some((found, _)) if *found == key => Some(at),
            _ => self.slots.binary_search_by_key(&key, |(key, _)| *key).ok(),
        }
    }

    pub(crate) fn get(&self, key: u64) -> Option<&T> {
        self.slots[self.slot_of(key)?].1.as_ref()
    }

    pub(crate) fn get_mut(&mut self, key: u64) -> Option<&mut T> {
        let at = self.slot_of(key)?;
        self.slots[at].1.as_mut()
    }

    /// Removes a job that has ended.
    pub(crate) fn remove(&mut self, key: u64) -> Option<T> {
        let at = self.slot_of(key)?;
        let job = self.slots[at].1.take()?;
        self.len -= 1;
        while let Some((_, None)) = self.slots.front() {
            self.slots.pop_front();
        }
        // One that waits for long must not keep the slots of all that end meanwhile. Each slot is
        // moved at most once for each that is given up.
        if self.slots.len() > 2 * self.len + SPARE {
            self.slots.retain(|(_, job)| job.is_some());
        }
        Some(job)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|(_, job)| job.as_ref())
    }

    /// Takes all jobs, oldest first. Their keys are not given again.
    pub(crate) fn take(&mut self) -> impl Iterator<Item = T> + use<T> {
        self.len = 0;
        std::mem::take(&mut self.slots).into_iter().filter_map(|(_, job)| job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_stay_whatever_ends() {
        let mut all = InFlight::default();
        let keys: Vec<u64> = (0..5).map(|number| all.push(number)).collect();
        assert_eq!((all.remove(keys[1]), all.remove(keys[1])), (Some(1), None));
        assert_eq!(all.remove(keys[0]), Some(0));
        assert_eq!((all.get(keys[1]), all.get(keys[3]).copied(), all.len()), (None, Some(3), 3));
        let sixth = all.push(5);
        *all.get_mut(sixth).unwrap() += 1;
        assert_eq!(all.take().collect::<Vec<_>>(), [2, 3, 4, 6]);
        assert!(all.is_empty() && all.slots.is_empty());
        assert_eq!(all.push(7), 6);
    }

    #[test]
    fn what_ends_beside_a_job_that_waits_keeps_no_slot() {
        let mut all = InFlight::default();
        let waits = all.push(0);
        for number in 1..10_000 {
            let key = all.push(number);
            assert_eq!(all.get(key), Some(&number));
            // Two at a time are in flight beside it.
            let before = key.checked_sub(1).filter(|&before| before > waits).and_then(|before| all.remove(before));
            assert_eq!(before, (number > 1).then(|| number - 1));
            assert!(all.slots.len() <= 2 * all.len() + SPARE, "{number}: {} slots", all.slots.len());
        }
        assert_eq!(all.get(waits), Some(&0));
    }
}
