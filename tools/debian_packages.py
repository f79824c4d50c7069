"""The few things that come from Debian's or Ubuntu's own packages and not from Python's.

What is there is seen by use (the library loads, the program is on the path) and not by asking dpkg, so a machine that
has them from elsewhere is left alone.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.console import SetupError, step
from tools.mooncake_wheel import can_load, has_nvidia_driver

# What Mooncake's wheels link to without shipping it.
LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
CUDA_LIBRARIES = {"libmlx5.so.1": "ibverbs-providers"}
# Without its headers the C compiler finds nothing to link to, and apt does not count them as needed.
LINKER = ("gcc", "libc6-dev")
APT_GET = ("apt-get", "-o", "DPkg::Lock::Timeout=300", "-q")


def missing_packages() -> list[str]:
    """Returns the packages that this machine lacks."""
    libraries = LIBRARIES | (CUDA_LIBRARIES if has_nvidia_driver() else {})
    packages = [package for library, package in libraries.items() if not can_load(library)]
    if importlib.util.find_spec("ensurepip") is None:
        packages.append(f"python{sys.version_info.major}.{sys.version_info.minor}-venv")
    if shutil.which("cc") is None:
        packages.extend(LINKER)
    return packages


def install_command(packages: Sequence[str], has_package_lists: bool) -> str:
    """Returns the line for a person to type."""
    install = f"sudo apt-get install {' '.join(packages)}"
    return install if has_package_lists else f"sudo apt-get update && {install}"


def ensure_packages() -> int:
    """Installs what is missing when this process is root's; returns the number of steps done, 0 or 1.

    Raises:
        SetupError: Something is missing and this is not root, or there is no apt-get, or it failed.
    """
    packages = missing_packages()
    if not packages:
        return 0
    if shutil.which(APT_GET[0]) is None:
        raise SetupError(f"install what Debian calls {' '.join(packages)}, then run make again")
    if os.geteuid() != 0:
        has_lists = any(Path("/var/lib/apt/lists").glob("*_Packages*"))
        raise SetupError(f"Debian packages are missing; run `{install_command(packages, has_lists)}`, then make again")
    with step(f"Debian packages {' '.join(packages)}"):
        _install(packages)
    still_missing = missing_packages()
    if still_missing:
        raise SetupError(f"installed {' '.join(packages)}, and still lacks what {' '.join(still_missing)} should bring")
    return 1


def _install(packages: Sequence[str]) -> None:
    install = (*APT_GET, "install", "--yes", "--no-install-recommends", *packages)
    if _apt_get(install).returncode == 0:
        return
    # A fresh machine has no package lists, and an old one lists versions that are gone. Otherwise there is no need.
    for command in ((*APT_GET, "update"), install):
        completed = _apt_get(command)
        if completed.returncode:
            print(completed.stdout, end="", flush=True)
            raise SetupError(f"`{' '.join(command)}` failed; its output above says why")


def _apt_get(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # DEBIAN_FRONTEND: a package that asks a question would wait for ever.
    return subprocess.run(
        command,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
