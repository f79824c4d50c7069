"""Sizes of memory as text: exact, and refused with their value where they cannot be meant."""

import doctest
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncrate import sizes
from mooncrate.config import StoreConfig
from mooncrate.errors import ConfigError
from mooncrate.sizes import parse_size

GIB = 1 << 30
MASTER = {"master_server_address": "127.0.0.1:50051"}
UNITS = {"B": 0, "KB": 1, "MB": 2, "GB": 3, "TB": 4, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}


def test_the_examples_in_the_docstrings_run() -> None:
    failed, attempted = doctest.testmod(sizes)
    assert attempted
    assert not failed


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("separator", ["", " "])
@pytest.mark.parametrize("change_case", [str, str.lower, str.upper])
def test_every_unit_counts_in_steps_of_1024_as_in_vllm(
    unit: str, separator: str, change_case: Callable[[str], str]
) -> None:
    text = f"3{separator}{change_case(unit)}"
    assert parse_size(text) == 3 * 1024 ** UNITS[unit]
    assert parse_size(f" {text} ") == parse_size(text)


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        (0, 0),
        ("0", 0),
        ("-0", 0),
        (2**63 - 1, 2**63 - 1),
        (str(2**63 - 1), 2**63 - 1),
        ("9007199254740993", 2**53 + 1),  # no float holds it
        ("9007199254740993B", 2**53 + 1),
        ("8388607.9999999999999TB", 2**63 - 1),
        ("1.5GB", 3 * GIB // 2),
        ("1.1TB", 11 * 1024**4 // 10),
        (".5KB", 512),
        ("2.MB", 2 << 20),
        ("+1KB", 1024),
        ("0.1GB", GIB // 10),
        ("1.9", 1),
        (1.0, 1),
        (4e9, 4_000_000_000),
        (Decimal(4294967296), 4 * GIB),
    ],
)
def test_sizes_are_exact_and_fractions_of_a_byte_are_dropped(value: object, num_bytes: int) -> None:
    assert parse_size(value) == num_bytes


@given(whole=st.integers(0, 10**6), part=st.text("0123456789", max_size=25), unit=st.sampled_from(sorted(UNITS)))
def test_sizes_agree_with_fractions(whole: int, part: str, unit: str) -> None:
    exact = (whole + Fraction(int(part or "0"), 10 ** len(part))) * 1024 ** UNITS[unit]
    assert parse_size(f"{whole}.{part}{unit}") == exact.__floor__()


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (-1, "-1 is not a size: it is negative"),
        ("-4GB", "'-4GB' is not a size: it is negative"),
        (-0.5, "-0.5 is not a size: it is negative"),
        (True, "True is not a size: a bool"),
        (False, "False is not a size: a bool"),
        (None, "None is not a size: a NoneType"),
        ([1], r"\[1\] is not a size: a list"),
        (float("inf"), "inf is not a size: it is not finite"),
        (float("-inf"), "-inf is not a size: it is not finite"),
        (float("nan"), "nan is not a size: it is not finite"),
        (Decimal("NaN"), "NaN is not a size: it is not finite"),
        (2**63, "9223372036854775808 is not a size: it is not below 2.63 bytes"),
        (2.0**63, r"9.223372036854776e\+18 is not a size: it is not below"),
        (10**100, r"10{76}\.\.\. is not a size: it is not below"),
        pytest.param(1 << 20_000, "an integer of 20001 bits is not a size: it is not below", id="very large"),
        (Decimal("1e999999999"), r"1E\+999999999 is not a size: it is not below"),
        ("8388608TB", "'8388608TB' is not a size: it is not below"),
        ("", "'' is not a size: write bytes"),
        (" ", "' ' is not a size"),
        (".", r"'\.' is not a size"),
        ("GB", "'GB' is not a size"),
        ("4G", "'4G' is not a size"),
        ("4XB", "'4XB' is not a size"),
        ("4iB", "'4iB' is not a size"),
        ("4BB", "'4BB' is not a size"),
        ("4GB GB", "'4GB GB' is not a size"),
        ("1,5GB", "'1,5GB' is not a size"),
        ("1.2.3GB", r"'1\.2\.3GB' is not a size"),
        ("1e3", "'1e3' is not a size"),
        ("0x10", "'0x10' is not a size"),
        ("1_000", "'1_000' is not a size"),
        ("inf", "'inf' is not a size"),
        ("NaN", "'NaN' is not a size"),
        ("true", "'true' is not a size"),
        ("\u0664GB", "'\u0664GB' is not a size"),  # a digit, but not one of ours
        ("9" * 1000, r"'9{76}\.\.\. is not a size"),
    ],
)
def test_what_is_no_size_is_refused_with_its_value(value: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_size(value)
    with pytest.raises(ConfigError, match=f"^mapping: local_buffer_size: {complaint}"):
        StoreConfig.from_mapping({**MASTER, "local_buffer_size": value})
