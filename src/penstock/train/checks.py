"""What settings of any kind of run are checked for: types, ranges, choices, links, the schedule."""

from __future__ import annotations

import inspect
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.cost import CostError, Links
from penstock.formats import load as load_schedule
from penstock.library import SCHEDULES, build
from penstock.schedule import Schedule, ScheduleError, check


class SettingsError(ValueError):
    """Settings that contradict one another or name what is not there."""


def check_numbers(settings: Any, *, least: Mapping[str, float], above_zero: Sequence[str]) -> None:
    """Types of all fields; `least` says the smallest value of some, where they are given. Raises SettingsError."""
    for name, kind in typing.get_type_hints(type(settings)).items():
        _check_type(name, getattr(settings, name), kind)
    for name, smallest in least.items():
        value = getattr(settings, name)
        if value is not None and value < smallest:
            raise SettingsError(f"{name} is {value}; give at least {smallest:g}")
    for name in above_zero:
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise SettingsError(f"{name} is {value:g}; give a number above 0")


def check_choices(settings: Any, choices: Mapping[str, Sequence[str]]) -> None:
    """Raises SettingsError for a word that is not among those a field takes."""
    for name, words in choices.items():
        value = getattr(settings, name)
        if value not in words:
            head = ", ".join(words[:-1])
            raise SettingsError(f"no {name} {value!r}; choose {head} or {words[-1]}")


def refuse_options(settings: Any, names: Sequence[str], why: str) -> None:
    """Raises SettingsError where one of these options, which are None unless given, is given."""
    for name in names:
        value = getattr(settings, name)
        if value is None:
            continue
        option = name.replace("_", "-")
        if isinstance(value, bool):
            shown = f"--{option}" if value else f"--no-{option}"
        else:
            shown = f"--{option} {','.join(map(str, value)) if isinstance(value, tuple) else value}"
        raise SettingsError(f"{shown}: {why}; leave it out")


def read_links(text: str | None, ranks: int) -> Links | None:
    """The conditions to inject. Raises SettingsError for those that make no sense."""
    if text is None:
        return None
    try:
        conditions = Links.parse(text)
        conditions.check_ranks(ranks)
    except (CostError, ValueError) as error:
        raise SettingsError(f"--link: {error}") from None
    return conditions


def read_schedule(
    schedule: str,
    ranks: int,
    microbatches: int,
    stages: int | None,
    warmup: Sequence[int] | None,
    window: int | None = None,
    max_mismatch: int | None = None,
    rule: str | None = None,
    others: Mapping[str, Any] | None = None,
) -> Schedule:
    """The schedule by name or from a file, checked. Raises ScheduleError.

    Args:
        others: options of a schedule by name, by which no argument here goes.
        window: microbatches an update gathers, None for a schedule without updates among its ops.
        max_mismatch: most updates between a microbatch's forward and its backward; None for the schedule's own bound.
        rule: which weights ops read; None for the schedule's own rule.
    """
    if is_schedule_file(schedule):
        if others:
            raise ScheduleError(
                f"--option {min(others)} is for library schedules; the file {schedule} says it itself, so leave it "
                "out",
                rule="options",
            )
        found = _read_file(schedule, ranks, microbatches, window)
    else:
        options: dict[str, Any] = {"num_stages": stages, "warmup": warmup, "window": window, **(others or {})}
        if "max_mismatch" in inspect.signature(SCHEDULES.get(schedule, build)).parameters:
            options["max_mismatch"] = max_mismatch
        found = build(schedule, ranks, microbatches, **options)
    if max_mismatch is not None and found.updates is not None:
        found = replace(found, updates=replace(found.updates, max_mismatch=max_mismatch))
    if rule is not None and found.updates is not None:
        found = replace(found, updates=replace(found.updates, rule=rule))
    check(found)
    return found


def _read_file(schedule: str, ranks: int, microbatches: int, window: int | None) -> Schedule:
    found = _load_once(schedule)
    if (found.num_ranks, found.num_microbatches) != (ranks, microbatches):
        raise ScheduleError(
            f"{schedule} is for {found.num_ranks} ranks and {found.num_microbatches} microbatches, "
            f"the run has {ranks} and {microbatches}; leave out --ranks and --microbatches",
            rule="options",
        )
    gathered = None if found.updates is None else found.updates.window
    if gathered != window:
        has = "no updates" if gathered is None else f"updates of {gathered} microbatches"
        raise ScheduleError(
            f"{schedule} has {has}, the run asks for a window of {window}; leave out --window", rule="options"
        )
    return found


def _load_once(path: str) -> Schedule:
    """The schedule of a file, which is read again only where it is another. Raises ScheduleError."""
    try:
        now = os.stat(path)
    except OSError:
        return load_schedule(path)  # which says what is wrong
    return _loaded(os.path.abspath(path), (now.st_ino, now.st_mtime_ns, now.st_size))


@lru_cache(maxsize=8)
def _loaded(path: str, version: tuple[int, ...]) -> Schedule:
    return load_schedule(path)


def said_by_file(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a schedule file says itself of a run's settings: ranks and microbatches; nothing for a schedule by name.

    With updates in it, it is a pass: a step is a window where those fill the pass, else the whole pass.
    """
    if not is_schedule_file(given["schedule"]):
        return {}
    path = os.path.abspath(given["schedule"])
    schedule = _load_once(path)
    counts = {"ranks": schedule.num_ranks, "microbatches": schedule.num_microbatches}
    if schedule.updates is not None:
        window, whole = schedule.updates.window, schedule.num_microbatches
        counts["microbatches"] = window if whole % window == 0 else whole
        counts["window"] = window
        microbatches = given.get("microbatches", counts["microbatches"])
        if microbatches and whole % microbatches == 0:
            counts["drain_every"] = whole // microbatches
    return {"schedule": path} | {name: count for name, count in counts.items() if name not in given}


def is_schedule_file(schedule: str) -> bool:
    """Whether it means a file: it looks like a path, or is one and no library schedule has that name."""
    return schedule not in SCHEDULES and ("/" in schedule or bool(Path(schedule).suffix) or Path(schedule).exists())


RENAMED = {"zero": "'sharding', with 'copies' for on and 'none' for off"}
"""Settings of other versions, each with its name now."""


def check_known(kind: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values for a settings class, lists as tuples. Raises SettingsError for a name that it does not have."""
    if unknown := sorted(set(values) - set(typing.get_type_hints(kind))):
        now = f": it is {RENAMED[unknown[0]]} since 0.2" if unknown[0] in RENAMED else ""
        raise SettingsError(f"{where}unknown setting {unknown[0]!r}; it was written by another version{now}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _check_type(name: str, value: Any, kind: Any) -> None:
    """Raises SettingsError unless `value` is of the field's type; a float field takes whole numbers too."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    plain = [typing.get_origin(k) or k for k in kinds]
    if isinstance(value, bool):
        fits = bool in plain
    elif isinstance(value, int):
        fits = int in plain or float in plain
    elif isinstance(value, tuple):
        fits = tuple in plain and all(type(v) is int for v in value)
    else:
        fits = any(isinstance(value, k) for k in plain)
    if not fits:
        words = [_WORDS[k] for k in plain if k in _WORDS]
        rest = "whole numbers" if tuple in plain else "an object"
        raise SettingsError(f"{name} is {value!r}; give {words[0] if words else rest}")
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{name} is {value}; give a finite number")
