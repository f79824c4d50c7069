//! Plans against the same steps on a plain list of chunks.
#![allow(clippy::unwrap_used, clippy::panic)]

use mooncrate_core::Error;
use mooncrate_core::plan::{Plan, PlanPart, PlannedChunk};
use mooncrate_core::rows::RowCache;
use proptest::prelude::*;

/// Block id, hash, bytes, regions.
type Item = (i64, Vec<u8>, u64, usize);

fn part(prefix: &str, num_chunks: i64, num_regions: usize, chunk_bytes: u64) -> PlanPart {
    let mut part = PlanPart::new(prefix, num_regions, chunk_bytes);
    for i in 0..num_chunks {
        let hash = vec![u8::try_from(i % 251).unwrap(); usize::try_from(i % 3).unwrap()];
        let (token_start, hash_index) = (i * 16, usize::try_from(i).unwrap());
        let chunk = PlannedChunk { token_start, token_end: token_start + 16, block_id: 1_000 + i, hash_index };
        part.push(chunk, &hash);
    }
    part
}

fn items(plan: &Plan, chunk_bytes: u64, num_regions: usize) -> Vec<Item> {
    plan.iter().map(|item| (item.chunk.block_id, item.chunk_hash.to_vec(), chunk_bytes, num_regions)).collect()
}

proptest! {
    #[test]
    fn narrowing_equals_the_same_steps_on_a_list(
        num_chunks in 0_i64..40,
        answers in proptest::collection::vec(any::<bool>(), 0..40),
        n in 0_usize..100,
        max_bytes in 1_u64..400,
        max_segments in 1_u64..20,
    ) {
        let plan = Plan::new(part("p", num_chunks, 3, 64)).unwrap();
        let all = items(&plan, 64, 3);
        if answers.len() > all.len() {
            let error = Error::TooManyAnswers { num_answers: answers.len(), num_keys: all.len() };
            prop_assert_eq!(plan.missing(&answers).map(|_| ()), Err(error));
            return Ok(());
        }
        let missing = plan.missing(&answers).unwrap();
        let left: Vec<Item> =
            all.iter().enumerate().filter(|(i, _)| answers.get(*i) != Some(&true)).map(|(_, item)| item.clone()).collect();
        prop_assert_eq!(items(&missing, 64, 3), left.clone());
        prop_assert_eq!(missing.num_bytes().unwrap(), 64 * left.len() as u64);

        let rotated = missing.rotate(n);
        let order: Vec<Item> = (0..left.len()).map(|i| left[(i + n) % left.len()].clone()).collect();
        prop_assert_eq!(items(&rotated, 64, 3), order.clone());

        let pieces = rotated.split(max_bytes, max_segments);
        let joined: Vec<Item> = pieces.iter().flat_map(|piece| items(piece, 64, 3)).collect();
        prop_assert_eq!(joined, order);
        for (i, piece) in pieces.iter().enumerate() {
            let fits = |len: usize| 64 * len as u64 <= max_bytes && 3 * len as u64 <= max_segments;
            prop_assert!(piece.len() == 1 || fits(piece.len()));
            // Greedy: the first chunk of the next piece would not have fitted.
            prop_assert!(i + 1 == pieces.len() || !fits(piece.len() + 1));
        }
    }

    #[test]
    fn the_cache_keeps_the_most_recently_used_rows(
        max_rows in 1_usize..10,
        uses in proptest::collection::vec(0_i64..20, 1..200),
    ) {
        let mut cache = RowCache::new(max_rows);
        let mut recent: Vec<i64> = Vec::new();
        for id in uses {
            let is_known = cache.get(id).is_some();
            prop_assert_eq!(is_known, recent.contains(&id));
            recent.retain(|other| *other != id);
            recent.push(id);
            if !is_known {
                let gone = cache.insert(id, id);
                if recent.len() > max_rows {
                    prop_assert_eq!(gone, vec![recent.remove(0)]);
                }
            }
            prop_assert_eq!(cache.len(), recent.len());
        }
    }
}

#[test]
fn concatenated_plans_keep_their_parts_apart() {
    let first = Plan::new(part("a", 3, 2, 10)).unwrap();
    let second = Plan::new(part("b", 2, 5, 100)).unwrap();
    let plan = Plan::concat(&[&first, &second.rotate(1)]).unwrap();
    let seen: Vec<_> =
        plan.iter().map(|item| (item.part_index, item.part.key_prefix().to_owned(), item.chunk.block_id)).collect();
    let expected = [(0, "a", 1000), (0, "a", 1001), (0, "a", 1002), (1, "b", 1001), (1, "b", 1000)];
    assert_eq!(seen, expected.map(|(part, prefix, block)| (part, prefix.to_owned(), block)));
    assert_eq!(plan.num_bytes(), Ok(230));
    let pieces = plan.split(u64::MAX, 7);
    assert_eq!(pieces.iter().map(Plan::len).collect::<Vec<_>>(), [3, 1, 1]);
    assert!(Plan::concat(&[]).unwrap().is_empty());
}

#[test]
fn bytes_past_64_bits_are_an_error() {
    let plan = Plan::new(part("p", 2, 1, u64::MAX / 2 + 1)).unwrap();
    assert_eq!(plan.num_bytes(), Err(Error::PlanOverflow { num_chunks: 2 }));
    assert_eq!(plan.split(u64::MAX - 1, 9).len(), 2);
    assert_eq!(plan.split(u64::MAX, 9).len(), 1, "no bound");
}

#[test]
fn a_cache_of_no_rows_keeps_none() {
    let mut cache = RowCache::new(0);
    assert_eq!(cache.insert(1, "row"), ["row"]);
    assert!(cache.is_empty());
}
