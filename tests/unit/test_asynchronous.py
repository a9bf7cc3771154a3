"""Schedules whose updates are ops of the order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asynchronous_runs as runs
import penstock as ps
from backends import Backend
from penstock.runtime import RuntimeFailure
from tiers import others_nightly

RUNS = runs.RUNS


@pytest.mark.parametrize("name", RUNS)
def test_the_mismatch_counted_is_the_one_proved(name: str) -> None:
    schedule = RUNS[name].build()
    _, losses, mismatch, _ = runs.trained(name, 8)
    assert mismatch == ps.schedule.count_mismatch(schedule)
    assert schedule.updates is not None
    assert max(mismatch.values()) <= (schedule.updates.max_mismatch or 0)
    assert len(losses) >= 8


@pytest.mark.parametrize("name", ["amdp", "amdp without mismatch"])
def test_without_mismatch_amdp_is_the_synchronous_loop(name: str) -> None:
    """A window's worth of microbatches a step, or windows that no other runs into."""
    run = RUNS[name]
    if name == "amdp":
        run = runs.Run("amdp", {"window": 8}, num_microbatches=8)
    schedule = run.build()
    model = runs.without_dropout(runs.model_of(schedule.num_stages))
    pipe = ps.Pipeline(model, schedule, loss_fn=runs.MSE, optimizer=run.optimizer)
    for step in range(6):
        pipe.step(*runs.batch_of(run.num_microbatches, step))
    assert set(pipe.mismatch().values()) == {0}
    assert not runs.unlike({n: p.detach() for n, p in pipe.named_parameters()}, runs.synchronous(run, 6))


def test_with_mismatch_it_is_not() -> None:
    run = RUNS["amdp"]
    pipe = ps.Pipeline(runs.without_dropout(runs.model_of(4)), run.build(), loss_fn=runs.MSE, optimizer=run.optimizer)
    pipe.step(*runs.batch_of(run.num_microbatches, 0))
    assert runs.unlike({n: p.detach() for n, p in pipe.named_parameters()}, runs.synchronous(run, 1))


@pytest.mark.parametrize("name", ["amdp", "amdp, xpipe", "amdp, xpipe, Muon"])
def test_zero_or_not_the_parameters_are_the_same(name: str) -> None:
    found = []
    for zero in (True, False):
        pipe = runs.pipeline_of(replace(RUNS[name], zero=zero, clip_norm=0.05))
        for step in range(3):
            pipe.step(*runs.batch_of(16, step), rates=[0.02, 0.04, 0.01, 0.03])
        found.append({n: p.detach() for n, p in pipe.named_parameters()})
        copies = pipe._local.model.copies.here
        for (_, stage), module in copies.items():
            for own, owners in zip(module.parameters(), copies[0, stage].parameters(), strict=True):
                assert torch.equal(own, owners)
        held = pipe.state_bytes()
        assert all(each["optimizer"] > 0 for each in held)
        found.append({"optimizer": torch.tensor(sum(each["optimizer"] for each in held))})
    assert not runs.unlike(found[0], found[2])
    assert 2 * found[1]["optimizer"] == found[3]["optimizer"]


@pytest.mark.parametrize("name", ["zb-h1", "chimera"])
def test_split_backwards_keep_the_windows_apart(name: str) -> None:
    """I of a later window may run before the last W of an earlier one; the sums are those of whole backwards."""
    whole = {"zb-h1": "1f1b", "chimera": "chimera"}[name]
    found = []
    for each, options in ((whole, {}), (name, {} if name == "zb-h1" else {"backward": "split"})):
        schedule = ps.passes.repeat_windows(ps.build(each, 4, 8, **options), 3)
        pipe = ps.Pipeline(runs.model_of(4), schedule, loss_fn=runs.MSE, optimizer=runs.ADAM)
        for step in range(2):
            pipe.step(*runs.batch_of(schedule.num_microbatches, step))
        assert pipe.num_updates == 6
        found.append({n: p.detach() for n, p in pipe.named_parameters()})
    assert not runs.unlike(*found)


