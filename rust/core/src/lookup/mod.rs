//! How long a prefix the pool can give, asking as little as possible.
//!
//! # Rationale
//! Asking for every chunk of a prompt under every rank's namespace costs the same whether the pool has all of it or
//! nothing. Here the cost follows the hit. Full attention needs every chunk from the start, so its chunks are asked in
//! windows that grow, first under one namespace, then under the others as far as the first one reached: a cold prompt
//! costs one window. Groups that need only the end of a prefix (sliding window, recurrent state) are asked at the
//! longest prefix that the others allow, then further and further below it.
//!
//! Without any full-attention group nothing bounds a miss from the front. There the last 256 chunks are asked for, then
//! samples of the rest, and then only what lies behind a sample that is there.
//!
//! # Limitations
//! Without any full-attention group, in a prompt of more than 240 times what such a group needs, a piece of 1/240 of it
//! is overlooked if its first chunk is absent and it does not lie among the last 256: the price of a bounded search.

mod group;
mod probe;

use crate::Error;
use crate::hashes::positive;

use group::{Group, Known};
pub use group::{GroupKind, LookupGroup, Query};
use probe::Samples;

/// Keys in the first window.
const FIRST_WINDOW: usize = 256;
/// How much larger each next window is.
const WINDOW_GROWTH: usize = 4;

#[derive(Debug, Clone, Copy)]
enum Phase {
    /// First namespace of the first full-attention group, units `from..to`.
    Prefix { from: usize, to: usize },
    /// Everything else of the full-attention groups, units `from..alive`, of a window that ends at `to`.
    PrefixRest { from: usize, alive: usize, to: usize },
    /// Ends of prefixes of at most `limit` units, first namespace or the others.
    Tail { limit: usize, is_rest: bool, budget: usize },
    /// Samples of prefixes of at most `limit` units, first namespace or the others.
    Probe { limit: usize, is_rest: bool, samples: Samples },
    /// The answer, in units.
    Decided(usize),
}

/// A lookup in progress: ask for [`queries`](Self::queries), [`feed`](Self::feed) the answers, until there are none.
///
/// Lengths are counted in units, the least common multiple of all block sizes: a hit must be whole in every group.
///
/// ```
/// use mooncrate_core::lookup::{GroupKind, Lookup, LookupGroup};
/// let group = LookupGroup { kind: GroupKind::FullAttention, block_size: 16, num_namespaces: 1 };
/// let mut lookup = Lookup::new(65, 4, &[group], 16)?;
/// assert_eq!(lookup.num_keys(), 4);
/// lookup.feed(&[true, true, true, false])?;
/// assert_eq!((lookup.num_keys(), lookup.num_hit_tokens()), (0, 48));
/// # Ok::<(), mooncrate_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Lookup {
    groups: Vec<Group>,
    unit: i64,
    max_units: usize,
    phase: Phase,
    queries: Vec<Query>,
    num_keys_asked: usize,
    is_probed: bool,
}

impl Lookup {
    /// A lookup for a request of `num_tokens` tokens with `num_hashes` hashes of `hash_block_size` tokens.
    ///
    /// The last token is never part of a hit, as the engine has to compute something.
    ///
    /// # Errors
    /// [`Error::NoGroups`], [`Error::NoKeyPrefix`], [`Error::NotPositive`], [`Error::BlockNotMultiple`],
    /// [`Error::NoCommonMultiple`].
    pub fn new(
        num_tokens: i64,
        num_hashes: usize,
        groups: &[LookupGroup],
        hash_block_size: i64,
    ) -> Result<Self, Error> {
        positive("hash_block_size", hash_block_size)?;
        if groups.is_empty() {
            return Err(Error::NoGroups);
        }
        let mut unit = 1;
        for (group_id, group) in groups.iter().enumerate() {
            let block_size = group.block_size;
            positive("block_size", block_size)?;
            if block_size % hash_block_size != 0 {
                return Err(Error::BlockNotMultiple { block_size, hash_block_size });
            }
            if group.num_namespaces == 0 {
                return Err(Error::NoKeyPrefix { group_id });
            }
            unit = least_common_multiple(unit, block_size).ok_or(Error::NoCommonMultiple)?;
        }
        let groups = groups.iter().map(|group| Group::new(group, unit, hash_block_size)).collect::<Result<_, _>>()?;
        let num_hashed = i64::try_from(num_hashes).unwrap_or(i64::MAX).saturating_mul(hash_block_size);
        let max_units = (num_tokens.saturating_sub(1)).min(num_hashed).max(0) / unit;
        let max_units = usize::try_from(max_units).unwrap_or(usize::MAX);
        let phase = Phase::Decided(0);
        let mut lookup =
            Self { groups, unit, max_units, phase, queries: Vec::new(), num_keys_asked: 0, is_probed: false };
        lookup.enter(lookup.first_phase());
        Ok(lookup)
    }

    /// What to ask for now; nothing when the answer is there.
    #[must_use]
    pub fn queries(&self) -> &[Query] {
        &self.queries
    }

