//! Tuples kept for the next request that needs them.

use std::sync::{Mutex, MutexGuard, PoisonError};

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

    /// The tuple of each id, none left out; `make` makes those that are not there.
    pub(crate) fn get<'py>(
        &self,
        py: Python<'py>,
        ids: impl ExactSizeIterator<Item = i64> + Clone,
        mut make: impl FnMut(i64) -> PyResult<Bound<'py, PyTuple>>,
    ) -> PyResult<Vec<Option<Bound<'py, PyTuple>>>> {
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
        Ok(rows)
    }
}

/// Tuples by position, made in order up to the last one asked for.
pub(crate) struct TupleTable {
    tuples: Mutex<Vec<Py<PyTuple>>>,
    max_len: usize,
}

impl TupleTable {
    pub(crate) fn new(max_len: usize) -> Self {
        Self { tuples: Mutex::new(Vec::new()), max_len }
    }

    /// The tuples at `indices`; `make` makes those that are not there. Past the table's end they are not kept.
    pub(crate) fn get<'py>(
        &self,
        py: Python<'py>,
        indices: impl ExactSizeIterator<Item = usize> + Clone,
        make: impl Fn(usize) -> PyResult<Bound<'py, PyTuple>>,
    ) -> PyResult<Vec<Option<Bound<'py, PyTuple>>>> {
        let len = indices.clone().max().map_or(0, |last| last + 1).min(self.max_len);
        let known = self.lock(py).len();
        // As above, nothing is made under the lock. Should another thread have been faster, its tuples are equal.
        let made = (known..len).map(|index| Ok(make(index)?.unbind())).collect::<PyResult<Vec<_>>>()?;
        let mut tuples = self.lock(py);
        if tuples.len() == known {
            tuples.extend(made.iter().map(|tuple| tuple.clone_ref(py)));
        }
        let mut found: Vec<_> =
            indices.clone().map(|index| tuples.get(index).map(|tuple| tuple.bind(py).clone())).collect();
        drop(tuples);
        for (index, tuple) in indices.zip(&mut found).filter(|(_, tuple)| tuple.is_none()) {
            *tuple = Some(make(index)?);
        }
        Ok(found)
    }

    fn lock(&self, py: Python<'_>) -> MutexGuard<'_, Vec<Py<PyTuple>>> {
        self.tuples.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }
}
