//! Chunks of a request, as tuples.

use mooncrate_core::chunks::{ChunkGrid, ChunkSelection, Chunks};
use mooncrate_core::plan::PlannedChunk;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pyo3::{PyTraverseError, PyVisit};

use crate::errors::{extract_i64, to_py};
use crate::hashes::HashSource;
use crate::rows::TupleTable;

/// Full chunks whose `(token_start, token_end)` is kept: those of a prompt of two million tokens at 16 tokens per block.
const MAX_SPANS: usize = 131_072;

/// Tokens per chunk and per hash of one KV cache group.
#[pyclass(frozen, name = "ChunkGrid", module = "mooncrate._core")]
pub(crate) struct PyChunkGrid {
    grid: ChunkGrid,
    /// `(token_start, token_end)` of full chunks: every prompt has the same ones.
    spans: TupleTable,
}

#[pymethods]
impl PyChunkGrid {
    #[new]
    fn new(block_size: &Bound<'_, PyAny>, hash_block_size: &Bound<'_, PyAny>) -> PyResult<Self> {
        let block_size = extract_i64(block_size, "block_size")?;
        let hash_block_size = extract_i64(hash_block_size, "hash_block_size")?;
        let grid = ChunkGrid::new(block_size, hash_block_size).map_err(to_py)?;
        Ok(Self { grid, spans: TupleTable::new(MAX_SPANS) })
    }

    /// Iterate over the chunks of a request: `(token_start, token_end, chunk_hash)`.
    ///
    /// As in the reference, nothing is checked and no hash is touched before the first item is asked for.
    #[pyo3(signature = (token_len, block_hashes, mask_num, chunk_mask, put_step, put_step_rank))]
    fn process_tokens(
        &self,
        token_len: Py<PyAny>,
        block_hashes: Bound<'_, PyAny>,
        mask_num: Py<PyAny>,
        chunk_mask: Option<Py<PyAny>>,
        put_step: Py<PyAny>,
        put_step_rank: Py<PyAny>,
    ) -> PyChunkIterator {
        let numbers = [token_len, mask_num, put_step, put_step_rank];
        let stage = Stage::Asked { numbers, hashes: HashSource::new(block_hashes), chunk_mask };
        PyChunkIterator { grid: self.grid, stage }
    }
}

/// The numbers of a request: `token_len`, `mask_num`, `put_step`, `put_step_rank`.
pub(crate) fn selection(numbers: [&Bound<'_, PyAny>; 4]) -> PyResult<ChunkSelection> {
    let [token_len, mask_num, put_step, put_step_rank] = numbers;
    Ok(ChunkSelection {
        token_len: extract_i64(token_len, "token_len")?,
        mask_num: extract_i64(mask_num, "mask_num")?,
        put_step: extract_i64(put_step, "put_step")?,
        put_step_rank: extract_i64(put_step_rank, "put_step_rank")?,
        ..ChunkSelection::default()
    })
}

impl PyChunkGrid {
    pub(crate) fn grid(&self) -> &ChunkGrid {
        &self.grid
    }

    /// `(token_start, token_end)` of each chunk, none left out.
    pub(crate) fn spans<'py>(
        &self,
        py: Python<'py>,
        chunks: &[PlannedChunk],
    ) -> PyResult<Vec<Option<Bound<'py, PyTuple>>>> {
        let block_size = self.grid.block_size();
        // A planned chunk starts at a multiple of the block size that is not negative.
        let indices = chunks.iter().map(|chunk| usize::try_from(chunk.token_start / block_size).unwrap_or(usize::MAX));
        let full = |index: usize| {
            let token_start = i64::try_from(index)? * block_size;
            (token_start, token_start + block_size).into_pyobject(py)
        };
        let mut spans = self.spans.get(py, indices, full)?;
        for (chunk, span) in chunks.iter().zip(&mut spans) {
            if chunk.token_end - chunk.token_start != block_size {
                *span = Some((chunk.token_start, chunk.token_end).into_pyobject(py)?);
            }
        }
        Ok(spans)
    }
}

/// Iterator over `(token_start, token_end, chunk_hash)`; it touches no hash but those it yields.
#[pyclass(name = "_ChunkIterator", module = "mooncrate._core")]
pub(crate) struct PyChunkIterator {
    grid: ChunkGrid,
    stage: Stage,
}

/// How far an iterator is. It lets go of hashes and mask when it ends, also by an error: one that began anew after an
/// error would give chunks twice.
enum Stage {
    /// Nothing was looked at.
    Asked { numbers: [Py<PyAny>; 4], hashes: HashSource, chunk_mask: Option<Py<PyAny>> },
    /// All was checked.
    Running { chunks: Chunks, hashes: HashSource, chunk_mask: Option<Py<PyAny>> },
    /// The last chunk was given, or an error raised.
    Finished,
}

#[pymethods]
impl PyChunkIterator {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__<'py>(&mut self, py: Python<'py>) -> PyResult<Option<(i64, i64, Bound<'py, PyAny>)>> {
        let (mut chunks, hashes, chunk_mask) = match std::mem::replace(&mut self.stage, Stage::Finished) {
            Stage::Asked { numbers, hashes, chunk_mask } => {
                let chunks = self.start(py, &numbers, &hashes, chunk_mask.as_ref())?;
                (chunks, hashes, chunk_mask)
            }
            Stage::Running { chunks, hashes, chunk_mask } => (chunks, hashes, chunk_mask),
            Stage::Finished => return Ok(None),
        };
        for chunk in &mut chunks {
            if let Some(mask) = &chunk_mask
                && !mask.bind(py).get_item(chunk.mask_index)?.is_truthy()?
            {
                continue;
            }
            let item = (chunk.token_start, chunk.token_end, hashes.get(py, chunk.hash_index)?);
            self.stage = Stage::Running { chunks, hashes, chunk_mask };
            return Ok(Some(item));
        }
        Ok(None)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match &self.stage {
            Stage::Asked { numbers, hashes, chunk_mask } => {
                numbers.iter().try_for_each(|number| visit.call(number))?;
                visit.call(chunk_mask)?;
                hashes.traverse(&visit)
            }
            Stage::Running { hashes, chunk_mask, .. } => {
                visit.call(chunk_mask)?;
                hashes.traverse(&visit)
            }
            Stage::Finished => Ok(()),
        }
    }

    fn __clear__(&mut self) {
        self.stage = Stage::Finished;
    }
}

impl PyChunkIterator {
    fn start(
        &self,
        py: Python<'_>,
        numbers: &[Py<PyAny>; 4],
        hashes: &HashSource,
        chunk_mask: Option<&Py<PyAny>>,
    ) -> PyResult<Chunks> {
        let selection = selection(numbers.each_ref().map(|number| number.bind(py)))?;
        let num_hashes = hashes.num_hashes(py)?;
        let chunk_mask = chunk_mask.filter(|_| num_hashes > 0);
        let mask_len = chunk_mask.map(|mask| mask.bind(py).len()).transpose()?;
        self.grid.chunks(&ChunkSelection { num_hashes, mask_len, ..selection }).map_err(to_py)
    }
}
