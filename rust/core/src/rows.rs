//! Rows that were made for a block, kept for the next request that uses it.
//!
//! # Rationale
//! The addresses of a block do not change while its tensors stay registered. Making a row costs a microsecond or two,
//! picking one that is there a few nanoseconds.

use std::collections::HashMap;

use rustc_hash::FxBuildHasher;

/// At most `max_rows` rows by block id; the least recently used ones go first.
///
/// ```
/// use mooncrate_core::rows::RowCache;
/// let mut cache = RowCache::new(2);
/// cache.insert(1, "one");
/// cache.insert(2, "two");
/// cache.get(1);
/// cache.insert(3, "three");
/// assert_eq!(cache.get(1), Some(&"one"));
/// assert_eq!(cache.get(2), None);
/// ```
#[derive(Debug)]
pub struct RowCache<T> {
    rows: HashMap<i64, Entry<T>, FxBuildHasher>,
    max_rows: usize,
    /// Counts uses; an entry remembers its last one. It would take centuries to overflow.
    clock: u64,
}

#[derive(Debug)]
struct Entry<T> {
    row: T,
    last_use: u64,
}

impl<T> RowCache<T> {
    /// An empty cache.
    #[must_use]
    pub fn new(max_rows: usize) -> Self {
        Self { rows: HashMap::default(), max_rows, clock: 0 }
    }

    /// Rows in the cache.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The row of `block_id`, which counts as a use.
    pub fn get(&mut self, block_id: i64) -> Option<&T> {
        self.clock += 1;
        let entry = self.rows.get_mut(&block_id)?;
        entry.last_use = self.clock;
        Some(&entry.row)
    }

    /// Keeps `row` for `block_id`, and returns the rows that had to go for it.
    pub fn insert(&mut self, block_id: i64, row: T) -> Vec<T> {
        if self.max_rows == 0 {
            return vec![row];
        }
        self.clock += 1;
        let replaced = self.rows.insert(block_id, Entry { row, last_use: self.clock });
        let mut gone: Vec<T> = replaced.map(|entry| entry.row).into_iter().collect();
        if self.rows.len() > self.max_rows {
            gone.extend(self.evict());
        }
        gone
    }

    /// Takes out the least recently used sixteenth, at least one row: finding the oldest looks at all of them, so it
    /// has to pay for many insertions.
    fn evict(&mut self) -> impl Iterator<Item = T> {
        let num_gone = (self.max_rows / 16).max(1);
        let mut uses: Vec<u64> = self.rows.values().map(|entry| entry.last_use).collect();
        let (_, &mut last, _) = uses.select_nth_unstable(num_gone - 1);
        self.rows.extract_if(move |_, entry| entry.last_use <= last).map(|(_, entry)| entry.row)
    }
}
