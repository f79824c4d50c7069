//! Where the bytes of a block lie.
//!
//! # Rationale
//! A block lies in every region of its KV cache group, at `base_addr + block_id * block_stride`, `block_bytes` long.
//! Stride and bytes are kept apart: a view packed into a shared slot moves its own bytes only.
//!
//! # Limitations
//! The table knows addresses, not who registered them.

use crate::Error;
use crate::chunks::ChunkGrid;

/// One addressable buffer that holds `block_bytes` of every block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Address of block 0.
    pub base_addr: u64,
    /// Bytes from one block to the next.
    pub block_stride: u64,
    /// Bytes of one block that are its own.
    pub block_bytes: u64,
}

/// The regions of one KV cache group, in the order in which their bytes are stored.
///
/// ```
/// use mooncrate_core::regions::RegionTable;
/// let table = RegionTable::from_block_len(&[0x1000, 0x9000], &[64])?;
/// let mut addrs = Vec::new();
/// table.write_addrs(2, 1, &mut addrs)?;
/// assert_eq!(addrs, [0x1080, 0x9080]);
/// assert_eq!(table.sizes(1)?, [64, 64]);
/// # Ok::<(), mooncrate_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionTable {
    regions: Vec<Region>,
    /// The last block id whose single block ends inside 64 bits in every region, if there is one: a comparison with it
    /// checks a whole row.
    last_block_id: Option<u64>,
    /// Blocks that are registered, where somebody said so.
    num_blocks: Option<u64>,
}

impl RegionTable {
    /// A table over `regions`, each of which holds `num_blocks` blocks; `None` when nobody knows.
    ///
    /// # Errors
    /// [`Error::BlocksOverlap`] when there are several blocks and they lie in each other's bytes.
    pub fn new(regions: Vec<Region>, num_blocks: Option<u64>) -> Result<Self, Error> {
        let overlap = regions.iter().position(|region| region.block_bytes > region.block_stride);
        if let Some(region_index) = overlap.filter(|_| num_blocks.is_some_and(|num_blocks| num_blocks > 1)) {
            let Region { block_bytes, block_stride, .. } = regions[region_index];
            return Err(Error::BlocksOverlap { region_index, block_bytes, block_stride });
        }
        let last_block_id = regions.iter().map(last_block_id).min().unwrap_or(Some(u64::MAX));
        Ok(Self { regions, last_block_id, num_blocks })
    }

    /// A table in the form of the seed API: block lengths, which are strides too, repeat over the regions when there
    /// are fewer of them.
    ///
    /// # Errors
    /// [`Error::NoBlockLen`] when there are regions but no length.
    pub fn from_block_len(base_addrs: &[u64], block_len: &[u64]) -> Result<Self, Error> {
        if block_len.is_empty() && !base_addrs.is_empty() {
            return Err(Error::NoBlockLen { num_regions: base_addrs.len() });
        }
        let regions = base_addrs.iter().zip(block_len.iter().cycle()).map(|(&base_addr, &len)| Region {
            base_addr,
            block_stride: len,
            block_bytes: len,
        });
        Self::new(regions.collect(), None)
    }

    /// The regions, in order.
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Appends the address of `block_id` in each region; `num_blocks` blocks are to be read from there.
    ///
    /// # Errors
    /// Those of [`check_block`](Self::check_block). Nothing is appended then.
    pub fn write_addrs(&self, block_id: i64, num_blocks: u64, addrs: &mut Vec<u64>) -> Result<(), Error> {
        let id = self.check_block(block_id, num_blocks)?;
        addrs.extend(self.regions.iter().map(|region| region.base_addr + id * region.block_stride));
        Ok(())
    }

    /// Checks that `num_blocks` blocks from `block_id` on can be read, and returns the id.
    ///
    /// # Errors
    /// [`Error::NegativeBlockId`]; [`Error::BlockIdPastEnd`] when they are not all registered; [`Error::BlocksApart`]
    /// when there are several and other bytes lie between them;
    /// [`Error::AddressOverflow`] or [`Error::SizeOverflow`] when they end past the last 64-bit address.
    pub fn check_block(&self, block_id: i64, num_blocks: u64) -> Result<u64, Error> {
        let id = u64::try_from(block_id).map_err(|_| Error::NegativeBlockId { block_id })?;
        if let Some(registered) = self.num_blocks
            && id.saturating_add(num_blocks.max(1)) > registered
        {
            return Err(Error::BlockIdPastEnd { block_id, num_blocks: registered });
        }
        if num_blocks > 1 || self.last_block_id.is_none_or(|last| id > last) {
            self.check_regions(block_id, id, num_blocks)?;
        }
        Ok(id)
    }

