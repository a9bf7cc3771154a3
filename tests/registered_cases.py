"""Programs with ops of registered kinds on plain chains, for tests of what runs them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import penstock as ps
from penstock.runtime.stage.registered_ops import OpCall
from penstock.schedule.dependencies import predecessors

NUM_RANKS, NUM_MICROBATCHES = 4, 8


def program(
    *ops: ps.NewOp, split: bool = False, each: int = 1, stages: ps.schedule.StageGraph | None = None
) -> ps.Program:
    """Over four ranks with `each` stages, eight microbatches."""
    place = ps.placements.circular(NUM_RANKS, NUM_RANKS * each)
    return ps.Program(place, NUM_MICROBATCHES, ps.Rules("backward-first"), split=split, ops=ops, stages=stages)


def chain(*needs: ps.schedule.Needs) -> ps.schedule.StageGraph:
    return ps.schedule.StageGraph(NUM_RANKS, tuple((s, s + 1) for s in range(NUM_RANKS - 1)), needs=needs)


CASES: dict[str, Callable[[], ps.Program]] = {
    "beside its stage": lambda: program(ps.NewOp("SNAPSHOT", 1, after={("F", 1): 2}, before={("B", 1): 2})),
    "after a stage of another rank": lambda: program(ps.NewOp("OFFLOAD", 1, after={("F", 3): 4})),
    "before a stage of another rank": lambda: program(ps.NewOp("FETCH", 3, before={("F", 0): 2}), split=True),
    "between two other ranks": lambda: program(ps.NewOp("GATE", 2, after={("F", 0): 2}, before={("F", 3): 2})),
    "one after another": lambda: program(
        ps.NewOp("ASK", 0, after={("F", 0): 2}),
        ps.NewOp("TELL", 3, after={("ASK", 0): 2}, before={("B", 3): 4}),
    ),
    "on a rank that does not host the stage": lambda: program(
        ps.NewOp("LOG", 0, after={("B", 0): 4}, on=(3,)), split=True
    ),
    "after all weight gradients": lambda: program(
        *(ps.NewOp("TALLY", s, after={("W", s): NUM_MICROBATCHES}) for s in range(NUM_RANKS)), split=True
    ),
    "more of them than microbatches": lambda: program(
        ps.NewOp("ASK", 0, num_ops=20), ps.NewOp("TELL", 3, after={("ASK", 0): 1})
    ),
    "needs besides the chain's, and twice": lambda: program(
        stages=chain(
            ps.schedule.Needs(("F", 0), ("F", 1)),
            ps.schedule.Needs(("B", 1), ("B", 0)),
            ps.schedule.Needs(("F", 3), ("B", 0), 4, 4),
            ps.schedule.Needs(("F", 3), ("B", 0), 4, 4),
        ),
    ),
    "two stages a rank": lambda: program(
        ps.NewOp("SNAPSHOT", 5, after={("F", 1): 2, ("F", 6): 2}, before={("B", 5): 2}),
        ps.NewOp("SNAPSHOT", 4, after={("F", 0): 4}, before={("B", 7): 4}),
        each=2,
        split=True,
    ),
}


def model(num_stages: int) -> nn.Sequential:
    """A linear layer with dropout for each stage."""
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Tanh()) for _ in range(num_stages)))


def batch(step: int, rows: int = 21) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(step)
    return torch.randn(rows, 16), torch.randn(rows, 16)


def meddle(call: OpCall) -> None:
    """Does what could disturb other ops, short of changing the model: draws, and leaves gradients switched off."""
    torch.rand(7)
    torch.default_generator.manual_seed(call.index)
    torch.set_grad_enabled(False)


def functions(schedule: ps.Schedule, function: Callable[[OpCall], object]) -> dict[str, Callable[[OpCall], object]]:
    return {registered.kind: function for registered in schedule.graph.registered}


def out_of_place(timeline: ps.Timeline) -> list[str]:
    """In words, ops that are not there once, and those that started before what they need had ended."""
    schedule = timeline.schedule
    number = {op: index for index, op in enumerate(op for row in schedule.order for op in row)}
    times = {timed.op: timed for timed in timeline.ops}
    found = [f"{op} is missing" for op in number if op not in times]
    if len(timeline.ops) != len(number):
        found.append(f"{len(timeline.ops)} ops ran, there are {len(number)}")
    for op, timed in times.items():
        for needed in predecessors(op, schedule.graph, number):
            if needed in times and times[needed].end > timed.start:
                found.append(f"{op} started before {needed} ended")
    return found
