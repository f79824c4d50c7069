"""What the bytes of one object mean, as text: equal texts, equal meaning, whatever the number of blocks.

The tensors of a group are described in the natural order of their layers' names, each by the order of its numbers in
memory. Where the regions of the group follow one another in another order (another order of the mapping, slots that
interleave otherwise), a digest of that order comes last. Names themselves are no part of it, since the stages of a
pipeline have different layers and look for each other's objects.
"""

from __future__ import annotations

import hashlib
import re
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Returns what sorts names as people count.

    >>> sorted(["layer.10", "layer.9", "layer"], key=natural_key)
    ['layer', 'layer.9', 'layer.10']
    """
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], name


def describe_dtypes(dtypes: Iterable[str]) -> str:
    """Returns the types of a group's tensors; several, joined by ``+``, in order of first use.

    >>> describe_dtypes(["bfloat16", "float32", "bfloat16"])
    'bfloat16+float32'
    """
    return "+".join(dict.fromkeys(dtypes))


def describe_group(tensors: Sequence[tuple[str, str]], owners: Sequence[int]) -> str:
    """Returns the text for a group.

    Args:
        tensors: Order of numbers and type of each tensor, in the natural order of layers.
        owners: Of each run of bytes of an object, in the order in which they are stored, the index of its tensor.

    >>> describe_group([("n*16*8", "bfloat16")] * 2, [0, 1])
    '2x[n*16*8]'
    >>> describe_group([("n*16*8", "bfloat16"), ("n*4", "float32")], [1, 0])
    '1x[n*16*8:bfloat16]+1x[n*4:float32]+order:040f462a'
    """
    is_mixed = len({dtype for _, dtype in tensors}) > 1
    texts = [f"{order}:{dtype}" if is_mixed else order for order, dtype in tensors]
    text = "+".join(f"{len(list(same))}x[{text}]" for text, same in groupby(texts))
    if list(owners) == sorted(owners):
        return text
    order = ".".join(f"{owner}x{len(list(same))}" for owner, same in groupby(owners))
    return f"{text}+order:{hashlib.sha256(order.encode()).hexdigest()[:8]}"
