"""Decides which of Mooncake's three wheels fits the machine: the only place that does."""

import ctypes

from tools.console import SetupError

MOONCAKE_GROUPS = ("mooncake-non-cuda", "mooncake-cuda12", "mooncake-cuda13")
# The newest Python for which every pinned wheel exists; look again when a pin changes.
NEWEST_PYTHON = (3, 13)


def choose_mooncake_group(torch_cuda: str | None, has_driver: bool) -> str:
    """Returns the dependency group of the wheel that fits.

    A wheel for CUDA links to the driver and to the runtime that torch ships, so it can be imported only where both are
    there and the runtime has the same major version. The wheel without CUDA can be imported everywhere, and is what a
    machine without a driver needs even though torch's ordinary build is one for CUDA.

    Args:
        torch_cuda: ``torch.version.cuda``, such as ``"13.0"``; None for a build without CUDA.
        has_driver: Whether NVIDIA's driver is there.

    Raises:
        ValueError: torch is for a version of CUDA for which there is no wheel. A wheel without CUDA would then be found
            out only later, when it is given an address in the memory of a GPU.
    """
    if torch_cuda is None or not has_driver:
        return "mooncake-non-cuda"
    group = f"mooncake-cuda{torch_cuda.partition('.')[0]}"
    if group not in MOONCAKE_GROUPS:
        raise ValueError(
            f"torch is built for CUDA {torch_cuda} and Mooncake's wheels are for CUDA 12 and 13; "
            "pin another torch in pyproject.toml"
        )
    return group


def check_python(version: tuple[int, int]) -> None:
    """Raises `SetupError` for a Python that Mooncake has no wheel for yet."""
    if version > NEWEST_PYTHON:
        newest = ".".join(map(str, NEWEST_PYTHON))
        raise SetupError(
            f"Mooncake's wheels are for Python 3.11 to {newest} and this is {version[0]}.{version[1]}; "
            f"name one: make PYTHON=python{newest}"
        )


def has_nvidia_driver() -> bool:
    """Returns whether the library of NVIDIA's driver can be loaded, which is what the wheels for CUDA do on import."""
    return can_load("libcuda.so.1")


def can_load(library: str) -> bool:
    """Returns whether the dynamic linker finds a library and all that it needs."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
