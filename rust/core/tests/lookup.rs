//! The lookup against a naive twin that knows the whole pool, and what it may ask for.
#![allow(clippy::unwrap_used, clippy::panic)]

use mooncrate_core::Error;
use mooncrate_core::lookup::{GroupKind, Lookup, LookupGroup};
use proptest::prelude::*;

/// `pool[group][namespace][hash_index]`.
type Pool = Vec<Vec<Vec<bool>>>;

#[derive(Debug, Clone)]
struct Case {
    num_tokens: i64,
    num_hashes: usize,
    groups: Vec<LookupGroup>,
    pool: Pool,
}

/// Every length that the pool can give, from the longest down; looks at everything.
fn naive_hits(case: &Case, hash_block_size: i64) -> impl Iterator<Item = i64> {
    let hashed = i64::try_from(case.num_hashes).unwrap() * hash_block_size;
    let is_good = move |length: i64| {
        case.groups.iter().zip(&case.pool).all(|(group, pool)| {
            let num_chunks = length / group.block_size;
            let needed = match group.kind {
                GroupKind::FullAttention => num_chunks,
                GroupKind::Recurrent => 1,
                GroupKind::SlidingWindow { window } => {
                    ((window - 1 + group.block_size - 1) / group.block_size).max(1).min(num_chunks)
                }
            };
            length % group.block_size == 0
                && (num_chunks - needed..num_chunks).all(|chunk| {
                    let hash = (chunk + 1) * group.block_size / hash_block_size - 1;
                    pool.iter().all(|namespace| namespace[usize::try_from(hash).unwrap()])
                })
        })
    };
    (1..case.num_tokens.min(hashed + 1)).rev().filter(move |length| is_good(*length)).chain([0])
}

/// Whether a search may leave pieces out: only without full attention, and in long prompts.
fn is_sampled(case: &Case) -> bool {
    let unit = case.groups.iter().fold(1, |unit, group| lcm(unit, group.block_size));
    let reach = |group: &LookupGroup| match group.kind {
        GroupKind::FullAttention => i64::MAX,
        GroupKind::Recurrent => 1,
        GroupKind::SlidingWindow { window } => ((window - 2).max(0) / group.block_size * group.block_size) / unit + 1,
    };
    let longest = case.groups.iter().map(reach).max().unwrap();
    case.num_tokens / unit / 240 >= longest
}

fn lcm(a: i64, b: i64) -> i64 {
    (1..=b).map(|factor| a * factor).find(|multiple| multiple % b == 0).unwrap()
}

/// Plays a lookup against the pool; returns the hit, the keys asked, and the number of calls.
fn play(case: &Case, hash_block_size: i64) -> (i64, usize, usize) {
    let mut lookup = Lookup::new(case.num_tokens, case.num_hashes, &case.groups, hash_block_size).unwrap();
    let mut asked = std::collections::HashSet::new();
    let mut num_calls = 0;
    while !lookup.queries().is_empty() {
        assert_eq!(lookup.num_hit_tokens(), 0, "no answer before it is decided");
        let mut answers = Vec::new();
        for query in lookup.queries() {
            for hash in query.hash_indices() {
                assert!(asked.insert((query.group, query.namespace, hash)), "{query:?} asks {hash} again");
                answers.push(case.pool[query.group][query.namespace][hash]);
            }
        }
        // Absent at the end may as well not be answered.
        while answers.last() == Some(&false) {
            answers.pop();
        }
        lookup.feed(&answers).unwrap();
        num_calls += 1;
    }
    assert!(lookup.is_decided());
    assert_eq!(lookup.num_keys_asked(), asked.len());
    (lookup.num_hit_tokens(), asked.len(), num_calls)
}

fn group() -> impl Strategy<Value = LookupGroup> {
    let kind = prop_oneof![
        2 => Just(GroupKind::FullAttention),
        2 => (1_i64..80).prop_map(|window| GroupKind::SlidingWindow { window }),
        1 => Just(GroupKind::Recurrent),
    ];
    (kind, prop_oneof![Just(4_i64), Just(8), Just(12), Just(16)], 1_usize..4)
        .prop_map(|(kind, block_size, num_namespaces)| LookupGroup { kind, block_size, num_namespaces })
}

