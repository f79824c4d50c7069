//! Views over block hashes.
//!
//! # Rationale
//! The blob stays where it is: items are slices of one `memoryview`, and keys are formatted straight from its bytes.
//!
//! # Limitations
//! A blob that somebody writes to while it is read gives the bytes of that moment, as a `memoryview` does.

use mooncrate_core::hashes::{ChunkHashIndex, HashSpans};
use pyo3::buffer::PyBuffer;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyMemoryView, PySlice};
use pyo3::{PyTraverseError, PyVisit, intern};

use crate::errors::{LayoutError, extract_i64, to_py};
use crate::sequence::{self, PyHashIterator, View, search_bound};

/// Lazy view over a flat buffer of fixed-size block hashes.
///
/// Args:
///     blob: Any C-contiguous buffer (bytes, bytearray, memoryview, numpy array); read as bytes, never copied.
///     hash_len: Bytes per hash. 0 gives an empty view. A ragged tail shorter than one hash is left out.
///
/// Items are `memoryview` slices of `hash_len` bytes; a slice of the view is a list of them. The buffer is released
/// when the view and its items are gone.
///
/// Raises:
///     LayoutError: `hash_len` is negative, or the buffer is not contiguous.
///     TypeError: `blob` is not a buffer.
#[pyclass(frozen, sequence, name = "BlobBlockHashes", module = "mooncrate.data")]
pub(crate) struct PyBlobBlockHashes {
    blob: Py<PyMemoryView>,
    spans: HashSpans,
}

#[pymethods]
impl PyBlobBlockHashes {
    #[new]
    fn new(blob: &Bound<'_, PyAny>, hash_len: &Bound<'_, PyAny>) -> PyResult<Self> {
        let hash_len = extract_i64(hash_len, "hash_len")?;
        let blob = bytes_view(blob)?;
        let spans = HashSpans::new(blob.len()?, hash_len).map_err(to_py)?;
        Ok(Self { blob: blob.unbind(), spans })
    }

    fn __len__(&self) -> usize {
        self.spans.num_hashes()
    }

    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        sequence::getitem(self, index)
    }

    fn __iter__(slf: &Bound<'_, Self>) -> PyResult<PyHashIterator> {
        PyHashIterator::forward(slf.as_any())
    }

    fn __reversed__(slf: &Bound<'_, Self>) -> PyResult<PyHashIterator> {
        PyHashIterator::backward(slf.as_any())
    }

    fn __contains__(&self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        sequence::contains(self, value)
    }

    /// Return the first index of `value` in `start..stop`. Raises ValueError when it is not there.
    #[pyo3(signature = (value, start=0, stop=None))]
    fn index(
        &self,
        value: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = search_bound)] start: i64,
        stop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        sequence::index(self, value, start, stop)
    }

    /// Return how many hashes equal `value`.
    fn count(&self, value: &Bound<'_, PyAny>) -> PyResult<usize> {
        sequence::count(self, value)
    }

    fn __repr__(&self) -> String {
        format!("BlobBlockHashes({} hashes of {} bytes)", self.spans.num_hashes(), self.spans.hash_len())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.blob)
    }
}

impl View for PyBlobBlockHashes {
    fn num_items(&self, _py: Python<'_>) -> PyResult<usize> {
        Ok(self.spans.num_hashes())
    }

    fn item<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyAny>> {
        let span = self.spans.span(index);
        self.blob.bind(py).get_item(PySlice::new(py, span.start.cast_signed(), span.end.cast_signed(), 1))
    }
}

impl PyBlobBlockHashes {
    /// Hashes in the view.
    pub(crate) fn num_hashes(&self) -> usize {
        self.spans.num_hashes()
    }
}

/// Block hashes of a request in any form; the two usual ones skip the general protocol.
pub(crate) enum HashSource {
    /// One buffer.
    Blob(Py<PyBlobBlockHashes>),
    /// A list of hashes.
    List(Py<PyList>),
    /// Anything that can be indexed.
    Sequence(Py<PyAny>),
}

impl HashSource {
    pub(crate) fn new(block_hashes: Bound<'_, PyAny>) -> Self {
        if let Ok(blob) = block_hashes.cast::<PyBlobBlockHashes>() {
            return Self::Blob(blob.clone().unbind());
        }
        match block_hashes.cast_into_exact::<PyList>() {
            Ok(list) => Self::List(list.unbind()),
            Err(error) => Self::Sequence(error.into_inner().unbind()),
        }
    }

