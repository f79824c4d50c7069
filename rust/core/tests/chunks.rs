//! The chunk iterator against looking at every chunk of a request.
#![allow(clippy::unwrap_used)]

use mooncrate_core::chunks::{Chunk, ChunkGrid, ChunkSelection, Chunks};
use mooncrate_core::{Error, ErrorKind};
use proptest::prelude::*;

/// All chunks that `selection` asks for, found by walking over the tokens.
fn walked(block_size: i64, hash_block_size: i64, selection: &ChunkSelection) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    let (mut chunk_id, mut token_start, mut mask_index) = (0, 0, 0);
    while selection.num_hashes > 0 && token_start < selection.token_len {
        let mut token_end = token_start;
        let mut num_hashes = usize::try_from(token_start / hash_block_size).unwrap();
        while token_end < selection.token_len && token_end < token_start + block_size {
            token_end += hash_block_size;
            num_hashes += 1;
        }
        if token_start >= selection.mask_num {
            if selection.mask_len.is_some_and(|mask_len| mask_index >= mask_len) {
                break;
            }
            if chunk_id % selection.put_step == selection.put_step_rank {
                chunks.push(Chunk { chunk_id, token_start, token_end, hash_index: num_hashes - 1, mask_index });
            }
            mask_index += 1;
        }
        chunk_id += 1;
        token_start += block_size;
    }
    chunks
}

fn selections() -> impl Strategy<Value = (i64, i64, ChunkSelection)> {
    (1_i64..9, 1_i64..6, 0_usize..60, 0_usize..3).prop_flat_map(|(hash_block_size, ratio, num_needed, spare)| {
        let token_len = hash_block_size * i64::try_from(num_needed).unwrap();
        let block_size = hash_block_size * ratio;
        (-9..token_len + 20, proptest::option::of(0_usize..70), 1_i64..6).prop_flat_map(
            move |(mask_num, mask_len, put_step)| {
                (0..put_step).prop_map(move |put_step_rank| {
                    let num_hashes = num_needed + spare;
                    let selection =
                        ChunkSelection { token_len, num_hashes, mask_num, mask_len, put_step, put_step_rank };
                    (block_size, hash_block_size, selection)
                })
            },
        )
    })
}

