//! Addresses and sizes of chunks, as lists.

use mooncrate_core::chunks::ChunkGrid;
use mooncrate_core::regions::{Region, RegionTable, TokenSpan};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyTuple};

use crate::chunks::PyChunkGrid;
use crate::errors::{extract_i64, extract_u64, to_py};
use crate::rows::TupleCache;

type Rows<'py> = (Bound<'py, PyList>, Bound<'py, PyList>, Bound<'py, PyList>);

/// What a row of addresses takes in memory: the tuple, and an integer and a reference per region.
const ROW_BYTES: usize = 64;
const ADDR_BYTES: usize = 40;

/// Where the blocks of one KV cache group lie, and the rows of addresses made so far.
#[pyclass(frozen, name = "RegionTable", module = "mooncrate._core")]
pub(crate) struct PyRegionTable {
    table: RegionTable,
    rows: TupleCache,
    size_row: PyOnceLock<Py<PyTuple>>,
}

#[pymethods]
impl PyRegionTable {
    /// A table from base addresses and block lengths, which repeat when there are fewer of them.
    #[new]
    fn new(
        kv_caches_base_addr: &Bound<'_, PyAny>,
        block_len: &Bound<'_, PyAny>,
        row_cache_bytes: usize,
    ) -> PyResult<Self> {
        let base_addrs = extract_all(kv_caches_base_addr, "base address")?;
        let block_len = extract_all(block_len, "block_len")?;
        let table = RegionTable::from_block_len(&base_addrs, &block_len).map_err(to_py)?;
        Ok(Self::with(table, row_cache_bytes))
    }

    /// A table from `(base_addr, block_stride, block_bytes)` of each region, all of which hold `num_blocks` blocks.
    #[staticmethod]
    fn from_regions(
        regions: &Bound<'_, PyAny>,
        num_blocks: &Bound<'_, PyAny>,
        row_cache_bytes: usize,
    ) -> PyResult<Self> {
        let region = |region: PyResult<Bound<'_, PyAny>>| {
            let region = region?;
            Ok::<_, PyErr>(Region {
                base_addr: extract_u64(&region.getattr("base_addr")?, "base address")?,
                block_stride: extract_u64(&region.getattr("block_stride")?, "block_stride")?,
                block_bytes: extract_u64(&region.getattr("block_bytes")?, "block_bytes")?,
            })
        };
        let regions = regions.try_iter()?.map(region).collect::<PyResult<_>>()?;
        let num_blocks = extract_u64(num_blocks, "num_blocks")?;
        Ok(Self::with(RegionTable::new(regions, Some(num_blocks)).map_err(to_py)?, row_cache_bytes))
    }

    /// Addresses, sizes and block ids of many chunks, one entry each.
    fn prepare_values<'py>(
        &self,
        grid: &PyChunkGrid,
        chunks: &Bound<'py, PyAny>,
        block_ids: &Bound<'py, PyAny>,
    ) -> PyResult<Rows<'py>> {
        let py = chunks.py();
        let spans = token_spans(chunks, grid.grid())?;
        let addr_rows = empty_rows(py, spans.len())?;
        let size_rows = empty_rows(py, spans.len())?;
        let blocks = BlockTable::new(block_ids, grid.grid().block_size());
        let mut sizes = SizeRows { table: &self.table, rows: Vec::new() };
        let mut addrs = Vec::with_capacity(self.table.regions().len());
        let mut chunk_block_ids = Vec::with_capacity(spans.len());
        for ((span, addr_row), size_row) in spans.into_iter().zip(&addr_rows).zip(&size_rows) {
            let num_blocks = span.num_blocks(grid.grid()).map_err(to_py)?;
            let block_id = blocks.block_id(span.token_start, span.token_end)?;
            addrs.clear();
            self.table.write_addrs(block_id, num_blocks, &mut addrs).map_err(to_py)?;
            fill(&addr_row, PyTuple::new(py, &addrs)?.as_any())?;
            fill(&size_row, sizes.row(py, num_blocks)?.as_any())?;
            chunk_block_ids.push(block_id);
        }
        Ok((addr_rows, size_rows, PyList::new(py, chunk_block_ids)?))
    }

    /// Addresses and sizes of one block.
    fn prepare_value_for_block(&self, block_id: &Bound<'_, PyAny>) -> PyResult<(Vec<u64>, Vec<u64>)> {
        let block_id = extract_i64(block_id, "block id")?;
        let mut addrs = Vec::new();
        self.table.write_addrs(block_id, 1, &mut addrs).map_err(to_py)?;
        Ok((addrs, self.table.sizes(1).map_err(to_py)?))
    }
}

impl PyRegionTable {
    fn with(table: RegionTable, row_cache_bytes: usize) -> Self {
        let max_rows = row_cache_bytes / (ROW_BYTES + ADDR_BYTES * table.regions().len());
        Self { table, rows: TupleCache::new(max_rows), size_row: PyOnceLock::new() }
    }

