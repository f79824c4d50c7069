//! Chunks of a request, as tuples.

use mooncrate_core::chunks::{ChunkGrid, ChunkSelection, Chunks};
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use crate::errors::{extract_i64, to_py};
use crate::hashes::HashSource;

/// Tokens per chunk and per hash of one KV cache group.
#[pyclass(frozen, name = "ChunkGrid", module = "mooncrate._core")]
pub(crate) struct PyChunkGrid(pub(crate) ChunkGrid);

#[pymethods]
impl PyChunkGrid {
    #[new]
    fn new(block_size: &Bound<'_, PyAny>, hash_block_size: &Bound<'_, PyAny>) -> PyResult<Self> {
        let block_size = extract_i64(block_size, "block_size")?;
        let hash_block_size = extract_i64(hash_block_size, "hash_block_size")?;
        ChunkGrid::new(block_size, hash_block_size).map(Self).map_err(to_py)
    }

    /// Iterate over the chunks of a request: `(token_start, token_end, chunk_hash)`.
    ///
    /// As in the reference, nothing is checked and no hash is touched before the first item is asked for.
    #[pyo3(signature = (token_len, block_hashes, mask_num=0, *, chunk_mask=None, put_step=1, put_step_rank=0))]
    fn process_tokens(
        &self,
        token_len: &Bound<'_, PyAny>,
        block_hashes: Bound<'_, PyAny>,
        mask_num: i64,
        chunk_mask: Option<Py<PyAny>>,
        put_step: i64,
        put_step_rank: i64,
    ) -> PyResult<PyChunkIterator> {
        let token_len = extract_i64(token_len, "token_len")?;
        let selection = ChunkSelection { token_len, mask_num, put_step, put_step_rank, ..ChunkSelection::default() };
        let hashes = HashSource::new(block_hashes);
        Ok(PyChunkIterator { grid: self.0, selection, hashes, chunk_mask, chunks: None })
    }
}

/// Iterator over `(token_start, token_end, chunk_hash)`; it touches no hash but those it yields.
#[pyclass(name = "_ChunkIterator", module = "mooncrate._core")]
pub(crate) struct PyChunkIterator {
    grid: ChunkGrid,
    selection: ChunkSelection,
    hashes: HashSource,
    chunk_mask: Option<Py<PyAny>>,
    chunks: Option<Chunks>,
}

#[pymethods]
impl PyChunkIterator {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__<'py>(&mut self, py: Python<'py>) -> PyResult<Option<(i64, i64, Bound<'py, PyAny>)>> {
        let mut chunks = match self.chunks.take() {
            Some(chunks) => chunks,
            None => self.start(py)?,
        };
        let item = loop {
            let Some(chunk) = chunks.next() else { break None };
            if let Some(mask) = &self.chunk_mask
                && !mask.bind(py).get_item(chunk.mask_index)?.is_truthy()?
            {
                continue;
            }
            break Some((chunk.token_start, chunk.token_end, self.hashes.get(py, chunk.hash_index)?));
        };
        self.chunks = Some(chunks);
        Ok(item)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.chunk_mask)?;
        self.hashes.traverse(&visit)
    }
}

impl PyChunkIterator {
    fn start(&mut self, py: Python<'_>) -> PyResult<Chunks> {
        let num_hashes = self.hashes.num_hashes(py)?;
        let mask_len = self.chunk_mask.as_ref().map(|mask| mask.bind(py).len()).transpose()?;
        self.grid.chunks(&ChunkSelection { num_hashes, mask_len, ..self.selection }).map_err(to_py)
    }
}
