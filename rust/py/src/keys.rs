//! Pool keys as Python strings.

use mooncrate_core::keys::{self, KeyFields, KeyWriter};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyStringMethods};
use pyo3::{Borrowed, intern};

use crate::errors::extract_i64;
use crate::hashes::{BlobReader, PyBlobBlockHashes};

/// The part of a key that all chunks of a rank and KV cache group share.
#[pyfunction]
pub(crate) fn build_prefix(
    cache_prefix: &str,
    model_name: &str,
    tp_rank: &Bound<'_, PyAny>,
    pcp_rank: &Bound<'_, PyAny>,
    dcp_rank: &Bound<'_, PyAny>,
    pp_rank: &Bound<'_, PyAny>,
    group_id: &Bound<'_, PyAny>,
) -> PyResult<String> {
    Ok(keys::build_prefix(&KeyFields {
        cache_prefix,
        model_name,
        tp_rank: extract_i64(tp_rank, "tp_rank")?,
        pcp_rank: extract_i64(pcp_rank, "pcp_rank")?,
        dcp_rank: extract_i64(dcp_rank, "dcp_rank")?,
        pp_rank: extract_i64(pp_rank, "pp_rank")?,
        group_id: extract_i64(group_id, "group_id")?,
    }))
}

/// A key from its prefix and the hex text of a chunk hash.
#[pyfunction]
pub(crate) fn build_key_string(key_prefix: &str, chunk_hash: &str) -> String {
    keys::build_key(key_prefix, chunk_hash)
}

/// The key of one chunk hash: bytes, or anything with a `hex` method.
#[pyfunction]
pub(crate) fn key_for<'py>(key_prefix: &str, chunk_hash: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyString>> {
    write_key(&mut KeyWriter::new(key_prefix), chunk_hash.as_borrowed())
}

/// The keys of many chunk hashes, in order: a `BlobBlockHashes`, or any iterable of what `key_for` takes.
#[pyfunction]
pub(crate) fn keys_for<'py>(key_prefix: &str, chunk_hashes: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
    let py = chunk_hashes.py();
    let mut writer = KeyWriter::new(key_prefix);
    if let Ok(blob) = chunk_hashes.cast::<PyBlobBlockHashes>() {
        let mut reader = BlobReader::new(py, blob.get())?;
        let made = (0..blob.get().num_hashes())
            .map(|index| Ok(PyString::new(py, writer.key(reader.read(index)?))))
            .collect::<PyResult<Vec<_>>>()?;
        return PyList::new(py, made);
    }
    if let Ok(list) = chunk_hashes.cast::<PyList>() {
        let made = list.iter().map(|hash| write_key(&mut writer, hash.as_borrowed())).collect::<PyResult<Vec<_>>>()?;
        return PyList::new(py, made);
    }
    let made = chunk_hashes
        .try_iter()?
        .map(|hash| write_key(&mut writer, hash?.as_borrowed()))
        .collect::<PyResult<Vec<_>>>()?;
    PyList::new(py, made)
}

fn write_key<'py>(writer: &mut KeyWriter, hash: Borrowed<'_, 'py, PyAny>) -> PyResult<Bound<'py, PyString>> {
    let py = hash.py();
    if let Ok(bytes) = hash.cast::<PyBytes>() {
        return Ok(PyString::new(py, writer.key(bytes.as_bytes())));
    }
    let text = hash.call_method0(intern!(py, "hex"))?;
    let text = text.cast::<PyString>()?.to_str()?;
    Ok(PyString::new(py, writer.key_from_text(text)))
}
