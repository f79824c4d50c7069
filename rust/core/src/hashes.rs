//! Where a block hash lies in a flat buffer, and which hash names a chunk.
//!
//! # Rationale
//! A prompt of 131,072 tokens has 8,192 hashes of 32 bytes. Kept as one blob they are one allocation that crosses
//! processes as it is; a hash is found by multiplication when somebody asks for it.

use std::ops::Range;

use crate::Error;

/// Fixed-size hashes laid end to end in a buffer.
///
/// A ragged tail, shorter than one hash, belongs to no hash. A width of 0 holds no hashes, whatever the buffer.
///
/// ```
/// use mooncrate_core::hashes::HashSpans;
/// let spans = HashSpans::new(70, 32)?;
/// assert_eq!(spans.num_hashes(), 2);
/// assert_eq!(spans.span(1), 32..64);
/// # Ok::<(), mooncrate_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HashSpans {
    hash_len: usize,
    num_hashes: usize,
}

impl HashSpans {
    /// Cuts `num_bytes` bytes into hashes of `hash_len` bytes.
    ///
    /// # Errors
    /// [`Error::HashLen`] for a negative width.
    pub fn new(num_bytes: usize, hash_len: i64) -> Result<Self, Error> {
        let width = usize::try_from(hash_len).map_err(|_| Error::HashLen { hash_len })?;
        Ok(Self { hash_len: width, num_hashes: num_bytes.checked_div(width).unwrap_or(0) })
    }

    /// Whole hashes in the buffer.
    #[must_use]
    pub fn num_hashes(&self) -> usize {
        self.num_hashes
    }

    /// Bytes per hash.
    #[must_use]
    pub fn hash_len(&self) -> usize {
        self.hash_len
    }

    /// The bytes of hash `index`, which the caller has checked against [`num_hashes`](Self::num_hashes).
    #[must_use]
    pub fn span(&self, index: usize) -> Range<usize> {
        let start = index * self.hash_len;
        start..start + self.hash_len
    }
}

/// Resolves an index that may count from the end, as Python does. `None` when it is outside.
///
/// ```
/// use mooncrate_core::hashes::resolve_index;
/// assert_eq!(resolve_index(-1, 3), Some(2));
/// assert_eq!(resolve_index(3, 3), None);
/// ```
#[must_use]
pub fn resolve_index(index: i64, len: usize) -> Option<usize> {
    let from_front = if index < 0 {
        len.checked_sub(usize::try_from(index.unsigned_abs()).ok()?)?
    } else {
        usize::try_from(index).ok()?
    };
    (from_front < len).then_some(from_front)
}

/// Which hash names a chunk: the **last** block hash inside it.
///
/// The engine chains its hashes, so the last one already names the whole chunk and everything before it. A key stays
/// one digest long, whatever the ratio of block sizes.
///
/// ```
/// use mooncrate_core::hashes::ChunkHashIndex;
/// let index = ChunkHashIndex::new(4, 16)?;
/// assert_eq!(index.num_chunks(9), 2);
/// assert_eq!(index.hash_index(1), 7);
/// # Ok::<(), mooncrate_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkHashIndex {
    scale: usize,
}

impl ChunkHashIndex {
    /// Chunks of `target_block_size` tokens over hashes of `hash_block_size` tokens.
    ///
    /// # Errors
    /// [`Error::NotPositive`] for a size below 1, [`Error::TargetNotMultiple`] when hashes do not tile the chunk.
    pub fn new(hash_block_size: i64, target_block_size: i64) -> Result<Self, Error> {
        positive("hash_block_size", hash_block_size)?;
        if target_block_size % hash_block_size != 0 {
            return Err(Error::TargetNotMultiple { target_block_size, hash_block_size });
        }
        positive("target_block_size", target_block_size)?;
        let value = target_block_size / hash_block_size;
        let scale = usize::try_from(value).map_err(|_| Error::NotPositive { name: "target_block_size", value })?;
        Ok(Self { scale })
    }

    /// Hashes per chunk.
    #[must_use]
    pub fn scale(&self) -> usize {
        self.scale
    }

    /// Whole chunks among `num_hashes` hashes.
    #[must_use]
    pub fn num_chunks(&self, num_hashes: usize) -> usize {
        num_hashes / self.scale
    }

    /// The hash that names chunk `chunk_index`, which the caller has checked against
    /// [`num_chunks`](Self::num_chunks).
    #[must_use]
    pub fn hash_index(&self, chunk_index: usize) -> usize {
        chunk_index * self.scale + (self.scale - 1)
    }
}

/// Refuses a count below 1.
pub(crate) fn positive(name: &'static str, value: i64) -> Result<(), Error> {
    if value > 0 { Ok(()) } else { Err(Error::NotPositive { name, value }) }
}
