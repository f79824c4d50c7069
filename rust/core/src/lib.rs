//! Chunk hashes, pool keys and KV cache addresses: the arithmetic and the text of mooncrate.
//!
//! Everything an engine asks for each token, chunk or region is answered here, once, in plain Rust: no Python, no I/O
//! and no `unsafe`. The modules are the field's nouns:
//!
//! - [`hashes`]: where a block hash lies in a flat buffer, and which hash names a chunk;
//! - [`chunks`]: which chunks of a request one rank handles;
//! - [`keys`]: the text of a pool key;
//! - [`regions`]: where the bytes of a block lie;
//! - [`rows`]: rows of addresses, kept per block;
//! - [`plan`]: the chunks of a request, as the unit that moves;
//! - [`lookup`]: how long a prefix the pool can give.
//!
//! Tokens are counted as `i64`, because callers subtract them; bytes and addresses are `u64` and never wrap.
#![forbid(unsafe_code)]

pub mod chunks;
mod error;
pub mod hashes;
pub mod keys;
pub mod lookup;
pub mod plan;
pub mod regions;
pub mod rows;

pub use error::{Error, ErrorKind};
