//! Keeps the cyclic garbage collector out of the way while many lists are made.
//!
//! # Rationale
//! CPython collects once per 700 new containers. While 16,384 rows of integers are made, that is 23 collections, each of
//! which looks at every integer of every young row to find cycles that cannot be there: a third of the time of the call.
//! A row is looked at once instead, at the first collection after the call.

use pyo3::intern;
use pyo3::prelude::*;

/// Below this many rows the calls into `gc` cost more than they save.
const MIN_ROWS: usize = 512;

/// Switches the collector on again when dropped, on every way out.
struct Paused<'py>(Bound<'py, PyModule>);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        // `gc.enable` takes nothing and fails at nothing; a drop has nobody to tell.
        let _ = self.0.call_method0(intern!(self.0.py(), "enable"));
    }
}

/// Runs `make`, which makes `num_rows` lists, without collections; the collector is then as it was before.
pub(crate) fn paused<T>(py: Python<'_>, num_rows: usize, make: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    if num_rows < MIN_ROWS {
        return make();
    }
    let gc = py.import(intern!(py, "gc"))?;
    if !gc.call_method0(intern!(py, "isenabled"))?.is_truthy()? {
        return make();
    }
    gc.call_method0(intern!(py, "disable"))?;
    let _paused = Paused(gc);
    make()
}
