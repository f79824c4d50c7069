//! The extension module `mooncrate._core`: conversions between Python and `mooncrate-core`, and nothing else.
// Docs of exported items are Python docstrings, in Python's markup.
#![allow(clippy::doc_markdown)]
// PyO3 hands arguments over by value.
#![allow(clippy::needless_pass_by_value)]

mod chunks;
mod errors;
mod hashes;
mod keys;
mod lookup;
mod plan;
mod regions;
mod rows;
mod sequence;

use pyo3::prelude::*;

/// The Rust core of mooncrate: block hashes, chunks, pool keys and addresses.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::chunks::PyChunkGrid;
    #[pymodule_export]
    use crate::hashes::{PyBlobBlockHashes, PyCompactChunkHashList, chunk_hashes_for_block_size};
    #[pymodule_export]
    use crate::keys::{build_key_string, build_prefix, key_for, keys_for};
    #[pymodule_export]
    use crate::lookup::PyLookupPlan;
    #[pymodule_export]
    use crate::plan::{PyTransferPlan, plan};
    #[pymodule_export]
    use crate::regions::PyRegionTable;
}