@pytest.mark.parametrize(
    "name",
    others_nightly(
        ["amdp", "pipedream", "pipedream-2bw", "xpipe", "spectrain", "vnag", "amdp, xpipe"],
        ["amdp", "pipedream-2bw", "spectrain", "amdp, xpipe"],
    ),
)
def test_a_checkpoint_in_the_middle_of_a_window(name: str, tmp_path: Path) -> None:
    """The gradients of a window that is still open, and older versions, go on to the bit."""

    def stepped(pipe: ps.Pipeline, steps: range) -> list[float]:
        losses = []
        for step in steps:
            losses += pipe.step(*runs.batch_of(16, step), update=step % 2 == 1).window_losses.tolist()
        return losses

    run = RUNS[name]
    whole = runs.pipeline_of(run)
    want = stepped(whole, range(4))
    first = runs.pipeline_of(run)
    got = stepped(first, range(1))
    first.save(tmp_path)
    again = runs.pipeline_of(run)
    again.load(tmp_path)
    assert again.num_updates == first.num_updates
    got += stepped(again, range(1, 4))
    assert got == want
    values = [{n: p.detach() for n, p in pipe.named_parameters()} for pipe in (whole, again)]
    assert not runs.unlike(*values)
    shorter = runs.pipeline_of(run)
    stepped(shorter, range(1))
    assert shorter.num_updates == 16 // (run.options["window"]) - 1


