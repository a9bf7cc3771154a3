"""Updates of the optimizer as ops of a schedule: which there are, what each gathers, and what they come between.

An update gathers the gradients of a window of microbatches. Each copy of a stage takes each update over once, by an
op of its own, U. The copy of pipeline 0 owns the stage: it has the optimizer's state and applies the sum of all
copies' gradients; the others wait for its parameters.

    two pipelines, a window of four          update 0 gathers microbatches 0 to 3, update 1 gathers 4 to 7

    B0 B2 on the owner's rank --.                           .--> U1 on the other copy's rank
    B1 B3 on the other's -------+--> U0 on the owner's -----'    (of update 0, in pipeline 1)
                   (gradients, reduced)           (parameters, broadcast)

So that every op is there once, U is numbered `update * num_pipelines + pipeline`. Its place among the other ops of
its copy says which parameters these meet: `count_mismatch` counts the updates between a forward and its backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.schedule.errors import ScheduleError
from penstock.schedule.op import BACKWARD, FORWARD, GIVE, INPUT, PREDICT, UPDATE, WEIGHT, Op
from penstock.schedule.short_repr import short_repr

if TYPE_CHECKING:
    from penstock.schedule.schedule import Schedule

OWNER = 0
"""The pipeline whose copy of a stage has the optimizer's state."""

NEWEST = "none"
"""The rule that is none: F and B each read the newest weights of their copy."""

TENTATIVE = "tentative"
"""The rule by which late forwards read weights that the known part of their window's gradient has moved."""

RULES = (NEWEST, "pipedream", "pipedream-2bw", "spectrain", "xpipe", "vnag", TENTATIVE)
"""Names of the rules by which ops read weights; `runtime/parameters/rules.py` has what each does."""


@dataclass(frozen=True)
class Updates:
    """That a schedule has its updates as ops, and what is asked of them.

    Attributes:
        window: microbatches that an update gathers, counted in their order; the last window may be shorter.
        max_mismatch: most updates of a copy between a microbatch's forward and its backward there; None for any.
        rule: which version of the weights ops read, one of `RULES`; "none" for the newest there is.

    Raises:
        ScheduleError: a window below 1, a bound below 0, or another rule.

    Examples:
        >>> import penstock as ps
        >>> s = ps.schedule.with_updates(ps.build("1f1b", 2, 4), window=2)
        >>> s.updates
        Updates(window=2)
    """

    window: int
    max_mismatch: int | None = None
    rule: str = NEWEST

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ScheduleError(
                f"no rule named {self.rule!r} says which weights ops read; there are {', '.join(RULES)}",
                rule="updates",
            )
        for name, value, least in (("window", self.window, 1), ("max_mismatch", self.max_mismatch, 0)):
            if value is None and name == "max_mismatch":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ScheduleError(
                    f"{name} of the updates is {value!r}; give a whole number from {least}", rule="updates"
                )


