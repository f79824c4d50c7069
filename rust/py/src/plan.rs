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
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use crate::chunks::{PyChunkGrid, selection};
use crate::errors::{LayoutError, to_py};
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
    /// Of each part of the plan.
    origins: Arc<[Origin]>,
    keys: Attribute,
    addrs: Attribute,
    sizes: Attribute,
    block_ids: Attribute,
    chunks: Attribute,
    hashes: Attribute,
}

/// What the lists of one part are made from.
struct Origin {
    grid: Py<PyChunkGrid>,
    regions: Py<PyRegionTable>,
    /// The request's hashes, when they came as a list: `hashes` then gives these objects instead of new ones.
    block_hashes: Option<Py<PyList>>,
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
    grid: &Bound<'py, PyChunkGrid>,
    regions: &Bound<'py, PyRegionTable>,
    token_len: &Bound<'py, PyAny>,
    block_hashes: Bound<'py, PyAny>,
    block_ids: &Bound<'py, PyAny>,
    mask_num: &Bound<'py, PyAny>,
    chunk_mask: Option<&Bound<'py, PyAny>>,
    put_step: &Bound<'py, PyAny>,
    put_step_rank: &Bound<'py, PyAny>,
    null_block_id: Option<i64>,
) -> PyResult<PyTransferPlan> {
    let py = regions.py();
    let table = regions.get().table();
    let hashes = HashSource::new(block_hashes);
    let selection = ChunkSelection {
        num_hashes: hashes.num_hashes(py)?,
        mask_len: chunk_mask.map(PyAnyMethods::len).transpose()?,
        ..selection([token_len, mask_num, put_step, put_step_rank])?
    };
    let chunk_grid = *grid.get().grid();
    let chunks = chunk_grid.chunks(&selection).map_err(to_py)?;
    let mut reader = hashes.reader(py)?;
    let blocks = BlockTable::new(block_ids, chunk_grid.block_size());
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
        let planned = PlannedChunk { token_start, token_end, block_id, hash_index: chunk.hash_index };
        reader.read(chunk.hash_index, |hash| part.push(planned, hash))?;
    }
    let plan = Plan::new(part).map_err(to_py)?;
    let block_hashes = hashes.snapshot(py);
    let origin = Origin { grid: grid.clone().unbind(), regions: regions.clone().unbind(), block_hashes };
    Ok(PyTransferPlan::new(plan, Arc::new([origin])))
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
            let mut writers: Vec<Option<KeyWriter>> = self.origins.iter().map(|_| None).collect();
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
            self.by_part(py, |origin, chunks| origin.regions.get().rows(py, chunks.iter().map(|c| c.block_id)))
        })
    }

    /// Sizes in bytes, in the shape of `addrs`; all chunks of a group share one tuple.
    #[getter]
    fn sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        made_once(&self.sizes, py, || {
            let rows = self.origins.iter().map(|origin| origin.regions.get().size_row(py));
            let rows = rows.collect::<PyResult<Vec<_>>>()?;
            PyList::new(py, self.plan.chunks().map(|(part_index, _)| &rows[part_index]))
        })
    }

    /// The block of each chunk.
    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        made_once(&self.block_ids, py, || PyList::new(py, self.plan.chunks().map(|(_, chunk)| chunk.block_id)))
    }

    /// `(token_start, token_end)` of each chunk.
    #[getter]
    fn chunks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        made_once(&self.chunks, py, || self.by_part(py, |origin, chunks| origin.grid.get().spans(py, chunks)))
    }

    /// The hash that names each chunk, as bytes.
    #[getter]
    fn hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        made_once(&self.hashes, py, || {
            let hashes = self.plan.iter().map(|item| {
                let given = self.origins[item.part_index].block_hashes.as_ref();
                let given = given.and_then(|list| list.bind(py).get_item(item.chunk.hash_index).ok());
                let given = given.and_then(|hash| hash.cast_into_exact::<PyBytes>().ok());
                given.unwrap_or_else(|| PyBytes::new(py, item.chunk_hash))
            });
            PyList::new(py, hashes)
        })
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
        let origins = plans.iter().flat_map(|plan| plan.get().origins.iter());
        let origins = origins.map(|origin| origin.clone_ref(py)).collect();
        Ok(Self::new(Plan::concat(&parts).map_err(to_py)?, origins))
    }

    fn __repr__(&self) -> PyResult<String> {
        Ok(format!("TransferPlan({} chunks, {} bytes)", self.plan.len(), self.num_bytes()?))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.origins.iter().try_for_each(|origin| {
            visit.call(&origin.grid)?;
            visit.call(&origin.regions)?;
            visit.call(&origin.block_hashes)
        })
    }
}

impl PyTransferPlan {
    fn new(plan: Plan, origins: Arc<[Origin]>) -> Self {
        Self {
            plan,
            origins,
            keys: Attribute::new(),
            addrs: Attribute::new(),
            sizes: Attribute::new(),
            block_ids: Attribute::new(),
            chunks: Attribute::new(),
            hashes: Attribute::new(),
        }
    }

    fn with(&self, plan: Plan) -> Self {
        Self::new(plan, Arc::clone(&self.origins))
    }

    /// One tuple per chunk, in the order of the plan, made for the chunks of each part in one go.
    fn by_part<'py>(
        &self,
        py: Python<'py>,
        make: impl Fn(&Origin, &[PlannedChunk]) -> PyResult<Vec<Option<Bound<'py, PyTuple>>>>,
    ) -> PyResult<Bound<'py, PyList>> {
        if let [origin] = &*self.origins {
            let chunks: Vec<_> = self.plan.chunks().map(|(_, chunk)| chunk).collect();
            return PyList::new(py, make(origin, &chunks)?);
        }
        let mut parts = Vec::with_capacity(self.origins.len());
        for (index, origin) in self.origins.iter().enumerate() {
            let own = self.plan.chunks().filter(|(part_index, _)| *part_index == index).map(|(_, chunk)| chunk);
            parts.push(make(origin, &own.collect::<Vec<_>>())?.into_iter());
        }
        // Each part gave as many tuples as it has chunks, so none runs out.
        let tuples: Vec<_> = self.plan.chunks().filter_map(|(part_index, _)| parts[part_index].next()).collect();
        PyList::new(py, tuples)
    }
}

impl Origin {
    fn clone_ref(&self, py: Python<'_>) -> Self {
        Self {
            grid: self.grid.clone_ref(py),
            regions: self.regions.clone_ref(py),
            block_hashes: self.block_hashes.as_ref().map(|list| list.clone_ref(py)),
        }
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