/// Presence with `num_holes` holes in a thousand chunks, as eviction leaves them.
fn presence(state: &mut u64, num_hashes: usize, num_holes: u64) -> Vec<bool> {
    let mut next = || {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state
    };
    (0..num_hashes).map(|_| next() % 1000 >= num_holes).collect()
}

fn case() -> impl Strategy<Value = Case> {
    let groups = proptest::collection::vec(group(), 1..4);
    let num_holes = prop_oneof![Just(0_u64), 1_u64..30, 1_u64..500];
    (0_i64..3_000, 0_usize..800, groups, num_holes, 1..u64::MAX).prop_map(
        |(num_tokens, num_hashes, groups, num_holes, mut state)| {
            let mut pool = Pool::new();
            for group in &groups {
                let row = |_| presence(&mut state, num_hashes, num_holes);
                pool.push((0..group.num_namespaces).map(row).collect());
            }
            Case { num_tokens, num_hashes, groups, pool }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn hit_is_the_longest_that_every_group_and_namespace_can_give(case in case()) {
        let hit = play(&case, 4).0;
        if is_sampled(&case) {
            prop_assert!(naive_hits(&case, 4).any(|length| length == hit));
        } else {
            prop_assert_eq!(Some(hit), naive_hits(&case, 4).next());
        }
    }

    /// As saving leaves them: the pool has the start of each prompt, in each namespace up to another length.
    #[test]
    fn of_prefixes_the_hit_is_the_longest_also_where_only_samples_are_asked(
        mut case in case(), reaches in proptest::collection::vec(0_usize..800, 12)
    ) {
        for (row, reach) in case.pool.iter_mut().flatten().zip(reaches) {
            row.iter_mut().enumerate().for_each(|(index, is_present)| *is_present = index < reach);
        }
        prop_assert_eq!(Some(play(&case, 4).0), naive_hits(&case, 4).next());
    }
}

fn full(num_namespaces: usize) -> LookupGroup {
    LookupGroup { kind: GroupKind::FullAttention, block_size: 16, num_namespaces }
}

fn uniform(num_tokens: i64, groups: Vec<LookupGroup>, is_present: bool) -> Case {
    let num_hashes = usize::try_from(num_tokens / 16).unwrap();
    let pool = groups.iter().map(|group| vec![vec![is_present; num_hashes]; group.num_namespaces]).collect();
    Case { num_tokens, num_hashes, groups, pool }
}

#[test]
fn a_cold_prompt_costs_one_window_whatever_its_length() {
    for num_tokens in [4_096 + 1, 131_072, 1_048_576] {
        assert_eq!(play(&uniform(num_tokens, vec![full(8)], false), 16), (0, 256, 1));
    }
}

#[test]
fn without_full_attention_a_cold_prompt_costs_a_few_hundred_keys_whatever_its_length() {
    let window = |window| LookupGroup { kind: GroupKind::SlidingWindow { window }, ..full(8) };
    let recurrent = LookupGroup { kind: GroupKind::Recurrent, ..full(8) };
    for groups in
        [vec![recurrent], vec![window(100)], vec![window(4_096)], vec![window(131_072)], vec![window(2), recurrent]]
    {
        for num_tokens in [4_096 + 1, 131_072, 1_048_576] {
            let mut case = uniform(num_tokens, groups.clone(), false);
            let (hit, num_keys, num_calls) = play(&case, 16);
            assert!(hit == 0 && num_keys <= 512 && num_calls <= 4, "{groups:?}, {num_tokens}: {num_keys}");
            // With all of it under the first namespace and nothing under the others.
            case.pool.iter_mut().for_each(|rows| rows[0].fill(true));
            let (hit, num_keys, _) = play(&case, 16);
            let num_needed: usize = if groups[0] == window(131_072) { 8_192 } else { 256 };
            assert!(hit == 0 && num_keys <= 8 * 512 + 8 * num_needed, "{groups:?}, {num_tokens}: {num_keys}");
        }
    }
}

#[test]
fn a_state_at_the_end_of_the_turn_before_is_found_though_it_stands_alone() {
    let recurrent = LookupGroup { kind: GroupKind::Recurrent, ..full(2) };
    for distance in [1, 2, 100, 256] {
        let mut case = uniform(1_048_576, vec![recurrent], false);
        let chunk = 65_535 - distance;
        case.pool[0].iter_mut().for_each(|row| row[chunk] = true);
        let hit = i64::try_from(chunk + 1).unwrap() * 16;
        assert_eq!(play(&case, 16).0, hit, "{distance} chunks before the end");
    }
}

#[test]
fn a_full_hit_asks_each_key_once_in_growing_windows() {
    let (hit, num_keys, num_calls) = play(&uniform(131_072, vec![full(8)], true), 16);
    assert_eq!((hit, num_keys), (131_056, 8_191 * 8));
    // Windows of 256, 1,024, 4,096 and the rest, two calls each.
    assert_eq!(num_calls, 8);
}

#[test]
fn other_namespaces_are_asked_only_as_far_as_the_first_one_reached() {
    let mut case = uniform(16_000, vec![full(4)], true);
    case.pool[0][0][10..].fill(false);
    assert_eq!(play(&case, 16), (160, 256 + 3 * 10, 2));
}

#[test]
fn one_missing_namespace_of_four_is_no_hit() {
    let mut case = uniform(640, vec![full(4)], true);
    case.pool[0][3].fill(false);
    assert_eq!(play(&case, 16).0, 0);
}

#[test]
fn a_full_prompt_hit_is_derived_again_below_the_last_token() {
    for (num_tokens, hit) in [(0, 0), (1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (64, 48), (65, 64)] {
        let mut case = uniform(64, vec![full(1)], true);
        case.num_tokens = num_tokens;
        assert_eq!(play(&case, 16).0, hit, "{num_tokens} tokens");
    }
}

#[test]
fn a_window_asks_for_the_end_of_the_prefix_only() {
    let window = LookupGroup { kind: GroupKind::SlidingWindow { window: 65 }, block_size: 16, num_namespaces: 2 };
    let case = uniform(16_000, vec![full(1), window], true);
    // 999 chunks of full attention, then 4 chunks of the window under each namespace.
    let (hit, num_keys, _) = play(&case, 16);
    assert_eq!((hit, num_keys), (15_984, 999 + 4 * 2));
}

#[test]
fn answers_to_other_keys_are_refused() {
    let mut lookup = Lookup::new(64, 4, &[full(1)], 16).unwrap();
    assert_eq!(lookup.feed(&[true; 4]), Err(Error::TooManyAnswers { num_answers: 4, num_keys: 3 }));
    lookup.feed(&[]).unwrap();
    assert_eq!(lookup.num_hit_tokens(), 0);
    assert_eq!(lookup.feed(&[true]), Err(Error::TooManyAnswers { num_answers: 1, num_keys: 0 }));
}

#[test]
fn groups_that_make_no_sense_are_refused() {
    let of = |group: LookupGroup| Lookup::new(64, 4, &[group], 16).map(|_| ());
    assert_eq!(Lookup::new(64, 4, &[], 16).map(|_| ()), Err(Error::NoGroups));
    assert_eq!(of(full(0)), Err(Error::NoKeyPrefix { group_id: 0 }));
    assert_eq!(
        of(LookupGroup { block_size: 24, ..full(1) }),
        Err(Error::BlockNotMultiple { block_size: 24, hash_block_size: 16 })
    );
    let window = GroupKind::SlidingWindow { window: 0 };
    assert_eq!(of(LookupGroup { kind: window, ..full(1) }), Err(Error::NotPositive { name: "window", value: 0 }));
    let huge = LookupGroup { block_size: (i64::MAX / 16) * 16, ..full(1) };
    let odd = LookupGroup { block_size: 48, ..full(1) };
    assert_eq!(Lookup::new(64, 4, &[huge, odd], 16).map(|_| ()), Err(Error::NoCommonMultiple));
}
