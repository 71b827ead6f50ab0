//! What is in progress, in the order of its beginning.

use std::collections::VecDeque;

/// Things in progress. Each has a key: how many have begun before it.
pub(crate) struct InFlight<T> {
    /// The key of the first slot.
    first: usize,
    /// `None` for those that have ended, but those before the first that has not.
    slots: VecDeque<Option<T>>,
    len: usize,
}

impl<T> Default for InFlight<T> {
    fn default() -> InFlight<T> {
        InFlight { first: 0, slots: VecDeque::new(), len: 0 }
    }
}

impl<T> InFlight<T> {
    /// The key of what begins next.
    pub(crate) fn next_key(&self) -> usize {
        self.first + self.slots.len()
    }

    /// Adds what begins now, and returns its key.
    pub(crate) fn push(&mut self, one: T) -> usize {
        let key = self.next_key();
        self.slots.push_back(Some(one));
        self.len += 1;
        key
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn get(&self, key: usize) -> Option<&T> {
        self.slots.get(key.checked_sub(self.first)?)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, key: usize) -> Option<&mut T> {
        self.slots.get_mut(key.checked_sub(self.first)?)?.as_mut()
    }

    /// Removes what has ended.
    pub(crate) fn remove(&mut self, key: usize) -> Option<T> {
        let one = self.slots.get_mut(key.checked_sub(self.first)?)?.take()?;
        self.len -= 1;
        while let Some(None) = self.slots.front() {
            self.slots.pop_front();
            self.first += 1;
        }
        Some(one)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().flatten()
    }

    /// Takes all, in their order.
    pub(crate) fn take(&mut self) -> impl Iterator<Item = T> + use<T> {
        std::mem::take(self).slots.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_stay_whatever_ends() {
        let mut all = InFlight::default();
        let keys: Vec<usize> = (0..5).map(|number| all.push(number)).collect();
        assert_eq!((all.remove(keys[1]), all.remove(keys[1])), (Some(1), None));
        assert_eq!(all.remove(keys[0]), Some(0));
        assert_eq!((all.get(keys[1]), all.get(keys[3]).copied(), all.len()), (None, Some(3), 3));
        let sixth = all.push(5);
        *all.get_mut(sixth).unwrap() += 1;
        assert_eq!(all.take().collect::<Vec<_>>(), [2, 3, 4, 6]);
        assert!(all.is_empty() && all.slots.is_empty());
    }
}
