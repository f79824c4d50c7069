//! Which chunks of a request one rank handles.
//!
//! # Rationale
//! When there are fewer KV heads than tensor-parallel ranks, several ranks hold the same bytes. Chunks are then dealt
//! out by `chunk_id % put_step`, by the absolute id, so that a chunk lands on the same rank wherever the processed
//! suffix begins. The iterator jumps from one own chunk to the next; it never looks at the others.

use crate::Error;
use crate::hashes::positive;

/// Tokens per chunk and per hash of one KV cache group, checked once.
///
/// ```
/// use mooncrate_core::chunks::{ChunkGrid, ChunkSelection};
/// let grid = ChunkGrid::new(32, 16)?;
/// let selection = ChunkSelection { token_len: 80, num_hashes: 5, ..ChunkSelection::default() };
/// let spans: Vec<_> = grid.chunks(&selection)?.map(|c| (c.token_start, c.token_end, c.hash_index)).collect();
/// assert_eq!(spans, [(0, 32, 1), (32, 64, 3), (64, 80, 4)]);
/// # Ok::<(), mooncrate_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkGrid {
    block_size: i64,
    hash_block_size: i64,
}

/// One chunk: tokens `token_start..token_end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Position of the chunk in the request, counted from its first token.
    pub chunk_id: i64,
    /// First token.
    pub token_start: i64,
    /// One past the last token; the last chunk may be short.
    pub token_end: i64,
    /// The block hash that names the chunk.
    pub hash_index: usize,
    /// Position of the chunk in a mask that begins at the first chunk after `mask_num`.
    pub mask_index: usize,
}

/// What of a request is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkSelection {
    /// Tokens of the request, in whole hash blocks.
    pub token_len: i64,
    /// Block hashes at hand.
    pub num_hashes: usize,
    /// Tokens to leave out at the front, rounded up to whole chunks.
    pub mask_num: i64,
    /// Length of a mask over the chunks after `mask_num`; chunks past its end are left out.
    pub mask_len: Option<usize>,
    /// Ranks that share the chunks.
    pub put_step: i64,
    /// The rank whose chunks are wanted.
    pub put_step_rank: i64,
}

impl Default for ChunkSelection {
    fn default() -> Self {
        Self { token_len: 0, num_hashes: 0, mask_num: 0, mask_len: None, put_step: 1, put_step_rank: 0 }
    }
}

impl ChunkGrid {
    /// Chunks of `block_size` tokens, hashed every `hash_block_size` tokens.
    ///
    /// # Errors
    /// [`Error::NotPositive`] for a size below 1, [`Error::BlockNotMultiple`] when hashes do not tile a block.
    pub fn new(block_size: i64, hash_block_size: i64) -> Result<Self, Error> {
        positive("block_size", block_size)?;
        positive("hash_block_size", hash_block_size)?;
        if block_size % hash_block_size != 0 {
            return Err(Error::BlockNotMultiple { block_size, hash_block_size });
        }
        Ok(Self { block_size, hash_block_size })
    }

    /// Tokens per chunk.
    #[must_use]
    pub fn block_size(&self) -> i64 {
        self.block_size
    }

    /// Tokens per hash.
    #[must_use]
    pub fn hash_block_size(&self) -> i64 {
        self.hash_block_size
    }

    /// The chunks that `selection` asks for, in order.
    ///
    /// # Errors
    /// [`Error::PutStep`], [`Error::PutStepRank`]; with hashes at hand also [`Error::TokensNotAligned`] and
    /// [`Error::TooFewHashes`]. Without any hash there are no chunks, and the token length is not looked at.
    pub fn chunks(&self, selection: &ChunkSelection) -> Result<Chunks, Error> {
        let ChunkSelection { token_len, num_hashes, put_step, put_step_rank, .. } = *selection;
        if put_step <= 0 {
            return Err(Error::PutStep { put_step });
        }
        if !(0..put_step).contains(&put_step_rank) {
            return Err(Error::PutStepRank { put_step_rank, put_step });
        }
        let mut chunks = Chunks { grid: *self, token_len, start_chunk: 0, next_chunk: None, end_chunk: 0, put_step };
        if num_hashes == 0 {
            return Ok(chunks);
        }
        let hash_block_size = self.hash_block_size;
        if token_len % hash_block_size != 0 {
            return Err(Error::TokensNotAligned { token_len, hash_block_size });
        }
        let num_needed = token_len / hash_block_size;
        if usize::try_from(num_needed).is_ok_and(|needed| needed > num_hashes) {
            return Err(Error::TooFewHashes { token_len, hash_block_size, num_needed, num_hashes });
        }
        chunks.start_chunk = div_ceil(selection.mask_num, self.block_size).max(0);
        chunks.end_chunk = div_ceil(token_len, self.block_size);
        if let Some(mask_len) = selection.mask_len.and_then(|len| i64::try_from(len).ok()) {
            chunks.end_chunk = chunks.end_chunk.min(chunks.start_chunk.saturating_add(mask_len));
        }
        let to_own = (put_step_rank - chunks.start_chunk).rem_euclid(put_step);
        chunks.next_chunk = chunks.start_chunk.checked_add(to_own);
        Ok(chunks)
    }
}

/// The chunks of one rank, in order. Made by [`ChunkGrid::chunks`].
#[derive(Debug, Clone)]
pub struct Chunks {
    grid: ChunkGrid,
    token_len: i64,
    start_chunk: i64,
    next_chunk: Option<i64>,
    end_chunk: i64,
    put_step: i64,
}

impl Iterator for Chunks {
    type Item = Chunk;

    fn next(&mut self) -> Option<Chunk> {
        let chunk_id = self.next_chunk.filter(|id| *id < self.end_chunk)?;
        self.next_chunk = chunk_id.checked_add(self.put_step);
        let block_size = self.grid.block_size;
        let token_start = chunk_id * block_size;
        let token_end = token_start + block_size.min(self.token_len - token_start);
        // `token_end` is a positive multiple of the hash block, and `start_chunk <= chunk_id`: both counts fit.
        let hash_index = usize::try_from(token_end / self.grid.hash_block_size - 1).ok()?;
        let mask_index = usize::try_from(chunk_id - self.start_chunk).ok()?;
        Some(Chunk { chunk_id, token_start, token_end, hash_index, mask_index })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.next_chunk.map_or(0, |next| div_ceil((self.end_chunk - next).max(0), self.put_step));
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        (left, Some(left))
    }
}

impl ExactSizeIterator for Chunks {}

/// Division that rounds up, for a positive divisor.
fn div_ceil(value: i64, divisor: i64) -> i64 {
    value.div_euclid(divisor) + i64::from(value.rem_euclid(divisor) != 0)
}
