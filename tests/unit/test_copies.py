"""Schedules with several pipelines: gradients and values of a loop grouped alike, to the bit."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import copies_runs
import penstock as ps
from backends import Backend, backends
from packed import packed
from penstock.runtime import RuntimeFailure
from penstock.runtime.mesh.peers import GroupPeers
from plain_loop import differences
from tiers import in_turn

MSE = nn.MSELoss()


def run_all(rank: int) -> dict[str, list[str]]:
    return {
        f"{name} {options} zero={zero}": copies_runs.wrong(name, options, zero)
        for number, (name, options) in enumerate(copies_runs.SCHEDULES)
        for zero in in_turn((True, False), number)
    }


@pytest.mark.parametrize("backend", backends(4))
def test_a_grouped_loop(backend: Backend) -> None:
    assert not backend.wrong(run_all)


def small(schedule: ps.Schedule, **options: Any) -> ps.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(schedule.num_stages)))
    return ps.Pipeline(
        model, schedule, **packed(**{"loss_fn": MSE, "optimizer": partial(torch.optim.AdamW, lr=0.1), **options})
    )


def test_gradients_of_two_steps_add_up_once_whatever_the_number_of_copies() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    pipe, plain = small(ps.build("chimera", 4, 8)), small(ps.build("1f1b", 4, 8))
    for each in (pipe, plain):
        each.step(x, y, update=False)
        each.step(x, y, update=False)
    for (name, p), (other, q) in zip(pipe.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        assert p.grad is not None
        torch.testing.assert_close(p.grad, q.grad)


def test_an_optimizer_given_steps_the_one_parameter_that_pipelines_of_a_process_share() -> None:
    schedule = ps.build("chimera", 2, 4)
    for zero in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.1)
        pipe = ps.Pipeline(
            model,
            schedule,
            loss_fn=MSE,
            optimizer=optimizer,
            parallel=ps.ParallelOptions(sharding="copies" if zero else "none"),
        )
        assert [group["params"] for group in optimizer.param_groups] == [list(part.parameters()) for part in model]
        before = [p.detach().clone() for p in model.parameters()]
        pipe.step(torch.randn(8, 4), torch.randn(8, 4))
        assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_copies_of_batch_norm_have_their_own_statistics_and_go_on_from_the_owners() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    plain = copy.deepcopy(model)
    schedule = ps.build("chimera", 2, 4)
    pipe = ps.Pipeline(model, schedule, loss_fn=MSE)
    for number in (1, 2):
        x, y = torch.randn(16, 4), torch.randn(16, 4)
        loss, want = copies_runs.grouped_step(plain, x, y, schedule, number)
        assert torch.equal(pipe.step(x, y, update=False).loss, loss)
        assert not differences(want, {n: p.grad for n, p in pipe.named_parameters()})
        pipe.zero_grad()
        for m, part in enumerate(x.tensor_split(4)):
            if schedule.microbatch_pipeline[m] == 0:
                plain(part)  # statistics are the owner's microbatches'
        assert not differences(dict(plain.named_buffers()), dict(model.named_buffers()))


def test_tied_parameters_are_summed_over_stages_and_pipelines() -> None:
    class Tied(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()

    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    model = nn.Sequential(Tied(shared), nn.Linear(4, 4), nn.Linear(4, 4), Tied(shared))
    plain = copy.deepcopy(model)
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    schedule = ps.build("chimera", 4, 8)
    _, want = copies_runs.grouped_step(plain, x, y, schedule, 1)
    pipe = ps.Pipeline(model, schedule, loss_fn=MSE)
    pipe.step(x, y, update=False)
    for name, p in pipe.named_parameters():
        assert torch.equal(p.grad, want[name]), name  # type: ignore[arg-type]


def test_a_checkpoint_fills_all_copies_and_keeps_gradients_that_wait(tmp_path: Path) -> None:
    torch.manual_seed(2)
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    first = small(ps.build("chimera", 4, 8))
    first.step(x, y)
    first.step(x, y, update=False)
    first.save(tmp_path)
    for name in ("chimera", "1f1b"):
        again = small(ps.build(name, 4, 8))
        again.load(tmp_path)
        for (_, p), (_, q) in zip(first.named_parameters(), again.named_parameters(), strict=True):
            assert torch.equal(p, q)
            assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
        assert torch.equal(again.evaluate(x, y).loss, first.evaluate(x, y).loss) or name == "1f1b"
    first.step(x, y)
    again = small(ps.build("chimera", 4, 8))
    again.load(tmp_path)
    again.step(x, y)
    for (_, p), (_, q) in zip(first.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_rank_that_hosts_a_stage_twice_is_refused() -> None:
    placement = ps.Placement(((0, 1), (0, 1)))
    order = tuple(tuple(op for m in (0, 1) for op in (ps.Op("F", s, m), ps.Op("B", s, m))) for s in (0, 1))
    schedule = ps.Schedule("twice", placement, order, (0, 1))
    ps.check(schedule)
    with pytest.raises(RuntimeFailure, match="rank 0 hosts stage 0 in pipelines 0, 1"):
        small(schedule)


@pytest.mark.parametrize("name", ["chimera", "amdp"])
def test_a_steered_run_has_the_same_losses(name: str) -> None:
    """What steering plans no order for it measures all the same."""
    torch.manual_seed(2)
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    losses = []
    for steering in (None, ps.AdaptOptions()):
        pipe = small(ps.build(name, 4, 8, **({"window": 8} if name == "amdp" else {})), steering=steering)
        losses.append([pipe.step(x, y).loss for _ in range(3)])
        pipe.close()
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def two_by_two(model: nn.Module) -> ps.Pipeline:
    return ps.Pipeline(model, ps.build("chimera", 2, 4), loss_fn=MSE)


def dropping() -> tuple[nn.Sequential, nn.Sequential]:
    """A model of two stages, and a copy of it for the loop beside."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(2)]
    model = nn.Sequential(*parts)
    return model, copy.deepcopy(model)


