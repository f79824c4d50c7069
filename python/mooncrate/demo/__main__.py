"""Command line of the demo: runs it, and prints a table, or one line that says what to do."""

import argparse
import importlib.util
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import NoReturn

from mooncrate import mooncake
from mooncrate.demo.session import Session
from mooncrate.demo.settings import Settings
from mooncrate.demo.workload import NUM_PATTERNS, Workload
from mooncrate.errors import MooncrateError, StoreError
from mooncrate.master import MasterProcess

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SEGMENT_SLACK_BYTES = 64 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo.

    Returns:
        The exit code: 0 only if every byte was verified, 1 if anything failed, 128 + n after signal n.
    """
    options = _parse(arguments)
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt)
    try:
        print(_run(options))
    except KeyboardInterrupt as interrupt:
        (number,) = interrupt.args
        print(f"mooncrate.demo: interrupted by {number.name}, everything is stopped", file=sys.stderr)
        return 128 + int(number)
    except (MooncrateError, OSError) as error:
        print(f"mooncrate.demo: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    defaults = Workload()
    parser = argparse.ArgumentParser(
        prog="python -m mooncrate.demo",
        description="Engine A saves the KV cache of a prompt to a Mooncake Store, engine B finds and loads it, and "
        "every byte is compared. Starts and stops all it needs, on loopback.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tokens", type=_positive, default=defaults.num_tokens, help="length of the prompt")
    parser.add_argument("--layers", type=_positive, default=defaults.num_layers, help="layers, one tensor each")
    parser.add_argument("--block-size", type=_positive, default=defaults.block_size, help="tokens per block")
    parser.add_argument("--heads", type=_positive, default=defaults.num_heads, help="KV heads")
    parser.add_argument("--head-dim", type=_positive, default=defaults.head_dim, help="numbers per head")
    parser.add_argument("--device", default="auto", help="torch device of both engines; auto: CUDA where there is one")
    parser.add_argument("--port", type=_positive, help="port of the master; a free one if not given")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds that any one step may take")
    parser.add_argument("--tamper", action="store_true", help=argparse.SUPPRESS)  # stores one wrong byte, for tests
    options = parser.parse_args(arguments)
    if options.tokens < options.block_size:
        parser.error(f"{options.tokens} tokens do not fill one block of {options.block_size}")
    options.workload = Workload(options.tokens, options.layers, options.block_size, options.heads, options.head_dim)
    num_patterns = options.layers * options.workload.num_chunks
    if num_patterns > NUM_PATTERNS:
        parser.error(f"{num_patterns} blocks of all layers are more than there are different patterns, {NUM_PATTERNS}")
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    """Unwinds the demo once; signals that come while it cleans up change nothing."""
    for other in STOP_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number))


def _run(options: argparse.Namespace) -> str:
    """Runs master and engines, and returns the table.

    Raises:
        StoreError: Something is missing, failed, or differs.
    """
    wheel = mooncake.capabilities()  # first of all, so that a missing library is named before anything is started
    if importlib.util.find_spec("torch") is None:
        raise StoreError("torch is not installed: run `pip install torch`")
    workload: Workload = options.workload
    with MasterProcess(options.port) as master, Session(master, options.timeout) as session:
        print(f"master    {master.address}, process {master.pid}, {wheel.distribution} {wheel.version}", flush=True)

        engine_b_settings = Settings(
            name="B",
            master_address=master.address,
            device=options.device,
            segment_bytes=0,
            is_saving=False,
            is_tampering=False,
            workload=workload,
        )
        engine_a_settings = replace(
            engine_b_settings,
            name="A",
            segment_bytes=workload.num_bytes * 5 // 4 + SEGMENT_SLACK_BYTES,  # the master evicts from 90 % on
            is_saving=True,
            is_tampering=options.tamper,
        )
        engine_a, engine_b = session.start(engine_a_settings), session.start(engine_b_settings)
        for engine in (engine_a, engine_b):
            print(f"engine {engine.name}  process {engine.pid}", flush=True)
        device = session.wait_for("ready", [engine_a, engine_b])[0]["device"]
        engine_a.send("save")
        (saved,) = session.wait_for("saved", [engine_a])
        # Engine A lives on: its memory is the pool.
        engine_b.send("load")
        (loaded,) = session.wait_for("loaded", [engine_b])
    if loaded["num_found"] != workload.num_chunks or saved["num_chunks"] != workload.num_chunks:
        raise StoreError(
            f"engine A saved {saved['num_chunks']} and engine B found {loaded['num_found']} of {workload.num_chunks} "
            "chunks: the pool lost some"
        )
    if loaded["wrong"]:
        raise StoreError(f"engine B got a {loaded['wrong']}")
    return _table(workload, device, saved["seconds"], loaded["seconds"])


def _table(workload: Workload, device: str, save_seconds: float, load_seconds: float) -> str:
    def speed(seconds: float) -> str:
        return f"{workload.num_bytes / seconds / 1e9:.2f} GB/s ({seconds:.2f} s)"

    rows = {
        "device": device,
        "tokens": f"{workload.cached_tokens:,}",
        "chunks": f"{workload.num_chunks:,}",
        "keys found": f"{workload.num_chunks:,}",
        "addresses": f"{workload.num_chunks * workload.num_layers:,}",
        "bytes": f"{workload.num_bytes:,}",
        "save": speed(save_seconds),
        "load": speed(load_seconds),
        "verified": "every byte",
    }
    return "\n".join(f"{name:<10}  {value}" for name, value in rows.items())


if __name__ == "__main__":
    sys.exit(main())
