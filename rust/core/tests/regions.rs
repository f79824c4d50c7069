//! Addresses and sizes against 128-bit arithmetic, region by region.
#![allow(clippy::unwrap_used)]

use mooncrate_core::chunks::ChunkGrid;
use mooncrate_core::regions::{Region, RegionTable, TokenSpan};
use mooncrate_core::{Error, ErrorKind};
use proptest::prelude::*;

const LAST_ADDR: u128 = u64::MAX as u128;

/// Addresses and sizes, or `None` where a byte would lie past the last address.
fn wide(regions: &[Region], block_id: u64, num_blocks: u64) -> Option<(Vec<u64>, Vec<u64>)> {
    let (mut addrs, mut sizes) = (Vec::new(), Vec::new());
    for region in regions {
        let addr = u128::from(region.base_addr) + u128::from(block_id) * u128::from(region.block_stride);
        let size = u128::from(region.block_bytes) * u128::from(num_blocks);
        if size > LAST_ADDR || addr + size.saturating_sub(1) > LAST_ADDR {
            return None;
        }
        addrs.push(u64::try_from(addr).unwrap());
        sizes.push(u64::try_from(size).unwrap());
    }
    Some((addrs, sizes))
}

fn numbers() -> impl Strategy<Value = u64> {
    let near = |edge: u64| (0_u64..40).prop_map(move |back| edge - back);
    prop_oneof![0_u64..1 << 47, 0_u64..40, near(1 << 32), near(1 << 63), near(u64::MAX), any::<u64>()]
}

fn regions() -> impl Strategy<Value = Vec<Region>> {
    let usual = (0_u64..1 << 47, 0_u64..1 << 24, 0_u64..1 << 24);
    let dense = (0_u64..1 << 47, 0_u64..1 << 24).prop_map(|(base_addr, bytes)| (base_addr, bytes, bytes));
    let any_region = prop_oneof![6 => dense, 2 => usual, 1 => (numbers(), numbers(), numbers())];
    let region =
        any_region.prop_map(|(base_addr, block_stride, block_bytes)| Region { base_addr, block_stride, block_bytes });
    proptest::collection::vec(region, 0..5)
}

fn block_ids() -> impl Strategy<Value = i64> {
    prop_oneof![0_i64..10_000, numbers().prop_map(|id| i64::try_from(id >> 1).unwrap())]
}

proptest! {
    #[test]
    fn rows_equal_128_bit_arithmetic(regions in regions(), block_id in block_ids(), num_blocks in 0_u64..9) {
        let table = RegionTable::new(regions.clone(), None).unwrap();
        let mut addrs = vec![7];
        let written = table.write_addrs(block_id, num_blocks, &mut addrs);
        if num_blocks > 1 && regions.iter().any(|region| region.block_bytes != region.block_stride) {
            prop_assert!(written.is_err(), "other bytes lie between these blocks");
            prop_assert_eq!(addrs, [7], "a row that fails leaves nothing");
        } else if let Some((expected, sizes)) = wide(&regions, block_id.unsigned_abs(), num_blocks) {
            prop_assert_eq!(written, Ok(()));
            prop_assert_eq!(&addrs[1..], &expected);
            prop_assert_eq!(table.sizes(num_blocks).unwrap(), sizes);
        } else {
            prop_assert_eq!(written.unwrap_err().kind(), ErrorKind::Overflow);
            prop_assert_eq!(addrs, [7], "a row that fails leaves nothing");
        }
    }

    #[test]
    fn block_lengths_repeat(
        bases in proptest::collection::vec(0_u64..1 << 40, 0..9),
        lengths in proptest::collection::vec(0_u64..1 << 20, 1..9),
    ) {
        let table = RegionTable::from_block_len(&bases, &lengths).unwrap();
        prop_assert_eq!(table.regions().len(), bases.len());
        for (i, region) in table.regions().iter().enumerate() {
            let length = lengths[i % lengths.len()];
            let expected = Region { base_addr: bases[i], block_stride: length, block_bytes: length };
            prop_assert_eq!(*region, expected);
        }
    }

    #[test]
    fn registered_blocks_are_the_limit(num_registered in 0_u64..20, block_id in 0_i64..25, num_blocks in 0_u64..5) {
        let region = Region { base_addr: 1 << 30, block_stride: 8_192, block_bytes: 8_192 };
        let table = RegionTable::new(vec![region], Some(num_registered)).unwrap();
        let first = block_id.unsigned_abs();
        let fits = (first..first + num_blocks.max(1)).all(|id| id < num_registered);
        let error = Error::BlockIdPastEnd { block_id, num_blocks: num_registered };
        prop_assert_eq!(table.check_block(block_id, num_blocks), if fits { Ok(first) } else { Err(error) });
    }

    #[test]
    fn spans_cover_the_blocks_that_their_tokens_touch(
        hash_block_size in 1_i64..9, ratio in 1_i64..6, token_start in 0_i64..100, num_hashes in 0_i64..40,
    ) {
        let grid = ChunkGrid::new(hash_block_size * ratio, hash_block_size).unwrap();
        let span = TokenSpan { token_start, token_end: token_start + num_hashes * hash_block_size };
        prop_assert_eq!(span.check_aligned(&grid), Ok(()));
        let mut blocks: Vec<i64> = (0..span.token_end - token_start).map(|token| token / grid.block_size()).collect();
        blocks.dedup();
        prop_assert_eq!(span.num_blocks(&grid), Ok(blocks.len() as u64));
    }

    #[test]
    fn a_span_is_aligned_when_its_length_is(token_start in any::<i64>(), token_end in any::<i64>()) {
        let grid = ChunkGrid::new(48, 3).unwrap();
        let span = TokenSpan { token_start, token_end };
        let length = i128::from(token_end) - i128::from(token_start);
        let is_aligned = i64::try_from(length).is_ok() && length % 3 == 0;
        prop_assert_eq!(span.check_aligned(&grid).is_ok(), is_aligned);
        prop_assert_eq!(span.num_blocks(&grid).is_ok(), token_start >= 0 && token_end >= token_start);
    }
}