@dataclass(frozen=True)
class Windows:
    """The updates of a schedule with so many microbatches and pipelines, and how their ops are numbered.

    Attributes:
        window: microbatches that an update gathers.
        num_microbatches: of the schedule, over all pipelines.
        num_pipelines: of the schedule; each has a copy of every stage.

    Examples:
        >>> import penstock as ps
        >>> windows = ps.build("amdp", 4, 16, window=4).windows
        >>> windows.window, windows.num_microbatches, windows.num_pipelines
        (4, 16, 2)
    """

    window: int
    num_microbatches: int
    num_pipelines: int = 1

    @property
    def num_updates(self) -> int:
        return -(-self.num_microbatches // self.window)

    @property
    def num_ops(self) -> int:
        """The U ops of each stage."""
        return self.num_updates * self.num_pipelines

    def microbatches(self, update: int) -> range:
        """The microbatches that an update gathers, over all pipelines."""
        return range(update * self.window, min((update + 1) * self.window, self.num_microbatches))

    @property
    def ranges(self) -> tuple[range, ...]:
        """The microbatches of each update."""
        return tuple(self.microbatches(update) for update in range(self.num_updates))

    def number(self, update: int, pipeline: int) -> int:
        """The number of the U with which a pipeline's copy takes an update over."""
        return update * self.num_pipelines + pipeline

    def update_of(self, number: int) -> tuple[int, int]:
        """The (update, pipeline) of the U with that number."""
        return divmod(number, self.num_pipelines)

    def needed(self, op: Op, present: Mapping[Op, int]) -> list[Op]:
        """What a U waits for: the copy's update before it, and then

        - the owner's: the backward (B, or W where it is split) of every microbatch of the window, in any pipeline;
        - another copy's: the owner's.

        A PREDICT waits for the same, but the owner's for the GIVE of other copies. A GIVE waits for nothing.
        """
        update, pipeline = self.update_of(op.microbatch)
        if op.kind == GIVE:
            return []
        needed = [Op(UPDATE, op.stage, self.number(update - 1, pipeline))] if update else []
        if pipeline != OWNER:
            return [*needed, op._replace(microbatch=self.number(update, OWNER))]
        if op.kind == PREDICT:
            given = (Op(GIVE, op.stage, self.number(update, copy)) for copy in range(self.num_pipelines))
            return needed + [each for each in given if each in present]
        return needed + [_weight_gradient(op.stage, m, present) for m in self.microbatches(update)]


def _weight_gradient(stage: int, microbatch: int, present: Mapping[Op, int]) -> Op:
    whole, half = Op(BACKWARD, stage, microbatch), Op(WEIGHT, stage, microbatch)
    split = whole not in present and (half in present or Op(INPUT, stage, microbatch) in present)
    return half if split else whole


def one_message_a_rank(needed: list[Op], rank: int, place: Mapping[Op, tuple[int, int]]) -> list[Op]:
    """What a U of `rank` waits for, with one message of gradients from every other rank.

    A rank adds up the gradients of a window and sends the sum, so the last op to add to it in that rank's order
    stands for all. `place` is the (rank, step) of each op.
    """
    last: dict[int, Op] = {}
    kept = []
    for op in needed:
        source, step = place.get(op, (rank, 0))
        if op.kind == UPDATE or source == rank:
            kept.append(op)
        elif source not in last or step > place[last[source]][1]:
            last[source] = op
    return kept + [last[source] for source in sorted(last)]


def updates_between(schedule: Schedule) -> dict[tuple[int, int], tuple[Op, ...]]:
    """By (stage, microbatch), the U ops of its copy between its forward and its backward (B or I), in their order."""
    found: dict[tuple[int, int], tuple[Op, ...]] = {}
    begun: dict[tuple[int, int, int], int] = {}
    for rank, _, op, passed in with_updates_before(schedule):
        own = rank, op.stage, op.microbatch
        if op.kind == FORWARD:
            begun[own] = len(passed)
        elif op.kind in (BACKWARD, INPUT) and own in begun:
            found[op.stage, op.microbatch] = tuple(passed[begun[own] :])
    return found


def with_updates_before(schedule: Schedule) -> Iterator[tuple[int, int, Op, Sequence[Op]]]:
    """(rank, step, op, the U ops of the op's copy before it in its row) of each op of a schedule."""
    for rank, row in enumerate(schedule.order):
        passed: dict[tuple[int, int], list[Op]] = {}
        for step, op in enumerate(row):
            own = passed.setdefault((op.stage, schedule.pipeline_of(op)), [])
            yield rank, step, op, own
            if op.kind == UPDATE:
                own.append(op)


def count_mismatch(schedule: Schedule) -> dict[tuple[int, int, int], int]:
    """By (stage, pipeline, microbatch), how many updates of that copy fall between its forward and its backward.

    AMDP's parameter mismatch (section 3.1). It is a matter of the order alone: no time, link or dispatch changes it.

    Args:
        schedule: a schedule with updates as ops.

    Examples:
        >>> import penstock as ps
        >>> counted = ps.schedule.count_mismatch(ps.build("pipedream", 3, 4, window=1))
        >>> [counted[0, 0, m] for m in range(4)]
        [0, 1, 2, 2]
    """
    return {
        (stage, schedule.microbatch_pipeline[m], m): len(passed)
        for (stage, m), passed in updates_between(schedule).items()
    }


def with_updates(schedule: Schedule, window: int, max_mismatch: int | None = None, rule: str = NEWEST) -> Schedule:
    """A schedule of one pipeline with every update right after the last backward that it waits for.

        before   rank 0 | F0 F1 .  .  B0 F2 B1 .  B2          after, window 1   rank 0 | F0 F1 .  .  B0 U0 F2 B1 U1 ..
                 rank 1 | .  F0 B0 F1 B1 F2 B2                                  rank 1 | .  F0 B0 U0 F1 B1 U1 F2 ..

    Args:
        schedule: a schedule of one pipeline, without updates.
        window: microbatches that an update gathers.
        max_mismatch: most updates between a forward and its backward, as in `Updates`.
        rule: which weights ops read, as in `Updates`.

    Raises:
        ScheduleError: several pipelines (whose copies wait for one another: a matter of time), updates that are
            there already, or what `Updates` refuses.

    Examples:
        >>> import penstock as ps
        >>> print(ps.schedule.with_updates(ps.build("1f1b", 2, 3), window=1))
        schedule 1f1b: 2 ranks, 2 stages, 3 microbatches
        pipeline 0: stages on ranks 0 1
        updates every 1 microbatch
        rank 0 | F0 F1 .  B0 U0 F2 B1 U1 .  B2 U2
        rank 1 | .  F0 B0 U0 F1 B1 U1 F2 B2 U2
    """
    require_no_updates(schedule, "with_updates puts them in")
    if schedule.placement.num_pipelines > 1 or schedule.graph.num_microbatches:
        raise ScheduleError(
            f"{schedule.name}: updates are put after the backwards of schedules with one pipeline and the same "
            "microbatches on every stage; others place theirs themselves, as amdp(window=...) does",
            rule="updates",
        )
    updates = Updates(window, max_mismatch, rule)
    windows = Windows(window, schedule.num_microbatches)
    rows = []
    for row in schedule.order:
        present = {op: step for step, op in enumerate(row)}
        placed: list[tuple[int, Op]] = []
        for stage in sorted({op.stage for op in row}):
            earliest = 0
            for update in range(windows.num_updates):
                u = Op(UPDATE, stage, update)
                earliest = max([earliest, *(present.get(op, 0) for op in windows.needed(u, present))])
                placed.append((earliest + 1, u))
        rows.append(with_ops_at(row, placed))
    return replace(schedule, order=tuple(rows), updates=updates)


def with_ops_at(row: Sequence[Op], placed: Sequence[tuple[int, Op]]) -> tuple[Op, ...]:
    """A row with more ops: each before the op that is at its place now, and those of one place in the order given."""
    at: dict[int, list[Op]] = {}
    for place, op in placed:
        at.setdefault(place, []).append(op)
    return tuple(each for place in range(len(row) + 1) for each in (*at.get(place, ()), *row[place : place + 1]))


def require_no_updates(schedule: Schedule, what: str) -> None:
    """Raises ScheduleError where a schedule has updates; `what` says who takes none.

    Args:
        schedule: any schedule.
        what: what does not support updates, for the message.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     ps.schedule.require_no_updates(ps.build("amdp", 4, 16, window=4), "my pass knows none")
        ... except ps.ScheduleError as error:
        ...     print(error.rule)
        updates
    """
    if schedule.updates is not None:
        raise ScheduleError(
            f"{schedule.name} has updates as ops (U, every {schedule.updates.window} microbatches), and {what}; give "
            "the schedule without them (rule: updates)",
            rule="updates",
        )
