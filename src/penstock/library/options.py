"""What schedules ask of their options, as errors that say what was given, the rule and what to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal, get_args

from penstock.schedule import ScheduleError

Backward = Literal["whole", "split"]


def read_options(texts: Sequence[str], option: str = "--option") -> dict[str, Any]:
    """Reads `num_stages=8`, `warmup=[7,5]` or `rule=text`, as `option` takes them: JSON, or text where it is none.

    Raises ScheduleError for a text without `=`, or a key given twice.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ScheduleError(f"{option} {text}: write KEY=VALUE, like num_stages=8", rule="options")
        if key in found:
            raise ScheduleError(f"{option} {text}: {key} is given twice", rule="options")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def whole_number(name: str, what: str, count: object) -> None:
    """Raises ScheduleError unless `count` is a whole number."""
    if not isinstance(count, Integral) or isinstance(count, bool):
        raise ScheduleError(f"{name}: the number of {what} is {count!r}; give a whole number", rule="options")


def yes_or_no(name: str, what: str, value: object) -> None:
    """Raises ScheduleError unless `value` is True or False: any text but the empty one would count as True."""
    if not isinstance(value, Integral) or value not in (0, 1):
        raise ScheduleError(
            f"{name}: {what} is {value!r}; give True or False, on the command line {what}=true or {what}=false",
            rule="options",
        )


def check_backward(name: str, backward: object) -> None:
    """Raises ScheduleError where that is neither "whole" nor "split"."""
    if backward not in get_args(Backward):
        raise ScheduleError(f"{name}: backward is {backward!r}; give 'whole' or 'split'", rule="options")


def whole_multiple(name: str, what: str, count: int, of: str, unit: int) -> None:
    """Raises ScheduleError unless `count` is a positive multiple of `unit`."""
    whole_number(name, what, count)
    if count < 1 or count % unit:
        lower = max(unit, count // unit * unit)
        choices = f"{lower} or {lower + unit}" if lower < count else f"{lower}"
        raise ScheduleError(
            f"{name} needs {what} in a multiple of the {unit} {of}, got {count}; use {choices}",
            rule="options",
        )


def at_least(name: str, what: str, count: int, lowest: int) -> None:
    """Raises ScheduleError if `count` is no whole number or below `lowest`."""
    whole_number(name, what, count)
    if count < lowest:
        raise ScheduleError(f"{name} needs at least {lowest} {what}, got {count}", rule="options")


def warmup_counts(name: str, warmup: Sequence[int], num_ranks: int, num_microbatches: int) -> list[int]:
    """The counts, each at most the number of microbatches.

    Raises ScheduleError unless there is one count per rank, each at least 1 and none above the one before it
    (PipeMorph, Lemma 1).
    """
    counts = list(warmup)
    if len(counts) != num_ranks:
        raise ScheduleError(
            f"{name}: warmup has {len(counts)} counts; give one per rank, {num_ranks} in all", rule="options"
        )
    if min(counts) < 1:
        raise ScheduleError(f"{name}: a warm-up count is at least 1, got {counts}", rule="options")
    for rank in range(1, num_ranks):
        if counts[rank] > counts[rank - 1]:
            raise ScheduleError(
                f"{name}: warm-up counts never rise from one stage to the next, but rank {rank} has {counts[rank]} "
                f"after {counts[rank - 1]}",
                rule="options",
            )
    return [min(count, num_microbatches) for count in counts]
