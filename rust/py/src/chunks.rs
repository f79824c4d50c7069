//! Chunks of a request, as tuples.

use mooncrate_core::chunks::{ChunkGrid, ChunkSelection, Chunks};
use mooncrate_core::plan::PlannedChunk;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pyo3::{PyTraverseError, PyVisit};

use crate::errors::{extract_i64, to_py};
use crate::hashes::HashSource;
use crate::rows::TupleCache;

/// Full chunks whose `(token_start, token_end)` is kept: those of a prompt of two million tokens at 16 tokens per block.
const MAX_SPANS: usize = 131_072;

/// Tokens per chunk and per hash of one KV cache group.
#[pyclass(frozen, name = "ChunkGrid", module = "mooncrate._core")]
pub(crate) struct PyChunkGrid {
    grid: ChunkGrid,
    /// `(token_start, token_end)` of full chunks: every prompt has the same ones.
    spans: TupleCache,
}

#[pymethods]
impl PyChunkGrid {
    #[new]
    fn new(block_size: &Bound<'_, PyAny>, hash_block_size: &Bound<'_, PyAny>) -> PyResult<Self> {
        let block_size = extract_i64(block_size, "block_size")?;
        let hash_block_size = extract_i64(hash_block_size, "hash_block_size")?;
        let grid = ChunkGrid::new(block_size, hash_block_size).map_err(to_py)?;
        Ok(Self { grid, spans: TupleCache::new(MAX_SPANS) })
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
        Ok(PyChunkIterator { grid: self.grid, selection, hashes, chunk_mask, chunks: None })
    }
}

impl PyChunkGrid {
    pub(crate) fn grid(&self) -> &ChunkGrid {
        &self.grid
    }

    /// `(token_start, token_end)` of each chunk.
    pub(crate) fn spans<'py>(&self, py: Python<'py>, chunks: &[PlannedChunk]) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let block_size = self.grid.block_size();
        let starts = chunks.iter().map(|chunk| chunk.token_start);
        let full = |token_start: i64| (token_start, token_start + block_size).into_pyobject(py);
        let mut spans = self.spans.get(py, starts, full)?;
        for (chunk, span) in chunks.iter().zip(&mut spans) {
            if chunk.token_end - chunk.token_start != block_size {
                *span = (chunk.token_start, chunk.token_end).into_pyobject(py)?;
            }
        }
        Ok(spans)
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