    /// Keys in [`queries`](Self::queries).
    #[must_use]
    pub fn num_keys(&self) -> usize {
        self.queries.iter().map(|query| query.num_chunks).sum()
    }

    /// Keys asked for so far, those of [`queries`](Self::queries) included.
    #[must_use]
    pub fn num_keys_asked(&self) -> usize {
        self.num_keys_asked
    }

    /// Tokens that can be loaded; 0 until the answer is there.
    #[must_use]
    pub fn num_hit_tokens(&self) -> i64 {
        match self.phase {
            Phase::Decided(units) => i64::try_from(units).map_or(0, |units| units * self.unit),
            _ => 0,
        }
    }

    /// Whether the answer is there.
    #[must_use]
    pub fn is_decided(&self) -> bool {
        matches!(self.phase, Phase::Decided(_))
    }

    /// Takes the answers to [`queries`](Self::queries), in order; chunks past the last answer count as absent.
    ///
    /// # Errors
    /// [`Error::TooManyAnswers`].
    pub fn feed(&mut self, is_present: &[bool]) -> Result<(), Error> {
        let (num_answers, num_keys) = (is_present.len(), self.num_keys());
        if num_answers > num_keys {
            return Err(Error::TooManyAnswers { num_answers, num_keys });
        }
        let answers = is_present.iter().copied().chain(std::iter::repeat(false));
        let next = match self.phase {
            Phase::Prefix { from, to } => self.after_prefix(from, to, self.alive_units(from, to, answers)),
            Phase::PrefixRest { from, alive, to } => self.after_rest(self.alive_units(from, alive, answers), to),
            Phase::Tail { limit, is_rest, budget } => {
                self.note(is_rest, answers);
                // As long as the prefix may still be the answer, asking for shorter ones would be in vain.
                let is_alive = self.longest_possible(limit) == limit;
                let grown = budget.saturating_mul(WINDOW_GROWTH).max(FIRST_WINDOW);
                if is_alive {
                    Phase::Tail { limit, is_rest, budget }
                } else if self.is_unbounded() && self.num_keys_asked >= FIRST_WINDOW {
                    self.probe_phase(limit)
                } else {
                    Phase::Tail { limit, is_rest, budget: grown }
                }
            }
            Phase::Probe { limit, is_rest, samples } => {
                self.note(is_rest, answers);
                self.after_probe(limit, is_rest, samples)
            }
            Phase::Decided(_) => self.phase,
        };
        self.enter(next);
        Ok(())
    }

    fn first_phase(&self) -> Phase {
        match self.full_groups().next() {
            Some((_, group)) => {
                let num_units = (FIRST_WINDOW / group.chunks_per_unit).max(1);
                Phase::Prefix { from: 0, to: num_units.min(self.max_units) }
            }
            None => self.first_without_full(),
        }
    }

    /// Whether nothing says how far down a search would go.
    fn is_unbounded(&self) -> bool {
        !self.is_probed && self.full_groups().next().is_none()
    }

    fn tail_phase(&self, limit: usize) -> Phase {
        if self.groups.iter().all(|group| group.tail.is_none()) {
            Phase::Decided(limit)
        } else {
            Phase::Tail { limit, is_rest: false, budget: 0 }
        }
    }

    /// Units `from..alive` are there in the first namespace: the others are next, where there are any.
    fn after_prefix(&self, from: usize, to: usize, alive: usize) -> Phase {
        let has_rest = self.full_groups().map(|(_, group)| group.num_namespaces).sum::<usize>() > 1;
        if alive > from && has_rest { Phase::PrefixRest { from, alive, to } } else { self.after_rest(alive, to) }
    }

    /// Units up to `alive` are there in all namespaces; the window reached to `to`.
    fn after_rest(&self, alive: usize, to: usize) -> Phase {
        if alive < to || to == self.max_units {
            return self.tail_phase(alive);
        }
        let chunks_per_unit = self.full_groups().next().map_or(1, |(_, group)| group.chunks_per_unit);
        let first_window = (FIRST_WINDOW / chunks_per_unit).max(1);
        // Windows of 1, 4, 16, ... times the first one: the next is as long as all before it, three times, and one more.
        let num_units = to.saturating_mul(WINDOW_GROWTH - 1).saturating_add(first_window);
        Phase::Prefix { from: to, to: to.saturating_add(num_units).min(self.max_units) }
    }

    /// Units from `from` on that every query has, given answers to chunks of units `from..to`.
    fn alive_units(&self, from: usize, to: usize, mut answers: impl Iterator<Item = bool>) -> usize {
        let mut alive = to;
        for query in &self.queries {
            let chunks_per_unit = self.groups[query.group].chunks_per_unit;
            let num_present = answers.by_ref().take(query.num_chunks).enumerate();
            let hole = num_present.fold(None, |hole: Option<usize>, (index, is_present)| match hole {
                None if !is_present => Some(index),
                found => found,
            });
            alive = alive.min(hole.map_or(to, |hole| from + hole / chunks_per_unit));
        }
        alive
    }

