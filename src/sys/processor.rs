//! On which processor a thread runs, and how it moves to another one.

/// Returns the number of the processor on which this thread runs, where threads can be moved.
pub(crate) fn processor() -> Option<u32> {
    #[cfg(all(target_os = "linux", not(miri)))]
    {
        // SAFETY: it takes nothing, and only tells a number. rustix's asks the vDSO without libc,
        // which ends a process under Valgrind: that maps no vDSO.
        u32::try_from(unsafe { libc::sched_getcpu() }).ok()
    }
    #[cfg(not(all(target_os = "linux", not(miri))))]
    None
}

/// Moves this thread to a processor of the lowest weight among those that it may use, unless that
/// weight is above `most`. Afterwards the thread may use the same processors as before, or those
/// that another thread has chosen for it meanwhile. Returns whether it was moved.
pub(crate) fn move_thread(most: usize, weight: impl Fn(u32) -> usize) -> bool {
    #[cfg(all(target_os = "linux", not(miri)))]
    return linux::move_thread(most, weight).unwrap_or(false);
    #[cfg(not(all(target_os = "linux", not(miri))))]
    {
        let _ = (most, weight);
        false
    }
}

#[cfg(all(target_os = "linux", not(miri)))]
mod linux {
    use rustix::io::Result;
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    pub(super) fn move_thread(most: usize, weight: impl Fn(u32) -> usize) -> Result<bool> {
        let mut before = sched_getaffinity(None)?;
        let Some(lightest) = lightest(&before, most, weight) else { return Ok(false) };
        if has_no_choice_of_its_own(&before)? {
            before = all();
        }
        // The kernel moves the thread before this returns.
        sched_setaffinity(None, &lightest)?;
        // Another thread may have chosen other processors for this one meanwhile: then these stay.
        if sched_getaffinity(None)? == lightest {
            sched_setaffinity(None, &before)?;
        }
        Ok(true)
    }

    /// Whether this thread may use all processors of its cpuset. It then follows the cpuset when
    /// that grows, which a choice of the same processors would end.
    fn has_no_choice_of_its_own(allowed: &CpuSet) -> Result<bool> {
        sched_setaffinity(None, &all())?;
        let is_all = sched_getaffinity(None)? == *allowed;
        if !is_all {
            sched_setaffinity(None, allowed)?;
        }
        Ok(is_all)
    }

    fn all() -> CpuSet {
        let mut all = CpuSet::new();
        (0..CpuSet::MAX_CPU).for_each(|processor| all.set(processor));
        all
    }

    fn lightest(among: &CpuSet, most: usize, weight: impl Fn(u32) -> usize) -> Option<CpuSet> {
        let weights = || processors(among).map(|processor| (weight(processor), processor));
        let (least, _) = weights().min()?;
        let mut lightest = CpuSet::new();
        weights().filter(|&(weight, _)| weight == least).for_each(|(_, processor)| lightest.set(processor as usize));
        (least <= most).then_some(lightest)
    }

    fn processors(set: &CpuSet) -> impl Iterator<Item = u32> {
        (0..CpuSet::MAX_CPU).filter(|&processor| set.is_set(processor)).map(|processor| processor as u32)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn allowed() -> Vec<u32> {
            processors(&sched_getaffinity(None).unwrap()).collect()
        }

        #[test]
        fn a_thread_moves_and_may_use_the_same_processors_as_before() {
            let before = allowed();
            for &to in &before {
                let mut moved_to = None;
                // The scheduler may move the thread again before it is asked where it is.
                while moved_to != Some(to) {
                    assert!(move_thread(0, |processor| usize::from(processor != to)).unwrap());
                    moved_to = crate::sys::processor();
                }
                assert_eq!(allowed(), before);
            }
            assert!(!move_thread(0, |_| 1).unwrap());
            assert_eq!(allowed(), before);
        }

        #[test]
        fn a_choice_of_the_program_stays() {
            let before = allowed();
            let mut one = CpuSet::new();
            one.set(before[0] as usize);
            sched_setaffinity(None, &one).unwrap();
            assert!(move_thread(0, |_| 0).unwrap());
            assert_eq!(allowed(), [before[0]]);
        }

        #[test]
        fn the_lightest_processors_are_chosen_if_they_are_light_enough() {
            let mut set = CpuSet::new();
            [0, 1, 3].into_iter().for_each(|processor| set.set(processor));
            let chosen = |most, weights: [usize; 4]| {
                lightest(&set, most, |processor| weights[processor as usize]).map(|set| processors(&set).collect::<Vec<_>>())
            };
            assert_eq!(chosen(0, [2, 0, 0, 0]), Some(vec![1, 3]));
            assert_eq!(chosen(0, [2, 1, 0, 0]), Some(vec![3]));
            assert_eq!(chosen(0, [2, 1, 0, 1]), None);
            assert_eq!(chosen(1, [3, 1, 0, 1]), Some(vec![1, 3]));
            assert_eq!(lightest(&CpuSet::new(), 9, |_| 0), None);
        }
    }
}
