"""Sizes of memory as people write them, ``"4GB"`` or ``"1.5 GiB"``, to bytes; in whole numbers from end to end."""

import re
from decimal import Decimal
from typing import Final

from mooncrate.errors import ConfigError

MAX_BYTES: Final = 2**63 - 1
"""Mooncake holds sizes in 64 bits; half of them, so that a sum of two does not wrap."""

_POWERS: Final = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE: Final = re.compile(
    # 30 digits are more than any size has, and keep hostile input cheap.
    r"\s*(?P<sign>[+-]?)\s*(?P<whole>[0-9]{0,30})(?:\.(?P<part>[0-9]{0,30}))?\s*(?:(?P<unit>[kmgt]i?b|b)\s*)?",
    re.ASCII | re.IGNORECASE,
)


def parse_size(value: object) -> int:
    """Returns a number of bytes.

    A unit is B, KB, MB, GB, TB or KiB, MiB, GiB, TiB, in any case, after a space or none. **KB and KiB are both 1,024
    bytes**, MB and MiB 1,024 of these, and so on, as in vLLM: an existing file has to mean what it meant. Without a
    unit the number counts bytes. A fraction of a byte is dropped, also as in vLLM.

    No float is involved: ``"1.1TB"`` is 1.1 x 2^40 rounded down, not a neighbour of it.

    Args:
        value: A string; or a number, which counts bytes.

    Raises:
        ConfigError: Not a size: a boolean, something negative, not finite, or of 2^63 bytes or more.

    >>> parse_size("1.5GB"), parse_size("64 KiB"), parse_size("300"), parse_size(4096)
    (1610612736, 65536, 300, 4096)
    >>> parse_size("4XB")
    Traceback (most recent call last):
    mooncrate.errors.ConfigError: '4XB' is not a size: write bytes, or a number with B, KB to TB or KiB to TiB
    """
    if isinstance(value, str):
        size = _parse_text(value)
    elif isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise ConfigError(f"{value!r} is not a size: a {type(value).__name__} where bytes are needed")
    elif not isinstance(value, int) and not Decimal(value).is_finite():
        raise ConfigError(f"{show(value)} is not a size: it is not finite")
    else:
        # Compared before it becomes an int: the Decimal 1e999999999 would fill all memory.
        size = MAX_BYTES + 1 if value > MAX_BYTES else -1 if value < 0 else int(value)
    if size < 0:
        raise ConfigError(f"{show(value)} is not a size: it is negative")
    if size > MAX_BYTES:
        raise ConfigError(f"{show(value)} is not a size: it is not below 2^63 bytes")
    return size


def _parse_text(text: str) -> int:
    match = _SIZE.fullmatch(text)
    whole, part = (match["whole"], match["part"] or "") if match else ("", "")
    if match is None or not whole + part:
        raise ConfigError(f"{show(text)} is not a size: write bytes, or a number with B, KB to TB or KiB to TiB")
    digits = int(whole + part)
    size = digits * 1024 ** _POWERS[(match["unit"] or "b")[0].lower()] // 10 ** len(part)
    return -1 if match["sign"] == "-" and digits else size


def show(value: object) -> str:
    """Returns a value for a message: as it would be written, and never more than a line of it."""
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to write out the largest ones
    text = str(value) if isinstance(value, Decimal) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
