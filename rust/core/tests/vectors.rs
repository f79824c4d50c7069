//! The vectors that Rust and Python share: `tests/vectors/*.json`.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use mooncrate_core::Error;
use mooncrate_core::chunks::{ChunkGrid, ChunkSelection};
use mooncrate_core::hashes::{ChunkHashIndex, HashSpans};
use mooncrate_core::keys::{KeyFields, KeyWriter, build_key, build_prefix};
use mooncrate_core::regions::{RegionTable, TokenSpan};
use serde::Deserialize;
use serde::de::DeserializeOwned;

#[derive(Deserialize)]
struct File<T> {
    vectors: Vec<T>,
}

fn vectors<T: DeserializeOwned>(name: &str) -> Vec<T> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors").join(name);
    let file: File<T> = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    assert!(file.vectors.len() > 20, "{name} lost its vectors");
    file.vectors
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

#[derive(Deserialize)]
struct KeyVector {
    cache_prefix: String,
    model_name: String,
    tp_rank: i64,
    pcp_rank: i64,
    dcp_rank: i64,
    pp_rank: i64,
    group_id: i64,
    chunk_hash: String,
    prefix: String,
    key: String,
}

#[test]
fn keys() {
    for vector in vectors::<KeyVector>("keys.json") {
        let fields = KeyFields {
            cache_prefix: &vector.cache_prefix,
            model_name: &vector.model_name,
            tp_rank: vector.tp_rank,
            pcp_rank: vector.pcp_rank,
            dcp_rank: vector.dcp_rank,
            pp_rank: vector.pp_rank,
            group_id: vector.group_id,
        };
        let prefix = build_prefix(&fields);
        assert_eq!(prefix, vector.prefix);
        assert_eq!(build_key(&prefix, &vector.chunk_hash), vector.key);
        let mut writer = KeyWriter::new(&prefix);
        assert_eq!(writer.key_from_text(&vector.chunk_hash), vector.key);
        assert_eq!(writer.key(&from_hex(&vector.chunk_hash)), vector.key);
    }
}

#[derive(Deserialize)]
struct ChunkVector {
    token_len: i64,
    block_size: i64,
    hash_block_size: i64,
    num_hashes: usize,
    mask_num: i64,
    chunk_mask: Option<Vec<bool>>,
    put_step: i64,
    put_step_rank: i64,
    chunks: Option<Vec<(i64, i64, usize)>>,
    error: Option<String>,
}

impl ChunkVector {
    fn run(&self) -> Result<Vec<(i64, i64, usize)>, Error> {
        let mask = self.chunk_mask.as_ref();
        let selection = ChunkSelection {
            token_len: self.token_len,
            num_hashes: self.num_hashes,
            mask_num: self.mask_num,
            mask_len: mask.map(Vec::len),
            put_step: self.put_step,
            put_step_rank: self.put_step_rank,
        };
        let chunks = ChunkGrid::new(self.block_size, self.hash_block_size)?.chunks(&selection)?;
        let wanted = chunks.filter(|chunk| mask.is_none_or(|mask| mask[chunk.mask_index]));
        Ok(wanted.map(|chunk| (chunk.token_start, chunk.token_end, chunk.hash_index)).collect())
    }
}

#[test]
fn chunks() {
    for vector in vectors::<ChunkVector>("chunks.json") {
        assert_eq!(vector.run().map_err(|error| error.to_string()), vector.chunks.ok_or_else(|| vector.error.unwrap()));
    }
}

#[derive(Deserialize)]
struct AddressVector {
    base_addrs: Vec<u64>,
    block_len: Vec<u64>,
    block_size: i64,
    hash_block_size: i64,
    chunks: Vec<(i64, i64)>,
    block_ids: Vec<i64>,
    addrs: Option<Vec<Vec<u64>>>,
    sizes: Option<Vec<Vec<u64>>>,
    chunk_block_ids: Option<Vec<i64>>,
    error: Option<String>,
}

type Rows = (Vec<Vec<u64>>, Vec<Vec<u64>>, Vec<i64>);

impl AddressVector {
    fn run(&self) -> Result<Rows, Error> {
        let grid = ChunkGrid::new(self.block_size, self.hash_block_size)?;
        let table = RegionTable::from_block_len(&self.base_addrs, &self.block_len)?;
        let spans: Vec<TokenSpan> =
            self.chunks.iter().map(|&(token_start, token_end)| TokenSpan { token_start, token_end }).collect();
        spans.iter().try_for_each(|span| span.check_aligned(&grid))?;
        let mut rows = Rows::default();
        for span in spans {
            let num_blocks = span.num_blocks(&grid)?;
            let block_id = self.block_ids[usize::try_from(span.token_start / self.block_size).unwrap()];
            let mut addrs = Vec::new();
            table.write_addrs(block_id, num_blocks, &mut addrs)?;
            rows.0.push(addrs);
            rows.1.push(table.sizes(num_blocks)?);
            rows.2.push(block_id);
        }
        Ok(rows)
    }
}

#[test]
fn addresses() {
    for vector in vectors::<AddressVector>("addresses.json") {
        let rows = vector.run().map_err(|error| error.to_string());
        let expected = vector.addrs.map(|addrs| (addrs, vector.sizes.unwrap(), vector.chunk_block_ids.unwrap()));
        assert_eq!(rows, expected.ok_or_else(|| vector.error.unwrap()));
    }
}

#[derive(Deserialize)]
struct SpanVector {
    num_bytes: usize,
    hash_len: i64,
    spans: Option<Vec<(usize, usize)>>,
    error: Option<String>,
}

#[test]
fn hash_spans() {
    for vector in vectors::<SpanVector>("hash_spans.json") {
        let spans = HashSpans::new(vector.num_bytes, vector.hash_len).map_err(|error| error.to_string());
        let found = spans.map(|spans| {
            let spans = (0..spans.num_hashes()).map(|index| spans.span(index));
            spans.map(|span| (span.start, span.end)).collect::<Vec<_>>()
        });
        assert_eq!(found, vector.spans.ok_or_else(|| vector.error.unwrap()));
    }
}

#[derive(Deserialize)]
struct ChunkHashVector {
    num_hashes: usize,
    hash_block_size: i64,
    target_block_size: i64,
    hash_indexes: Option<Vec<usize>>,
    error: Option<String>,
}

#[test]
fn chunk_hashes() {
    for vector in vectors::<ChunkHashVector>("chunk_hashes.json") {
        let index = ChunkHashIndex::new(vector.hash_block_size, vector.target_block_size);
        let found = index.map_err(|error| error.to_string()).map(|index| {
            let chunks = 0..index.num_chunks(vector.num_hashes);
            chunks.map(|chunk_index| index.hash_index(chunk_index)).collect::<Vec<_>>()
        });
        assert_eq!(found, vector.hash_indexes.ok_or_else(|| vector.error.unwrap()));
    }
}
