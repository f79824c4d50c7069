//! The unit that moves: the chunks of a request with their keys, blocks and byte counts.
//!
//! # Rationale
//! A save asks the pool what it has, leaves that out, starts at another chunk on each rank and goes out in batches. With
//! lists of strings and addresses each step copies them all. A plan keeps what it was made from and a list of *picks*:
//! narrowing copies eight bytes per chunk, and text and rows are made once, for what is left.

use std::sync::Arc;

use crate::Error;

/// One chunk of a plan, resolved to a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedChunk {
    /// First token.
    pub token_start: i64,
    /// One past the last token.
    pub token_end: i64,
    /// The block that holds the chunk.
    pub block_id: i64,
    /// Position, among the request's hashes, of the one that names the chunk.
    pub hash_index: usize,
}

/// The chunks of one KV cache group, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanPart {
    key_prefix: String,
    num_regions: usize,
    chunk_bytes: u64,
    num_null_blocks: usize,
    chunks: Vec<PlannedChunk>,
    hash_bytes: Vec<u8>,
    hash_ends: Vec<usize>,
}

impl PlanPart {
    /// An empty part; each chunk will have `num_regions` addresses and `chunk_bytes` bytes in all of them together.
    #[must_use]
    pub fn new(key_prefix: &str, num_regions: usize, chunk_bytes: u64) -> Self {
        Self {
            key_prefix: key_prefix.to_owned(),
            num_regions,
            chunk_bytes,
            num_null_blocks: 0,
            chunks: Vec::new(),
            hash_bytes: Vec::new(),
            hash_ends: Vec::new(),
        }
    }

    /// Makes room for `num_chunks` chunks with hashes of `hash_len` bytes.
    pub fn reserve(&mut self, num_chunks: usize, hash_len: usize) {
        self.chunks.reserve(num_chunks);
        self.hash_ends.reserve(num_chunks);
        self.hash_bytes.reserve(num_chunks.saturating_mul(hash_len));
    }

    /// Appends a chunk named by `chunk_hash`.
    pub fn push(&mut self, chunk: PlannedChunk, chunk_hash: &[u8]) {
        self.hash_bytes.extend_from_slice(chunk_hash);
        self.hash_ends.push(self.hash_bytes.len());
        self.chunks.push(chunk);
    }

    /// Counts a chunk that was left out because its block is the null block.
    pub fn count_null_block(&mut self) {
        self.num_null_blocks += 1;
    }

    /// What the keys of this part begin with.
    #[must_use]
    pub fn key_prefix(&self) -> &str {
        &self.key_prefix
    }

    fn chunk_hash(&self, index: usize) -> &[u8] {
        let start = index.checked_sub(1).map_or(0, |before| self.hash_ends[before]);
        &self.hash_bytes[start..self.hash_ends[index]]
    }
}

/// Which chunk of which part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pick {
    part: u32,
    chunk: u32,
}

/// Chunks picked from one or more parts, in the order in which they go out.
///
/// ```
/// use mooncrate_core::plan::{Plan, PlanPart, PlannedChunk};
/// let mut part = PlanPart::new("p", 2, 128);
/// for i in 0..3 {
///     let chunk = PlannedChunk { token_start: i * 16, token_end: i * 16 + 16, block_id: 7 + i, hash_index: 0 };
///     part.push(chunk, &[i as u8]);
/// }
/// let plan = Plan::new(part)?;
/// let missing = plan.missing(&[true, false, false])?;
/// assert_eq!(missing.num_bytes()?, 256);
/// let blocks: Vec<_> = missing.rotate(1).iter().map(|item| item.chunk.block_id).collect();
/// assert_eq!(blocks, [9, 8]);
/// # Ok::<(), mooncrate_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Plan {
    parts: Arc<[Arc<PlanPart>]>,
    picks: Vec<Pick>,
}

/// One chunk of a plan with everything that belongs to it.
#[derive(Debug, Clone, Copy)]
pub struct PlanItem<'plan> {
    /// Position of the chunk's part in the plan.
    pub part_index: usize,
    /// The part that the chunk comes from.
    pub part: &'plan PlanPart,
    /// Tokens and block.
    pub chunk: PlannedChunk,
    /// The hash that names the chunk.
    pub chunk_hash: &'plan [u8],
}

impl Plan {
    /// All chunks of one part.
    ///
    /// # Errors
    /// [`Error::TooManyChunks`] past 2^32.
    pub fn new(part: PlanPart) -> Result<Self, Error> {
        let num_chunks = part.chunks.len();
        let end = u32::try_from(num_chunks).map_err(|_| Error::TooManyChunks { num_chunks })?;
        let picks = (0..end).map(|chunk| Pick { part: 0, chunk }).collect();
        Ok(Self { parts: Arc::new([Arc::new(part)]), picks })
    }

