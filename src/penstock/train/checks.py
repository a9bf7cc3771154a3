"""Checks that settings of any kind of run need: types, ranges, choices, links, the schedule."""

from __future__ import annotations

import inspect
import math
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.cost import CostError, Costs, Links
from penstock.cost.conditions import read_quantity
from penstock.library import SCHEDULES, build
from penstock.schedule import TENTATIVE, Schedule, ScheduleError, check, with_tentative_updates

BASE = "host", "gloo", "direct"
"""Transports whose single links may be delegated."""
ROUTES = *BASE, "delegate", "nccl"
"""Transports of a run with real compute."""
STORES = re.compile(r"rediss?://\S+")
SIZES = {f"{prefix}B": size for prefix, size in (("", 1.0), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))} | {
    f"{prefix}iB": size for prefix, size in (("K", 2.0**10), ("M", 2.0**20), ("G", 2.0**30), ("T", 2.0**40))
}


class SettingsError(ValueError):
    """Settings that contradict one another, or that name something that does not exist."""


def check_numbers(settings: Any, *, least: Mapping[str, float], above_zero: Sequence[str]) -> None:
    """Checks the types of all fields, and that those in `least` are not too small. Raises SettingsError."""
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
    """Raises SettingsError if a field has a word that it does not take."""
    for name, words in choices.items():
        value = getattr(settings, name)
        if value not in words:
            head = ", ".join(words[:-1])
            raise SettingsError(f"no {name} {value!r}; choose {head} or {words[-1]}")


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
    window: int | None = None,
    max_mismatch: int | None = None,
    rule: str | None = None,
    others: Mapping[str, Any] | None = None,
) -> Schedule:
    """The schedule by name or from a file, checked. Raises ScheduleError.

    Args:
        others: further options of a library schedule, by name, that have no argument here.
        window: microbatches whose gradients an update adds up; None for a schedule without updates as ops.
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
        found = _read_file(schedule, ranks, microbatches, stages, window)
    else:
        options: dict[str, Any] = {"num_stages": stages, "window": window, **(others or {})}
        takes = inspect.signature(SCHEDULES.get(schedule, build)).parameters
        given = {"max_mismatch": max_mismatch, "rule": rule}
        options |= {name: value for name, value in given.items() if name in takes}
        found = build(schedule, ranks, microbatches, **options)
    if max_mismatch is not None and found.updates is not None:
        found = replace(found, updates=replace(found.updates, max_mismatch=max_mismatch))
    if found.updates is not None and rule not in (None, found.updates.rule):
        found = replace(found, updates=replace(found.updates, rule=rule))
        found = with_tentative_updates(found) if rule == TENTATIVE else found
    check(found)
    return found


def _read_file(schedule: str, ranks: int, microbatches: int, stages: int | None, window: int | None) -> Schedule:
    found = _load_once(schedule)
    asked = ranks, microbatches, stages or found.num_stages
    if (found.num_ranks, found.num_microbatches, found.num_stages) != asked:
        raise ScheduleError(
            f"{schedule} is for {found.num_ranks} ranks, {found.num_microbatches} microbatches and "
            f"{found.num_stages} stages, the run has {asked[0]}, {asked[1]} and {asked[2]}; leave out --ranks, "
            "--microbatches and --stages",
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
    """The schedule of a file. It is read again only if the file has changed. Raises ScheduleError."""
    try:
        now = os.stat(path)
    except OSError:
        return ps.load(path)  # which says what is wrong
    return _loaded(os.path.abspath(path), (now.st_ino, now.st_mtime_ns, now.st_size))


@lru_cache(maxsize=8)
def _loaded(path: str, version: tuple[int, ...]) -> Schedule:
    return ps.load(path)


def said_by_file(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a schedule file itself determines: ranks and microbatches. Nothing for a schedule by name.

    A file with updates is one pass. A step is then a window if windows fill the pass, and otherwise the whole pass.
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
    """Whether a file is meant: the name looks like a path, or there is such a file and no library
    schedule of that name.
    """
    return schedule not in SCHEDULES and ("/" in schedule or bool(Path(schedule).suffix) or Path(schedule).exists())


def check_known(kind: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values for a settings class, with lists made tuples. Raises SettingsError for a name that the class
    does not have.
    """
    if unknown := sorted(set(values) - set(typing.get_type_hints(kind))):
        raise SettingsError(
            f"{where}unknown settings: {', '.join(unknown)}; another version wrote them: take them out of the file "
            "to go on without them, or go on with that version"
        )
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _check_type(name: str, value: Any, kind: Any) -> None:
    """Raises SettingsError unless `value` has the field's type. A float field also takes whole numbers."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    plain = [typing.get_origin(k) or k for k in kinds]
    if isinstance(value, bool):
        fits = bool in plain
    elif isinstance(value, int):
        fits = int in plain or float in plain
    elif isinstance(value, tuple):
        each = next((typing.get_args(k)[0] for k in kinds if typing.get_origin(k) is tuple), None)
        fits = each is not None and all(type(v) is each for v in value)
    else:
        fits = any(isinstance(value, k) for k in plain)
    if not fits:
        words = [_WORDS[k] for k in plain if k in _WORDS]
        rest = "whole numbers" if tuple in plain else "an object"
        raise SettingsError(f"{name} is {value!r}; give {words[0] if words else rest}")
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{name} is {value}; give a finite number")


def host_memory_of(text: str | None, costs: Costs | None) -> float:
    """Host memory in the units of the costs: `4` is activations of the largest stage, `8GB` is bytes.

    Without costs a stage's activation counts as 1.

    Raises:
        SettingsError: no number of at least 0, or bytes where the activations' bytes are not known.
    """
    if text is None:
        return 0.0
    largest = 1.0 if costs is None else max(costs.activation)
    try:
        return read_quantity(text, {"": 1.0}) * largest
    except CostError:
        pass
    size = read_size("host_memory", text, "activations, like 4, or ")
    if costs is not None and largest <= 1024:
        raise SettingsError(
            f"host_memory {text}: how many bytes an activation has is not known here; give activations, like 4"
        )
    return size


def read_size(name: str, text: str, or_else: str = "") -> float:
    """Reads `8GB`, `8GiB` or `1000B`. Raises SettingsError."""
    try:
        return read_quantity(text, SIZES)
    except CostError:
        raise SettingsError(f"{name} {text!r}: give {or_else}bytes, like 8GB or 8GiB") from None
