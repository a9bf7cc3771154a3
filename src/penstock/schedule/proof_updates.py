"""The part of `check` that is about updates. It proves that each copy takes over each update once, and that no more
updates fall between a microbatch's forward and its backward than the schedule allows. Where microbatches find their
weights in two buffers, it proves that these are there in time.

That an update comes after what it gathers, and a copy's updates in their order, is proved with all other needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from penstock.schedule.errors import ScheduleError, name_of
from penstock.schedule.op import BACKWARD, FORWARD, GIVE, INPUT, PREDICT, UPDATE, WEIGHT, Op
from penstock.schedule.schedule import Schedule
from penstock.schedule.tentative import require_whole_backwards
from penstock.schedule.text import error_at
from penstock.schedule.updates import OWNER, TENTATIVE, updates_between, with_updates_before
from penstock.schedule.weight_versions import TWO_BUFFERS


def check_windows(schedule: Schedule) -> None:
    """Updates are defined for stages that all work on the schedule's microbatches."""
    if schedule.updates is not None and schedule.graph.num_microbatches:
        raise ScheduleError(
            f"the stages work on {schedule.graph.num_microbatches} microbatches, but an update gathers the same "
            "window of them on every stage (rule: updates); give all stages the schedule's number",
            rule="updates",
        )


def num_updates_of(schedule: Schedule, rank: int, step: int, op: Op) -> int:
    """How many U a stage has; raises ScheduleError for the U of a schedule that says nothing of updates."""
    if schedule.windows is None:
        message = "the schedule does not say what an update gathers; give it updates=Updates(window=...)"
        raise error_at(schedule, "kind", rank, step, op, message)
    return schedule.windows.num_ops


def check_every_update(schedule: Schedule, spot: Mapping[Op, tuple[int, int]]) -> None:
    """Every copy of every stage has every update; `spot` is the (rank, step) of each op."""
    windows = schedule.windows
    if windows is None:
        return
    for stage in range(schedule.num_stages):
        for number in range(windows.num_ops):
            op = Op(UPDATE, stage, number)
            if op not in spot:
                update, pipeline = windows.update_of(number)
                rank = schedule.hosts(op)[0]
                raise ScheduleError(
                    f"rank {rank}: {name_of(op)} is missing: update {update} of pipeline {pipeline}'s copy, after "
                    f"microbatches {_range(windows.microbatches(update))}; every copy takes every update over once "
                    "(rule: coverage)",
                    rule="coverage",
                    rank=rank,
                    op=op,
                )


def check_tentative(schedule: Schedule) -> None:
    """Each GIVE and PREDICT belongs to the rule `tentative`, stands before its copy's update, and has an owner's
    PREDICT; and backwards are whole.
    """
    windows, updates = schedule.windows, schedule.updates
    if windows is None or updates is None:
        return
    if stepped := {op[1:] for row in schedule.order for op in row if op.kind == PREDICT}:
        require_whole_backwards(schedule)
    for rank, row in enumerate(schedule.order):
        past: set[tuple[int, int]] = set()
        for step, op in enumerate(row):
            if op.kind == UPDATE:
                past.add(op[1:])
            if op.kind not in (GIVE, PREDICT):
                continue
            update, pipeline = windows.update_of(op.microbatch)
            why = None
            if updates.rule != TENTATIVE:
                why = f"it belongs to the rule {TENTATIVE!r}, and updates are by {updates.rule!r}"
            elif op[1:] in past:
                why = f"it comes after its copy's update, U{op.microbatch}; put it before"
            elif op.kind == GIVE and pipeline == OWNER:
                why = "it would send gradients from the owner to the owner; leave it out"
            elif (op.stage, windows.number(update, OWNER)) not in stepped:
                why = f"the owner has no PREDICT of update {update}; give it one, or leave this op out"
            if why is not None:
                raise error_at(schedule, "updates", rank, step, op, why)


def check_mismatch(schedule: Schedule, most: int) -> None:
    """No more than `most` updates of a copy between a microbatch's forward and its backward there."""
    for (stage, microbatch), passed in updates_between(schedule).items():
        if len(passed) > most:
            _refuse(schedule, stage, microbatch, passed, most)


def check_two_buffers(schedule: Schedule) -> None:
    """By the rule of PipeDream-2BW, every forward comes after the update that makes the version it reads.

    Microbatches of window t read what t - 1 updates made, so a forward of window t comes after update t - 2 of its
    copy. That asks for windows about as long as what a stage has in flight. A third version is never needed, whatever
    the window: update t gathers the window's own backwards, so while one of them is to come, no more than t updates
    are made, one more than it reads.
    """
    windows, updates = schedule.windows, schedule.updates
    if windows is None or updates is None or updates.rule != TWO_BUFFERS:
        return
    for rank, step, op, passed in with_updates_before(schedule):
        if op.kind == FORWARD and len(passed) < (window := op.microbatch // windows.window) - 1:
            message = (
                f"by the rule {TWO_BUFFERS} microbatch {op.microbatch}, of window {window}, reads what update "
                f"{window - 2} makes, but this copy has that update later; with windows of {windows.window} two "
                f"versions of the weights are not enough for this order. Give windows of at least "
                f"{_least_window(schedule)}"
            )
            raise error_at(schedule, "versions", rank, step, op, message)


def _least_window(schedule: Schedule) -> int:
    """The shortest window with which every forward of this order can find the backwards of its version ended."""
    mine: dict[int, list[int]] = {}
    for m, pipeline in enumerate(schedule.microbatch_pipeline):
        mine.setdefault(pipeline, []).append(m)
    found: list[tuple[int, int]] = []  # each forward's microbatch, and the first of its copy still to go back
    for row in schedule.order:
        split = {(op.stage, op.microbatch) for op in row if op.kind == WEIGHT}
        ended: dict[tuple[int, int], set[int]] = {}
        for op in row:
            done = ended.setdefault((op.stage, schedule.pipeline_of(op)), set())
            if op.kind == WEIGHT or (op.kind == BACKWARD and (op.stage, op.microbatch) not in split):
                done.add(op.microbatch)
            elif op.kind == FORWARD:
                first = next(m for m in mine[schedule.pipeline_of(op)] if m not in done)
                found.append((op.microbatch, first))
    window = 1
    while any((m // window - 1) * window > first for m, first in found):
        window += 1
    return window


def _refuse(schedule: Schedule, stage: int, microbatch: int, passed: tuple[Op, ...], most: int) -> NoReturn:
    windows = schedule.windows
    assert windows is not None  # there is a U in `passed`
    rank = schedule.hosts(passed[0])[0]
    place = {op: step for step, op in enumerate(schedule.order[rank])}
    backward = next(op for kind in (BACKWARD, INPUT) if (op := Op(kind, stage, microbatch)) in place)
    forward = Op(FORWARD, stage, microbatch)
    found = ", ".join(f"{u.short()} (update {windows.update_of(u.microbatch)[0]}) at step {place[u]}" for u in passed)
    message = (
        f"microbatch {microbatch} meets {len(passed)} updates of stage {stage} between its forward, at step "
        f"{place[forward]}, and this backward: {found}; at most {most} may fall there. Give updates a longer "
        "window, or let fewer microbatches in"
    )
    raise error_at(schedule, "mismatch", rank, place[backward], backward, message, peer=name_of(passed[0]))


def _range(microbatches: range) -> str:
    return f"{microbatches[0]} to {microbatches[-1]}"
