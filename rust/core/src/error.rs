//! What can be wrong with a description of chunks, hashes or memory.

/// A contradiction in the input, with the numbers that show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A count of tokens or bytes that has to be at least 1.
    #[error("{value} is not a {name}: at least 1 is needed")]
    NotPositive {
        /// What was counted.
        name: &'static str,
        /// What it was.
        value: i64,
    },
    /// Blocks that do not hold a whole number of hash blocks.
    #[error("block_size ({block_size}) must be a multiple of hash_block_size ({hash_block_size})")]
    BlockNotMultiple {
        /// Tokens per block.
        block_size: i64,
        /// Tokens per hash.
        hash_block_size: i64,
    },
    /// A view over chunk hashes whose target is not a multiple of what was hashed.
    #[error("target_block_size ({target_block_size}) is not a multiple of hash_block_size ({hash_block_size})")]
    TargetNotMultiple {
        /// Tokens per chunk.
        target_block_size: i64,
        /// Tokens per hash.
        hash_block_size: i64,
    },
    /// A stride of ranks below 1.
    #[error("put_step ({put_step}) must be greater than 0")]
    PutStep {
        /// The stride.
        put_step: i64,
    },
    /// A rank that owns no chunk, so what it should save would never be saved.
    #[error("put_step_rank ({put_step_rank}) is not in 0..{put_step}")]
    PutStepRank {
        /// The rank.
        put_step_rank: i64,
        /// The stride.
        put_step: i64,
    },
    /// A request that ends inside a hash block.
    #[error("token_len ({token_len}) is not a multiple of hash_block_size ({hash_block_size})")]
    TokensNotAligned {
        /// Tokens of the request.
        token_len: i64,
        /// Tokens per hash.
        hash_block_size: i64,
    },
    /// A request with more tokens than hashes.
    #[error("token_len ({token_len}) needs {num_needed} block hashes of {hash_block_size} tokens, got {num_hashes}")]
    TooFewHashes {
        /// Tokens of the request.
        token_len: i64,
        /// Tokens per hash.
        hash_block_size: i64,
        /// Hashes needed.
        num_needed: i64,
        /// Hashes given.
        num_hashes: usize,
    },
    /// A chunk whose length is not in whole hash blocks.
    #[error("chunk {token_start}..{token_end} does not hold a whole number of {hash_block_size}-token hash blocks")]
    SpanNotAligned {
        /// First token.
        token_start: i64,
        /// One past the last token.
        token_end: i64,
        /// Tokens per hash.
        hash_block_size: i64,
    },
    /// A chunk that starts before the request does or ends before its own start.
    #[error("chunk {token_start}..{token_end} is not a range of tokens of the request")]
    ChunkRange {
        /// First token.
        token_start: i64,
        /// One past the last token.
        token_end: i64,
    },
    /// A hash width below 0.
    #[error("{hash_len} is not a number of bytes per hash")]
    HashLen {
        /// The width.
        hash_len: i64,
    },
    /// Regions of which nothing says how long a block is.
    #[error("block_len is empty but there are {num_regions} regions")]
    NoBlockLen {
        /// Regions given.
        num_regions: usize,
    },
    /// A block id that no engine hands out.
    #[error("block id {block_id} is negative")]
    NegativeBlockId {
        /// The id.
        block_id: i64,
    },
    /// A block id past the end of the registered memory.
    #[error("block id {block_id} is not below the {num_blocks} registered blocks")]
    BlockIdPastEnd {
        /// The id.
        block_id: i64,
        /// Blocks registered.
        num_blocks: u64,
    },
    /// Blocks that lie in each other's bytes.
    #[error("region {region_index}: blocks of {block_bytes} bytes overlap, {block_stride} bytes apart")]
    BlocksOverlap {
        /// The region.
        region_index: usize,
        /// Bytes of a block.
        block_bytes: u64,
        /// Bytes from one block to the next.
        block_stride: u64,
    },
    /// Several blocks asked for as one run of bytes where other bytes lie between them.
    #[error(
        "{num_blocks} blocks of region {region_index} are not one run of bytes: they are {block_bytes} bytes long, \
         {block_stride} apart"
    )]
    BlocksApart {
        /// Blocks asked for.
        num_blocks: u64,
        /// The region.
        region_index: usize,
        /// Bytes of a block.
        block_bytes: u64,
        /// Bytes from one block to the next.
        block_stride: u64,
    },
    /// More answers than keys were asked for.
    #[error("{num_answers} answers to {num_keys} keys")]
    TooManyAnswers {
        /// Answers given.
        num_answers: usize,
        /// Keys asked.
        num_keys: usize,
    },
    /// A plan too large to be counted.
    #[error("{num_chunks} chunks are more than a plan can hold")]
    TooManyChunks {
        /// Chunks.
        num_chunks: usize,
    },
    /// A plan whose bytes do not fit 64 bits.
    #[error("the bytes of {num_chunks} chunks do not fit 64 bits")]
    PlanOverflow {
        /// Chunks.
        num_chunks: usize,
    },
    /// A lookup without any KV cache group.
    #[error("a lookup needs at least one KV cache group")]
    NoGroups,
    /// A KV cache group that nobody stores anything for.
    #[error("KV cache group {group_id} has no key prefix to look under")]
    NoKeyPrefix {
        /// The group.
        group_id: usize,
    },
    /// Block sizes that have no common multiple in 64 bits.
    #[error("the block sizes of the KV cache groups have no common multiple below 2^63")]
    NoCommonMultiple,
    /// A block that would end past the last 64-bit address.
    #[error(
        "block {block_id} of region {region_index} (base {base_addr:#x}, stride {block_stride}, {num_bytes} bytes) \
         ends past the last 64-bit address"
    )]
    AddressOverflow {
        /// The block.
        block_id: i64,
        /// The region.
        region_index: usize,
        /// Where the region begins.
        base_addr: u64,
        /// Bytes from one block to the next.
        block_stride: u64,
        /// Bytes asked for.
        num_bytes: u64,
    },
    /// A chunk whose bytes in one region do not fit 64 bits.
    #[error("{num_blocks} blocks of {block_bytes} bytes do not fit 64 bits")]
    SizeOverflow {
        /// Blocks of the chunk.
        num_blocks: u64,
        /// Bytes of a block.
        block_bytes: u64,
    },
}

