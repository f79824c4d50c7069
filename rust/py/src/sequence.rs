//! What makes a view a Python `Sequence`: indexing, slicing, searching and iterating, written once for all views.

use std::ops::Range;

use mooncrate_core::hashes::resolve_index;
use pyo3::exceptions::{PyIndexError, PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PySlice};
use pyo3::{PyTraverseError, PyVisit};

/// A fixed order of items that are made when asked for.
pub(crate) trait View {
    /// Items in the view.
    fn num_items(&self, py: Python<'_>) -> PyResult<usize>;
    /// Item `index`, which the caller has checked.
    fn item<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyAny>>;
}

/// `view[index]`: an item, or a list of items for a slice.
pub(crate) fn getitem<'py>(view: &impl View, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = index.py();
    let len = view.num_items(py)?;
    if let Ok(slice) = index.cast::<PySlice>() {
        let indices = slice.indices(len.try_into()?)?;
        let items = PyList::empty(py);
        // Multiplied anew each time: one step past the last item may leave the integers.
        for count in 0..indices.slicelength.cast_signed() {
            items.append(view.item(py, (indices.start + count * indices.step).cast_unsigned())?)?;
        }
        return Ok(items.into_any());
    }
    let outside = || PyIndexError::new_err(format!("hash {index} of {len}"));
    let position = match index.extract::<i64>() {
        Ok(position) => position,
        Err(error) if error.is_instance_of::<PyOverflowError>(py) => return Err(outside()),
        Err(error) => return Err(error),
    };
    view.item(py, resolve_index(position, len).ok_or_else(outside)?)
}

/// `value in view`.
pub(crate) fn contains(view: &impl View, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    let len = view.num_items(value.py())?;
    Ok(find(view, value, 0..len)?.is_some())
}

/// An end of a range to search: any integer, those past 64 bits as the nearest one.
pub(crate) fn search_bound(value: &Bound<'_, PyAny>) -> PyResult<i64> {
    match value.extract::<i64>() {
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
            Ok(if value.lt(0)? { i64::MIN } else { i64::MAX })
        }
        extracted => extracted,
    }
}

/// `view.index(value, start, stop)`.
pub(crate) fn index(
    view: &impl View,
    value: &Bound<'_, PyAny>,
    start: i64,
    stop: Option<&Bound<'_, PyAny>>,
) -> PyResult<usize> {
    let len = view.num_items(value.py())?;
    let clamp = |index: i64| resolve_index(index, len).unwrap_or(if index < 0 { 0 } else { len });
    let range = clamp(start)..stop.map(search_bound).transpose()?.map_or(len, clamp);
    find(view, value, range)?.ok_or_else(|| PyValueError::new_err(format!("not among the {len} hashes")))
}

/// `view.count(value)`.
pub(crate) fn count(view: &impl View, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    let py = value.py();
    (0..view.num_items(py)?).try_fold(0, |count, index| Ok(count + usize::from(view.item(py, index)?.eq(value)?)))
}

fn find(view: &impl View, value: &Bound<'_, PyAny>, range: Range<usize>) -> PyResult<Option<usize>> {
    for index in range {
        if view.item(value.py(), index)?.eq(value)? {
            return Ok(Some(index));
        }
    }
    Ok(None)
}

/// Iterator over the items of a view, from either end.
#[pyclass(name = "_HashIterator", module = "mooncrate._core")]
pub(crate) struct PyHashIterator {
    view: Py<PyAny>,
    indices: Range<usize>,
    is_reversed: bool,
}

impl PyHashIterator {
    pub(crate) fn forward(view: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self { indices: 0..view.len()?, view: view.clone().unbind(), is_reversed: false })
    }

    pub(crate) fn backward(view: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self { is_reversed: true, ..Self::forward(view)? })
    }
}

#[pymethods]
impl PyHashIterator {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let index = if self.is_reversed { self.indices.next_back() } else { self.indices.next() };
        index.map(|index| self.view.bind(py).get_item(index)).transpose()
    }

    fn __length_hint__(&self) -> usize {
        self.indices.len()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.view)
    }
}