    /// Hashes at hand: 0 for whatever Python holds to be false.
    pub(crate) fn num_hashes(&self, py: Python<'_>) -> PyResult<usize> {
        match self {
            Self::Blob(blob) => Ok(blob.get().num_hashes()),
            Self::List(list) => Ok(list.bind(py).len()),
            Self::Sequence(hashes) if hashes.bind(py).is_truthy()? => hashes.bind(py).len(),
            Self::Sequence(_) => Ok(0),
        }
    }

    /// Hash `index` as the object that it is.
    pub(crate) fn get<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Self::Blob(blob) => blob.get().item(py, index),
            Self::List(list) => list.bind(py).get_item(index),
            Self::Sequence(hashes) => hashes.bind(py).get_item(index),
        }
    }

    /// The hashes as they are now, where that costs next to nothing.
    pub(crate) fn snapshot(&self, py: Python<'_>) -> Option<Py<PyList>> {
        match self {
            Self::List(list) => Some(list.bind(py).get_slice(0, list.bind(py).len()).unbind()),
            Self::Blob(_) | Self::Sequence(_) => None,
        }
    }

    /// A reader of the bytes of hashes.
    pub(crate) fn reader<'py>(&self, py: Python<'py>) -> PyResult<HashReader<'_, 'py>> {
        match self {
            Self::Blob(blob) => BlobReader::new(py, blob.get()).map(HashReader::Blob),
            Self::List(_) | Self::Sequence(_) => Ok(HashReader::Items { source: self, py }),
        }
    }

    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self {
            Self::Blob(hashes) => visit.call(hashes),
            Self::List(hashes) => visit.call(hashes),
            Self::Sequence(hashes) => visit.call(hashes),
        }
    }
}

/// Reads the bytes of hashes one at a time.
pub(crate) enum HashReader<'source, 'py> {
    /// Straight from a buffer, without making a Python object.
    Blob(BlobReader),
    /// From the items of a sequence.
    Items {
        /// The sequence.
        source: &'source HashSource,
        /// Proof that Python may be used.
        py: Python<'py>,
    },
}

impl HashReader<'_, '_> {
    /// Calls `visit` with the bytes of hash `index`.
    pub(crate) fn read(&mut self, index: usize, visit: impl FnOnce(&[u8])) -> PyResult<()> {
        match self {
            Self::Blob(reader) => visit(reader.read(index)?),
            Self::Items { source, py } => {
                let item = source.get(*py, index)?;
                match item.cast::<PyBytes>() {
                    Ok(bytes) => visit(bytes.as_bytes()),
                    Err(_) => visit(&PyBuffer::<u8>::get(&item)?.to_vec(*py)?),
                }
            }
        }
        Ok(())
    }
}

/// The bytes of one blob.
pub(crate) struct BlobReader {
    /// Keeps the blob's memory in place while this lives.
    buffer: PyBuffer<u8>,
    spans: HashSpans,
    hash: Vec<u8>,
}

impl BlobReader {
    pub(crate) fn new(py: Python<'_>, blob: &PyBlobBlockHashes) -> PyResult<Self> {
        let buffer = PyBuffer::<u8>::get(blob.blob.bind(py))?;
        Ok(Self { buffer, spans: blob.spans, hash: vec![0; blob.spans.hash_len()] })
    }

    /// A copy of hash `index`, valid until the next call.
    pub(crate) fn read(&mut self, index: usize) -> PyResult<&[u8]> {
        let bytes = self.buffer.as_slice_ptr().filter(|_| index < self.spans.num_hashes());
        let Some(bytes) = bytes else {
            return Err(LayoutError::new_err(format!("no hash {index} in a blob of {}", self.spans.num_hashes())));
        };
        let span = self.spans.span(index);
        // SAFETY: `bytes` is the start of a contiguous buffer of initialised bytes; the export that `buffer` holds keeps
        // it allocated and as long as it was when `spans` measured it, and the span of an index below `num_hashes` ends
        // inside that length. `hash` is our own and as long as a span. Bytes are copied before anybody looks at
        // them, so a writer elsewhere can change their values, but no reference to memory that changes exists.
        #[allow(unsafe_code)]
        unsafe {
            let start = bytes.cast::<u8>().as_ptr().cast_const().add(span.start);
            std::ptr::copy_nonoverlapping(start, self.hash.as_mut_ptr(), span.len());
        }
        Ok(&self.hash)
    }
}