    pub(crate) fn table(&self) -> &RegionTable {
        &self.table
    }

    /// The addresses of each block, made the first time that it is asked for.
    pub(crate) fn rows<'py>(
        &self,
        py: Python<'py>,
        block_ids: impl ExactSizeIterator<Item = i64> + Clone,
    ) -> PyResult<Vec<Option<Bound<'py, PyTuple>>>> {
        let mut addrs = Vec::with_capacity(self.table.regions().len());
        self.rows.get(py, block_ids, |block_id| {
            addrs.clear();
            self.table.write_addrs(block_id, 1, &mut addrs).map_err(to_py)?;
            PyTuple::new(py, &addrs)
        })
    }

    /// The sizes of one block, shared by all plans.
    pub(crate) fn size_row<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let make = || Ok::<_, PyErr>(PyTuple::new(py, self.table.sizes(1).map_err(to_py)?)?.unbind());
        Ok(self.size_row.get_or_try_init(py, make)?.bind(py).clone())
    }
}

/// Rows to be filled later.
///
/// CPython 3.11 collects garbage once per 700 new lists, and a collection looks at every item of every young list: with
/// rows made full, that is a third of the time of the call. Rows are all made empty first, when looking at them is free;
/// filling them makes no new list.
fn empty_rows(py: Python<'_>, num_rows: usize) -> PyResult<Bound<'_, PyList>> {
    PyList::new(py, (0..num_rows).map(|_| PyList::empty(py)))
}

/// Puts `items` into the empty list `row`.
fn fill(row: &Bound<'_, PyAny>, items: &Bound<'_, PyAny>) -> PyResult<()> {
    row.cast::<PyList>()?.set_slice(0, 0, items)
}

/// Sizes by number of blocks. Almost every chunk of a request covers the same number, so they are made once.
struct SizeRows<'py, 'table> {
    table: &'table RegionTable,
    rows: Vec<(u64, Bound<'py, PyTuple>)>,
}

impl<'py> SizeRows<'py, '_> {
    fn row(&mut self, py: Python<'py>, num_blocks: u64) -> PyResult<Bound<'py, PyTuple>> {
        if let Some((_, sizes)) = self.rows.iter().find(|(blocks, _)| *blocks == num_blocks) {
            return Ok(sizes.clone());
        }
        let sizes = PyTuple::new(py, self.table.sizes(num_blocks).map_err(to_py)?)?;
        self.rows.push((num_blocks, sizes.clone()));
        Ok(sizes)
    }
}

fn extract_all(values: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<u64>> {
    values.try_iter()?.map(|value| extract_u64(&value?, name)).collect()
}

/// The spans of `chunks`, all of them checked before any is used.
fn token_spans(chunks: &Bound<'_, PyAny>, grid: &ChunkGrid) -> PyResult<Vec<TokenSpan>> {
    chunks
        .try_iter()?
        .map(|chunk| {
            let span = token_span(&chunk?)?;
            span.check_aligned(grid).map_err(to_py)?;
            Ok(span)
        })
        .collect()
}

fn token_span(chunk: &Bound<'_, PyAny>) -> PyResult<TokenSpan> {
    let (token_start, token_end) = match chunk.cast::<PyTuple>() {
        Ok(chunk) => (chunk.get_item(0)?, chunk.get_item(1)?),
        Err(_) => (chunk.get_item(0)?, chunk.get_item(1)?),
    };
    Ok(TokenSpan {
        token_start: extract_i64(&token_start, "chunk start")?,
        token_end: extract_i64(&token_end, "chunk end")?,
    })
}

/// A request's block table.
pub(crate) struct BlockTable<'a, 'py> {
    block_ids: &'a Bound<'py, PyAny>,
    list: Option<&'a Bound<'py, PyList>>,
    block_size: i64,
}

impl<'a, 'py> BlockTable<'a, 'py> {
    pub(crate) fn new(block_ids: &'a Bound<'py, PyAny>, block_size: i64) -> Self {
        Self { block_ids, list: block_ids.cast().ok(), block_size }
    }

    /// The block that holds the chunk `token_start..token_end`, whose start is not negative.
    pub(crate) fn block_id(&self, token_start: i64, token_end: i64) -> PyResult<i64> {
        let index = usize::try_from(token_start / self.block_size)?;
        let found = match self.list {
            Some(list) => list.get_item(index),
            None => self.block_ids.get_item(index),
        };
        let block_id = found.map_err(|error| {
            if !error.is_instance_of::<PyIndexError>(self.block_ids.py()) {
                return error;
            }
            let len = self.block_ids.len().unwrap_or_default();
            PyIndexError::new_err(format!("chunk {token_start}..{token_end} needs block {index} of a table of {len}"))
        })?;
        extract_i64(&block_id, "block id")
    }
}
