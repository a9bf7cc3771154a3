"""Programs with ops of registered kinds on plain chains, and the comparison of each with the plain loop."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
import penstock.runtime.split_backward.prepared as slot_module
from device_queues import lines_over_gloo
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.stage.registered_ops import OpCall
from penstock.runtime.transport.gloo import GlooTransport
from penstock.runtime.transport.nccl import lines_of
from penstock.runtime.transport.wiring import wire
from penstock.schedule.dependencies import predecessors
from plain_loop import differences, gradients, plain_step
from tiers import in_turn
from waiting import PATIENCE

NUM_RANKS, NUM_MICROBATCHES = 4, 8
LOSS = nn.functional.mse_loss


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


STEPS = ((1, 21), (2, 16), (3, 21))
"""Numbers of steps, and how many samples each has."""

_PLAIN: dict[int, tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]] = {}


def plain(num_stages: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]:
    """The losses and the summed gradients of the plain loop, the same for every program of so many stages."""
    if num_stages not in _PLAIN:
        made = model(num_stages)
        losses = [plain_step(made, *batch(step, rows), NUM_MICROBATCHES, LOSS, step=step) for step, rows in STEPS]
        _PLAIN[num_stages] = losses, gradients(made)
    return _PLAIN[num_stages]


def compare(name: str, dispatch: str, lines: bool) -> list[str]:
    """Three steps and an evaluation, shapes coming and going; what differs from the plain loop, in words.

    Args:
        lines: whether messages go through lines, which only processes of their own have.
    """
    schedule = CASES[name]().build()
    called: list[ps.Op] = []

    def function(call: OpCall) -> None:
        called.append(call.op)
        meddle(call)
        time.sleep(0.002)

    losses, want = plain(schedule.num_stages)
    ops = functions(schedule, function)
    pipe = ps.Pipeline(
        model(schedule.num_stages), schedule, loss_fn=LOSS, dispatch=dispatch, ops=ops, timeout=PATIENCE
    )
    if lines:
        assert isinstance(pipe._local.peers, GroupPeers)
        made = lines_of(wire(schedule))
        through = lines_over_gloo(pipe._local.peers.group, made, PATIENCE)
        pipe._local.transport = GlooTransport(pipe._local.peers.group, pipe._local.tags, PATIENCE, lines=through)
    wrong = []
    for (step, rows), loss in zip(STEPS, losses, strict=True):
        x, y = batch(step, rows)
        before = torch.get_rng_state()
        if not torch.equal(pipe.step(x, y, update=False).loss, loss):
            wrong.append(f"the loss of step {step}")
        if not torch.equal(torch.get_rng_state(), before) or not torch.is_grad_enabled():
            wrong.append(f"step {step} left torch's generator, or whether gradients are computed, as an op did")
        wrong += out_of_place(pipe.timeline())
        pipe.evaluate(x, y)
    mine = {n: None if p.grad is None else p.grad.clone() for n, p in pipe.named_parameters()}
    wrong += differences({n: want[n] for n in mine}, mine)
    rows_here = [schedule.order[pipe.rank]] if dist.is_initialized() else schedule.order
    own = [op for row in rows_here for op in row if op.kind not in "FBIW"]
    if sorted(called) != sorted(own * len(STEPS)):
        wrong.append(f"{len(called)} calls for {own * len(STEPS)}")
    return wrong


WAYS = [("frozen", False), ("dynamic", False), ("frozen", True)]
"""The dispatch, and whether messages go through lines."""


def compare_all(rank: int) -> dict[str, list[str]]:
    """Every case in the ways whose turn it is between processes; in one process in both that it has."""
    slot_module.MERGE_WORK = 0
    return {
        f"{name}, {dispatch}{', lines' * lines}": compare(name, dispatch, lines)
        for number, name in enumerate(CASES)
        for dispatch, lines in (in_turn(WAYS, number) if dist.is_initialized() else WAYS[:2])
    }
