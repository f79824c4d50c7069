//! Tuples kept for the next request that needs them.

use std::sync::{Mutex, PoisonError};

use mooncrate_core::rows::RowCache;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyTuple;

/// Tuples by id: made the first time that one is asked for, the least recently used ones dropped.
pub(crate) struct TupleCache(Mutex<RowCache<Py<PyTuple>>>);

impl TupleCache {
    pub(crate) fn new(max_rows: usize) -> Self {
        Self(Mutex::new(RowCache::new(max_rows)))
    }

    /// The tuple of each id; `make` makes those that are not there.
    pub(crate) fn get<'py>(
        &self,
        py: Python<'py>,
        ids: impl ExactSizeIterator<Item = i64> + Clone,
        mut make: impl FnMut(i64) -> PyResult<Bound<'py, PyTuple>>,
    ) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        // No Python object is made or dropped under the lock: either may run other code, which may ask for rows.
        let mut rows: Vec<Option<Bound<'py, PyTuple>>> = {
            let mut cache = self.0.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
            ids.clone().map(|id| cache.get(id).map(|row| row.bind(py).clone())).collect()
        };
        let mut made = Vec::new();
        for (id, row) in ids.zip(&mut rows).filter(|(_, row)| row.is_none()) {
            let tuple = make(id)?;
            made.push((id, tuple.clone().unbind()));
            *row = Some(tuple);
        }
        if !made.is_empty() {
            let mut gone = Vec::new();
            let mut cache = self.0.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
            for (id, row) in made {
                gone.extend(cache.insert(id, row));
            }
            drop(cache);
        }
        Ok(rows.into_iter().flatten().collect())
    }
}
