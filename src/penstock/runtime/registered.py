"""Ops of the user's own kinds: which function runs them, and what it is told.

    ps.Program(..., ops=[ps.NewOp("SNAPSHOT", stage=1, after={("F", 1): 2}, before={("B", 1): 2}, run=keep)])
    ps.Pipeline(..., program.build(), ops=program.callables)

    rank 1 | F0 F1 SNAPSHOT0 B0 B1 ...      keep(OpCall(op=SNAPSHOT0, microbatches=(0, 1), ...))

What such an op waits for, and what waits for it, the stage graph's `Needs` say. Where both ends of a need lie on
one rank the decision core counts it; between ranks a message without content (a token) tells that an op has run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.runtime.errors import RuntimeFailure
from penstock.schedule import Op, Schedule
from penstock.schedule.dependencies import predecessors


@dataclass(frozen=True)
class OpCall:
    """What a function is told when the runtime calls it for an op of its kind.

    Attributes:
        rank: where it runs.
        stage: the op's stage.
        op: the op; `op.kind` is its kind.
        index: its number among its like, from 0.
        microbatches: those whose ops it comes after, ascending: the ones that it needs itself, or through other
            registered ops. Empty where it needs nothing.
        module: the stage, its parameters under their plain names; None where the op runs on a rank that does not
            host the stage.
    """

    rank: int
    stage: int
    op: Op
    index: int
    microbatches: tuple[int, ...]
    module: nn.Module | None


OpFunction = Callable[[OpCall], Any]
"""Called at an op's place in the order of its rank; what it returns is ignored."""


def functions_of(schedule: Schedule, given: Mapping[str, OpFunction]) -> dict[str, OpFunction]:
    """The function of each registered kind of the schedule.

    Raises:
        RuntimeFailure: a kind without a function, a function for a kind that is not there, or something that
            cannot be called.
    """
    kinds = sorted({registered.kind for registered in schedule.graph.registered})
    if missing := [kind for kind in kinds if kind not in given]:
        raise RuntimeFailure(
            f"{schedule.name} has ops of kind {missing[0]}, and no function was given for them; give one, "
            f"ps.Pipeline(..., ops={{{missing[0]!r}: function}})"
        )
    if unknown := [kind for kind in given if kind not in kinds]:
        raise RuntimeFailure(
            f"ops= has a function for kind {unknown[0]}, of which {schedule.name} has no ops "
            f"(its registered kinds: {', '.join(kinds) or 'none'}); leave it out or build the schedule with such ops"
        )
    for kind, function in given.items():
        if not callable(function):
            raise RuntimeFailure(f"ops= has {function!r} for kind {kind}; give a function of one argument, the call")
    return dict(given)


def calls_of(
    schedule: Schedule, functions: Mapping[str, OpFunction], stages: Mapping[int, nn.Module]
) -> dict[Op, tuple[OpFunction, OpCall]]:
    """For each registered op of a schedule its function and what that is told. `stages` are those in this process."""
    if not functions:
        return {}
    number = {op: index for index, op in enumerate(op for row in schedule.order for op in row)}
    followed: dict[Op, frozenset[int]] = {}

    def follow(op: Op) -> frozenset[int]:
        if op not in followed:
            found: set[int] = set()
            for before in predecessors(op, schedule.graph, number):
                found |= follow(before) if before.kind in functions else {before.microbatch}
            followed[op] = frozenset(found)
        return followed[op]

    calls: dict[Op, tuple[OpFunction, OpCall]] = {}
    for rank, row in enumerate(schedule.order):
        for op in row:
            if op.kind in functions:
                module = stages.get(op.stage) if op.stage in schedule.stages_of(rank) else None
                microbatches = tuple(sorted(follow(op)))
                call = OpCall(rank, op.stage, op, op.microbatch, microbatches, module)
                calls[op] = functions[op.kind], call
    return calls


def name_of(function: OpFunction) -> str:
    """A function's name for an error."""
    return str(getattr(function, "__qualname__", None) or repr(function))
