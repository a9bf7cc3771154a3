"""Runs of schedules whose updates are ops of the order: the same in one process as with one process a rank."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from copies_runs import grouped_step
from penstock.runtime import MuonAdamW
from plain_loop import cut, differences
from waiting import PATIENCE

NUM_RANKS = 4
MSE = nn.MSELoss()
ADAM = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
NADAM = partial(torch.optim.NAdam, lr=0.02, betas=(0.99, 0.999), momentum_decay=0.004, decoupled_weight_decay=True)
MUON = partial(MuonAdamW, lr=0.02)
MOMENTUM = partial(torch.optim.SGD, lr=0.02, momentum=0.9)


@dataclasses.dataclass(frozen=True)
class Run:
    """A schedule, what steps it, and how often it must run for more than fifty updates.

    Attributes:
        rule: in place of the schedule's own.
    """

    schedule: str
    options: dict[str, Any]
    optimizer: Any = ADAM
    num_microbatches: int = 16
    zero: bool = True
    clip_norm: float | None = None
    split: bool = False
    rule: str | None = None

    def build(self) -> ps.Schedule:
        schedule = ps.build(self.schedule, NUM_RANKS, self.num_microbatches, **self.options)
        if self.rule is not None:
            assert schedule.updates is not None
            schedule = dataclasses.replace(schedule, updates=dataclasses.replace(schedule.updates, rule=self.rule))
        return ps.passes.separate_gradients(schedule) if self.split else schedule


RUNS = {
    "amdp": Run("amdp", {"window": 4}),
    "amdp without ZeRO, clipped": Run("amdp", {"window": 4}, zero=False, clip_norm=0.05),
    "amdp without mismatch": Run("amdp", {"window": 4, "max_mismatch": 0}),
    "pipedream": Run("pipedream", {"window": 1}),
    "pipedream-2bw": Run("pipedream-2bw", {"window": 4}),
    "xpipe": Run("xpipe", {"window": 4}),
    "spectrain": Run("spectrain", {"window": 1}, MOMENTUM),
    "vnag": Run("vnag", {"window": 1}, NADAM),
    "amdp, Muon": Run("amdp", {"window": 4}, MUON),
    "xpipe, Muon": Run("xpipe", {"window": 4}, MUON),
    "amdp, xpipe": Run("amdp", {"window": 4}, rule="xpipe"),
    "amdp, xpipe, Muon": Run("amdp", {"window": 4}, MUON, rule="xpipe"),
}


def model_of(num_stages: int, seed: int = 3) -> nn.Sequential:
    """Layers whose weights autograd saves as leaves, as views and not at all."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Dropout(0.1)) for _ in range(num_stages))
    )


def batch_of(num: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(2 * num, 6, generator=generator)
    return x, x.roll(1, 1)


def pipeline_of(run: Run) -> ps.Pipeline:
    schedule = run.build()
    return ps.Pipeline(
        model_of(schedule.num_stages),
        schedule,
        loss_fn=MSE,
        optimizer=run.optimizer,
        timeout=PATIENCE,
        precision=ps.PrecisionOptions(clip_norm=run.clip_norm),
        parallel=ps.ParallelOptions(sharding="copies" if run.zero else "none"),
    )


def trained(name: str, num_updates: int = 50) -> tuple[dict[str, Tensor], list[float], dict[Any, int], float]:
    """This process's parameters after so many updates, the losses, the mismatch counted, and an evaluation."""
    with one_thread():
        return _trained(RUNS[name], num_updates)


@contextmanager
def one_thread() -> Iterator[None]:
    """LayerNorm's gradients are summed up thread by thread, and ranks have one each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _trained(run: Run, num_updates: int) -> tuple[dict[str, Tensor], list[float], dict[Any, int], float]:
    pipe = pipeline_of(run)
    windows = pipe.schedule.windows
    assert windows is not None
    losses: list[float] = []
    step = 0
    while pipe.num_updates < num_updates:
        x, y = batch_of(run.num_microbatches, step)
        rates = [0.02 / (1 + step + update / windows.num_updates) for update in range(windows.num_updates)]
        losses += pipe.step(x, y, rates=rates).window_losses.tolist()
        step += 1
    mismatch = pipe.mismatch()
    evaluated = float(pipe.evaluate(*batch_of(run.num_microbatches, 0)).loss)
    parameters = {n: p.detach().clone() for n, p in pipe.named_parameters()}
    pipe.close()
    return parameters, losses, mismatch, evaluated


def synchronous(run: Run, num_steps: int) -> dict[str, Tensor]:
    """Parameters after a loop that makes every update of the run before the next window begins, grouped alike."""
    schedule = run.build()
    windows = schedule.windows
    assert windows is not None
    model = model_of(schedule.num_stages)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    optimizer = run.optimizer(model.parameters())
    for step in range(num_steps):
        xs, ys = (cut(part, run.num_microbatches) for part in batch_of(run.num_microbatches, step))
        for update in range(windows.num_updates):
            window = windows.microbatches(update)
            alone = dataclasses.replace(
                schedule, microbatch_pipeline=tuple(schedule.microbatch_pipeline[m] for m in window)
            )
            x, y = torch.cat([xs[m] for m in window]), torch.cat([ys[m] for m in window])
            _, gradients = grouped_step(model, x, y, alone, step + 1)
            for name, p in model.named_parameters():
                p.grad = gradients[name]
            optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def unlike(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return differences({n: b[n] for n in a}, dict(a))


def without_dropout(model: nn.Sequential) -> nn.Sequential:
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return model
