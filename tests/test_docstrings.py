"""The examples in docstrings run, and say what comes out."""

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("name", ["groups", "kv_caches", "namespace", "pool", "store", "workers"])
def test_examples_in_docstrings(name: str) -> None:
    results = doctest.testmod(import_module(f"mooncrate.{name}"))
    assert results.attempted > 0
    assert results.failed == 0
