//! Queues by tag.

use std::collections::{BTreeMap, VecDeque};

use crate::types::Tag;

/// A queue for each tag. Messages without a tag, which most programs use alone, cost no search.
pub(super) struct ByTag<T> {
    untagged: VecDeque<T>,
    /// None of these is empty.
    tagged: BTreeMap<Tag, VecDeque<T>>,
}

impl<T> Default for ByTag<T> {
    fn default() -> ByTag<T> {
        ByTag { untagged: VecDeque::new(), tagged: BTreeMap::new() }
    }
}

impl<T> ByTag<T> {
    pub(super) fn push(&mut self, tag: Tag, item: T) {
        let queue = if tag == 0 { &mut self.untagged } else { self.tagged.entry(tag).or_default() };
        queue.push_back(item);
    }

    /// Returns the first with a tag.
    pub(super) fn front(&self, tag: Tag) -> Option<&T> {
        if tag == 0 { self.untagged.front() } else { self.tagged.get(&tag)?.front() }
    }

    /// Removes the first with a tag.
    pub(super) fn pop(&mut self, tag: Tag) -> Option<T> {
        if tag == 0 {
            return self.untagged.pop_front();
        }
        let queue = self.tagged.get_mut(&tag)?;
        let item = queue.pop_front();
        if queue.is_empty() {
            self.tagged.remove(&tag);
        }
        item
    }

    /// Returns the first of the lowest tag.
    pub(super) fn first(&self) -> Option<&T> {
        self.untagged.front().or_else(|| self.tagged.first_key_value()?.1.front())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.untagged.is_empty() && self.tagged.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.untagged.clear();
        self.tagged.clear();
    }

    /// Returns the tags, each once, in order.
    pub(super) fn tags(&self) -> impl Iterator<Item = Tag> {
        (!self.untagged.is_empty()).then_some(0).into_iter().chain(self.tagged.keys().copied())
    }
}
