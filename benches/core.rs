//! Criterion benches of the core, without Python: hash view, keys, chunks and rows.
//!
//! Each asserts its answer before it is timed and stands beside a naive row, which does the same with the plainest code
//! of the standard library.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::fmt::Write as _;
use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use mooncrate_core::chunks::{ChunkGrid, ChunkSelection};
use mooncrate_core::hashes::HashSpans;
use mooncrate_core::keys::KeyWriter;
use mooncrate_core::regions::RegionTable;

const PREFIX: &str = "meta-llama/Llama-3.1-70B@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0";
const HASH_LEN: usize = 32;
const BLOCK_SIZE: i64 = 16;
const NUM_TOKENS: [i64; 3] = [8_192, 131_072, 1_048_576];
const NUM_REGIONS: [u64; 3] = [1, 64, 128];

fn blob(num_hashes: usize) -> Vec<u8> {
    (0..num_hashes * HASH_LEN).map(|i| u8::try_from(i % 251).unwrap()).collect()
}

fn num_chunks(num_tokens: i64) -> usize {
    usize::try_from(num_tokens / BLOCK_SIZE).unwrap()
}

fn hash_view(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("hash_view");
    for num_tokens in NUM_TOKENS {
        let blob = blob(num_chunks(num_tokens));
        let spans = HashSpans::new(blob.len(), 32).unwrap();
        let sum_views = || (0..spans.num_hashes()).map(|i| u64::from(blob[spans.span(i)][0])).sum::<u64>();
        let sum_naive = || blob.chunks(HASH_LEN).map(|hash| u64::from(hash.to_vec()[0])).sum::<u64>();
        assert_eq!(sum_views(), sum_naive());
        group.throughput(Throughput::Elements(spans.num_hashes() as u64));
        group.bench_function(BenchmarkId::new("span", num_tokens), |bench| bench.iter(|| black_box(sum_views())));
        group.bench_function(BenchmarkId::new("naive", num_tokens), |bench| bench.iter(|| black_box(sum_naive())));
    }
    group.finish();
}

fn keys(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("keys");
    for num_tokens in NUM_TOKENS {
        let blob = blob(num_chunks(num_tokens));
        let written = || {
            let mut writer = KeyWriter::new(PREFIX);
            blob.chunks(HASH_LEN).map(|hash| writer.key(hash).len()).sum::<usize>()
        };
        let naive = || {
            let key = |hash: &[u8]| {
                let mut key = format!("{PREFIX}@");
                for byte in hash {
                    write!(key, "{byte:02x}").unwrap();
                }
                key
            };
            blob.chunks(HASH_LEN).map(|hash| key(hash).len()).sum::<usize>()
        };
        assert_eq!(written(), naive());
        group.throughput(Throughput::Elements(num_chunks(num_tokens) as u64));
        group.bench_function(BenchmarkId::new("writer", num_tokens), |bench| bench.iter(|| black_box(written())));
        group.bench_function(BenchmarkId::new("naive", num_tokens), |bench| bench.iter(|| black_box(naive())));
    }
    group.finish();
}

fn chunks(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("chunks");
    let grid = ChunkGrid::new(BLOCK_SIZE, BLOCK_SIZE).unwrap();
    for num_tokens in NUM_TOKENS {
        for put_step in [1, 8] {
            let num_hashes = num_chunks(num_tokens);
            let selection = ChunkSelection { token_len: num_tokens, num_hashes, put_step, ..ChunkSelection::default() };
            let strided = || grid.chunks(&selection).unwrap().map(|chunk| chunk.token_end).sum::<i64>();
            let naive = || {
                let own = (0..num_tokens / BLOCK_SIZE).filter(|id| id % put_step == 0);
                own.map(|id| (id * BLOCK_SIZE + BLOCK_SIZE).min(num_tokens)).sum::<i64>()
            };
            assert_eq!(strided(), naive());
            let id = |name| BenchmarkId::new(format!("{name}/step{put_step}"), num_tokens);
            group.throughput(Throughput::Elements(num_hashes as u64));
            group.bench_function(id("strided"), |bench| bench.iter(|| black_box(strided())));
            group.bench_function(id("naive"), |bench| bench.iter(|| black_box(naive())));
        }
    }
    group.finish();
}

fn rows(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("rows");
    let num_blocks: i64 = 8_192;
    for num_regions in NUM_REGIONS {
        let base_addrs: Vec<u64> = (0..num_regions).map(|i| 0x7f00_0000_0000 + (i << 32)).collect();
        let table = RegionTable::from_block_len(&base_addrs, &[65_536]).unwrap();
        let written = || {
            let mut row = Vec::with_capacity(base_addrs.len());
            (0..num_blocks).fold(0, |sum: u64, block_id| {
                row.clear();
                table.write_addrs(block_id, 1, &mut row).unwrap();
                row.iter().fold(sum, |sum, addr| sum ^ addr)
            })
        };
        let naive = || {
            (0..num_blocks.unsigned_abs()).fold(0, |sum: u64, block_id| {
                let row: Vec<u64> = base_addrs
                    .iter()
                    .map(|base| base.checked_add(block_id.checked_mul(65_536).unwrap()).unwrap())
                    .collect();
                row.iter().fold(sum, |sum, addr| sum ^ addr)
            })
        };
        assert_eq!(written(), naive());
        group.throughput(Throughput::Elements(num_blocks.unsigned_abs() * num_regions));
        group.bench_function(BenchmarkId::new("table", num_regions), |bench| bench.iter(|| black_box(written())));
        group.bench_function(BenchmarkId::new("naive", num_regions), |bench| bench.iter(|| black_box(naive())));
    }
    group.finish();
}

criterion_group!(benches, hash_view, keys, chunks, rows);
criterion_main!(benches);