#[test]
fn addresses_above_the_signed_range_and_at_the_very_end() {
    let table = RegionTable::from_block_len(&[(1 << 63) - 4_096, 1 << 63, u64::MAX - 3 * 4_096 + 1], &[4_096]).unwrap();
    let mut addrs = Vec::new();
    table.write_addrs(2, 1, &mut addrs).unwrap();
    assert_eq!(addrs, [(1 << 63) + 4_096, (1 << 63) + 8_192, u64::MAX - 4_095]);
    let overflow = |block_id, num_bytes| {
        let base_addr = u64::MAX - 3 * 4_096 + 1;
        Err(Error::AddressOverflow { block_id, region_index: 2, base_addr, block_stride: 4_096, num_bytes })
    };
    assert_eq!(table.check_block(3, 1), overflow(3, 4_096));
    assert_eq!(table.check_block(2, 2), overflow(2, 8_192));
    assert_eq!(table.check_block(i64::MAX, 1).unwrap_err().kind(), ErrorKind::Overflow);
}

#[test]
fn regions_of_no_bytes_end_where_they_begin() {
    let table = RegionTable::from_block_len(&[0, u64::MAX], &[0]).unwrap();
    let mut addrs = Vec::new();
    table.write_addrs(i64::MAX, u64::MAX, &mut addrs).unwrap();
    assert_eq!((addrs, table.sizes(u64::MAX)), (vec![0, u64::MAX], Ok(vec![0, 0])));
    assert_eq!(RegionTable::from_block_len(&[], &[]).unwrap().check_block(i64::MAX, u64::MAX), Ok(u64::MAX >> 1));
}

#[test]
fn a_view_packed_into_a_shared_slot_moves_its_own_bytes() {
    let region = Region { base_addr: 0x1000 + 8_192, block_stride: 10_000, block_bytes: 8_192 };
    let table = RegionTable::new(vec![region], Some(4)).unwrap();
    let mut addrs = Vec::new();
    table.write_addrs(3, 1, &mut addrs).unwrap();
    assert_eq!(
        (addrs, table.sizes(1).unwrap(), table.row_bytes()),
        (vec![0x1000 + 8_192 + 30_000], vec![8_192], Ok(8_192))
    );
    let apart = Error::BlocksApart { num_blocks: 2, region_index: 0, block_bytes: 8_192, block_stride: 10_000 };
    assert_eq!(table.check_block(0, 2), Err(apart), "the bytes between them belong to others");
    let region = Region { block_bytes: 10_001, ..region };
    let overlap = Error::BlocksOverlap { region_index: 0, block_bytes: 10_001, block_stride: 10_000 };
    assert_eq!(RegionTable::new(vec![region], Some(2)), Err(overlap));
    assert!(RegionTable::new(vec![region], Some(1)).is_ok(), "one block overlaps with none");
}

#[test]
fn errors_carry_their_numbers() {
    let table = RegionTable::from_block_len(&[0], &[1 << 62]).unwrap();
    assert_eq!(RegionTable::from_block_len(&[1, 2, 3], &[]), Err(Error::NoBlockLen { num_regions: 3 }));
    for block_id in [-1, i64::MIN] {
        let error = Error::NegativeBlockId { block_id };
        assert_eq!(table.check_block(block_id, 1), Err(error));
        assert_eq!(error.to_string(), format!("block id {block_id} is negative"));
    }
    let error = Error::SizeOverflow { num_blocks: 4, block_bytes: 1 << 62 };
    assert_eq!(table.sizes(4), Err(error));
    assert_eq!(table.check_block(0, 4), Err(error));
    assert_eq!(error.to_string(), "4 blocks of 4611686018427387904 bytes do not fit 64 bits");

    let grid = ChunkGrid::new(16, 16).unwrap();
    for (token_start, token_end) in [(-16, 0), (16, 0), (i64::MIN, i64::MAX)] {
        let error = Error::ChunkRange { token_start, token_end };
        assert_eq!(TokenSpan { token_start, token_end }.num_blocks(&grid), Err(error));
        assert_eq!(error.kind(), ErrorKind::Layout);
    }
    let error = Error::SpanNotAligned { token_start: 0, token_end: 15, hash_block_size: 16 };
    assert_eq!(TokenSpan { token_start: 0, token_end: 15 }.check_aligned(&grid), Err(error));
    assert_eq!(error.kind(), ErrorKind::Assertion);
    assert_eq!(TokenSpan { token_start: 0, token_end: i64::MAX - 15 }.num_blocks(&grid), Ok((1 << 59) - 1));
}

#[test]
fn values_for_any_thread() {
    fn is_value<T: Copy + Send + Sync + 'static>() {}
    fn is_sendable<T: Clone + Send + Sync + 'static>() {}
    is_value::<Region>();
    is_value::<TokenSpan>();
    is_value::<Error>();
    is_sendable::<RegionTable>();
    assert_eq!((size_of::<Region>(), size_of::<TokenSpan>()), (24, 16));
}
