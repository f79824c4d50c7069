//! The one mapping from errors of the core to Python exceptions.

use mooncrate_core::{Error, ErrorKind};
use pyo3::exceptions::PyAssertionError;
use pyo3::prelude::*;

// Exceptions are written in Python, so that they have docstrings, a module and more than one base.
pyo3::import_exception!(mooncrate.errors, LayoutError);
pyo3::import_exception!(mooncrate.errors, AddressOverflowError);

/// The Python exception for `error`.
pub(crate) fn to_py(error: Error) -> PyErr {
    let message = error.to_string();
    match error.kind() {
        ErrorKind::Assertion => PyAssertionError::new_err(message),
        ErrorKind::Layout => LayoutError::new_err(message),
        ErrorKind::Overflow => AddressOverflowError::new_err(message),
    }
}

/// An unsigned 64-bit number; anything that is not an integer is a `TypeError`, as usual.
pub(crate) fn extract_u64(value: &Bound<'_, PyAny>, name: &str) -> PyResult<u64> {
    value.extract::<u64>().map_err(|error| out_of_range(error, value, name, "0..2**64"))
}

/// A signed 64-bit number; anything that is not an integer is a `TypeError`, as usual.
pub(crate) fn extract_i64(value: &Bound<'_, PyAny>, name: &str) -> PyResult<i64> {
    value.extract::<i64>().map_err(|error| out_of_range(error, value, name, "-2**63..2**63"))
}

/// Says which number left which range, where the conversion only says that one did.
fn out_of_range(error: PyErr, value: &Bound<'_, PyAny>, name: &str, range: &str) -> PyErr {
    if error.is_instance_of::<pyo3::exceptions::PyOverflowError>(value.py()) {
        AddressOverflowError::new_err(format!("{name} {value} is not in {range}"))
    } else {
        error
    }
}
