"""Makes the environments that the Makefile's targets need: ``python3 -m tools.setup [dev | vllm]``.

A second run finds every step done and does nothing; a run after an interrupted one, or after the checkout moved,
repairs what is not whole. See `tools.environments` for the steps.
"""

import sys

# Before the imports below, which an older Python cannot even parse.
if sys.version_info < (3, 11):  # noqa: UP036 - the one line that older Pythons are meant to reach
    sys.exit(
        f"mooncrate: {sys.executable} is Python {sys.version_info[0]}.{sys.version_info[1]}; "
        "3.11 or newer is needed, name one: make PYTHON=python3.12"
    )

import argparse
import time
from pathlib import Path

from tools.console import SetupError
from tools.environments import Checkout, prepare_dev, prepare_vllm
from tools.stamps import locked


def main() -> int:
    """Prepares one environment, and whatever it is built with."""
    parser = argparse.ArgumentParser(prog="python3 -m tools.setup", description=__doc__)
    parser.add_argument("environment", choices=["dev", "vllm"], nargs="?", default="dev")
    arguments = parser.parse_args()
    checkout = Checkout(Path(__file__).resolve().parent.parent)
    start = time.monotonic()
    try:
        # Two makes at the same time take turns, and the second one finds the work done.
        with locked(checkout.root / "target" / "setup.lock"):
            num_steps = prepare_dev(checkout)
            if arguments.environment == "vllm":
                num_steps += prepare_vllm(checkout)
    except SetupError as error:
        print(f"mooncrate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mooncrate: interrupted; the next run goes on from here", file=sys.stderr)
        return 130
    seconds = time.monotonic() - start
    if num_steps:
        print(f"==> set-up ({arguments.environment}): {num_steps} steps, {seconds:.1f} s", flush=True)
    else:
        print(f"==> set-up ({arguments.environment}): nothing to do", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
