"""The README's code blocks: Python runs and prints what stands below it, commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
PYTHON = [
    (code, BLOCKS[index + 1][1])
    for index, (language, code) in enumerate(BLOCKS[:-1])
    if language == "python" and BLOCKS[index + 1][0] == "text"
]


def test_every_python_block_has_its_output_below_it() -> None:
    assert len(PYTHON) == sum(language == "python" for language, _ in BLOCKS)
    assert len(PYTHON) >= 3


@pytest.mark.parametrize(("code", "output"), PYTHON, ids=range(len(PYTHON)))
def test_python_block_prints_its_output(code: str, output: str) -> None:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (0, output), ran.stderr


def test_the_first_block_is_short() -> None:
    code = [line for line in PYTHON[0][0].splitlines() if line and not line.startswith("#")]
    assert len(code) <= 13


def test_every_command_is_a_target_of_the_makefile() -> None:
    commands = {line for language, code in BLOCKS if language == "shell" for line in code.splitlines()}
    commands |= set(re.findall(r"`(make [a-z-]+)`", README))
    assert {"make demo", "make test", "make help", "make bench"} <= commands
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {command.removeprefix("make ") for command in commands} <= targets
