//! Hash views against cutting a buffer into pieces and counting.
#![allow(clippy::unwrap_used)]

use mooncrate_core::hashes::{ChunkHashIndex, HashSpans, resolve_index};
use mooncrate_core::{Error, ErrorKind};
use proptest::prelude::*;

/// Where whole pieces of `hash_len` bytes lie, by walking over the buffer.
fn walked(num_bytes: usize, hash_len: usize) -> Vec<std::ops::Range<usize>> {
    let mut spans = Vec::new();
    let mut start = 0;
    while hash_len > 0 && start + hash_len <= num_bytes {
        spans.push(start..start + hash_len);
        start += hash_len;
    }
    spans
}

/// The last hash of each whole chunk, by counting hashes.
fn counted(num_hashes: usize, scale: usize) -> Vec<usize> {
    (0..num_hashes).filter(|index| (index + 1).is_multiple_of(scale)).collect()
}

proptest! {
    #[test]
    fn spans_equal_walking(num_bytes in 0_usize..2_000, hash_len in 0_usize..100) {
        let spans = HashSpans::new(num_bytes, i64::try_from(hash_len).unwrap()).unwrap();
        let found: Vec<_> = (0..spans.num_hashes()).map(|index| spans.span(index)).collect();
        prop_assert_eq!(found, walked(num_bytes, hash_len));
        prop_assert_eq!(spans.hash_len(), hash_len);
    }

    #[test]
    fn indexes_resolve_as_in_a_list_written_twice(index in -30_i64..30, len in 0_usize..20) {
        // Position `len + index` of the items written twice is item `index` of them, counted from the end if negative.
        let twice: Vec<usize> = (0..len).chain(0..len).collect();
        let signed_len = i64::try_from(len).unwrap();
        let expected = usize::try_from(signed_len + index).ok().and_then(|position| twice.get(position).copied());
        prop_assert_eq!(resolve_index(index, len), expected);
    }

    #[test]
    fn chunk_hashes_equal_counting(num_hashes in 0_usize..200, hash_block_size in 1_i64..300, scale in 1_usize..20) {
        let target = hash_block_size * i64::try_from(scale).unwrap();
        let index = ChunkHashIndex::new(hash_block_size, target).unwrap();
        let found: Vec<_> = (0..index.num_chunks(num_hashes)).map(|chunk| index.hash_index(chunk)).collect();
        prop_assert_eq!(found, counted(num_hashes, scale));
        prop_assert_eq!(index.scale(), scale);
    }
}

#[test]
fn boundaries_of_spans() {
    for hash_len in [1_usize, 2, 16, 20, 32, 64] {
        for (num_bytes, num_hashes) in
            [(0, 0), (1, 1 / hash_len), (hash_len - 1, 0), (hash_len, 1), (2 * hash_len, 2), (2 * hash_len - 1, 1)]
        {
            let spans = HashSpans::new(num_bytes, i64::try_from(hash_len).unwrap()).unwrap();
            assert_eq!(spans.num_hashes(), num_hashes, "{num_bytes} bytes, width {hash_len}");
        }
        let ragged = HashSpans::new(hash_len + hash_len / 2, i64::try_from(hash_len).unwrap()).unwrap();
        assert_eq!(ragged.num_hashes(), 1);
    }
    assert_eq!(HashSpans::new(usize::MAX, 0).unwrap().num_hashes(), 0);
    assert_eq!(HashSpans::new(usize::MAX, 1).unwrap().span(usize::MAX - 1), usize::MAX - 1..usize::MAX);
    assert_eq!(HashSpans::new(usize::MAX, i64::MAX).unwrap().num_hashes(), 2);
}

#[test]
fn a_negative_width_is_refused() {
    for hash_len in [-1, i64::MIN] {
        let error = HashSpans::new(64, hash_len).unwrap_err();
        assert_eq!(error, Error::HashLen { hash_len });
        assert_eq!(error.kind(), ErrorKind::Layout);
        assert_eq!(error.to_string(), format!("{hash_len} is not a number of bytes per hash"));
    }
}

#[test]
fn ends_of_indexes() {
    for index in [i64::MIN, i64::MIN + 1, -4, 3, i64::MAX] {
        assert_eq!(resolve_index(index, 3), None, "{index}");
    }
    assert_eq!(resolve_index(0, 0), None);
    assert_eq!(resolve_index(-1, 0), None);
    assert_eq!(resolve_index(-3, 3), Some(0));
    assert_eq!(resolve_index(2, 3), Some(2));
    assert_eq!(resolve_index(i64::MIN, usize::MAX), Some(usize::MAX - (1 << 63)));
}

#[test]
fn sizes_that_do_not_tile_are_refused() {
    let not_multiple =
        |hash_block_size, target_block_size| Error::TargetNotMultiple { target_block_size, hash_block_size };
    for (hash_block_size, target_block_size, error) in [
        (16, 24, not_multiple(16, 24)),
        (32, 16, not_multiple(32, 16)),
        (2, i64::MAX, not_multiple(2, i64::MAX)),
        (0, 16, Error::NotPositive { name: "hash_block_size", value: 0 }),
        (-16, 32, Error::NotPositive { name: "hash_block_size", value: -16 }),
        (16, 0, Error::NotPositive { name: "target_block_size", value: 0 }),
        (16, -32, Error::NotPositive { name: "target_block_size", value: -32 }),
        (1, i64::MIN, Error::NotPositive { name: "target_block_size", value: i64::MIN }),
    ] {
        assert_eq!(ChunkHashIndex::new(hash_block_size, target_block_size), Err(error));
    }
    assert_eq!(not_multiple(16, 24).kind(), ErrorKind::Assertion);
    assert_eq!(ChunkHashIndex::new(1, i64::MAX).unwrap().num_chunks(usize::MAX), 2);
}

#[test]
fn views_are_small_values_for_any_thread() {
    fn is_value<T: Copy + Send + Sync + 'static>() {}
    is_value::<HashSpans>();
    is_value::<ChunkHashIndex>();
    assert_eq!((size_of::<HashSpans>(), size_of::<ChunkHashIndex>()), (16, 8));
}
