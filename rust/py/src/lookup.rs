//! Lookups: windows of keys to ask for, answers to feed.

use mooncrate_core::keys::KeyWriter;
use mooncrate_core::lookup::{GroupKind, Lookup, LookupGroup};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString};
use pyo3::{PyTraverseError, PyVisit};

use crate::errors::{LayoutError, extract_i64, to_py};
use crate::hashes::HashSource;

/// Decides how long a prefix the pool can give, asking as little as possible.
///
/// Args:
///     num_tokens: Tokens of the request; a hit stays below the last one.
///     block_hashes: One hash per `hash_block_size` tokens, in any form; only those asked for are touched.
///     groups: For each KV cache group its key prefixes, one per rank namespace that must hold a chunk, and its
///         `CacheGroup`.
///     hash_block_size: Tokens per hash.
///
/// Ask the store for `next_keys()` and `feed` its answers until there are no keys.
///
/// Raises:
///     LayoutError: There is no group, a group has no prefix, or its block size is not a multiple of the hash block.
#[pyclass(name = "LookupPlan", module = "mooncrate")]
pub(crate) struct PyLookupPlan {
    lookup: Lookup,
    hashes: HashSource,
    /// By group and namespace.
    writers: Vec<Vec<KeyWriter>>,
}

#[pymethods]
impl PyLookupPlan {
    #[new]
    fn new(
        num_tokens: &Bound<'_, PyAny>,
        block_hashes: Bound<'_, PyAny>,
        groups: &Bound<'_, PyAny>,
        hash_block_size: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let py = num_tokens.py();
        let hashes = HashSource::new(block_hashes);
        let mut lookup_groups = Vec::new();
        let mut writers = Vec::new();
        for pair in groups.try_iter()? {
            let (key_prefixes, group): (Vec<String>, Bound<'_, PyAny>) = pair?.extract()?;
            lookup_groups.push(lookup_group(&group, key_prefixes.len())?);
            writers.push(key_prefixes.iter().map(|prefix| KeyWriter::new(prefix)).collect());
        }
        let num_tokens = extract_i64(num_tokens, "num_tokens")?;
        let hash_block_size = extract_i64(hash_block_size, "hash_block_size")?;
        let num_hashes = hashes.num_hashes(py)?;
        let lookup = Lookup::new(num_tokens, num_hashes, &lookup_groups, hash_block_size).map_err(to_py)?;
        Ok(Self { lookup, hashes, writers })
    }

    /// Make the keys to ask for now, in the order in which answers are expected; empty when the answer is there.
    fn next_keys<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let mut keys = Vec::with_capacity(self.lookup.num_keys());
        let mut reader = self.hashes.reader(py)?;
        for query in self.lookup.queries() {
            let writer = &mut self.writers[query.group][query.namespace];
            for index in query.hash_indices() {
                reader.read(index, |hash| keys.push(PyString::new(py, writer.key(hash))))?;
            }
        }
        PyList::new(py, keys)
    }

    /// Take the store's answers to `next_keys()`: 1 for present; anything else, and no answer, for absent.
    ///
    /// Raises:
    ///     LayoutError: There are more answers than keys.
    fn feed(&mut self, exists: &Bound<'_, PyAny>) -> PyResult<()> {
        self.lookup.feed(&extract_presence(exists)?).map_err(to_py)
    }

    /// Tokens that can be loaded, in whole blocks of every group; 0 until the answer is there.
    #[getter]
    fn num_hit_tokens(&self) -> i64 {
        self.lookup.num_hit_tokens()
    }

    /// Keys asked for so far, those of `next_keys()` included.
    #[getter]
    fn num_keys_asked(&self) -> usize {
        self.lookup.num_keys_asked()
    }

    fn __repr__(&self) -> String {
        let state = if self.lookup.is_decided() { "decided" } else { "undecided" };
        format!("LookupPlan({state}, {} hit tokens)", self.lookup.num_hit_tokens())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.hashes.traverse(&visit)
    }
}

/// Which of the store's answers say that a key is there.
pub(crate) fn extract_presence(exists: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
    if let Ok(list) = exists.cast::<PyList>() {
        return list.iter().map(|answer| Ok(answer.extract::<i64>()? == 1)).collect();
    }
    exists.try_iter()?.map(|answer| Ok(answer?.extract::<i64>()? == 1)).collect()
}

fn lookup_group(group: &Bound<'_, PyAny>, num_namespaces: usize) -> PyResult<LookupGroup> {
    let kind = group.getattr("kind")?.str()?;
    let kind = match kind.to_str()? {
        "full_attention" => GroupKind::FullAttention,
        "sliding_window" => GroupKind::SlidingWindow { window: extract_i64(&group.getattr("window")?, "window")? },
        "recurrent" => GroupKind::Recurrent,
        other => return Err(LayoutError::new_err(format!("{other} is not a kind of KV cache group"))),
    };
    let block_size = extract_i64(&group.getattr("block_size")?, "block_size")?;
    Ok(LookupGroup { kind, block_size, num_namespaces })
}
