"""Reads the pinned versions: the table ``[dependency-groups]`` of ``pyproject.toml``, the only place that holds any.

``python3 -m tools.pins GROUP`` prints the version of a group that holds one package, for the Makefile.
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = "pyproject.toml"


class Pins:
    """The requirements of each dependency group, every one of the form ``name==version``."""

    def __init__(self, groups: dict[str, list[str]]) -> None:
        """Takes the table as it stands in the file.

        Raises:
            ValueError: A requirement is not pinned.
        """
        for group, requirements in groups.items():
            for requirement in requirements:
                name, separator, version = requirement.partition("==")
                if not (name and separator and version):
                    raise ValueError(f"{requirement!r} in dependency group {group!r} is not of the form name==version")
        self._groups = groups

    @classmethod
    def of(cls, root: Path) -> "Pins":
        """Reads the table of the checkout at ``root``."""
        with (root / PYPROJECT).open("rb") as file:
            return cls(tomllib.load(file)["dependency-groups"])

    def requirements(self, *groups: str) -> list[str]:
        """Returns the requirements of groups, in order."""
        return [requirement for group in groups for requirement in self._groups[group]]

    def names(self, *groups: str) -> list[str]:
        """Returns the package names of groups, in order."""
        return [requirement.partition("==")[0] for requirement in self.requirements(*groups)]

    def version(self, group: str) -> str:
        """Returns the version of the one package in a group."""
        (requirement,) = self._groups[group]
        return requirement.partition("==")[2]


if __name__ == "__main__":
    print(Pins.of(Path(__file__).resolve().parent.parent).version(sys.argv[1]))
