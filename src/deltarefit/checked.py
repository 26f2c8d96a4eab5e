"""Settings declare the kind and the range of each field; one function holds them to it, for every class of settings.

A field of a number is annotated with its ``Range``: ``Annotated[int, Range(0, 64)]``. What cannot be declared so, such as two
fields that must fit together, a class checks by itself.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from deltarefit.errors import RejectedError

__all__ = [
    "Count",
    "Nbytes",
    "Range",
    "Seconds",
    "SomeNbytes",
    "SomeSeconds",
    "Threads",
    "base_kind",
    "check_fields",
    "fields_of",
    "shown",
]

_MOST_SHOWN = 120
_WORDS: Mapping[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    type(None): "none",
}


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a field may have, both ends included unless ``is_open``, which leaves out the lower one."""

    low: float
    high: float
    is_open: bool = False

    def holds(self, value: float) -> bool:
        """Whether the number is one of them. What is no number (NaN) is not."""
        return (self.low < value if self.is_open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"above {self.low:g}, at most {self.high:.12g}" if self.is_open else f"from {self.low:g} to {self.high:.17g}"


_YEAR_S = 366 * 86400.0
_MOST_NBYTES = 2**50
Count = Annotated[int, Range(0, 10**6)]
Threads = Annotated[int, Range(0, 1024)]
Nbytes = Annotated[int, Range(0, _MOST_NBYTES)]
SomeNbytes = Annotated[int, Range(1, _MOST_NBYTES)]
Seconds = Annotated[float, Range(0, _YEAR_S)]
SomeSeconds = Annotated[float, Range(0, _YEAR_S, is_open=True)]


@functools.cache
def fields_of(kind: Any) -> Mapping[str, Any]:
    """What each field of a class is declared to be, by name."""
    return get_type_hints(kind, include_extras=True)


def base_kind(hint: Any) -> Any:
    """A declaration without its range."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def check_fields(settings: object) -> None:
    """Hold an object to what its class declares.

    Raises:
        RejectedError: a field has a value of another kind, or out of its range; the text says what was expected.
    """
    kind: Any = type(settings)
    for name, hint in fields_of(kind).items():
        value = getattr(settings, name)
        if not _fits(hint, value):
            raise RejectedError(f"{kind.__name__}: {name}: expected {_words(hint)}, got {shown(value)}")


def _fits(hint: Any, value: object) -> bool:
    """Whether the value is of that kind and range. A bool is no number here, and a number no bool."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(arguments[0], value) and all(rule.holds(value) for rule in arguments[1:])
    if origin is Literal:
        return type(value) is str and value in arguments
    if origin in (Union, types.UnionType):
        return any(_fits(argument, value) for argument in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(arguments[0], one) for one in value)
    if origin is Callable or hint is Callable:
        return callable(value)
    if hint is float:
        return type(value) in (int, float)
    if hint in (int, bool, str):
        return type(value) is hint
    return isinstance(value, hint)


def shown(value: object) -> str:
    """A value for a message, cut short."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        return "one that is too long to show"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _words(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join([_words(arguments[0]), *map(str, arguments[1:])])
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(_words, arguments))
    if origin is tuple:
        return f"a tuple, each {_words(arguments[0])}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(map(str, hint))}"
    return _WORDS.get(hint, "a function")
