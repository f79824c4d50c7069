"""The two environments and their steps: ``.venv`` for all work, ``.venv-vllm`` for the tests inside vLLM.

vLLM has an environment of its own because it pins some seventy packages that the other one has no need of. No version
of vLLM is installed in it: they lie side by side in ``.vllm/VERSION``, and ``PYTHONPATH`` selects one.
"""

import os
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.console import SetupError, output_of, run
from tools.debian_packages import ensure_packages
from tools.extension import check_cargo, extension_key, find_cargo
from tools.mooncake_wheel import MOONCAKE_GROUPS, check_python, choose_mooncake_group, has_nvidia_driver
from tools.pins import Pins
from tools.stamps import Stamps, digest_of_files, fingerprint

VLLM_GROUPS = ("vllm-0-27", "vllm-0-32")
# The newer one's requirements serve both.
VLLM_REQUIREMENTS_GROUP = "vllm-0-32"
STAMPS = ".mooncrate"


@dataclass(frozen=True)
class Checkout:
    """Where everything lies, and the Python that the environments are made with."""

    root: Path

    @property
    def dev(self) -> "Environment":
        """The environment of all targets but those that need vLLM."""
        return Environment(self, ".venv")

    @property
    def vllm(self) -> "Environment":
        """The environment that vLLM runs in."""
        return Environment(self, ".venv-vllm")

    @property
    def vllm_directory(self) -> Path:
        """Holds one directory for each version of vLLM."""
        return self.root / ".vllm"

    @property
    def base_python(self) -> Path:
        """The Python itself, also when the one that runs this belongs to an activated environment."""
        return Path(sys.executable).resolve()


class Environment:
    """A virtual environment of the checkout, and the steps that fill it."""

    def __init__(self, checkout: Checkout, name: str) -> None:
        """Names the environment, which need not exist yet."""
        self.checkout = checkout
        self.name = name
        self.directory = checkout.root / name
        self.python = self.directory / "bin" / "python"
        self.pins = Pins.of(checkout.root)
        self.stamps = Stamps(self.directory / STAMPS)

    def create(self) -> None:
        """Makes the environment, anew when the Python changed or the checkout moved: scripts hold absolute paths.

        Also when an installation was stopped half-way: uv takes a package for installed once its metadata is there.
        """
        if any(self.stamps.is_half_done(name) for name in ("bootstrap", "packages", "mooncake")):
            self.stamps.forget("environment")
        key = fingerprint(sys.version, str(self.checkout.base_python), str(self.directory))
        title = f"{self.name}: environment of Python {sys.version.split()[0]}"
        self.stamps.once("environment", key, title, self._create, partial(_digest_of_presence, self.python))

    def _create(self) -> None:
        run([self.checkout.base_python, "-m", "venv", "--clear", self.directory], cwd=self.checkout.root)

    def install(self, requirements: list[str], *options: str | Path) -> None:
        """Installs packages into the environment, with the index that the machine is configured for."""
        uv = self.checkout.dev.directory / "bin" / "uv"
        run([uv, "pip", "install", "--python", self.python, *options, *requirements], cwd=self.checkout.root)

    def install_with_mooncake(self, requirements: list[str]) -> None:
        """Installs packages together with the Mooncake wheel that fits, and sees that it can be imported.

        The torch of `Checkout.dev` is asked: its pin, and so its build, is the same in both environments.
        """
        root, uv = self.checkout.root, self.checkout.dev.directory / "bin" / "uv"
        asked = output_of([self.checkout.dev.python, "-c", "import torch; print(torch.version.cuda or '')"], cwd=root)
        try:
            group = choose_mooncake_group(asked.strip() or None, has_nvidia_driver())
        except ValueError as error:
            raise SetupError(str(error)) from error
        print(f"    {self.pins.requirements(group)[0]}, for torch's CUDA {asked.strip() or 'none'}", flush=True)
        # All three wheels bring the same files: one of them removed after another was installed would leave holes.
        others = self.pins.names(*(other for other in MOONCAKE_GROUPS if other != group))
        run([uv, "pip", "uninstall", "--quiet", "--python", self.python, *others], cwd=root)
        self.install([*requirements, *self.pins.requirements(group)])
        # torch first: it loads the CUDA runtime that the wheels for CUDA link to.
        run([self.python, "-c", "import torch, mooncake.store"], cwd=root)

    def mooncake_key(self) -> str:
        """Returns a digest of what the choice of the wheel depends on."""
        return fingerprint(self.pins.requirements("torch", *MOONCAKE_GROUPS), has_nvidia_driver())

    def install_mooncrate(self) -> None:
        """Builds the extension in release mode, and installs the package so that changes to its Python count at once.

        Both environments use the same built file, in ``python/mooncrate``. Cargo finds the second build done.
        """
        key = extension_key(self.checkout.root)
        title = f"{self.name}: mooncrate with its extension, in release mode"
        self.stamps.once("mooncrate", key, title, self._install_mooncrate, self._built_extension)

    def _install_mooncrate(self) -> None:
        check_cargo(self.checkout.root)
        # A build for one Python version that somebody left there would be imported in place of ours.
        for path in self._extension_files():
            path.unlink()
        dev = self.checkout.dev
        run(
            [dev.directory / "bin" / "maturin", "develop", "--release", "--locked", "--uv"],
            cwd=self.checkout.root,
            variables={
                "VIRTUAL_ENV": str(self.directory),
                "PATH": f"{dev.directory / 'bin'}:{os.environ['PATH']}",
                # The same for both environments and for the Makefile's cargo, or each would rebuild the others' work.
                "PYO3_PYTHON": str(dev.python),
            },
        )

    def _extension_files(self) -> list[Path]:
        return list((self.checkout.root / "python" / "mooncrate").glob("_core*.so"))

    def _built_extension(self) -> str:
        return digest_of_files(self.checkout.root, self._extension_files())


