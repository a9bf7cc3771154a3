"""How much of a sweep each tier of tests runs: all of it at night, and a sample of it before a change lands.

`make test` says its tier in the environment variable TIER. Where pytest is started by hand it is the sample too:

    TIER=nightly .venv/bin/pytest tests/property
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

NIGHTLY = os.environ.get("TIER") == "nightly"
"""Whether sweeps that a single test goes through are whole."""

FEWEST = 10

ALONE = "(alone or gpu)"
"""How the expression begins by which `make test` chooses the tests of its second phase."""


def examples(num: int) -> int:
    """How many examples Hypothesis tries where `num` are tried at night: an eighth, and ten at least."""
    return num if NIGHTLY else min(num, max(FEWEST, num // 8))


def sample(num: int, by_day: int) -> int:
    """How many drawn cases a test goes through where `num` are gone through at night."""
    return num if NIGHTLY else by_day


def in_turn(ways: Sequence[T], number: int, num: int = 1) -> Sequence[T]:
    """Of the ways in which each case can run, the `num` whose turn it is at case `number`; at night all of them."""
    return ways if NIGHTLY else [ways[(number + k * len(ways) // num) % len(ways)] for k in range(num)]


def chosen(cases: Mapping[str, T], by_day: Collection[str]) -> dict[str, T]:
    """The cases that a test goes through: all at night, otherwise those of the names `by_day`.

    >>> sorted(chosen({"a": 1, "b": 2}, ["a", "b"]))
    ['a', 'b']
    """
    unknown = set(by_day) - cases.keys()
    if unknown:
        raise KeyError(f"no case is named {sorted(unknown)}; there are {sorted(cases)}")
    return {name: case for name, case in cases.items() if NIGHTLY or name in by_day}


def others_nightly(cases: Iterable[Any], by_day: Collection[Any]) -> list[Any]:
    """Cases for `pytest.mark.parametrize`, all but those `by_day` marked `nightly`.

    >>> [[mark.name for mark in case.marks] for case in others_nightly("ab", "a")]
    [[], ['nightly']]
    """
    given = list(cases)
    unknown = [case for case in by_day if case not in given]
    if unknown:
        raise KeyError(f"no case is {unknown}; there are {given}")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if case in by_day else pytest.mark.nightly
        )
        for case in given
    ]


def runs_alone(text: str) -> bool:
    """Whether a file of tests with this text has some that run alone: their marks stand in the file itself."""
    return "pytest.mark.alone" in text or "pytest.mark.gpu" in text
