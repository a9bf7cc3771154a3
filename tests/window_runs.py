"""Schedules of branching and of shared stages whose updates are ops, window after window, beside the plain loop: no
update comes between a forward and its backward, so each window has the numbers of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import compatibility_cells as cells
import penstock as ps
from penstock.runtime.tensors.dtensor import whole
from penstock.schedule.weight_versions import predictions_of
from waiting import PATIENCE

WINDOW, NUM_WINDOWS = 4, 3


@cache
def schedule_of(name: str, num_ranks: int) -> ps.Schedule:
    if name == "fork":
        base = ps.Program(ps.placements.circular(num_ranks, 4), WINDOW, stages=cells.FORK).build()
    else:
        base = ps.build(name, num_ranks, WINDOW)
    return ps.passes.repeat_windows(base, NUM_WINDOWS)


def model_of(num_stages: int, tied: Sequence[int]) -> list[cells.Block]:
    """A block a stage; these have one weight."""
    torch.manual_seed(5)
    model = [cells.Block() for _ in range(num_stages)]
    for stage in tied[1:]:
        model[stage].up.weight = model[tied[0]].up.weight
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    size = 2 * WINDOW * NUM_WINDOWS, cells.WIDTH
    return torch.randn(size, generator=generator), torch.randn(size, generator=generator)


def pipeline(name: str, num_ranks: int, tied: Sequence[int], **options: Any) -> ps.Pipeline:
    schedule = schedule_of(name, num_ranks)
    model = model_of(schedule.num_stages, tied)
    return ps.Pipeline(model, schedule, loss_fn=cells.MSE, optimizer=cells.ADAM, timeout=PATIENCE, **options)


def unlike_steps(name: str, num_ranks: int, tied: Sequence[int], far: float = 0.0, **options: Any) -> list[str]:
    """What is not as after as many steps of the plain loop as there were windows, in words."""
    schedule, found = schedule_of(name, num_ranks), []
    pipe = pipeline(name, num_ranks, tied, **options)
    plain = nn.ModuleList(model_of(schedule.num_stages, tied))
    adam = cells.ADAM(plain.parameters())
    for number in range(2):
        x, y = batch(number)
        pipe.step(x, y)
        for window in zip(x.split(2 * WINDOW), y.split(2 * WINDOW), strict=True):
            plain.zero_grad()
            for one, other in zip(*(part.split(2) for part in window), strict=True):
                cells._forward_backward(plain, schedule, one, other, 1 / WINDOW, None)
            adam.step()
        want = {each: parameter.detach() for each, parameter in plain.named_parameters()}
        for each, parameter in pipe.named_parameters():
            off = float((whole(parameter.detach()) - want[each]).abs().max())
            found += [f"step {number}: {each} is off by {off}"] if off > far else []
    pipe.close()
    return found


def unlike_when_loaded(name: str, num_ranks: int, tied: Sequence[int], folder: Path, **options: Any) -> list[str]:
    """What differs after a window that was left open, where a run goes on from a checkpoint or was handed over."""
    going, loaded, then = (pipeline(name, num_ranks, tied, **options) for _ in range(3))
    going.step(*batch(0), update=False)
    loaded.load(going.save(folder))
    going.hand_over(then)
    again = pipeline(name, num_ranks, tied, **options)
    again.step(*batch(0), update=False)
    values = []
    for pipe in (again, loaded, then):
        pipe.step(*batch(1))
        values.append({each: whole(p.detach()).clone() for each, p in pipe.named_parameters()})
    for pipe in (going, loaded, then, again):
        pipe.close()
    return [
        f"{what}: {each}"
        for what, found in zip(("loaded", "handed over"), values[1:], strict=True)
        for each, value in found.items()
        if not torch.equal(value, values[0][each])
    ]


def predicting(name: str, rule: str, tied: Sequence[int], **options: Any) -> dict[str, Tensor]:
    """The parameters here after two steps on four ranks, by a rule that predicts, with an update per microbatch."""
    if name == "fork":
        base = ps.Program(ps.placements.circular(4, 4), WINDOW * NUM_WINDOWS, stages=cells.FORK).build()
    else:
        base = ps.build(name, 4, WINDOW * NUM_WINDOWS)
    schedule = ps.schedule.with_updates(base, 1, rule=rule)
    assert predictions_of(schedule)
    optimizer = cells.SGD if rule == "spectrain" else cells.ADAM
    model = model_of(schedule.num_stages, tied)
    pipe = ps.Pipeline(model, schedule, loss_fn=cells.MSE, optimizer=optimizer, timeout=PATIENCE, **options)
    for number in range(2):
        pipe.step(*batch(number))
    found = {each: parameter.detach().clone() for each, parameter in pipe.named_parameters()}
    pipe.close()
    return found


PREDICTING = [
    ("mllm", "xpipe", (0, 5)),
    ("mllm", "spectrain", (1, 3)),
    ("fork", "xpipe", (0, 1, 2, 3)),
    ("fork", "spectrain", (0, 3)),
]
"""What `predicting` is given."""
