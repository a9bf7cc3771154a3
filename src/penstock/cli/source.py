"""A schedule as verbs take it: the name of a library schedule with its counts, or a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.failure import Misuse
from penstock.formats import load
from penstock.library import SCHEDULES, build
from penstock.schedule import Schedule

SCHEDULE = "A library schedule (" + ", ".join(SCHEDULES) + ") or a schedule file (.json, .txt, torch's .csv)"


@dataclass(frozen=True)
class Counts:
    """What a library schedule is built from; None where not given."""

    ranks: int | None = None
    microbatches: int | None = None
    stages: int | None = None
    warmup: Sequence[int] | None = None
    memory_limit: float | None = None


def is_file(source: str) -> bool:
    """Whether `source` means a file: it looks like a path, or is one and no library schedule has that name."""
    return "/" in source or bool(Path(source).suffix) or (source not in SCHEDULES and Path(source).exists())


def read_or_build(source: str, counts: Counts) -> Schedule:
    """The schedule `source` names. A built one is proved; one from a file is as it was written.

    Raises:
        Misuse: counts are missing for a name, or given for a file.
        ScheduleError: as `load` and `build` do.
    """
    given = {
        "--ranks": counts.ranks,
        "--microbatches": counts.microbatches,
        "--stages": counts.stages,
        "--warmup": counts.warmup,
    }
    if is_file(source):
        if extra := next((name for name, value in given.items() if value is not None), None):
            raise Misuse(f"{extra} is for library schedules; the file {source} says it itself, so leave {extra} out")
        return load(source)
    if source in SCHEDULES and (counts.ranks is None or counts.microbatches is None):
        missing = " and ".join(name for name in ("--ranks", "--microbatches") if given[name] is None)
        raise Misuse(f"{source} is a library schedule: give {missing} too, like --ranks 4 --microbatches 12")
    return build(
        source,
        counts.ranks if counts.ranks is not None else 1,
        counts.microbatches if counts.microbatches is not None else 1,
        counts.memory_limit,
        num_stages=counts.stages,
        warmup=counts.warmup,
    )