/// A flat view of the bytes of any contiguous buffer.
fn bytes_view<'py>(blob: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyMemoryView>> {
    let py = blob.py();
    let view = PyMemoryView::from(blob)?;
    if !view.getattr(intern!(py, "c_contiguous"))?.is_truthy()? {
        return Err(LayoutError::new_err("the blob of block hashes is not contiguous; pass a contiguous copy of it"));
    }
    let is_flat = view.getattr(intern!(py, "ndim"))?.eq(1)? && view.getattr(intern!(py, "format"))?.eq("B")?;
    if is_flat {
        return Ok(view);
    }
    if view.getattr(intern!(py, "format"))?.contains("O")? {
        return Err(PyTypeError::new_err("an array of objects holds their addresses, not the bytes of hashes"));
    }
    // `memoryview.cast` refuses formats that `struct` has no single letter for (numpy's fixed-size strings) and
    // empty shapes, while numpy takes the bytes of any contiguous buffer.
    let flat =
        py.import(intern!(py, "numpy"))?.call_method1(intern!(py, "frombuffer"), (blob, intern!(py, "uint8")))?;
    PyMemoryView::from(&flat)
}

/// View that names each chunk of `target_block_size` tokens by the last of its `hash_block_size` hashes.
///
/// The engine chains its hashes, so the last one already names the whole chunk and everything before it; a key stays
/// one digest long whatever the ratio of the sizes.
///
/// Args:
///     block_hashes: Any indexable sequence of hashes; only the item asked for is touched.
///     hash_block_size: Tokens per hash.
///     target_block_size: Tokens per chunk, a multiple of `hash_block_size`.
///
/// Raises:
///     AssertionError: `target_block_size` is not a multiple of `hash_block_size`.
///     LayoutError: One of them is below 1.
#[pyclass(frozen, sequence, name = "_CompactChunkHashList", module = "mooncrate.data")]
pub(crate) struct PyCompactChunkHashList {
    /// The hashes below, one per `hash_block_size` tokens.
    #[pyo3(get)]
    block_hashes: Py<PyAny>,
    chunk_hashes: ChunkHashIndex,
}

#[pymethods]
impl PyCompactChunkHashList {
    #[new]
    fn new(
        block_hashes: Py<PyAny>,
        hash_block_size: &Bound<'_, PyAny>,
        target_block_size: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let hash_block_size = extract_i64(hash_block_size, "hash_block_size")?;
        let target_block_size = extract_i64(target_block_size, "target_block_size")?;
        let chunk_hashes = ChunkHashIndex::new(hash_block_size, target_block_size).map_err(to_py)?;
        Ok(Self { block_hashes, chunk_hashes })
    }

    /// Hashes per chunk.
    #[getter]
    fn scale_factor(&self) -> usize {
        self.chunk_hashes.scale()
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.num_items(py)
    }

    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        sequence::getitem(self, index)
    }

    fn __iter__(slf: &Bound<'_, Self>) -> PyResult<PyHashIterator> {
        PyHashIterator::forward(slf.as_any())
    }

    fn __reversed__(slf: &Bound<'_, Self>) -> PyResult<PyHashIterator> {
        PyHashIterator::backward(slf.as_any())
    }

    fn __contains__(&self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        sequence::contains(self, value)
    }

    /// Return the first index of `value` in `start..stop`. Raises ValueError when it is not there.
    #[pyo3(signature = (value, start=0, stop=None))]
    fn index(
        &self,
        value: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = search_bound)] start: i64,
        stop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        sequence::index(self, value, start, stop)
    }

    /// Return how many hashes equal `value`.
    fn count(&self, value: &Bound<'_, PyAny>) -> PyResult<usize> {
        sequence::count(self, value)
    }

    /// Return the hash of chunk `idx`, as the reference names it.
    fn _get_value_at<'py>(&self, idx: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        sequence::getitem(self, idx)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.block_hashes)
    }
}

impl View for PyCompactChunkHashList {
    fn num_items(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.chunk_hashes.num_chunks(self.block_hashes.bind(py).len()?))
    }

    fn item<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyAny>> {
        self.block_hashes.bind(py).get_item(self.chunk_hashes.hash_index(index))
    }
}

/// One hash per chunk of `block_size` tokens: `block_hashes` itself when the sizes are equal.
///
/// Args:
///     block_hashes: Any indexable sequence of hashes, one per `hash_block_size` tokens.
///     hash_block_size: Tokens per hash.
///     block_size: Tokens per chunk, a multiple of `hash_block_size`.
///
/// Raises:
///     AssertionError: `block_size` is not a multiple of `hash_block_size`.
///     LayoutError: One of them is below 1 and they differ.
#[pyfunction]
pub(crate) fn chunk_hashes_for_block_size<'py>(
    block_hashes: Bound<'py, PyAny>,
    hash_block_size: &Bound<'py, PyAny>,
    block_size: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    if block_size.eq(hash_block_size)? {
        return Ok(block_hashes);
    }
    let py = block_hashes.py();
    let view = PyCompactChunkHashList::new(block_hashes.unbind(), hash_block_size, block_size)?;
    Ok(Bound::new(py, view)?.into_any())
}
