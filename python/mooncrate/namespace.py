"""A fingerprint of everything that decides what the bytes under a key mean, readable, in front of every key.

The plain key names model, ranks, group and hash. Two deployments that differ in anything else (KV dtype, block size,
layout, ...) would read each other's bytes, without a word. The fingerprint looks like this, one line in front of the
model's name:

``(kv_dtype=bfloat16,block_size=16,block_bytes=65536,layout=2x%5Bn*16*8*128%5D,tp_size=2,pp_size=1)@``

Rationale: fields stand in a fixed order under their names, one that is not known is left out, and whatever could be
taken for punctuation is written as ``%XX``; so are the same characters in the model's name and the user's prefix. Hence
two different sets of values never give one key.

# Limitations
Every rank looks for the objects of all ranks under its own fingerprint. Pipeline stages of unlike layers differ in
``block_bytes`` and ``layout`` and would never find each other's: give both, alike on all stages.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mooncrate.errors import LayoutError
from mooncrate.groups import check_integer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mooncrate.groups import CacheGroup, RankTopology
    from mooncrate.kv_caches import KVGroupsLayout

RESERVED: Final = re.compile(rb"[^A-Za-z0-9._/*+:-]")
"""What is escaped: everything but these, so ``@ % ( ) , =``, spaces, control characters and non-ASCII text too."""
TENSOR_FIELDS: Final = ("kv_dtype", "block_bytes", "layout")
"""What only the tensors can tell."""


def escape(text: str) -> str:
    """Writes reserved characters as the hex of their UTF-8 bytes; different texts stay different.

    >>> escape("meta-llama/Llama-3"), escape("x@y"), escape("100%")
    ('meta-llama/Llama-3', 'x%40y', '100%25')
    """
    return RESERVED.sub(lambda match: b"%%%02X" % match[0][0], text.encode()).decode()


@dataclass(frozen=True)
class Namespace:
    """What identifies the bytes of a pool beyond model, ranks and hash.

    What is not given is filled in where it can be known: sizes of blocks and ranks when the pool is opened, what
    depends on tensors when they are registered. The last two fields are left out if the engine does not give them.
    A value that several groups do not share is given as a tuple, one per group.

    Attributes:
        kv_dtype: Type of the numbers, as the engine means it: ``fp8_e4m3`` may lie in tensors of bytes.
        block_size: Tokens per block.
        block_bytes: Bytes of one chunk over all regions, which is one object.
        layout: Order of the numbers within a block, as `mooncrate.layout_text` has it or in the engine's own words.
        tp_size: Tensor-parallel ranks.
        pp_size: Pipeline stages.
        model_revision: Of the weights.
        hash_algorithm: Of the block hashes, with its seed where it has one.
    """

    kv_dtype: str | tuple[str, ...] | None = None
    block_size: int | tuple[int, ...] | None = None
    block_bytes: int | tuple[int, ...] | None = None
    layout: str | tuple[str, ...] | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    model_revision: str | None = None
    hash_algorithm: str | None = None

    def __post_init__(self) -> None:
        """Checks every value.

        Raises:
            LayoutError: A number that is no positive integer, or a text that is none.
        """
        for name, value in self._fields():
            for item in value if isinstance(value, tuple) else (value,):
                if name in ("block_size", "block_bytes", "tp_size", "pp_size"):
                    check_integer(name, item, least=1)
                elif not isinstance(item, str):
                    raise LayoutError(f"{name} is {item!r}, which is not text")

    def fingerprint(self, group_id: int) -> str:
        """Returns the text for the keys of one group."""
        return f"({','.join(f'{name}={escape(str(_of_group(value, group_id)))}' for name, value in self._fields())})"

    def missing(self) -> list[str]:
        """Returns the names of fields that keys need and that are not known yet."""
        return [name for name in TENSOR_FIELDS if getattr(self, name) is None]

    def with_ranks(self, groups: Sequence[CacheGroup], topology: RankTopology) -> Namespace:
        """Fills in what groups and ranks tell.

        Raises:
            LayoutError: A value was given that is not so, or a tuple that has not one value per group.
        """
        for name, value in self._fields():
            if isinstance(value, tuple) and len(value) != len(groups):
                raise LayoutError(f"{name} has {len(value)} values for {len(groups)} groups")
        known = {
            "block_size": _shared([group.block_size for group in groups]),
            "tp_size": topology.tp_size,
            "pp_size": topology.pp_size,
        }
        return self._filled(known, len(groups), are_checked=tuple(known))

    def with_layout(self, layout: KVGroupsLayout) -> Namespace:
        """Fills in what tensors tell. Type and layout that the engine named stay: it knows what it means by them.

        Raises:
            LayoutError: ``block_bytes`` was given and is not so; with several pipeline stages it may be that of others.
        """
        known = {
            "kv_dtype": _shared(layout.dtypes),
            "block_bytes": _shared([sum(region.block_bytes for region in group) for group in layout.regions]),
            "layout": _shared(layout.texts),
        }
        is_alone = (self.pp_size or 1) == 1
        return self._filled(known, len(layout.regions), are_checked=("block_bytes",) if is_alone else ())

    def _fields(self) -> list[tuple[str, object]]:
        values = [(one.name, getattr(self, one.name)) for one in dataclasses.fields(self)]
        return [(name, value) for name, value in values if value is not None]

    def _filled(self, known: Mapping[str, object], num_groups: int, are_checked: Sequence[str]) -> Namespace:
        given = dict(self._fields())
        for name in set(are_checked) & set(given):
            if any(_of_group(given[name], group) != _of_group(known[name], group) for group in range(num_groups)):
                raise LayoutError(f"namespace: {name} is {given[name]}, but it was found to be {known[name]}")
        return dataclasses.replace(self, **{**known, **given})  # type: ignore[arg-type]


def _shared(values: Sequence[object]) -> object:
    """Returns the value that all groups share, or the tuple of all."""
    return values[0] if all(value == values[0] for value in values) else tuple(values)


def _of_group(value: object, group_id: int) -> object:
    return value[group_id] if isinstance(value, tuple) else value
