"""Pairs of ops on a GPU: the numbers of the plain loop."""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from offload_programs import offloaded
from packed import packed
from penstock.schedule import Op
from plain_loop import plain_step
from processes import run_ranks_to_end

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

DEVICE = "cuda:0"
WIDTH, NUM_SAMPLES, NUM_MICROBATCHES, NUM_STEPS = 512, 10240, 10, 12
"""So large that the GPU is behind Python: ops are launched while those before them run."""
CHAINS = (1, 24, 2, 12, 18, 0, 6, 30)
"""Of each stage the small matmuls that its forward runs one after the other."""
WIDE = (4096, 0, 2048, 512, 0, 8192, 1024, 0)
"""Of each stage the inner width of its large matmuls."""


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class Uneven(nn.Module):
    """A stage with short and long kernels, dropout, statistics of batches, and state that each forward replaces: what
    would read that too late would find what has been given its memory.

    Args:
        keeps: whether it also keeps some of what it computed last.
    """

    mean: Tensor

    def __init__(self, chain: int, wide: int, keeps: bool) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.small = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.chain = chain
        self.large = nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH)) if wide else None
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.last = [torch.zeros(WIDTH)] if keeps else []

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.norm(x))
        if self.large is not None:
            y = y + self.large(y)
        for _ in range(self.chain):
            y = torch.tanh(y @ self.small)
        y = y + 0.1 * self.mean
        for last in self.last:
            y = y + 0.1 * last.to(y.device)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        if self.last:
            self.last = [y.detach().amax(0)]
        return x + y


class Kind(NamedTuple):
    """What a model is like: whether its stages keep what they computed last, and whether two share a parameter."""

    keeps: bool = True
    tied: bool = False


USUAL = Kind()


def build_model(kind: Kind) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Uneven(*each, kind.keeps) for each in zip(CHAINS, WIDE, strict=True)))
    if kind.tied:
        model[7].small = model[0].small
    return model.to(DEVICE)


def build_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(NUM_SAMPLES, WIDTH).to(DEVICE), torch.randn(NUM_SAMPLES, WIDTH).to(DEVICE)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def digest(value: Tensor) -> int:
    return zlib.crc32(value.detach().cpu().contiguous().numpy().tobytes())


def gradients(parameters: dict[str, nn.Parameter], step: int) -> dict[str, int]:
    return {f"{name} in step {step}": digest(p.grad) for name, p in parameters.items() if p.grad is not None}


def values(model: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[str, int]:
    """Parameters, and the buffers of the stages that have them."""
    stages = {name.split(".")[0] for name in parameters}
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: digest(value) for name, value in named if name.split(".")[0] in stages}


_plain: dict[Kind, dict[str, Any]] = {}


def plain(kind: Kind = USUAL) -> dict[str, Any]:
    """Digests of what the plain loop computes on this GPU: gradients in each step, then parameters and buffers. Each
    step starts from what the one before has made, so that a wrong number stays."""
    if kind not in _plain:
        model, (x, y) = build_model(kind), build_batch()
        found: dict[str, Any] = {}
        losses, optimizer = [], sgd(model.parameters())
        for step in range(1, NUM_STEPS + 1):
            loss = plain_step(model, x, y, NUM_MICROBATCHES, nn.functional.mse_loss, step=step)
            losses.append(float(loss))
            found |= gradients(dict(model.named_parameters()), step)
            optimizer.step()
            optimizer.zero_grad()
        _plain[kind] = {**found, **values(model, dict(model.named_parameters())), "losses": losses}
    return _plain[kind]


def piped(schedule: ps.Schedule, kind: Kind = USUAL, **options: Any) -> dict[str, Any]:
    """The same of a pipeline, as far as it lies in this process."""
    model, (x, y) = build_model(kind), build_batch()
    found: dict[str, Any] = {}
    losses = []
    given = packed(loss_fn=nn.functional.mse_loss, optimizer=sgd, **options)
    with ps.Pipeline(model, schedule, **given) as pipe:
        here = dict(pipe.named_parameters())
        for step in range(1, NUM_STEPS + 1):
            losses.append(float(pipe.step(x, y, update=False).loss))
            found |= gradients(here, step)
            pipe.update()
        timeline = pipe.timeline()
        found |= values(model, here)
    for row in timeline.rows:
        assert all(before.end <= after.start + 0.005 for before, after in pairwise(row))
    return {**found, "losses": losses}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [name for name in found if found[name] != expected[name]]


