"""Fixtures that several test modules share."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from mooncrate.master import MasterProcess

pytest.register_assert_rewrite("store_contract")  # before a test module imports it

# The same examples in every run, unless the many of a night are asked for. A busy machine is slow, not wrong.
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", settings.get_profile("ci"), derandomize=False, max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def master() -> Iterator[MasterProcess]:
    """One real Mooncake master for the whole run."""
    with MasterProcess() as process:
        yield process
