//! Key text against putting parts together one by one.

use mooncrate_core::keys::{KeyFields, KeyWriter, build_key, build_prefix};
use proptest::prelude::*;

fn joined(fields: &KeyFields<'_>) -> String {
    let mut parts = Vec::new();
    if !fields.cache_prefix.is_empty() {
        parts.push(fields.cache_prefix.to_owned());
    }
    parts.push(fields.model_name.to_owned());
    parts.push(format!("tp_rank:{}", fields.tp_rank));
    parts.push(format!("pcp{}", fields.pcp_rank));
    parts.push(format!("dcp{}", fields.dcp_rank));
    parts.push(format!("pp_rank:{}", fields.pp_rank));
    parts.push(format!("group:{}", fields.group_id));
    parts.join("@")
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .filter_map(|digit| char::from_digit(digit.into(), 16))
        .collect()
}

proptest! {
    #[test]
    fn prefixes_equal_joined_parts(
        cache_prefix in ".{0,12}",
        model_name in ".{0,12}",
        ranks in any::<[i64; 5]>(),
    ) {
        let [tp_rank, pcp_rank, dcp_rank, pp_rank, group_id] = ranks;
        let (cache_prefix, model_name) = (cache_prefix.as_str(), model_name.as_str());
        let fields = KeyFields { cache_prefix, model_name, tp_rank, pcp_rank, dcp_rank, pp_rank, group_id };
        prop_assert_eq!(build_prefix(&fields), joined(&fields));
    }

    #[test]
    fn a_writer_writes_what_each_key_reads(
        prefix in ".{0,20}",
        hashes in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..70), 0..10),
    ) {
        let mut writer = KeyWriter::new(&prefix);
        for hash in hashes {
            let expected = format!("{prefix}@{}", hex(&hash));
            prop_assert_eq!(&build_key(&prefix, &hex(&hash)), &expected);
            prop_assert_eq!(writer.key(&hash), &expected);
            prop_assert_eq!(writer.key_from_text(&hex(&hash)), &expected);
        }
    }
}

#[test]
fn every_byte_is_two_lower_case_digits() {
    let bytes: Vec<u8> = (0..=u8::MAX).collect();
    assert_eq!(KeyWriter::new("").key(&bytes), format!("@{}", hex(&bytes)));
}

#[test]
fn a_shorter_hash_leaves_nothing_of_a_longer_one() {
    let mut writer = KeyWriter::new("p");
    assert_eq!(writer.key(&[0xab; 64]).len(), 2 + 128);
    assert_eq!(writer.key(&[0xcd]), "p@cd");
    assert_eq!(writer.key(&[]), "p@");
    assert_eq!(writer.key_from_text("text"), "p@text");
    assert_eq!(writer.clone().key(&[1, 2]), "p@0102");
}

#[test]
fn writers_can_be_sent() {
    fn is_sendable<T: Clone + Send + Sync + 'static>() {}
    is_sendable::<KeyWriter>();
}
