"""What the Rust extension is built from, and whether there is a toolchain that can build it."""

import re
import shutil
import tomllib
from pathlib import Path

from tools.console import SetupError, output_of
from tools.pins import PYPROJECT
from tools.stamps import digest_of_files

# Those that are there; the patterns are relative to the checkout.
SOURCES = (
    "rust/**/*.rs",
    "rust/*/Cargo.toml",
    "Cargo.toml",
    "Cargo.lock",
    "rust-toolchain.toml",
    ".cargo/*",
    PYPROJECT,
)


def extension_key(root: Path) -> str:
    """Returns a digest of everything that the extension is built from."""
    return digest_of_files(root, {path for pattern in SOURCES for path in root.glob(pattern) if path.is_file()})


def find_cargo() -> None:
    """Raises `SetupError` where there is no Rust toolchain at all."""
    if shutil.which("cargo") is None:
        raise SetupError("no cargo on the PATH; install a Rust toolchain with rustup, then run make again")


def check_cargo(root: Path) -> None:
    """Raises `SetupError` where the Rust toolchain is older than ``rust-version`` in ``Cargo.toml``.

    Cargo says so too, but as one error for each dependency. A Rust from Debian's packages is usually too old.
    """
    needed = tomllib.loads((root / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
    answer = output_of(["cargo", "--version"], cwd=root).strip()
    found = re.match(r"cargo (\d+)\.(\d+)", answer)
    if found is None or tuple(map(int, found.groups())) < tuple(map(int, needed.split(".")[:2])):
        raise SetupError(f"Rust {needed} or newer is needed and this is `{answer}`; run `rustup update stable`")
