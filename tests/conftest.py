"""Fixtures that several test modules share."""

from collections.abc import Iterator

import pytest

from mooncrate.master import MasterProcess

pytest.register_assert_rewrite("store_contract")  # before a test module imports it


@pytest.fixture(scope="session")
def master() -> Iterator[MasterProcess]:
    """One real Mooncake master for the whole run."""
    with MasterProcess() as process:
        yield process