def recomputed(schedule: ps.Schedule) -> ps.Schedule:
    """Forwards of every second microbatch run again right before their full backward, or before its pair."""
    backward_of = dict(schedule.pairs)
    rows = []
    for row in schedule.order:
        made: list[Op] = []
        for op in row:
            backward = backward_of.get(op, op)
            if backward.kind == "B" and backward.microbatch % 2 == 0 and Op("R", *backward[1:]) not in made:
                made.append(Op("R", *backward[1:]))
            made.append(op)
        rows.append(tuple(made))
    again = replace(schedule, order=tuple(rows))
    ps.check(again)
    return again


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic", "hinted"])
def test_one_process_equals_the_plain_loop(dispatch: str) -> None:
    schedule = ps.build("dualpipe-v", 4, NUM_MICROBATCHES, overlap=True)
    found = piped(schedule, dispatch=dispatch)
    assert differences(found, plain()) == []
    assert found.keys() == plain().keys()


def test_pairs_in_the_order_of_another_schedule() -> None:
    """Stages of three and more pairs of stages, of which some contradict one another."""
    schedule = ps.passes.overlap_pairs(ps.build("interleaved-1f1b", 2, NUM_MICROBATCHES, num_stages=8))
    found = piped(schedule)
    assert differences(found, plain()) == []


def test_pairs_of_one_stage_run_one_after_the_other() -> None:
    schedule = ps.passes.overlap_pairs(ps.build("1f1b", 8, NUM_MICROBATCHES))
    found = piped(schedule)
    assert differences(found, plain()) == []


def test_forwards_that_run_again() -> None:
    schedule = recomputed(ps.build("dualpipe-v", 4, NUM_MICROBATCHES, overlap=True))
    kind = Kind(keeps=False)  # what a stage keeps beside its buffers would be kept twice
    found = piped(schedule, kind)
    assert differences(found, plain(kind)) == []


def test_activations_that_go_to_host_memory() -> None:
    built = ps.build("dualpipe-v", 4, NUM_MICROBATCHES, overlap=True)
    found = piped(offloaded_around(built))
    assert differences(found, plain()) == []


def offloaded_around(schedule: ps.Schedule) -> ps.Schedule:
    """With the activations of single ops away; those of pairs, whose two stand side by side, stay."""
    away = offloaded(ps.passes.separate_pairs(schedule), every=3)
    at = {op: (rank, step) for rank, row in enumerate(away.order) for step, op in enumerate(row)}
    left = tuple(
        pair for pair in schedule.pairs if at[pair.backward] == (at[pair.forward][0], at[pair.forward][1] + 1)
    )
    return replace(away, pairs=left)


def test_a_parameter_that_two_stages_have() -> None:
    schedule, kind = ps.build("dualpipe-v", 4, NUM_MICROBATCHES, overlap=True), Kind(tied=True)
    found = piped(schedule, kind)
    assert differences(found, plain(kind)) == []


def share_one_device(rank: int, transport: str, dispatch: str) -> dict[str, Any]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    schedule = ps.build("dualpipe-v", 2, NUM_MICROBATCHES, overlap=True)
    return piped(schedule, device=DEVICE, transport=transport, dispatch=dispatch)


@pytest.mark.parametrize(("transport", "dispatch"), [("host", "frozen"), ("host", "dynamic"), ("gloo", "frozen")])
def test_two_processes_on_one_device_equal_the_plain_loop(transport: str, dispatch: str) -> None:
    outcomes = run_ranks_to_end(2, share_one_device, transport, dispatch, deadline=110.0)
    first, second = (o.value for o in outcomes)
    assert differences(first, plain()) == differences(second, plain()) == []
    assert first.keys() | second.keys() == plain().keys()


class Failing(nn.Module):
    """A stage whose forward fails once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 6:
            raise ValueError("once")
        output: Tensor = self.layer(x)
        return output


def test_a_step_after_one_that_failed() -> None:
    """It failed with ops under way."""
    torch.manual_seed(0)
    x, y = build_batch()
    schedule = ps.build("dualpipe-v", 4, NUM_MICROBATCHES, overlap=True)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    layers[4] = Failing()  # type: ignore[call-overload]
    model = nn.Sequential(*layers).to(DEVICE)
    with ps.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss) as pipe:
        with pytest.raises(ValueError, match="once"):
            pipe.step(x, y, update=False)
        pipe.zero_grad()
        loss = pipe.step(x, y, update=False).loss
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        expected = plain_step(model, x, y, NUM_MICROBATCHES, nn.functional.mse_loss, step=2)
    assert torch.equal(loss, expected.cpu())
    assert all(torch.equal(a, b.grad) for a, b in zip(found, model.parameters(), strict=True) if b.grad is not None)
