//! Plans: what moves between an engine's blocks and the pool.
//!
//! Lists are made when an attribute is read, once, and only for the chunks that are left.

use std::sync::Arc;

use mooncrate_core::chunks::ChunkSelection;
use mooncrate_core::hashes::resolve_index;
use mooncrate_core::keys::KeyWriter;
use mooncrate_core::plan::{Plan, PlanPart, PlannedChunk};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyList, PyString};
use pyo3::{PyTraverseError, PyVisit};

use crate::chunks::PyChunkGrid;
use crate::errors::{LayoutError, extract_i64, to_py};
use crate::hashes::HashSource;
use crate::lookup::extract_presence;
use crate::regions::{BlockTable, PyRegionTable};

/// Chunks of a request with their keys, addresses and sizes, in the order in which they go to the store.
///
/// Made by `ChunkedTokenDatabase.plan`. Attributes are lists with one entry per chunk, made when they are first read;
/// they must not be changed. The methods give plans that share what this one was made from.
#[pyclass(frozen, name = "TransferPlan", module = "mooncrate")]
pub(crate) struct PyTransferPlan {
    plan: Plan,
    /// The region table of each part of the plan.
    tables: Arc<[Py<PyRegionTable>]>,
    keys: Attribute,
    addrs: Attribute,
    sizes: Attribute,
    block_ids: Attribute,
    chunks: Attribute,
    hashes: Attribute,
}

/// A list that is made once.
type Attribute = PyOnceLock<Py<PyList>>;

/// Plans a request in one call: the chunks that `process_tokens` gives, resolved to blocks.
#[pyfunction]
#[pyo3(signature = (
    key_prefix, grid, regions, token_len, block_hashes, block_ids, mask_num, chunk_mask, put_step, put_step_rank,
    null_block_id
))]
#[allow(clippy::too_many_arguments)] // one call per request is the point
pub(crate) fn plan<'py>(
    key_prefix: &str,
    grid: &PyChunkGrid,
    regions: &Bound<'py, PyRegionTable>,
    token_len: &Bound<'py, PyAny>,
    block_hashes: Bound<'py, PyAny>,
    block_ids: &Bound<'py, PyAny>,
    mask_num: i64,
    chunk_mask: Option<&Bound<'py, PyAny>>,
    put_step: i64,
    put_step_rank: i64,
    null_block_id: Option<i64>,
) -> PyResult<PyTransferPlan> {
    let py = regions.py();
    let table = regions.get().table();
    let hashes = HashSource::new(block_hashes);
    let selection = ChunkSelection {
        token_len: extract_i64(token_len, "token_len")?,
        num_hashes: hashes.num_hashes(py)?,
        mask_num,
        mask_len: chunk_mask.map(PyAnyMethods::len).transpose()?,
        put_step,
        put_step_rank,
    };
    let chunks = grid.0.chunks(&selection).map_err(to_py)?;
    let mut reader = hashes.reader(py)?;
    let blocks = BlockTable::new(block_ids, grid.0.block_size());
    let mut part = PlanPart::new(key_prefix, table.regions().len(), table.row_bytes().map_err(to_py)?);
    part.reserve(chunks.len(), 32);
    for chunk in chunks {
        if let Some(mask) = chunk_mask
            && !mask.get_item(chunk.mask_index)?.is_truthy()?
        {
            continue;
        }
        let block_id = blocks.block_id(chunk.token_start, chunk.token_end)?;
        if Some(block_id) == null_block_id {
            part.count_null_block();
            continue;
        }
        table.check_block(block_id, 1).map_err(to_py)?;
        let (token_start, token_end) = (chunk.token_start, chunk.token_end);
        let planned = PlannedChunk { token_start, token_end, block_id };
        reader.read(chunk.hash_index, |hash| part.push(planned, hash))?;
    }
    let plan = Plan::new(part).map_err(to_py)?;
    Ok(PyTransferPlan::new(plan, Arc::new([regions.clone().unbind()])))
}

#[pymethods]
impl PyTransferPlan {
    fn __len__(&self) -> usize {
        self.plan.len()
    }

