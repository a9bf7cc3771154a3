"""A schedule as verbs take it: the name of a library schedule with its counts, or a file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.cli.failure import Misuse
from penstock.library import SCHEDULES, build, options_of_each
from penstock.schedule import Schedule, check
from penstock.train.options import SCHEDULE as SCHEDULE_GROUP
from penstock.train.options import setting

SCHEDULE = "A library schedule (" + ", ".join(SCHEDULES) + ") or a schedule file (.json, .txt, torch's .csv)"


@dataclass(frozen=True)
class GivenCounts:
    """What a library schedule is built from; None where not given."""

    ranks: int | None = setting(None, "Number of ranks, for a schedule given by name.", SCHEDULE_GROUP)
    microbatches: int | None = setting(None, "Number of microbatches, for a schedule given by name.", SCHEDULE_GROUP)
    options: Mapping[str, Any] = setting(
        {},
        "Another option of a library schedule, as for ps.build, repeatable: num_stages=8, warmup=[7,5,3,1], "
        "window=4. A file takes bounds, which are proved: max_in_flight=7, max_mismatch=1.",
        SCHEDULE_GROUP,
        flags=("--option",),
        metavar="KEY=VALUE",
        is_repeated=True,
    )

    @property
    def most(self) -> float | None:
        """The most stage activations that a rank may hold, each until its B or W; None for no limit.

        Raises:
            Misuse: a limit that is no number above 0.
        """
        most = self.options.get(LIMIT)
        if most is None or (isinstance(most, int | float) and most > 0):
            return most
        raise Misuse(f"--option {LIMIT}={most}: a schedule has one limit for all ranks; give one number above 0")

    @property
    def of_files(self) -> GivenCounts:
        """The settings that a schedule file takes too: bounds that are proved of its schedule."""
        return GivenCounts(options={name: self.options[name] for name in self.options if name in (BOUND, LIMIT)})


def counts_of(schedule: Schedule) -> dict[str, Any]:
    """The name and the counts of a schedule, as verbs write them in JSON."""
    names = ("name", "num_ranks", "num_stages", "num_microbatches", "num_ops")
    return {name: getattr(schedule, name) for name in names}


BOUND, LIMIT = "max_mismatch", "max_in_flight"
"""Options that a schedule file takes too: most updates between a microbatch's forward and its backward, and most
activations that a rank may hold.
"""


def is_file(source: str) -> bool:
    """Whether `source` means a file: it looks like a path, or is one and no library schedule has that name."""
    return "/" in source or bool(Path(source).suffix) or (source not in SCHEDULES and Path(source).exists())


def read_or_build(
    source: str, counts: GivenCounts, dialect: str | None = None, declare_order: bool = False
) -> Schedule:
    """The schedule `source` names. A built one is proved; one from a file is as it was written.

    `dialect` and `declare_order` are for files, see `ps.load`.

    Bounds are proved of both; one on the mismatch is then the schedule's own.

    Raises:
        Misuse: counts are missing for a name, or given for a file; a bound for a schedule that has no updates.
        ScheduleError: as `load` and `build` do.
    """
    most = counts.most
    options = {name: value for name, value in counts.options.items() if name != LIMIT}
    shapes_itself = source in SCHEDULES and BOUND in inspect.signature(SCHEDULES[source]).parameters
    bound = options.get(BOUND)
    if is_file(source) or not shapes_itself:
        options.pop(BOUND, None)
    given = {"--ranks": counts.ranks, "--microbatches": counts.microbatches, "--option": options or None}
    if is_file(source):
        if extra := next((name for name, value in given.items() if value is not None), None):
            raise Misuse(f"{extra} is for library schedules; the file {source} says it itself, so leave {extra} out")
        return _bounded(source, ps.load(source, dialect, declare_order), bound, most)
    if source in SCHEDULES and (counts.ranks is None or counts.microbatches is None):
        missing = " and ".join(name for name in ("--ranks", "--microbatches") if given[name] is None)
        raise Misuse(f"{source} is a library schedule: give {missing} too, like --ranks 4 --microbatches 12")
    if clash := {"num_ranks", "num_microbatches", "name"} & options.keys():
        raise Misuse(f"--option {min(clash)}: give --{min(clash).removeprefix('num_').replace('_', '-')}")
    if "costs" in options:
        raise Misuse(
            "--option costs: schedules take costs in Python alone, by ps.build(..., costs=costs); leave it out"
        )
    ranks, microbatches = (1 if given is None else given for given in (counts.ranks, counts.microbatches))
    return _bounded(source, build(source, ranks, microbatches, most, **options), bound, None)


def read_or_build_each(sources: Sequence[str], counts: GivenCounts) -> list[Schedule]:
    """Several schedules for as many ranks, which are compared. Each gets those options that it takes.

    A file gives the ranks and the microbatches of the others, where these are not given.

    Raises:
        Misuse, ScheduleError: as `read_or_build`; schedules for other numbers of ranks, or an option that none takes.
    """
    names = [each for each in sources if not is_file(each)]
    of_files = counts.of_files if names else counts
    files = {each: read_or_build(each, of_files) for each in sources if is_file(each)}
    said = next(iter(files.values()), None)
    others = {name: value for name, value in counts.options.items() if name != LIMIT}
    taken = options_of_each(names, others) if names else {}
    found = []
    for each in sources:
        alone = GivenCounts(
            counts.ranks or (said.num_ranks if said else None),
            counts.microbatches or (said.num_microbatches if said else None),
            {**taken.get(each, {}), LIMIT: counts.most},
        )
        found.append(files[each] if each in files else read_or_build(each, alone))
        check(found[-1])
        if found[-1].num_ranks != found[0].num_ranks:
            raise Misuse(
                f"{each} is for {found[-1].num_ranks} ranks and {sources[0]} for {found[0].num_ranks}; compare "
                "schedules for as many"
            )
    return found


def _bounded(source: str, schedule: Schedule, max_mismatch: int | None, most: float | None) -> Schedule:
    if most is not None:
        check(schedule, max_in_flight=most)
    if max_mismatch is None:
        return schedule
    if schedule.updates is None:
        raise Misuse(
            f"--option {BOUND}={max_mismatch}: {source} has no updates among its ops; give --option window=4 to one "
            f"of the asynchronous schedules, or leave {BOUND} out"
        )
    bounded = replace(schedule, updates=replace(schedule.updates, max_mismatch=max_mismatch))
    check(bounded)
    return bounded