def prepare_dev(checkout: Checkout) -> int:
    """Makes ``.venv`` whole; returns the number of steps that this took."""
    find_cargo()
    check_python(sys.version_info[:2])
    num_steps = ensure_packages()
    env = checkout.dev
    pins, stamps = env.pins, env.stamps
    env.create()
    bootstrap = pins.requirements("bootstrap")
    pip: list[str | Path] = [env.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    stamps.once(
        "bootstrap",
        fingerprint(bootstrap),
        f"{env.name}: {' '.join(bootstrap)}",
        partial(run, [*pip, *bootstrap], cwd=checkout.root),
    )
    packages = pins.requirements("torch", "build", "test", "lint")
    title = f"{env.name}: {' '.join(packages)}"
    stamps.once("packages", fingerprint(packages), title, partial(env.install, packages))
    key = fingerprint(packages, env.mooncake_key())
    stamps.once("mooncake", key, f"{env.name}: Mooncake", partial(env.install_with_mooncake, packages))
    env.install_mooncrate()
    return num_steps + stamps.num_steps_done


def prepare_vllm(checkout: Checkout) -> int:
    """Makes ``.vllm`` and ``.venv-vllm`` whole, with the tools in ``.venv``; returns the number of steps."""
    env = checkout.vllm
    env.create()
    versions = Stamps(checkout.vllm_directory / STAMPS)
    for group in VLLM_GROUPS:
        (requirement,) = env.pins.requirements(group)
        target = checkout.vllm_directory / env.pins.version(group)
        versions.once(
            group,
            fingerprint(requirement, sys.version_info[:2]),
            f".vllm/{target.name}: {requirement}",
            partial(_install_vllm, env, requirement, target),
            partial(_digest_of_presence, target),
        )
    (vllm,) = env.pins.requirements(VLLM_REQUIREMENTS_GROUP)
    packages = env.pins.requirements("torch", "test")
    env.stamps.once(
        "packages",
        fingerprint(packages, vllm, env.mooncake_key()),
        f"{env.name}: {' '.join(packages)}, Mooncake, and what {vllm} needs",
        lambda: env.install_with_mooncake([*packages, *_vllm_requirements(checkout)]),
    )
    env.install_mooncrate()
    return env.stamps.num_steps_done + versions.num_steps_done


def _install_vllm(env: Environment, requirement: str, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    env.install([requirement], "--no-deps", "--target", target)


def _vllm_requirements(checkout: Checkout) -> list[str]:
    pins = checkout.vllm.pins
    (package,) = pins.names(VLLM_REQUIREMENTS_GROUP)
    target = checkout.vllm_directory / pins.version(VLLM_REQUIREMENTS_GROUP)
    command: list[str | Path] = [
        checkout.dev.python,
        "-m",
        "tools.vllm_requirements",
        target,
        package,
        *pins.names("torch"),
    ]
    return output_of(command, cwd=checkout.root).splitlines()


def _digest_of_presence(path: Path) -> str:
    return fingerprint(path.exists())
