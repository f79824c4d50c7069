"""What a call does, in a form that modules can be compared by: the exact types of all that it gives, or its error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

ERRORS = (AssertionError, ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError)


@dataclass(frozen=True)
class Raised:
    """The call raised; `builtin` is the exception that a user who knows only Python would catch."""

    builtin: str


@dataclass(frozen=True)
class Exactly:
    """A value together with its type. Equal values of different types are not equal here."""

    type_name: str
    value: object


def exactly(value: object) -> Exactly:
    """Describe `value` down to the last item; classes of different modules are alike when they are called alike."""
    if isinstance(value, Exactly):
        return value
    name = type(value).__name__
    if isinstance(value, int | str | bytes | Raised):
        return Exactly(name, value)
    if isinstance(value, list | tuple):
        return Exactly(name, [exactly(item) for item in value])
    if isinstance(value, set):
        return Exactly(name, sorted((exactly(item) for item in value), key=repr))
    if isinstance(value, dict):
        return Exactly(name, [(exactly(key), exactly(item)) for key, item in value.items()])
    if isinstance(value, memoryview):
        return Exactly(name, (value.format, value.shape, value.tobytes()))
    if dataclasses.is_dataclass(value):
        return Exactly(name, [(field.name, exactly(getattr(value, field.name))) for field in dataclasses.fields(value)])
    return Exactly(name, value)


def outcome(call: Callable[[], object]) -> Exactly:
    """Call it, and describe what comes out."""
    try:
        return exactly(call())
    except ERRORS as error:
        return exactly(Raised(next(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins")))