def test_a_synchronous_run_goes_on_from_an_open_window(tmp_path: Path) -> None:
    run = runs.Run("amdp", {"window": 16}, partial(torch.optim.SGD, lr=0.1))
    pipe = runs.pipeline_of(run)
    pipe.step(*runs.batch_of(16, 0), update=False)
    pipe.save(tmp_path)
    plain = ps.Pipeline(runs.model_of(4), ps.build("1f1b", 4, 16), loss_fn=runs.MSE, optimizer=run.optimizer)
    plain.load(tmp_path)
    plain.step(*runs.batch_of(16, 1))
    pipe.step(*runs.batch_of(16, 1))
    for (_, p), (_, q) in zip(plain.named_parameters(), pipe.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


class Breaks(nn.Module):
    """Raises at one of its forwards."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left, self.linear = at, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise ValueError("out of luck")
        return self.linear(x)


def test_after_a_step_that_broke_off_only_a_checkpoint_helps(tmp_path: Path) -> None:
    schedule = ps.build("pipedream", 4, 16, window=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Breaks(0), nn.Linear(6, 6), nn.Linear(6, 6))
    pipe = ps.Pipeline(model, schedule, loss_fn=runs.MSE, optimizer=runs.ADAM)
    pipe.save(tmp_path)
    before = {n: p.detach().clone() for n, p in pipe.named_parameters()}
    model[1].left = 10  # type: ignore[assignment]
    with pytest.raises(ValueError, match="out of luck"):
        pipe.step(*runs.batch_of(16, 0))
    for refused in (lambda: pipe.step(*runs.batch_of(16, 0)), lambda: pipe.save(tmp_path)):
        with pytest.raises(RuntimeFailure, match=r"an earlier step broke off \(out of luck.*go on from a checkpoint"):
            refused()
    pipe.load(tmp_path)
    assert not runs.unlike({n: p.detach() for n, p in pipe.named_parameters()}, before)
    fresh = ps.Pipeline(runs.model_of(4), schedule, loss_fn=runs.MSE, optimizer=runs.ADAM)
    assert fresh is not pipe
    pipe.step(*runs.batch_of(16, 0))


def weighed(output: Tensor, targets: Tensor) -> Tensor:
    return ((output - targets) ** 2).mean()


class Weighed:
    """A loss that counts only targets above 0."""

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        return weighed(output, targets)

    def weight(self, targets: Tensor) -> float:
        return float((targets > 0).sum())


def test_a_window_that_weighs_nothing_is_refused_before_anything_runs() -> None:
    pipe = ps.Pipeline(runs.model_of(4), ps.build("amdp", 4, 16, window=4), loss_fn=Weighed(), optimizer=runs.ADAM)
    x, y = runs.batch_of(16, 0)
    y = y.abs()
    y[8:16] = 0
    before = {n: p.detach().clone() for n, p in pipe.named_parameters()}
    with pytest.raises(RuntimeFailure, match="microbatches 4 to 7, the window of update 1, weigh nothing"):
        pipe.step(x, y)
    assert not runs.unlike({n: p.detach() for n, p in pipe.named_parameters()}, before)
    pipe.step(x, y + 1)


def test_losses_are_weighed_in_their_window() -> None:
    pipe = runs.pipeline_of(runs.Run("amdp", {"window": 4, "max_mismatch": 0}))
    result = pipe.step(*runs.batch_of(16, 0))
    assert result.window_losses.shape == (4,)
    assert torch.equal(result.window_losses, result.losses.reshape(4, 4).cumsum(1)[:, -1]) or torch.allclose(
        result.window_losses, result.losses.reshape(4, 4).sum(1)
    )
    assert torch.equal(result.loss, result.window_losses.mean())


def test_a_rule_that_predicts_nothing_is_told_as_a_notice() -> None:
    """AMDP's windows are whole blocks, and longer than SpecTrain looks ahead."""
    amdp = runs.RUNS["amdp"].build()
    assert amdp.updates is not None
    for rule, optimizer, num in (("spectrain", runs.MOMENTUM, 1), ("xpipe", runs.ADAM, 0), ("none", runs.ADAM, 0)):
        schedule = replace(amdp, updates=replace(amdp.updates, rule=rule))
        with ps.Pipeline(runs.model_of(4), schedule, loss_fn=nn.MSELoss(), optimizer=optimizer) as pipe:
            assert sum("predicts no weights here" in notice for notice in pipe.notices) == num


def test_what_a_step_refuses() -> None:
    pipe = runs.pipeline_of(RUNS["amdp"])
    with pytest.raises(RuntimeFailure, match="3 rates given for 4 updates of amdp"):
        pipe.step(*runs.batch_of(16, 0), rates=[0.1] * 3)
    with pytest.raises(RuntimeFailure, match="updates as ops of its order"):
        pipe.update()
    bare = ps.Pipeline(runs.model_of(4), ps.build("amdp", 4, 8, window=8), loss_fn=runs.MSE)
    with pytest.raises(RuntimeFailure, match="no optimizer to run there"):
        bare.step(*runs.batch_of(8, 0))
    plain = ps.Pipeline(runs.model_of(4), ps.build("1f1b", 4, 8), loss_fn=runs.MSE, optimizer=runs.ADAM)
    with pytest.raises(RuntimeFailure, match="1f1b has no updates as ops"):
        plain.step(*runs.batch_of(8, 0), rates=[0.1])


def without_decay_where_marked(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Puts parameters into groups by an attribute that the model has set on them."""
    marked = [p for p in parameters if hasattr(p, "no_decay")]
    rest = [p for p in parameters if not hasattr(p, "no_decay")]
    groups = [{"params": marked, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.1}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.1)


def test_bug_what_an_optimizer_function_is_called_with_had_lost_the_attributes_of_parameters() -> None:
    """So every parameter got weight decay where updates are ops, without a word."""
    for name, options in (("1f1b", {}), ("amdp", {"window": 8, "max_mismatch": 0})):
        schedule = ps.build(name, 4, 8, **options)
        model = runs.without_dropout(runs.model_of(schedule.num_stages))
        biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
        for parameter in biases:
            parameter.no_decay = True  # type: ignore[attr-defined]
        pipe = ps.Pipeline(model, schedule, loss_fn=runs.MSE, optimizer=without_decay_where_marked)
        assert pipe.optimizer is not None
        assert len(pipe.optimizer.param_groups[0]["params"]) == len(biases), name


def train_all(rank: int) -> dict[str, Any]:
    return {name: runs.trained(name) for name in runs.RUNS}


@pytest.mark.multiproc
@pytest.mark.nightly
def test_a_process_a_rank_gives_fifty_updates_by_every_rule_as_one_process() -> None:
    values = Backend(runs.NUM_RANKS).values(train_all)
    for name in runs.RUNS:
        parameters, losses, mismatch, evaluated = runs.trained(name)
        found: dict[str, Tensor] = {}
        for value in values:
            own, its_losses, its_mismatch, its_evaluated = value[name]
            assert (its_losses, its_mismatch, its_evaluated) == (losses, mismatch, evaluated), name
            found |= own
        assert found.keys() == parameters.keys()
        assert not runs.unlike(parameters, found), name
        assert len(losses) >= 50


@pytest.mark.parametrize("rule", ["spectrain", "xpipe"])
def test_a_weight_frozen_midway_was_predicted_to_move(rule: str) -> None:
    optimizer = {"spectrain": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "xpipe": torch.optim.AdamW}[rule]
    first, seen = nn.Linear(6, 6), list[Tensor]()
    schedule = ps.build(rule, 2, 8, window=1)
    pipe = ps.Pipeline([first, nn.Linear(6, 6)], schedule, loss_fn=runs.MSE, optimizer=optimizer)
    x = torch.randn(16, 6)
    pipe.step(x, x)
    first.weight.requires_grad_(False)
    first.register_forward_pre_hook(lambda *_: seen.append(first.weight.detach().clone()))
    before = first.weight.detach().clone()
    pipe.step(x, x)
    assert len(seen) == 8
    assert all(torch.equal(each, before) for each in [*seen, first.weight])