    /// Bytes of one block in all regions together.
    ///
    /// # Errors
    /// [`Error::SizeOverflow`].
    pub fn row_bytes(&self) -> Result<u64, Error> {
        let add = |sum: u64, region: &Region| sum.checked_add(region.block_bytes);
        let sum = self.regions.iter().try_fold(0, add);
        sum.ok_or(Error::SizeOverflow { num_blocks: 1, block_bytes: u64::MAX })
    }

    /// Bytes of `num_blocks` blocks in each region.
    ///
    /// # Errors
    /// [`Error::SizeOverflow`].
    pub fn sizes(&self, num_blocks: u64) -> Result<Vec<u64>, Error> {
        self.regions.iter().map(|region| region_bytes(region, num_blocks)).collect()
    }

    /// Checks region by region that `num_blocks` blocks from block `id` on end inside 64 bits.
    fn check_regions(&self, block_id: i64, id: u64, num_blocks: u64) -> Result<(), Error> {
        for (region_index, region) in self.regions.iter().enumerate() {
            let Region { block_bytes, block_stride, .. } = *region;
            if num_blocks > 1 && block_bytes != block_stride {
                return Err(Error::BlocksApart { num_blocks, region_index, block_bytes, block_stride });
            }
            let num_bytes = region_bytes(region, num_blocks)?;
            let addr = id.checked_mul(region.block_stride).and_then(|offset| offset.checked_add(region.base_addr));
            if addr.and_then(|addr| addr.checked_add(num_bytes.saturating_sub(1))).is_none() {
                let Region { base_addr, block_stride, .. } = *region;
                return Err(Error::AddressOverflow { block_id, region_index, base_addr, block_stride, num_bytes });
            }
        }
        Ok(())
    }
}

/// A chunk as callers of the seed API give it: tokens `token_start..token_end`, found in one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenSpan {
    /// First token.
    pub token_start: i64,
    /// One past the last token.
    pub token_end: i64,
}

impl TokenSpan {
    /// Checks that the span holds whole hash blocks.
    ///
    /// # Errors
    /// [`Error::SpanNotAligned`], also when the length leaves 64 bits.
    pub fn check_aligned(&self, grid: &ChunkGrid) -> Result<(), Error> {
        let Self { token_start, token_end } = *self;
        let hash_block_size = grid.hash_block_size();
        match token_end.checked_sub(token_start) {
            Some(span) if span % hash_block_size == 0 => Ok(()),
            _ => Err(Error::SpanNotAligned { token_start, token_end, hash_block_size }),
        }
    }

    /// Blocks that the span covers.
    ///
    /// # Errors
    /// [`Error::ChunkRange`] for a start below 0 or an end before the start: both would name other bytes.
    pub fn num_blocks(&self, grid: &ChunkGrid) -> Result<u64, Error> {
        let Self { token_start, token_end } = *self;
        if token_start < 0 || token_end < token_start {
            return Err(Error::ChunkRange { token_start, token_end });
        }
        Ok((token_end - token_start).unsigned_abs().div_ceil(grid.block_size().unsigned_abs()))
    }
}

/// Bytes of `num_blocks` blocks in `region`.
fn region_bytes(region: &Region, num_blocks: u64) -> Result<u64, Error> {
    let block_bytes = region.block_bytes;
    block_bytes.checked_mul(num_blocks).ok_or(Error::SizeOverflow { num_blocks, block_bytes })
}

/// The last id of a block that ends inside 64 bits in `region`; `None` when not even block 0 does.
fn last_block_id(region: &Region) -> Option<u64> {
    let room = (u64::MAX - region.base_addr).checked_sub(region.block_bytes.saturating_sub(1))?;
    Some(room.checked_div(region.block_stride).unwrap_or(u64::MAX))
}
