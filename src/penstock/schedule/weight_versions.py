"""Which weights ops read, and how many versions of them a copy of a stage holds.

Both are a matter of the order alone, as mismatch is.

By rules that predict weights, ops read what is some updates ahead of the newest:

    xpipe, window 1    F0 F1 F2 B0 U0 F3 B1 U1 F4 ...
    the newest         0        0     1     1     2
    a forward reads    0  +1 +2       +2          +2       up to the update that gathers its own microbatch

Of a tied parameter every stage reads what stands for the same moment. The owner's stage sets it. What has come to
another stage may lack some updates, and is moved on by so many more:

    stage 0, owner    F3: newest 1, +2 = 3       ..        B3: newest 3, = 3
    stage 2           F3: came 1, +2 = 3         B3: came 1, +2 = 3

By rules that stash, what an update replaces is still there where a microbatch in flight must find it again:

    pipedream, window 1, rank 0 of 3    F0 F1 F2 B0 U0 F3 B1 U1 F4 ...
    the newest                          0           1        2
    read in flight, after each U                    0        0 1        (by F1 F2, and by F2 F3)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.schedule.errors import ScheduleError
from penstock.schedule.op import BACKWARD, FORWARD, INPUT, PREDICT, RECOMPUTE, UPDATE, Op
from penstock.schedule.updates import NEWEST, OWNER, TENTATIVE, with_updates_before

if TYPE_CHECKING:
    from penstock.schedule.schedule import Schedule


BY_MOMENTUM = ("spectrain",)
BY_ADAM = ("xpipe", TENTATIVE)
PREDICTING = (*BY_MOMENTUM, *BY_ADAM)
"""Rules by which ops read weights that are predicted."""

Needs = dict[int, tuple[int, ...]]
"""By moment (see `moment`), how many steps ahead of the newest weights ops read; ascending."""


def moment(num_updates: int, is_predicted: bool = False) -> int:
    """The number of a moment of a pass: when a copy has so many updates, before its next PREDICT or after it."""
    return 2 * num_updates + is_predicted


def num_updates_at(when: int) -> int:
    """The updates that a copy has at a moment."""
    return when // 2


def updates_ahead(schedule: Schedule, stage: int) -> dict[int, int]:
    """Microbatch -> updates of its copy of the stage after its forward and before the update that gathers it.

        F0 F1 F2 B0 U0 F3 B1 U1 F4 B2 U2 ...      window 1: F0 0, F1 1 (U0), F2 2 (U0 U1), F3 2 (U1 U2)

    Empty for a schedule without updates. An order that `check` accepts is taken for granted.
    """
    windows = schedule.windows
    return {
        op.microbatch: op.microbatch // windows.window - len(passed)
        for _, _, op, passed in with_updates_before(schedule)
        if windows is not None and op[:2] == (FORWARD, stage)
    }


def forward_steps(stage: int, num_stages: int, window_size: int) -> int:
    """SpecTrain's s of a forward on stage k of N: floor(k/2) + N - k - 1 microbatches, in whole windows."""
    return (stage // 2 + num_stages - stage - 1) // window_size


def backward_steps(stage: int, window_size: int) -> int:
    """SpecTrain's s of a backward: floor(k/2) microbatches, in whole windows."""
    return stage // 2 // window_size


@dataclass
class WeightReads:
    """What ops of one copy of a stage read of some weights, counted in the updates of a pass.

    Attributes:
        moments: microbatch -> the moment (see `moment`) of its forward.
        forward, backward: microbatch -> the updates that the weights stand for which its forward, and its backward,
            reads: those of the newest, and those that are predicted on top.
        needs: by moment, how far ahead of the newest ops read.
    """

    moments: dict[int, int] = field(default_factory=dict)
    forward: dict[int, int] = field(default_factory=dict)
    backward: dict[int, int] = field(default_factory=dict)
    needs: dict[int, set[int]] = field(default_factory=dict)

    def needed(self, when: int) -> tuple[int, ...]:
        """How far ahead of the newest weights ops read at a moment; ascending."""
        return tuple(sorted(self.needs.get(when, ())))

    def note(self, when: int, stands_for: int) -> None:
        """An op reads at a moment what stands for so many updates."""
        if (steps := stands_for - num_updates_at(when)) > 0:
            self.needs.setdefault(when, set()).add(steps)


def reads_of(schedule: Schedule, stage: int) -> dict[int, WeightReads]:
    """By pipeline what the ops of a stage read of its own weights; nothing by a rule that predicts none."""
    found: dict[int, WeightReads] = {}
    if (steps := _steps_of(schedule, stage)) is None:
        return found
    ahead, backward = steps
    for row in _rows_of(schedule, stage):
        moments: dict[int, int] = {}
        for op in _of_stage(row, stage):
            pipeline, m = schedule.pipeline_of(op), op.microbatch
            reads, now = found.setdefault(pipeline, WeightReads()), moments.setdefault(pipeline, 0)
            newest = num_updates_at(now)
            if op.kind in (UPDATE, PREDICT):
                moments[pipeline] = moment(newest + 1) if op.kind == UPDATE else moment(newest, True)
            elif op.kind == FORWARD:
                reads.moments[m], reads.forward[m] = now, newest + ahead(m, newest)
                reads.note(now, reads.forward[m])
            else:
                if op.kind != RECOMPUTE:
                    reads.backward[m] = newest + backward(m, newest)
                reads.note(now, newest + backward(m, newest))
    return found


def tied_reads_of(schedule: Schedule, owner: int, stage: int) -> dict[int, WeightReads]:
    """By pipeline what the ops of a stage read of a tied parameter that another one owns.

    New values come with the first forward whose microbatch has passed the owner's stage since the update.
    """
    found: dict[int, WeightReads] = {}
    owners = reads_of(schedule, owner)
    for row in _rows_of(schedule, stage) if owners else ():
        came: dict[int, int] = {}
        for op in _of_stage(row, stage):
            pipeline, m = schedule.pipeline_of(op), op.microbatch
            if op.kind in (UPDATE, PREDICT):
                continue
            theirs, mine = owners[pipeline], found.setdefault(pipeline, WeightReads())
            if op.kind == FORWARD:
                came[pipeline] = max(came.get(pipeline, 0), theirs.moments[m])
                mine.moments[m] = came[pipeline]
            stands_for = (theirs.forward if op.kind == FORWARD else theirs.backward)[m]
            (mine.forward if op.kind == FORWARD else mine.backward)[m] = stands_for
            mine.note(came[pipeline], stands_for)
    return found


def predictions_of(
    schedule: Schedule, tied_stages: Sequence[Sequence[int]] = (), one_copy_steps: bool = False
) -> dict[tuple[int, int], Needs]:
    """By (pipeline, stage) how far ahead of its newest weights each copy must know them.

    For its own ops, and for those of other stages to which it sends a tied parameter.

    Args:
        tied_stages: of each tied parameter the stages that have it, ascending; the first owns it.
        one_copy_steps: of several pipelines one has the optimizer's state, and predicts for the copies of the others,
            too.
    """
    found: dict[tuple[int, int], dict[int, set[int]]] = {}

    def add(pipeline: int, stage: int, needs: Mapping[int, set[int]]) -> None:
        for key in {(pipeline, stage), (OWNER, stage)} if one_copy_steps else {(pipeline, stage)}:
            mine = found.setdefault(key, {})
            for when, steps in needs.items():
                mine[when] = mine.get(when, set()) | steps

    for stage in range(schedule.num_stages):
        for pipeline, reads in reads_of(schedule, stage).items():
            add(pipeline, stage, reads.needs)
    for owner, *others in tied_stages:
        for stage in others:
            for pipeline, reads in tied_reads_of(schedule, owner, stage).items():
                add(pipeline, owner, reads.needs)
    return {
        key: {when: tuple(sorted(steps)) for when, steps in needs.items()} for key, needs in found.items() if needs
    }


def why_none_is_predicted(schedule: Schedule) -> str | None:
    """Why no stage reads predictions of its own weights, by a rule that makes some; None where any does."""
    updates, num_stages = schedule.updates, schedule.num_stages
    if updates is None or updates.rule not in PREDICTING or predictions_of(schedule):
        return None
    if not any(ahead for stage in range(num_stages) for ahead in updates_ahead(schedule, stage).values()):
        why = "no update of a stage comes between a forward and the update of its own microbatch"
    else:
        why = (
            f"it looks at most {num_stages - 1} microbatches ahead, fewer than the {updates.window} that an update "
            f"gathers; shorter windows, or a rule that counts updates ({', '.join(BY_ADAM)}), would predict some"
        )
    return (
        f"rule {updates.rule!r} predicts no weights here, so that each stage reads its newest ones, as by rule "
        f"'none': {why}"
    )


StepsAhead = Callable[[int, int], int]
"""How far ahead of the newest weights an op reads, by its microbatch and the updates that these weights have."""


def _steps_of(schedule: Schedule, stage: int) -> tuple[StepsAhead, StepsAhead] | None:
    """How far ahead of the newest a forward reads, and a backward; None by a rule that predicts nothing."""
    if schedule.updates is None or schedule.updates.rule not in PREDICTING:
        return None
    rule, window = schedule.updates.rule, schedule.updates.window
    if rule in BY_MOMENTUM:
        forward, backward = forward_steps(stage, schedule.num_stages, window), backward_steps(stage, window)
        return lambda m, newest: forward, lambda m, newest: backward
    return (
        lambda m, newest: m // window - newest,
        lambda m, newest: m // window - newest if rule == TENTATIVE else 0,
    )


def _rows_of(schedule: Schedule, stage: int) -> list[Sequence[Op]]:
    """The rows of the ranks that host a stage."""
    placement = schedule.placement
    hosts = {rank for pipeline in range(placement.num_pipelines) for rank in placement.hosts(pipeline, stage)}
    return [row for rank, row in enumerate(schedule.order) if rank in hosts]


def _of_stage(row: Sequence[Op], stage: int) -> list[Op]:
    """The ops that read its weights, or make new ones."""
    kinds = FORWARD, BACKWARD, INPUT, RECOMPUTE, PREDICT, UPDATE
    return [op for op in row if op.stage == stage and op.kind in kinds]


STASHING = ("pipedream", "vnag")
"""Rules by which a backward reads the version that its forward read."""

TWO_BUFFERS = "pipedream-2bw"
"""The rule by which microbatches of window t read what t - 1 updates made, forwards and backwards alike."""

SHARDINGS = ("none", "copies", "zero1", "fsdp")
"""Who of those that hold a stage has its optimizer's state, as `ps.ParallelOptions` has it."""

Copies = dict[tuple[int, int], int]
"""Numbers by (stage, pipeline)."""


def count_versions(
    schedule: Schedule,
    *,
    sharding: str = "none",
    num_replicas: int = 1,
    tied_stages: Sequence[Sequence[int]] = (),
) -> Copies:
    """By (stage, pipeline), the most versions of its weights that the copy holds at once.

    - none: 1. Updates overwrite it.
    - pipedream, vnag: the newest, and each older one that the forward of a microbatch in flight (its B
      or I still to come) read: p - i on rank i of 1F1B with windows of one microbatch (PipeDream, section 3.3).
    - pipedream-2bw: 2, the newest and the one before (PipeDream-2BW, section 3.1).
    - spectrain, xpipe, tentative: 2, the newest and what predictions are written to; 1 where nothing is
      predicted. A copy that can't predict for itself holds besides all predictions that it is sent with a version,
      and any copy what a PREDICT has made.

    Where no updates are ops of the schedule it is 1.

    Args:
        schedule: any schedule.
        sharding: who has the optimizer's state and predicts: "none" (each copy for itself), "copies" (the owner for
            all copies of a stage), "zero1" or "fsdp" (that, and each replica for the part that it has).
        num_replicas: of the pipelines.
        tied_stages: of each parameter that stages share these, ascending; the first one predicts for the others.

    Raises:
        ScheduleError: another sharding.

    Examples:
        >>> import penstock as ps
        >>> ps.schedule.count_versions(ps.build("pipedream", 3, 6, window=1))
        {(0, 0): 3, (1, 0): 2, (2, 0): 1}
    """
    if sharding not in SHARDINGS:
        raise ScheduleError(f"no sharding {sharding!r}; choose {', '.join(SHARDINGS)}", rule="options")
    copies = {(stage, k): 1 for k in range(schedule.placement.num_pipelines) for stage in range(schedule.num_stages)}
    rule = NEWEST if schedule.updates is None else schedule.updates.rule
    if rule == NEWEST:
        return copies
    if rule in STASHING:
        return _stashed(schedule, copies)
    if rule == TWO_BUFFERS:
        return dict.fromkeys(copies, 2)
    sent = predictions_of(schedule, tied_stages, one_copy_steps=sharding != "none")
    predicted = {s for s in range(schedule.num_stages) if any(each.needs for each in reads_of(schedule, s).values())}
    in_parts = num_replicas > 1 and sharding in ("zero1", "fsdp")
    found = {}
    for stage, pipeline in copies:
        is_sent = in_parts or (pipeline != OWNER and sharding != "none")
        # What a PREDICT makes is held even where it is made: after odd moments.
        ahead = [s for when, s in sent.get((pipeline, stage), {}).items() if is_sent or when % 2]
        found[stage, pipeline] = 1 + (stage in predicted) + max(map(len, ahead), default=0)
    return found


def _stashed(schedule: Schedule, most: Copies) -> Copies:
    most, newest = dict(most), dict.fromkeys(most, 0)
    read: dict[tuple[int, int], dict[int, int]] = {copy: {} for copy in most}
    for row in schedule.order:
        for op in row:
            copy = op.stage, schedule.pipeline_of(op)
            if op.kind == FORWARD:
                read[copy][op.microbatch] = newest[copy]
            elif op.kind in (BACKWARD, INPUT):
                read[copy].pop(op.microbatch, None)
            elif op.kind == UPDATE:
                newest[copy] += 1
                most[copy] = max(most[copy], len({newest[copy], *read[copy].values()}))
    return most
