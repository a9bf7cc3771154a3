"""A schedule as verbs take it: the name of a library schedule with its counts, or a file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.cli.failure import Misuse
from penstock.cli.options import counts, one_count
from penstock.formats import load
from penstock.library import SCHEDULES, build, options_of_each
from penstock.library.options import read_options
from penstock.schedule import Schedule, check

SCHEDULE = "A library schedule (" + ", ".join(SCHEDULES) + ") or a schedule file (.json, .txt, torch's .csv)"


@dataclass(frozen=True)
class GivenCounts:
    """What a library schedule is built from; None where not given."""

    ranks: int | None = None
    microbatches: int | None = None
    stages: int | None = None
    warmup: Sequence[int] | None = None
    max_in_flight: float | None = None
    window: int | None = None
    max_mismatch: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def counts_of(
    ranks: int | None,
    microbatches: int | None,
    stages: int | None,
    warmup: str | None,
    max_in_flight: str | None,
    window: int | None,
    max_mismatch: int | None,
    option: list[str] | None = None,
) -> GivenCounts:
    """The counts as options give them. Raises Misuse for a warm-up or a limit that is not written as they are."""
    warmups = None if warmup is None else counts("--warmup", warmup)
    most = one_count("--max-in-flight", max_in_flight)
    return GivenCounts(ranks, microbatches, stages, warmups, most, window, max_mismatch, read_options(option or ()))


def is_file(source: str) -> bool:
    """Whether `source` means a file: it looks like a path, or is one and no library schedule has that name."""
    return "/" in source or bool(Path(source).suffix) or (source not in SCHEDULES and Path(source).exists())


def read_or_build(
    source: str, counts: GivenCounts, dialect: str | None = None, declare_order: bool = False
) -> Schedule:
    """The schedule `source` names. A built one is proved; one from a file is as it was written.

    `dialect` and `declare_order` are for files, see `load`.

    A bound on the mismatch is proved of both, and is then the schedule's own.

    Raises:
        Misuse: counts are missing for a name, or given for a file; a bound for a schedule that has no updates.
        ScheduleError: as `load` and `build` do.
    """
    given = {
        "--ranks": counts.ranks,
        "--microbatches": counts.microbatches,
        "--stages": counts.stages,
        "--warmup": counts.warmup,
        "--window": counts.window,
        "--option": counts.options or None,
    }
    if is_file(source):
        if extra := next((name for name, value in given.items() if value is not None), None):
            raise Misuse(f"{extra} is for library schedules; the file {source} says it itself, so leave {extra} out")
        return _bounded(source, load(source, dialect, declare_order), counts.max_mismatch)
    if source in SCHEDULES and (counts.ranks is None or counts.microbatches is None):
        missing = " and ".join(name for name in ("--ranks", "--microbatches") if given[name] is None)
        raise Misuse(f"{source} is a library schedule: give {missing} too, like --ranks 4 --microbatches 12")
    shapes_itself = source in SCHEDULES and "max_mismatch" in inspect.signature(SCHEDULES[source]).parameters
    own = {"num_stages": "--stages", "warmup": "--warmup", "window": "--window", "max_mismatch": "--max-mismatch"}
    if twice := next((key for key in counts.options if key in own and given.get(own[key]) is not None), None):
        raise Misuse(f"--option {twice} and {own[twice]} say the same; give one of them")
    options = {
        "num_stages": counts.stages,
        "warmup": counts.warmup,
        "window": counts.window,
        "max_mismatch": counts.max_mismatch if shapes_itself else None,
        **counts.options,
    }
    if clash := {"num_ranks", "num_microbatches", "max_in_flight", "name"} & options.keys():
        raise Misuse(f"--option {min(clash)}: give --{min(clash).removeprefix('num_').replace('_', '-')}")
    found = build(
        source,
        counts.ranks if counts.ranks is not None else 1,
        counts.microbatches if counts.microbatches is not None else 1,
        counts.max_in_flight,
        **options,
    )
    return _bounded(source, found, counts.max_mismatch)


def read_or_build_each(sources: Sequence[str], counts: GivenCounts) -> list[Schedule]:
    """Several schedules for as many ranks, which are compared. Each gets those options that it takes.

    A file gives the ranks and the microbatches of the others, where these are not given.

    Raises:
        Misuse, ScheduleError: as `read_or_build`; schedules for other numbers of ranks, or an option that none takes.
    """
    files = {each: load(each) for each in sources if is_file(each)}
    said = next(iter(files.values()), None)
    own = {"num_stages": counts.stages, "warmup": counts.warmup, "window": counts.window}
    own = {name: value for name, value in (own | {"max_mismatch": counts.max_mismatch}).items() if value is not None}
    taken = options_of_each([each for each in sources if not is_file(each)], {**own, **counts.options})
    found = []
    for each in sources:
        alone = GivenCounts(
            counts.ranks or (said.num_ranks if said else None),
            counts.microbatches or (said.num_microbatches if said else None),
            max_in_flight=counts.max_in_flight,
            options=taken.get(each, {}),
        )
        found.append(files[each] if each in files else read_or_build(each, alone))
        check(found[-1], max_in_flight=counts.max_in_flight)
        if found[-1].num_ranks != found[0].num_ranks:
            raise Misuse(
                f"{each} is for {found[-1].num_ranks} ranks and {sources[0]} for {found[0].num_ranks}; compare "
                "schedules for as many"
            )
    return found


def _bounded(source: str, schedule: Schedule, max_mismatch: int | None) -> Schedule:
    if max_mismatch is None:
        return schedule
    if schedule.updates is None:
        raise Misuse(
            f"--max-mismatch {max_mismatch}: {source} has no updates among its ops; give --window to one of the "
            "asynchronous schedules, or leave --max-mismatch out"
        )
    bounded = replace(schedule, updates=replace(schedule.updates, max_mismatch=max_mismatch))
    check(bounded)
    return bounded
