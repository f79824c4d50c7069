"""Imports vLLM's modules inside a test, where warnings are errors."""

import warnings
from importlib import import_module
from typing import Any


def import_vllm(name: str) -> Any:  # noqa: ANN401 - vLLM is not typed here
    """Import `vllm.<name>`; what vLLM and torch warn about while they load is theirs to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(f"vllm.{name}")
