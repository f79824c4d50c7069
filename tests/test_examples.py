"""The programs in examples/ do what they say, on a real store."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_seed_api_saves_finds_and_loads() -> None:
    command = [sys.executable, str(EXAMPLES / "seed_api.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (0, "saved 64 chunks\nloaded 64 chunks\nverified every byte\n"), ran.stderr