def as_grouped(pipe: ps.Pipeline, plain: nn.Module, number: int = 1) -> None:
    torch.manual_seed(number)
    x, y = torch.randn(9, 4), torch.randn(9, 4)
    loss, want = copies_runs.grouped_step(plain, x, y, pipe.schedule, number)
    assert torch.equal(pipe.step(x, y, update=False).loss, loss)
    assert not differences(want, {n: p.grad for n, p in pipe.named_parameters()})
    pipe.zero_grad()


def test_values_loaded_into_the_model_reach_all_pipelines() -> None:
    model, plain = dropping()
    pipe = two_by_two(model)
    as_grouped(pipe, plain)
    values = {n: v if n.endswith("tracked") else torch.rand_like(v) for n, v in model.state_dict().items()}
    model.load_state_dict(values)
    plain.load_state_dict(values)
    as_grouped(pipe, plain, 2)


def test_evaluation_mode_reaches_all_pipelines() -> None:
    model, plain = dropping()
    pipe = two_by_two(model)
    model[0].eval()
    plain[0].eval()
    as_grouped(pipe, plain)


def test_freezing_reaches_all_pipelines() -> None:
    model, plain = dropping()
    pipe = two_by_two(model)
    for number, frozen in enumerate(("0.0.weight", "1.1.bias"), start=1):
        for each in (model, plain):
            each.get_parameter(frozen).requires_grad_(False)
        as_grouped(pipe, plain, number)
    for each in (model, plain):
        each.requires_grad_(True)
    as_grouped(pipe, plain, 3)


@pytest.mark.parametrize("before", [True, False])
def test_hooks_on_parameters_are_called_in_all_pipelines(before: bool) -> None:
    model, plain = dropping()
    calls: list[str] = []

    def hook() -> None:
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda g, name=name: calls.append(name) or g * 3)

    if before:
        hook()
    pipe = two_by_two(model)
    if not before:
        hook()
    torch.manual_seed(1)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    _, want = copies_runs.grouped_step(plain, x, y, pipe.schedule, 1)
    pipe.step(x, y, update=False)
    for name, parameter in pipe.named_parameters():
        assert calls.count(name) == 4
        torch.testing.assert_close(parameter.grad, want[name] * 3)


def test_an_optimizer_that_has_stepped_goes_on() -> None:
    model, plain = dropping()
    mine = torch.optim.AdamW(model.parameters(), lr=0.1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for each, optimizer in ((model, mine), (plain, theirs)):
        for p in each.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
    pipe = ps.Pipeline(
        model, ps.build("chimera", 2, 4), loss_fn=MSE, optimizer=mine, parallel=ps.ParallelOptions(sharding="none")
    )
    torch.manual_seed(1)
    x, y = torch.randn(9, 4), torch.randn(9, 4)
    _, want = copies_runs.grouped_step(plain, x, y, pipe.schedule, 1)
    for name, p in plain.named_parameters():
        p.grad = want[name]
    theirs.step()
    pipe.step(x, y)
    assert not differences(dict(plain.named_parameters()), dict(model.named_parameters()))


def messages_of_sums(rank: int) -> list[int]:
    """How many messages this process sends to add up the copies' gradients, for models of few and many parameters."""
    return [_sent_in_a_step(num_layers) for num_layers in (2, 12)]


def _sent_in_a_step(num_layers: int) -> int:
    layers = nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers))) for _ in range(2)))
    pipe = ps.Pipeline(layers, ps.build("chimera", 2, 4), loss_fn=nn.MSELoss())
    sent, once = [], GroupPeers.send

    def counted(*args: Any) -> None:
        sent.append(args)
        once(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupPeers, "send", counted)
        pipe.step(torch.ones(8, 4), torch.zeros(8, 4), update=False)
    pipe.close()
    return len(sent)


@pytest.mark.multiproc
def test_bug_each_parameter_of_a_copy_was_a_message_of_its_own() -> None:
    """Two pipelines sent two messages for each parameter of each stage, and waited for every one."""
    # Of each stage a copy's gradients go to its owner, or the sums come back: one message each.
    assert Backend(2).values(messages_of_sums) == [[2, 2], [2, 2]]
