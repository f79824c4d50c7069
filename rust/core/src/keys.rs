//! The text of a pool key. Nothing else in the project knows it.
//!
//! The text is frozen: pools in production hold objects under it, so a change makes them unreachable.

use std::fmt::Write as _;

/// The fields of a key prefix: which deployment, model, rank and KV cache group the bytes belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyFields<'a> {
    /// Namespace of a deployment; left out of the text when empty.
    pub cache_prefix: &'a str,
    /// Name of the model.
    pub model_name: &'a str,
    /// Tensor-parallel rank.
    pub tp_rank: i64,
    /// Prefill-context-parallel rank.
    pub pcp_rank: i64,
    /// Decode-context-parallel rank.
    pub dcp_rank: i64,
    /// Pipeline-parallel rank.
    pub pp_rank: i64,
    /// KV cache group.
    pub group_id: i64,
}

/// The part of a key that all chunks of a rank and group share.
///
/// ```
/// use mooncrate_core::keys::{KeyFields, build_prefix};
/// let fields =
///     KeyFields { cache_prefix: "", model_name: "m", tp_rank: 1, pcp_rank: 0, dcp_rank: 0, pp_rank: 2, group_id: 3 };
/// assert_eq!(build_prefix(&fields), "m@tp_rank:1@pcp0@dcp0@pp_rank:2@group:3");
/// ```
#[must_use]
pub fn build_prefix(fields: &KeyFields<'_>) -> String {
    let KeyFields { cache_prefix, model_name, tp_rank, pcp_rank, dcp_rank, pp_rank, group_id } = fields;
    let mut text = String::with_capacity(cache_prefix.len() + model_name.len() + 64);
    if !cache_prefix.is_empty() {
        text.push_str(cache_prefix);
        text.push('@');
    }
    // Writing into a String cannot fail.
    let _ =
        write!(text, "{model_name}@tp_rank:{tp_rank}@pcp{pcp_rank}@dcp{dcp_rank}@pp_rank:{pp_rank}@group:{group_id}");
    text
}

/// A key from its prefix and the text of a chunk hash.
///
/// ```
/// assert_eq!(mooncrate_core::keys::build_key("p", "00ff"), "p@00ff");
/// ```
#[must_use]
pub fn build_key(key_prefix: &str, chunk_hash: &str) -> String {
    let mut key = String::with_capacity(key_prefix.len() + 1 + chunk_hash.len());
    key.push_str(key_prefix);
    key.push('@');
    key.push_str(chunk_hash);
    key
}

/// Characters of a 32-byte hash: room for it is made at once.
const USUAL_HEX_LEN: usize = 64;

/// Writes the keys of many chunks under one prefix, into one buffer.
///
/// ```
/// use mooncrate_core::keys::KeyWriter;
/// let mut writer = KeyWriter::new("p");
/// assert_eq!(writer.key(&[0, 255]), "p@00ff");
/// assert_eq!(writer.key(&[1]), "p@01");
/// ```
#[derive(Debug, Clone)]
pub struct KeyWriter {
    text: String,
    prefix_len: usize,
    hex: Vec<u8>,
}

impl KeyWriter {
    /// A writer for keys that begin with `key_prefix`.
    #[must_use]
    pub fn new(key_prefix: &str) -> Self {
        let mut text = String::with_capacity(key_prefix.len() + 1 + USUAL_HEX_LEN);
        text.push_str(key_prefix);
        text.push('@');
        Self { prefix_len: text.len(), text, hex: Vec::with_capacity(USUAL_HEX_LEN) }
    }

    /// The key of the chunk named by `chunk_hash`, of any width; valid until the next call.
    pub fn key(&mut self, chunk_hash: &[u8]) -> &str {
        self.hex.resize(chunk_hash.len() * 2, 0);
        self.text.truncate(self.prefix_len);
        // The buffer has two places per byte, which is all that encoding asks for.
        if let Ok(hex) = const_hex::encode_to_str(chunk_hash, &mut self.hex) {
            self.text.push_str(hex);
        }
        &self.text
    }

    /// The key of the chunk whose hash reads `chunk_hash`; valid until the next call.
    pub fn key_from_text(&mut self, chunk_hash: &str) -> &str {
        self.text.truncate(self.prefix_len);
        self.text.push_str(chunk_hash);
        &self.text
    }
}