/// How a caller in another language should raise an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The reference API asserts this.
    Assertion,
    /// A description that contradicts itself.
    Layout,
    /// Arithmetic that leaves 64 bits.
    Overflow,
}

impl Error {
    /// The kind of this error.
    ///
    /// ```
    /// use mooncrate_core::{Error, ErrorKind};
    /// assert_eq!(Error::PutStep { put_step: 0 }.kind(), ErrorKind::Assertion);
    /// ```
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::TargetNotMultiple { .. }
            | Self::PutStep { .. }
            | Self::TokensNotAligned { .. }
            | Self::TooFewHashes { .. }
            | Self::SpanNotAligned { .. } => ErrorKind::Assertion,
            Self::NotPositive { .. }
            | Self::BlockNotMultiple { .. }
            | Self::PutStepRank { .. }
            | Self::ChunkRange { .. }
            | Self::HashLen { .. }
            | Self::NoBlockLen { .. }
            | Self::NegativeBlockId { .. }
            | Self::BlockIdPastEnd { .. }
            | Self::BlocksOverlap { .. }
            | Self::BlocksApart { .. }
            | Self::TooManyAnswers { .. }
            | Self::TooManyChunks { .. }
            | Self::NoGroups
            | Self::NoKeyPrefix { .. }
            | Self::NoCommonMultiple => ErrorKind::Layout,
            Self::AddressOverflow { .. } | Self::SizeOverflow { .. } | Self::PlanOverflow { .. } => ErrorKind::Overflow,
        }
    }
}
