"""The runs that are compared: one settings object per schedule, equal except for options that only one schedule
has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.library import options_of_each
from penstock.train.asynchronous import ASYNCHRONOUS, OPTIONS, completed, usual_microbatches
from penstock.train.checks import SettingsError, is_schedule_file, said_by_file
from penstock.train.kinds import GPT, is_path, usual_of
from penstock.train.settings import Settings

USUAL = ("1f1b", "zb-v", "amdp", "pipedream-2bw")
"""The schedules that are compared by default."""

STEPS = 64
OF_UPDATES = (*OPTIONS, "sharding")
"""Options that only asynchronous schedules take."""


def contenders(names: Sequence[str], given: Mapping[str, Any]) -> list[Settings]:
    """The settings of each run. All have the same number of steps: those asked for, rounded up to whole
    passes of all.

    Args:
        names: of library schedules, or files. If there is a file, its ranks and microbatches are those of all runs,
            unless options say otherwise.
        given: settings of a training run; None for those that were not given. Of `schedule_options` each schedule
            gets those that it takes.

    Raises:
        SettingsError: a schedule named twice, options that no schedule takes, settings that exclude each other.
        ScheduleError: a file that can't be read, an option that no schedule takes.
    """
    names, given = list(names or USUAL), {name: value for name, value in given.items() if value is not None}
    shown = [shown_name(name) for name in names]
    if twice := [name for name in shown if shown.count(name) > 1]:
        raise SettingsError(f"{twice[0]} is named twice; a schedule is compared with others")
    files = {name: said_by_file({"schedule": name}) for name in names if is_schedule_file(name)}
    asynchronous = [name for name in names if name in ASYNCHRONOUS]
    if not asynchronous and (extra := [name for name in OF_UPDATES if name in given]):
        raise SettingsError(
            f"--{extra[0].replace('_', '-')} is for schedules that have their updates among the other ops "
            f"({', '.join(ASYNCHRONOUS)}), and none is compared; leave it out"
        )
    own = {field.name: field.default for field in dataclasses.fields(Settings) if field.name in _ALWAYS}
    batch, ranks = given.get("batch", Settings.batch), given.get("ranks", Settings.ranks)
    usual = [usual_microbatches(name, ranks, batch) for name in names]
    own["microbatches"] = max(filter(None, usual), default=own["microbatches"])
    own |= next(({name: said[name] for name in _ALWAYS} for said in files.values()), {})
    if is_path(given.get("model", GPT)):
        own |= usual_of(given["model"], given.get("data"))
    taken = options_of_each(names, given.pop("schedule_options", {}))
    found = []
    for name in names:
        alike = {k: v for k, v in given.items() if name in ASYNCHRONOUS or k not in OF_UPDATES}
        both = {**own, "steps": STEPS, **alike, "schedule": name, **_as_settings(taken.get(name, {}))}
        settings = Settings.from_mapping(completed({**both, **said_by_file(both)}))
        found.append(dataclasses.replace(settings, threads=settings.num_threads))
    steps = _common_steps(found)
    return [dataclasses.replace(settings, steps=steps) for settings in found]


_ALWAYS = ("ranks", "microbatches")


def _as_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a schedule as settings; some of them are settings of their own."""
    own = {setting: options[name] for name, setting in _SETTINGS.items() if name in options}
    return {**own, "schedule_options": {name: value for name, value in options.items() if name not in _SETTINGS}}


_SETTINGS = {"num_stages": "stages", "warmup": "warmup"}


def shown_name(schedule: str) -> str:
    """What a schedule is called in a comparison: its name, or its file's."""
    return Path(schedule).stem if is_schedule_file(schedule) else schedule


def _common_steps(found: Sequence[Settings]) -> int:
    """The fewest steps that end with whole passes and windows of all."""
    steps = found[0].steps
    while any(settings.passes.whole(steps) != steps for settings in found):
        steps = max(settings.passes.whole(steps) for settings in found)
    return steps
