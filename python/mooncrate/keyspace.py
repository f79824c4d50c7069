"""The keys of one pool: which prefixes each group has, what identifies them, and how to remove them all."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from mooncrate.data import ChunkedTokenDatabase, KeyMetadata, PoolKey
from mooncrate.errors import LayoutError
from mooncrate.groups import check_integer
from mooncrate.namespace import escape

if TYPE_CHECKING:
    from mooncrate.groups import CacheGroup, RankTopology
    from mooncrate.namespace import Namespace

REGEX_SPECIAL: Final = re.compile(r"[\\^$.*+?()\[\]{}|]")
"""Special to Python and to C++; a backslash before anything else might not be allowed."""


@dataclass(frozen=True)
class KeySpace:
    """What all keys of a pool are made from.

    Attributes:
        model_name: Name of the model.
        groups: The KV cache groups.
        topology: Where this worker stands among the ranks.
        hash_block_size: Tokens per block hash.
        cache_prefix: In front of every key; left out when empty.
        namespace: What else identifies them, None for nothing else.
    """

    model_name: str
    groups: tuple[CacheGroup, ...]
    topology: RankTopology
    hash_block_size: int
    cache_prefix: str = ""
    namespace: Namespace | None = None

    def __post_init__(self) -> None:
        """Checks what the parts have to do with each other.

        Raises:
            LayoutError: No groups, block sizes that are no multiples of the hashes', replicas that do not fit the
                ranks, or a namespace that says something else than groups and ranks.
        """
        check_integer("hash_block_size", self.hash_block_size, least=1)
        if not self.groups:
            raise LayoutError("0 KV cache groups: a pool needs one at least")
        for group in self.groups:
            ChunkedTokenDatabase(KeyMetadata("", 0, 0, 0, 0), group.block_size, self.hash_block_size)
            self.topology.put_step(group)
        if self.namespace is not None:
            object.__setattr__(self, "namespace", self.namespace.with_ranks(self.groups, self.topology))

    @property
    def unit(self) -> int:
        """Least common multiple of all block sizes: what every hit is a multiple of."""
        return math.lcm(*(group.block_size for group in self.groups))

    def missing(self) -> list[str]:
        """Returns the fields of the namespace that have to be known before there are keys."""
        return [] if self.namespace is None else self.namespace.missing()

    def metadata(self, group_id: int) -> KeyMetadata:
        """Returns what the keys of a group name, for this rank."""
        model_name, cache_prefix = self.model_name, self.cache_prefix
        if self.namespace is not None:
            model_name = escape(model_name)
            own = self.namespace.fingerprint(group_id)
            cache_prefix = f"{escape(cache_prefix)}@{own}" if cache_prefix else own
        ranks = self.topology.own_ranks(self.groups[group_id])
        return KeyMetadata(model_name, *ranks, group_id=group_id, cache_prefix=cache_prefix)

    def databases(self) -> list[ChunkedTokenDatabase]:
        """Returns one database per group, without addresses."""
        return [
            ChunkedTokenDatabase(self.metadata(group_id), group.block_size, self.hash_block_size)
            for group_id, group in enumerate(self.groups)
        ]

    def lookup_groups(self) -> list[tuple[list[str], CacheGroup]]:
        """Returns, per group, the key prefixes of all ranks that must have a chunk."""
        return [
            (
                [
                    PoolKey.build_prefix(replace(self.metadata(group_id), **ranks._asdict()))
                    for ranks in self.topology.lookup_ranks(group)
                ],
                group,
            )
            for group_id, group in enumerate(self.groups)
        ]

    def removal_patterns(self) -> list[str]:
        """Returns regular expressions, searched for and not matched, that find all keys of all ranks, and no others."""
        patterns = []
        for group_id in range(len(self.groups)):
            metadata = self.metadata(group_id)
            start = f"{metadata.cache_prefix}@" if metadata.cache_prefix else ""
            name = REGEX_SPECIAL.sub(r"\\\g<0>", f"{start}{metadata.model_name}")
            ranks = "@tp_rank:[0-9]+@pcp[0-9]+@dcp[0-9]+@pp_rank:[0-9]+"
            patterns.append(f"^{name}{ranks}@group:{group_id}@[0-9a-f]*$")
        return patterns

    def describe(self) -> str:
        """Returns one line on what identifies the keys."""
        if self.namespace is None:
            start = f"cache prefix {self.cache_prefix!r}, " if self.cache_prefix else ""
            return (
                f"keys are identified by {start}model name {self.model_name!r}, ranks, group and block hash alone: "
                "deployments that differ in KV dtype, layout, sizes or revision must not share them "
                "(namespace=Namespace() tells them apart)"
            )
        fingerprints = dict.fromkeys(map(self.namespace.fingerprint, range(len(self.groups))))
        known_later = f", {' and '.join(self.missing())} to come with the tensors" if self.missing() else ""
        return f"keys are identified by {' '.join(fingerprints)} and model name {self.model_name!r}{known_later}"
