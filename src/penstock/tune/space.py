"""The space that is searched: ranks per pipeline, replicas, microbatch size, schedule, recomputing. They
determine the cut.

    devices 4, batch 16                pp 4, dp 1, size 2    8 microbatches of 2 samples through 4 ranks
                                       pp 2, dp 2, size 4    2 microbatches of 4 samples through 2 copies of 2 ranks

FlexPipe searches this space by a grid too (section 6), with every placement and traversal of its language in place of
our library's schedules.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.library import ASYNCHRONOUS, SCHEDULES, build
from penstock.schedule import TENTATIVE, Schedule, ScheduleError
from penstock.schedule.op import KINDS, OF_UPDATES
from penstock.train.asynchronous import USUAL_STEPS
from penstock.tune.errors import TuneError

if TYPE_CHECKING:
    from penstock.train.tasks.clip import Tower

MOST_STAGES_A_RANK = 4

SHARED_ENDS = ("mllm",)
"""Library schedules whose first and last stage are shared by all ranks."""

NEVER_DRAINS = "amdp"
"""The asynchronous schedule that is searched, under rule `tentative`. It is a candidate only if it is asked for."""


@dataclass(frozen=True)
class TuneSpace:
    """The values to try.

    Attributes:
        num_devices: most ranks. batch: samples per step.
        pp, dp, microbatch_sizes, schedules, recompute: what to try; None for everything that makes sense.
        shared_ends: whether the ranks of a pipeline share the first and the last layer; both may be tried.
    """

    num_devices: int
    batch: int
    pp: Sequence[int] | None = None
    dp: Sequence[int] | None = None
    microbatch_sizes: Sequence[int] | None = None
    schedules: Sequence[str] | None = None
    recompute: Sequence[bool] = (False,)
    shared_ends: Sequence[bool] = (False,)

    def __post_init__(self) -> None:
        for name in ("num_devices", "batch"):
            if getattr(self, name) < 1:
                raise TuneError(f"{name.replace('_', ' ')} is {getattr(self, name)}; give at least 1")
        for name in ("pp", "dp", "microbatch_sizes"):
            wrong = [value for value in getattr(self, name) or () if value < 1]
            if wrong:
                raise TuneError(f"{name.replace('_', ' ')} {wrong[0]}; give whole numbers of at least 1")
        for name in self.schedules or ():
            if name not in SCHEDULES:
                build(name, 1, 1)  # says which names are near
            if name in ASYNCHRONOUS and name != NEVER_DRAINS:
                raise TuneError(
                    f"{name} never drains, and of such schedules only {NEVER_DRAINS} is tuned; leave it out"
                )

    def shapes(self) -> list[Shape]:
        """Every (pp, dp, microbatch size) that fits the devices and divides the batch.

        Raises:
            TuneError: there is none.
        """
        pps = list(self.pp) if self.pp else counts(self.num_devices)
        dps = list(self.dp) if self.dp else counts(self.num_devices)
        found = [
            Shape(pp, dp, size, self.batch // (dp * size))
            for pp in pps
            for dp in dps
            if pp * dp <= self.num_devices and self.batch % dp == 0
            for size in (self.microbatch_sizes or counts(self.batch // dp))
            if self.batch // dp % size == 0
        ]
        if not found:
            sizes = f" {list(self.microbatch_sizes)}" if self.microbatch_sizes else ""
            raise TuneError(
                f"no way to spread the batch is left: pp {pps} times dp {dps} may be at most the {self.num_devices} "
                f"ranks, and dp times the microbatch size{sizes} must divide the batch of {self.batch}"
            )
        return found


@dataclass(frozen=True, order=True)
class Shape:
    """How a batch is spread: over `dp` copies of a pipeline of `pp` ranks, in microbatches."""

    pp: int
    dp: int
    microbatch_size: int
    num_microbatches: int

    @property
    def num_measured_together(self) -> int:
        """Ranks that measure messages for it: two, or one if it has no more."""
        return min(2, self.pp * self.dp)

    @property
    def microbatches(self) -> str:
        """In words: `4 microbatches of 2`."""
        noun = "microbatch" if self.num_microbatches == 1 else "microbatches"
        return f"{self.num_microbatches} {noun} of {self.microbatch_size}"


@dataclass(frozen=True)
class TunePlan:
    """A schedule, and how it was built: by the library with options, as a program that was found by search, or of
    towers that lie as `towers` says.
    """

    name: str
    schedule: Schedule
    options: tuple[tuple[str, object], ...] = ()
    program: bool = False
    towers: tuple[tuple[str, Tower], ...] = ()

    @property
    def needs_file(self) -> bool:
        """Whether `penstock train` can only read the schedule from a file, as neither a name nor options say it."""
        return self.program or bool(self.towers)


def counts(limit: int) -> list[int]:
    """Powers of two up to `limit`, and its other divisors."""
    return [n for n in range(1, limit + 1) if limit % n == 0 or n & (n - 1) == 0]


def schedules_for(
    num_ranks: int,
    num_microbatches: int,
    num_layers: int,
    names: Sequence[str] | None = None,
    shared_ends: bool = False,
) -> list[TunePlan]:
    """Every synchronous library schedule of a chain of stages that these counts allow, each order once.

    `NEVER_DRAINS` is among them only by name. It has as many steps as `penstock train` runs without draining.

    Args:
        shared_ends: take those whose first and last stage are shared by all ranks, and not those with a rank
            for each stage.
    """
    found: list[TunePlan] = []
    seen: set[tuple[object, ...]] = set()
    for name in names or SCHEDULES:
        if name in ASYNCHRONOUS and not names:
            continue
        num_steps = USUAL_STEPS if name == NEVER_DRAINS else 1
        for options in _variants(name, num_ranks, num_microbatches):
            try:
                schedule = build(name, num_ranks, num_steps * num_microbatches, **options)
            except ScheduleError:
                continue
            key = schedule.placement, schedule.order
            if key in seen or not _is_chain(schedule, shared_ends) or schedule.num_stages > num_layers:
                continue
            if num_ranks == 1 and schedule.num_stages > 1:  # cutting what one rank does in turn gains nothing
                continue
            seen.add(key)
            given = tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in options.items())
            found.append(TunePlan(name, schedule, given))
    return found


def why_none(space: TuneSpace, shape: Shape) -> str:
    """Why the first schedule asked for cannot be built for a shape; empty if it can, or if none is asked for."""
    for name in (space.schedules or ())[:1]:
        try:
            build(name, shape.pp, shape.num_microbatches)
        except ScheduleError as error:
            return f": {error}"
    return ""


def _variants(name: str, num_ranks: int, num_microbatches: int) -> Iterator[dict[str, Any]]:
    """Values of the options that change the shape of a schedule."""
    if name == NEVER_DRAINS:
        yield {"rule": TENTATIVE, "window": num_microbatches}
        return
    takes = inspect.signature(SCHEDULES[name]).parameters
    yield {}
    if "num_stages" in takes and num_ranks > 1:
        for each in range(2, MOST_STAGES_A_RANK + 1):
            yield {"num_stages": each * num_ranks}
    if "warmup" in takes:
        for slack in (1, 3):
            yield {"warmup": [slack * (num_ranks - 1 - rank) + 1 for rank in range(num_ranks)]}


def _is_chain(schedule: Schedule, shared_ends: bool) -> bool:
    plain = schedule.stage_graph is None and bool(schedule.placement.shared) == shared_ends
    return plain and all(op.kind in (*KINDS, *OF_UPDATES) for row in schedule.order for op in row)
