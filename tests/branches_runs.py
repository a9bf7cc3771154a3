"""Stages that branch and join: pipelines beside the plain loop that runs stage after stage through autograd."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from penstock.runtime.tensors.rng import mix
from plain_loop import differences, seed_devices
from waiting import PATIENCE

MSE = nn.MSELoss()
ADAM = partial(torch.optim.AdamW, lr=0.05)


class Joined(nn.Module):
    """Takes what two stages give."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.linear(a * torch.sigmoid(b))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(6, 6), nn.LayerNorm(6), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.norm(self.linear(x))))


GRAPHS: dict[str, ps.schedule.StageGraph] = {
    "a fork that joins": ps.schedule.StageGraph(4, ((0, 1), (0, 2), (1, 3), (2, 3))),
    "two towers": ps.schedule.StageGraph(5, ((0, 1), (2, 3), (1, 4), (3, 4))),
    "a skip": ps.schedule.StageGraph(4, ((0, 1), (1, 2), (0, 3), (2, 3))),
    "smaller microbatches in one tower": ps.schedule.StageGraph(
        5, ((0, 1), (2, 3), (1, 4), (3, 4)), num_microbatches=(8, 8, 4, 4, 4)
    ),
    "a large loss": ps.schedule.StageGraph(5, ((0, 1), (2, 3), (1, 4), (3, 4)), num_microbatches=(8, 8, 8, 8, 2)),
}
EVEN = [name for name, graph in GRAPHS.items() if not graph.num_microbatches]
NUM = 8


def schedule_of(name: str, split: bool = False) -> ps.Schedule:
    graph = GRAPHS[name]
    return ps.Program(ps.placements.one_to_one(graph.num_stages), NUM, stages=graph, split=split).build()


def stages_of(name: str) -> list[nn.Module]:
    torch.manual_seed(1)
    return [Joined() if len(sources) == 2 else Plain() for sources in GRAPHS[name].sources]


def batch_of(name: str, step: int) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(step)
    starts = [stage for stage, sources in enumerate(GRAPHS[name].sources) if not sources]
    inputs = {stage: torch.randn(16, 6, generator=generator) for stage in starts}
    return (inputs if len(starts) > 1 else inputs[starts[0]]), torch.randn(16, 6, generator=generator)


def plain_step(name: str, stages: list[nn.Module], inputs: Any, targets: Tensor, step: int) -> Tensor:
    """Adds a step's gradients to the stages' and returns the loss; matching microbatches go together."""
    graph = GRAPHS[name]
    counts = [graph.microbatches_of(stage, NUM) for stage in range(graph.num_stages)]
    end, num_groups = graph.num_stages - 1, min(counts)
    given = inputs if isinstance(inputs, dict) else {0: inputs}
    cut = {stage: value.tensor_split(counts[stage]) for stage, value in given.items()}
    cut_targets, total = targets.tensor_split(counts[end]), torch.zeros(())
    with torch.random.fork_rng(devices=[]):
        for group in range(num_groups):
            made: dict[int, Tensor] = {}
            for stage, sources in enumerate(graph.sources):
                size = counts[stage] // num_groups
                mine = [made[source].tensor_split(size) for source in sources]
                parts = []
                for place in range(size):
                    m = group * size + place
                    seed_devices(seed_of(step, m, stage))
                    values = [part[place] for part in mine] or [cut[stage][m]]
                    parts.append(stages[stage](*values))
                made[stage] = torch.cat(parts) if len(parts) > 1 else parts[0]
            for place, output in enumerate(made[end].tensor_split(counts[end] // num_groups)):
                loss = MSE(output, cut_targets[group * (counts[end] // num_groups) + place]) / counts[end]
                loss.backward(retain_graph=place + 1 < counts[end] // num_groups)
                total = total + loss.detach()
    return total


def seed_of(step: int, m: int, stage: int) -> int:
    return mix(mix(mix(0, step), m), stage)


class Looped:
    """The plain loop over two steps: the losses and the gradients, an update behind each."""

    def __init__(self, name: str) -> None:
        stages = stages_of(name)
        names = {f"{index}.{n}": p for index, stage in enumerate(stages) for n, p in stage.named_parameters()}
        adam = ADAM(names.values())
        self.losses: list[Tensor] = []
        self.gradients: list[dict[str, Tensor | None]] = []
        for step in (1, 2):
            self.losses.append(plain_step(name, stages, *batch_of(name, step), step))
            self.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in names.items()})
            adam.step()
            adam.zero_grad()


_LOOPED: dict[str, Looped] = {}
"""By graph: whatever the schedule, the plain loop is the same, and is run once a process."""


def wrong(
    name: str,
    dispatch: str = "frozen",
    split: bool = False,
    exact: bool = True,
    schedule: ps.Schedule | None = None,
) -> list[str]:
    """What is not as in the plain loop over two steps, in words; of the schedule given or the usual one."""
    if name not in _LOOPED:
        _LOOPED[name] = Looped(name)
    looped, stages = _LOOPED[name], stages_of(name)
    schedule = schedule_of(name, split) if schedule is None else schedule
    pipe = ps.Pipeline(stages, schedule, loss_fn=MSE, optimizer=ADAM, dispatch=dispatch, timeout=PATIENCE)
    found: list[str] = []
    for step in (1, 2):
        want = looped.losses[step - 1]
        result = pipe.step(*batch_of(name, step), update=False)
        own = {n: p.grad for n, p in pipe.named_parameters()}
        wanted = {n: looped.gradients[step - 1][n] for n in own}
        if exact:
            found += differences(wanted, own)
            found += [] if torch.equal(result.loss, want) else [f"loss {result.loss} is not {want}"]
        else:
            close = {n: torch.allclose(wanted[n], own[n], rtol=1e-5, atol=1e-7) for n in own}  # type: ignore[arg-type]
            found += [n for n, each in close.items() if not each]
            found += [] if torch.allclose(result.loss, want) else [f"loss {result.loss} is not {want}"]
        pipe.update()
    inputs, targets = batch_of(name, 3)
    evaluated, outputs = pipe.evaluate(inputs, targets).loss, torch.cat(pipe.predict(inputs))
    found += (
        [] if torch.allclose(evaluated, MSE(outputs, targets)) else ["what is evaluated is not what is predicted"]
    )
    pipe.close()
    return found