    /// Pool keys.
    #[getter]
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        made_once(&self.keys, py, || {
            let mut writers: Vec<Option<KeyWriter>> = self.tables.iter().map(|_| None).collect();
            let keys = self.plan.iter().map(|item| {
                let writer = writers[item.part_index].get_or_insert_with(|| KeyWriter::new(item.part.key_prefix()));
                PyString::new(py, writer.key(item.chunk_hash))
            });
            PyList::new(py, keys)
        })
    }

    /// Addresses: one tuple per chunk, one entry per region, kept per block by the database.
    #[getter]
    fn addrs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        made_once(&self.addrs, py, || {
            if let [table] = &*self.tables {
                let block_ids: Vec<i64> = self.plan.iter().map(|item| item.chunk.block_id).collect();
                return PyList::new(py, table.get().rows(py, &block_ids)?);
            }
            let mut rows: Vec<_> = Vec::with_capacity(self.tables.len());
            for (index, table) in self.tables.iter().enumerate() {
                let own = self.plan.iter().filter(|item| item.part_index == index);
                let block_ids: Vec<i64> = own.map(|item| item.chunk.block_id).collect();
                rows.push(table.get().rows(py, &block_ids)?.into_iter());
            }
            let merged: Option<Vec<_>> = self.plan.iter().map(|item| rows[item.part_index].next()).collect();
            PyList::new(py, merged.unwrap_or_default())
        })
    }

    /// Sizes in bytes, in the shape of `addrs`; all chunks of a group share one tuple.
    #[getter]
    fn sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        made_once(&self.sizes, py, || {
            let rows = self.tables.iter().map(|table| table.get().size_row(py)).collect::<PyResult<Vec<_>>>()?;
            PyList::new(py, self.plan.iter().map(|item| &rows[item.part_index]))
        })
    }

    /// The block of each chunk.
    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        made_once(&self.block_ids, py, || PyList::new(py, self.plan.iter().map(|item| item.chunk.block_id)))
    }

    /// `(token_start, token_end)` of each chunk.
    #[getter]
    fn chunks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        made_once(&self.chunks, py, || {
            PyList::new(py, self.plan.iter().map(|item| (item.chunk.token_start, item.chunk.token_end)))
        })
    }

    /// The hash that names each chunk, as bytes.
    #[getter]
    fn hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        made_once(&self.hashes, py, || PyList::new(py, self.plan.iter().map(|item| PyBytes::new(py, item.chunk_hash))))
    }

    /// Bytes of all chunks in all their regions.
    #[getter]
    fn num_bytes(&self) -> PyResult<u64> {
        self.plan.num_bytes().map_err(to_py)
    }

    /// Chunks that were left out because their block is the null block.
    #[getter]
    fn num_null_blocks(&self) -> usize {
        self.plan.num_null_blocks()
    }

    /// The chunks whose answer is not 1: what a save has left to do.
    ///
    /// Args:
    ///     exists: The store's answers, one per key; chunks past the last answer count as missing.
    ///
    /// Raises:
    ///     LayoutError: There are more answers than chunks.
    fn missing(&self, exists: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(self.with(self.plan.missing(&extract_presence(exists)?).map_err(to_py)?))
    }

    /// The chunks at `indices`, in that order; negative ones count from the end.
    ///
    /// Raises:
    ///     IndexError: An index is outside.
    fn select(&self, indices: &Bound<'_, PyAny>) -> PyResult<Self> {
        let len = self.plan.len();
        let indices = indices.try_iter()?.map(|index| {
            let index = index?.extract::<i64>()?;
            resolve_index(index, len).ok_or_else(|| PyIndexError::new_err(format!("chunk {index} of {len}")))
        });
        Ok(self.with(self.plan.select(&indices.collect::<PyResult<Vec<_>>>()?)))
    }

    /// The same chunks, beginning with chunk `n`; counts past either end go round.
    fn rotate(&self, n: i64) -> PyResult<Self> {
        let len = i64::try_from(self.plan.len())?;
        let n = n.checked_rem_euclid(len).unwrap_or(0);
        Ok(self.with(self.plan.rotate(n.try_into()?)))
    }

    /// Cut into plans of consecutive chunks, within the bounds given.
    ///
    /// Args:
    ///     max_bytes: Bytes per plan; None for no bound.
    ///     max_segments: Addresses per plan; None for no bound.
    ///
    /// A chunk that is over a bound by itself goes alone: it cannot be cut.
    ///
    /// Raises:
    ///     LayoutError: A bound is below 1.
    #[pyo3(signature = (max_bytes=None, max_segments=None))]
    fn split(&self, max_bytes: Option<i64>, max_segments: Option<i64>) -> PyResult<Vec<Self>> {
        let max_bytes = bound("max_bytes", max_bytes)?;
        let max_segments = bound("max_segments", max_segments)?;
        Ok(self.plan.split(max_bytes, max_segments).into_iter().map(|plan| self.with(plan)).collect())
    }

    /// The chunks of several plans (of other KV cache groups, say), one after the other.
    #[staticmethod]
    fn concat(py: Python<'_>, plans: Vec<Py<Self>>) -> PyResult<Self> {
        let parts: Vec<&Plan> = plans.iter().map(|plan| &plan.get().plan).collect();
        let tables = plans.iter().flat_map(|plan| plan.get().tables.iter());
        let tables = tables.map(|table| table.clone_ref(py)).collect();
        Ok(Self::new(Plan::concat(&parts).map_err(to_py)?, tables))
    }

    fn __repr__(&self) -> PyResult<String> {
        Ok(format!("TransferPlan({} chunks, {} bytes)", self.plan.len(), self.num_bytes()?))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.tables.iter().try_for_each(|table| visit.call(table))
    }
}

impl PyTransferPlan {
    fn new(plan: Plan, tables: Arc<[Py<PyRegionTable>]>) -> Self {
        Self {
            plan,
            tables,
            keys: Attribute::new(),
            addrs: Attribute::new(),
            sizes: Attribute::new(),
            block_ids: Attribute::new(),
            chunks: Attribute::new(),
            hashes: Attribute::new(),
        }
    }

    fn with(&self, plan: Plan) -> Self {
        Self::new(plan, Arc::clone(&self.tables))
    }
}

fn made_once<'py>(
    attribute: &Attribute,
    py: Python<'py>,
    make: impl FnOnce() -> PyResult<Bound<'py, PyList>>,
) -> PyResult<Bound<'py, PyList>> {
    Ok(attribute.get_or_try_init(py, || make().map(Bound::unbind))?.bind(py).clone())
}

fn bound(name: &str, value: Option<i64>) -> PyResult<u64> {
    match value {
        None => Ok(u64::MAX),
        Some(value) if value > 0 => Ok(value.unsigned_abs()),
        Some(value) => Err(LayoutError::new_err(format!("{name} {value} is not at least 1"))),
    }
}