    /// Writes the answers of a tail query into what is known.
    fn note(&mut self, is_rest: bool, mut answers: impl Iterator<Item = bool>) {
        for query in &self.queries {
            for chunk in query.chunks() {
                if answers.next() != Some(true) {
                    self.groups[query.group].known[chunk] = Known::Absent;
                }
            }
        }
        for query in &self.queries {
            let group = &mut self.groups[query.group];
            let learnt = if is_rest || group.num_namespaces == 1 { Known::Present } else { Known::First };
            for chunk in query.chunks() {
                if group.known[chunk] == Known::Asked {
                    group.known[chunk] = learnt;
                }
            }
        }
    }

    /// Makes `phase` the current one, with its queries; phases that have nothing to ask are passed through.
    fn enter(&mut self, phase: Phase) {
        self.queries.clear();
        self.phase = phase;
        match phase {
            Phase::Prefix { from, to } if from == to => return self.enter(self.tail_phase(from)),
            Phase::Prefix { from, to } => {
                let first = self.full_groups().next().map(|(index, group)| group.query(index, 0, from, to));
                self.queries.extend(first);
            }
            Phase::PrefixRest { from, alive, .. } => {
                let all = self.full_groups().flat_map(|(index, group)| {
                    (0..group.num_namespaces).map(move |namespace| group.query(index, namespace, from, alive))
                });
                self.queries = all.skip(1).collect();
            }
            Phase::Tail { limit, budget, .. } => return self.enter_tail(limit, budget),
            Phase::Probe { limit, is_rest, samples } => return self.enter_probe(limit, is_rest, samples),
            Phase::Decided(_) => {}
        }
        self.num_keys_asked += self.num_keys();
    }

    fn make_room(&mut self, limit: usize) {
        for group in self.groups.iter_mut().filter(|group| group.tail.is_some()) {
            group.known.resize(limit * group.chunks_per_unit, Known::Nothing);
        }
    }

    fn enter_tail(&mut self, limit: usize, budget: usize) {
        self.make_room(limit);
        let limit = self.longest_possible(limit);
        let is_first_known = self.tail_groups().all(|(_, group)| !group.has(limit, Known::Nothing));
        let is_known = is_first_known && self.tail_groups().all(|(_, group)| !group.has(limit, Known::First));
        if is_known {
            self.phase = Phase::Decided(limit);
            return;
        }
        self.phase = Phase::Tail { limit, is_rest: is_first_known, budget };
        let wanted = if is_first_known { Known::First } else { Known::Nothing };
        // The longest prefix that is still possible, then shorter ones for as long as there is budget.
        let mut num_units = limit;
        let mut num_keys = 0;
        while num_units > 0 {
            num_keys += self.ask(num_units, wanted);
            if num_keys >= budget {
                break;
            }
            num_units = self.longest_possible(num_units - 1);
        }
        self.num_keys_asked += self.num_keys();
    }

    /// Queries the chunks at the end of `num_units` units of which `wanted` is known. Returns the number of keys.
    fn ask(&mut self, num_units: usize, wanted: Known) -> usize {
        let num_before = self.queries.len();
        for (index, group) in self.groups.iter_mut().enumerate().filter(|(_, group)| group.tail.is_some()) {
            let namespaces = if wanted == Known::First { 1..group.num_namespaces } else { 0..1 };
            let mut chunk = group.needed(num_units).start;
            let end = group.needed(num_units).end;
            while chunk < end {
                let num_chunks = group.known[chunk..end].iter().take_while(|known| **known == wanted).count();
                if num_chunks > 0 {
                    group.known[chunk..chunk + num_chunks].fill(Known::Asked);
                    let scale = group.hashes_per_chunk;
                    self.queries.extend(namespaces.clone().map(|namespace| Query {
                        group: index,
                        namespace,
                        first_chunk: chunk,
                        num_chunks,
                        scale,
                    }));
                }
                chunk += num_chunks.max(1);
            }
        }
        self.queries[num_before..].iter().map(|query| query.num_chunks).sum()
    }

    /// The longest prefix of at most `num_units` units in whose end no group lacks a chunk, as far as is known.
    fn longest_possible(&self, mut num_units: usize) -> usize {
        'shorter: while num_units > 0 {
            for (_, group) in self.tail_groups() {
                // Every prefix that ends behind this chunk and not behind `num_units` needs it too.
                if let Some(chunk) = group.first_absent(num_units) {
                    num_units = chunk / group.chunks_per_unit;
                    continue 'shorter;
                }
            }
            break;
        }
        num_units
    }

    fn full_groups(&self) -> impl Iterator<Item = (usize, &Group)> {
        self.groups.iter().enumerate().filter(|(_, group)| group.tail.is_none())
    }

    fn tail_groups(&self) -> impl Iterator<Item = (usize, &Group)> {
        self.groups.iter().enumerate().filter(|(_, group)| group.tail.is_some())
    }
}

fn least_common_multiple(a: i64, b: i64) -> Option<i64> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b)
}