    /// Chunks in the plan.
    #[must_use]
    pub fn len(&self) -> usize {
        self.picks.len()
    }

    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.picks.is_empty()
    }

    /// Chunks that were left out because their block is the null block.
    #[must_use]
    pub fn num_null_blocks(&self) -> usize {
        self.parts.iter().map(|part| part.num_null_blocks).sum()
    }

    /// The chunks, in order.
    #[must_use]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = PlanItem<'_>> + Clone {
        self.picks.iter().map(|pick| {
            let (part_index, index) = (pick.part as usize, pick.chunk as usize);
            let part = &*self.parts[part_index];
            PlanItem { part_index, part, chunk: part.chunks[index], chunk_hash: part.chunk_hash(index) }
        })
    }

    /// Tokens and block of each chunk and the position of its part, in order, without hash and key.
    #[must_use]
    pub fn chunks(&self) -> impl ExactSizeIterator<Item = (usize, PlannedChunk)> + Clone {
        self.picks.iter().map(|pick| {
            let part_index = pick.part as usize;
            (part_index, self.parts[part_index].chunks[pick.chunk as usize])
        })
    }

    /// Bytes of all chunks in all their regions.
    ///
    /// # Errors
    /// [`Error::PlanOverflow`] past 64 bits.
    pub fn num_bytes(&self) -> Result<u64, Error> {
        self.picks
            .iter()
            .try_fold(0_u64, |sum, pick| sum.checked_add(self.parts[pick.part as usize].chunk_bytes))
            .ok_or(Error::PlanOverflow { num_chunks: self.len() })
    }

    /// The chunks whose answer is not `true`. Chunks past the last answer count as missing.
    ///
    /// # Errors
    /// [`Error::TooManyAnswers`]: answers to other keys than the plan's.
    pub fn missing(&self, is_present: &[bool]) -> Result<Self, Error> {
        let (num_answers, num_chunks) = (is_present.len(), self.len());
        if num_answers > num_chunks {
            return Err(Error::TooManyAnswers { num_answers, num_keys: num_chunks });
        }
        let answered = self.picks.iter().zip(is_present).filter(|(_, present)| !**present).map(|(pick, _)| *pick);
        Ok(self.with(answered.chain(self.picks[num_answers..].iter().copied()).collect()))
    }

    /// The chunks at `indices`, in that order; the caller has checked them against [`len`](Self::len).
    #[must_use]
    pub fn select(&self, indices: &[usize]) -> Self {
        self.with(indices.iter().map(|index| self.picks[*index]).collect())
    }

    /// The same chunks, beginning with chunk `n`; counts past the end go round.
    #[must_use]
    pub fn rotate(&self, n: usize) -> Self {
        let mut picks = self.picks.clone();
        if let Some(n) = n.checked_rem(picks.len()) {
            picks.rotate_left(n);
        }
        self.with(picks)
    }

    /// Consecutive pieces of at most `max_bytes` bytes and `max_segments` addresses each. A chunk that is over a bound
    /// by itself goes alone: it cannot be cut. `u64::MAX` bounds nothing.
    #[must_use]
    pub fn split(&self, max_bytes: u64, max_segments: u64) -> Vec<Self> {
        let mut pieces = Vec::new();
        let mut picks: Vec<Pick> = Vec::new();
        let (mut num_bytes, mut num_segments) = (0_u64, 0_u64);
        for pick in &self.picks {
            let part = &self.parts[pick.part as usize];
            // Saturating is right here: a sum past 64 bits is over every bound that is one.
            num_bytes = num_bytes.saturating_add(part.chunk_bytes);
            num_segments = num_segments.saturating_add(part.num_regions as u64);
            if !picks.is_empty() && (num_bytes > max_bytes || num_segments > max_segments) {
                pieces.push(self.with(std::mem::take(&mut picks)));
                (num_bytes, num_segments) = (part.chunk_bytes, part.num_regions as u64);
            }
            picks.push(*pick);
        }
        if !picks.is_empty() {
            pieces.push(self.with(picks));
        }
        pieces
    }

    /// The chunks of several plans, one after the other. Part `i` of plan `p` becomes part `i` plus the number of parts
    /// of the plans before it.
    ///
    /// # Errors
    /// [`Error::TooManyChunks`] past 2^32 parts.
    pub fn concat(plans: &[&Self]) -> Result<Self, Error> {
        let parts: Arc<[_]> = plans.iter().flat_map(|plan| plan.parts.iter().cloned()).collect();
        let mut picks = Vec::with_capacity(plans.iter().map(|plan| plan.len()).sum());
        let mut num_parts = 0;
        for plan in plans {
            let num_chunks = num_parts;
            let offset = u32::try_from(num_parts).map_err(|_| Error::TooManyChunks { num_chunks })?;
            picks.extend(plan.picks.iter().map(|pick| Pick { part: pick.part + offset, ..*pick }));
            num_parts += plan.parts.len();
        }
        Ok(Self { parts, picks })
    }

    fn with(&self, picks: Vec<Pick>) -> Self {
        Self { parts: Arc::clone(&self.parts), picks }
    }
}
