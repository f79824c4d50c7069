"""Prints what an installed vLLM needs, one requirement a line, without the packages named after it.

Run as ``python -m tools.vllm_requirements DIRECTORY PACKAGE [WITHOUT ...]`` by the Python of ``.venv``, which has
`packaging`. The package itself cannot be given to an installer, because it pins a local build of torch that package
indexes do not have.
"""

import sys
from collections.abc import Collection, Iterable, Iterator
from importlib.metadata import distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def requirements_without(requirements: Iterable[str], without: Collection[str]) -> Iterator[str]:
    """Yields the requirements that hold on this machine and for no extra, but those on packages in ``without``."""
    names = {canonicalize_name(name) for name in without}
    for text in requirements:
        requirement = Requirement(text)
        holds = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if holds and canonicalize_name(requirement.name) not in names:
            requirement.marker = None
            yield str(requirement)


def main(directory: str, package: str, *without: str) -> None:
    """Prints the requirements of the package that is installed in a directory."""
    (distribution,) = distributions(name=package, path=[directory])
    for requirement in requirements_without(distribution.requires or [], [package, *without]):
        print(requirement)


if __name__ == "__main__":
    main(*sys.argv[1:])