proptest! {
    #[test]
    fn chunks_equal_walking((block_size, hash_block_size, selection) in selections()) {
        let chunks = ChunkGrid::new(block_size, hash_block_size).unwrap().chunks(&selection).unwrap();
        let expected = walked(block_size, hash_block_size, &selection);
        prop_assert_eq!(chunks.len(), expected.len());
        prop_assert_eq!(chunks.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn all_ranks_together_take_every_chunk_once((block_size, hash_block_size, selection) in selections()) {
        let grid = ChunkGrid::new(block_size, hash_block_size).unwrap();
        let of_rank = |put_step_rank| grid.chunks(&ChunkSelection { put_step_rank, ..selection }).unwrap();
        let mut found: Vec<_> = (0..selection.put_step).flat_map(of_rank).collect();
        found.sort_by_key(|chunk| chunk.chunk_id);
        let all = ChunkSelection { put_step: 1, put_step_rank: 0, ..selection };
        prop_assert_eq!(found, grid.chunks(&all).unwrap().collect::<Vec<_>>());
    }

    #[test]
    fn length_counts_down((block_size, hash_block_size, selection) in selections()) {
        let mut chunks = ChunkGrid::new(block_size, hash_block_size).unwrap().chunks(&selection).unwrap();
        for left in (0..chunks.len()).rev() {
            prop_assert!(chunks.next().is_some());
            prop_assert_eq!(chunks.len(), left);
        }
        prop_assert_eq!((chunks.next(), chunks.next(), chunks.len()), (None, None, 0));
    }
}

fn spans(block_size: i64, hash_block_size: i64, selection: ChunkSelection) -> Vec<(i64, i64, usize)> {
    let chunks = ChunkGrid::new(block_size, hash_block_size).unwrap().chunks(&selection).unwrap();
    chunks.map(|chunk| (chunk.token_start, chunk.token_end, chunk.hash_index)).collect()
}

#[test]
fn boundaries_of_token_len() {
    let of = |token_len| spans(32, 16, ChunkSelection { token_len, num_hashes: 9, ..ChunkSelection::default() });
    assert_eq!(of(0), []);
    assert_eq!(of(-16), []);
    assert_eq!(of(16), [(0, 16, 0)]);
    assert_eq!(of(32), [(0, 32, 1)]);
    assert_eq!(of(48), [(0, 32, 1), (32, 48, 2)]);
    assert_eq!(of(64), [(0, 32, 1), (32, 64, 3)]);
}

#[test]
fn boundaries_of_mask_num() {
    let selection = ChunkSelection { token_len: 48, num_hashes: 3, ..ChunkSelection::default() };
    let of = |mask_num| spans(16, 16, ChunkSelection { mask_num, ..selection }).len();
    for (mask_num, num_chunks) in [(i64::MIN, 3), (-1, 3), (0, 3), (1, 2), (16, 2), (17, 1), (47, 0), (i64::MAX, 0)] {
        assert_eq!(of(mask_num), num_chunks, "mask_num {mask_num}");
    }
}

#[test]
fn ends_of_64_bits() {
    let last = i64::MAX - 15;
    let num_hashes = usize::try_from(i64::MAX / 16 + 1).unwrap();
    let selection = ChunkSelection { token_len: last - 1 + 1, num_hashes, ..ChunkSelection::default() };
    let grid = ChunkGrid::new(16, 16).unwrap();
    assert_eq!(grid.chunks(&selection).unwrap().len(), usize::try_from(last / 16).unwrap());
    let tail = ChunkSelection { mask_num: last - 16, ..selection };
    let chunks: Vec<_> = grid.chunks(&tail).unwrap().map(|chunk| (chunk.token_start, chunk.token_end)).collect();
    assert_eq!(chunks, [(last - 16, last)]);
    let rare = ChunkSelection { put_step: i64::MAX, put_step_rank: 1, ..selection };
    assert_eq!(grid.chunks(&rare).unwrap().map(|chunk| chunk.chunk_id).collect::<Vec<_>>(), [1]);
    let masked = ChunkSelection { mask_len: Some(usize::MAX), ..tail };
    assert_eq!(grid.chunks(&masked).unwrap().len(), 1);
}

#[test]
fn without_hashes_only_the_ranks_are_checked() {
    let grid = ChunkGrid::new(16, 16).unwrap();
    let none = ChunkSelection { token_len: 7, num_hashes: 0, ..ChunkSelection::default() };
    assert_eq!(grid.chunks(&none).unwrap().count(), 0);
    let error = grid.chunks(&ChunkSelection { put_step: 0, ..none }).unwrap_err();
    assert_eq!(error, Error::PutStep { put_step: 0 });
}

#[test]
fn errors_carry_their_numbers() {
    let grid = ChunkGrid::new(32, 16).unwrap();
    let good = ChunkSelection { token_len: 64, num_hashes: 4, ..ChunkSelection::default() };
    for (selection, error, kind) in [
        (ChunkSelection { put_step: -2, ..good }, Error::PutStep { put_step: -2 }, ErrorKind::Assertion),
        (
            ChunkSelection { put_step: 4, put_step_rank: 4, ..good },
            Error::PutStepRank { put_step_rank: 4, put_step: 4 },
            ErrorKind::Layout,
        ),
        (
            ChunkSelection { put_step: 4, put_step_rank: -1, ..good },
            Error::PutStepRank { put_step_rank: -1, put_step: 4 },
            ErrorKind::Layout,
        ),
        (
            ChunkSelection { token_len: 63, ..good },
            Error::TokensNotAligned { token_len: 63, hash_block_size: 16 },
            ErrorKind::Assertion,
        ),
        (
            ChunkSelection { num_hashes: 3, ..good },
            Error::TooFewHashes { token_len: 64, hash_block_size: 16, num_needed: 4, num_hashes: 3 },
            ErrorKind::Assertion,
        ),
    ] {
        assert_eq!(grid.chunks(&selection).unwrap_err(), error);
        assert_eq!(error.kind(), kind);
    }
    for (block_size, hash_block_size, error) in [
        (0, 16, Error::NotPositive { name: "block_size", value: 0 }),
        (16, 0, Error::NotPositive { name: "hash_block_size", value: 0 }),
        (-16, -16, Error::NotPositive { name: "block_size", value: -16 }),
        (24, 16, Error::BlockNotMultiple { block_size: 24, hash_block_size: 16 }),
        (16, 32, Error::BlockNotMultiple { block_size: 16, hash_block_size: 32 }),
    ] {
        assert_eq!(ChunkGrid::new(block_size, hash_block_size), Err(error));
        assert_eq!(error.kind(), ErrorKind::Layout);
    }
    assert_eq!((grid.block_size(), grid.hash_block_size()), (32, 16));
}

#[test]
fn values_for_any_thread() {
    fn is_value<T: Copy + Send + Sync + 'static>() {}
    fn is_sendable<T: Clone + Send + Sync + 'static>() {}
    is_value::<ChunkGrid>();
    is_value::<ChunkSelection>();
    is_value::<Chunk>();
    is_sendable::<Chunks>();
    assert_eq!((size_of::<ChunkGrid>(), size_of::<Chunk>()), (16, 40));
}
