//! What one KV cache group needs of a prefix, and what is known of its chunks.

use std::ops::Range;

use crate::Error;
use crate::hashes::positive;

/// What of a prefix a KV cache group needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupKind {
    /// Every chunk.
    FullAttention,
    /// The chunks that the last `window` tokens before the next one reach into.
    SlidingWindow {
        /// Tokens that one token attends to, itself included.
        window: i64,
    },
    /// The last chunk, which holds the state.
    Recurrent,
}

/// One KV cache group of a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookupGroup {
    /// What it needs.
    pub kind: GroupKind,
    /// Tokens per chunk.
    pub block_size: i64,
    /// Namespaces that must all hold a chunk: one per rank that loads its own bytes.
    pub num_namespaces: usize,
}

/// Keys to ask for: the chunks of `hash_indices` of one group under one namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Query {
    /// The group.
    pub group: usize,
    /// The namespace.
    pub namespace: usize,
    /// First chunk.
    pub(super) first_chunk: usize,
    /// Chunks.
    pub(super) num_chunks: usize,
    /// Hashes per chunk.
    pub(super) scale: usize,
}

impl Query {
    /// The hashes that name the chunks, in order.
    #[must_use]
    pub fn hash_indices(&self) -> impl ExactSizeIterator<Item = usize> + use<> {
        let Self { first_chunk, num_chunks, scale, .. } = *self;
        (0..num_chunks).map(move |i| (first_chunk + i) * scale + (scale - 1))
    }

    pub(super) fn chunks(&self) -> Range<usize> {
        self.first_chunk..self.first_chunk + self.num_chunks
    }
}

/// What is known of one chunk of a group that needs the end of a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Known {
    Nothing,
    /// The first namespace has it.
    First,
    /// All namespaces have it.
    Present,
    /// Some namespace does not have it.
    Absent,
    /// It is being asked for.
    Asked,
}

#[derive(Debug, Clone)]
pub(super) struct Group {
    /// Chunks needed at the end of a prefix; `None` for all of them.
    pub(super) tail: Option<usize>,
    pub(super) chunks_per_unit: usize,
    pub(super) hashes_per_chunk: usize,
    pub(super) num_namespaces: usize,
    /// By chunk; empty for full attention, and for the others until their turn comes.
    pub(super) known: Vec<Known>,
}

impl Group {
    pub(super) fn new(group: &LookupGroup, unit: i64, hash_block_size: i64) -> Result<Self, Error> {
        let LookupGroup { kind, block_size, num_namespaces } = *group;
        let count = |name, value: i64| usize::try_from(value).map_err(|_| Error::NotPositive { name, value });
        let tail = match kind {
            GroupKind::FullAttention => None,
            GroupKind::Recurrent => Some(1),
            GroupKind::SlidingWindow { window } => {
                positive("window", window)?;
                let reach = window - 1;
                // The next token attends to itself and the `window - 1` before it.
                let num_chunks = reach / block_size + i64::from(reach % block_size != 0);
                Some(count("window", num_chunks)?.max(1))
            }
        };
        let chunks_per_unit = count("block_size", unit / block_size)?;
        let hashes_per_chunk = count("block_size", block_size / hash_block_size)?;
        Ok(Self { tail, chunks_per_unit, hashes_per_chunk, num_namespaces, known: Vec::new() })
    }

    pub(super) fn query(&self, group: usize, namespace: usize, from: usize, to: usize) -> Query {
        let first_chunk = from * self.chunks_per_unit;
        let num_chunks = (to - from) * self.chunks_per_unit;
        Query { group, namespace, first_chunk, num_chunks, scale: self.hashes_per_chunk }
    }

    /// The chunks that a prefix of `num_units` units needs at its end.
    pub(super) fn needed(&self, num_units: usize) -> Range<usize> {
        let end = num_units * self.chunks_per_unit;
        end.saturating_sub(self.tail.unwrap_or(end))..end
    }

    pub(super) fn has(&self, num_units: usize, known: Known) -> bool {
        self.known[self.needed(num_units)].contains(&known)
    }

    pub(super) fn first_absent(&self, num_units: usize) -> Option<usize> {
        let needed = self.needed(num_units);
        let start = needed.start;
        self.known[needed].iter().position(|known| *known == Known::Absent).map(|index| start + index)
    }
}
