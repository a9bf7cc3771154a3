"""Rows 1, 2, 11 and 20 over processes: losses are the batch's, and all ranks learn where one is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import penstock as ps
from loss_forms import RIGHT, WRONG, batch_of, model_of, of_whole
from penstock.runtime.errors import RuntimeFailure
from plain_loop import differences, gradients, plain_step
from processes import run_ranks_to_end
from tiers import chosen
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc

RIGHT_HERE = chosen(RIGHT, ["class weights and padding", "cross entropy of masked microbatches", "dropout", "shares"])
WRONG_HERE = chosen(WRONG, ["padding hidden in a function", "a sum", "a contrast"])


def fails(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target.long()[:, :2])


def every_loss(rank: int) -> tuple[list[str], dict[str, str]]:
    """Which right losses are not the plain loop's, and by name what is said of others."""
    bad: list[str] = []
    said: dict[str, str] = {}
    torch.set_num_threads(1)
    schedule = ps.build("zb-h1", 2, 4)
    for name, form in RIGHT_HERE.items():
        model, (x, y), loss_fn = model_of(form), batch_of(form), form.make()
        plain, own = copy.deepcopy(model), copy.deepcopy(loss_fn)
        with ps.Pipeline(model, schedule, loss_fn=loss_fn, timeout=PATIENCE) as pipe:
            for step in (1, 2):
                found = pipe.step(x, y, update=False)
                if not torch.equal(found.loss, plain_step(plain, x, y, 4, own, step=step)):
                    bad.append(f"{name}: loss")
            want = {key: g for key, g in gradients(plain).items() if key.startswith(f"{rank}.")}
            got = {key: g for key, g in gradients(model).items() if key.startswith(f"{rank}.")}
            bad += [f"{name}: {each}" for each in differences(want, got)]
    for name, loss_fn in {**{name: form.make() for name, form in WRONG_HERE.items()}, "it fails": fails}.items():
        form = WRONG[name] if name in WRONG else RIGHT["squares"]
        x, y = batch_of(form, 12)
        with ps.Pipeline(model_of(form), schedule, loss_fn=loss_fn, timeout=PATIENCE) as pipe:
            for _ in range(2):
                try:
                    pipe.step(x, y)
                except RuntimeFailure as error:
                    said[name] = f"{type(error).__name__}: {error}"
    return bad, said


def test_all_ranks_learn_that_a_loss_is_not_the_batchs() -> None:
    outcomes = run_ranks_to_end(2, every_loss)
    (first_bad, first), (last_bad, last) = (o.value for o in outcomes)
    assert first_bad == last_bad == []
    assert set(first) == set(last) == {*WRONG_HERE, "it fails"}
    for name, words in last.items():
        fault = "loss_fn failed on output" if name == "it fails" else "loss_fn gives "
        assert words.partition(": ")[2].startswith(fault)
        assert first[name].startswith(f"PeerFailed: rank 1 could not do its part of the step: {fault}")


def replicas(rank: int) -> list[str]:
    """What is wrong with losses of two replicas, given the whole batch or each its own part."""
    bad = []
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    for name in ("class weights and padding", "cross entropy of masked microbatches"):
        form = RIGHT[name]
        for batches in ("whole", "replica"):
            model, (x, y), loss_fn = model_of(form, 1), batch_of(form, 12), form.make()
            loss, wanted = of_whole(model, x, y, loss_fn)
            given = (x, y) if batches == "whole" else (x.chunk(2)[rank], y.chunk(2)[rank])
            parallel = ps.ParallelOptions(batches=batches)
            schedule = ps.build("1f1b", 1, 3)
            with ps.Pipeline(
                model, schedule, loss_fn=loss_fn, mesh=mesh, parallel=parallel, timeout=PATIENCE
            ) as pipe:
                found = pipe.step(*given, update=False)
            if not torch.allclose(found.loss, loss):
                bad.append(f"{name}, {batches}: {found.loss} for {loss}")
            for p, want in zip(nn.ModuleList(model).parameters(), wanted, strict=True):
                if p.grad is None or not torch.allclose(p.grad, want, rtol=1e-4, atol=1e-6):
                    bad.append(f"{name}, {batches}: a gradient")
    return bad


def test_replicas_are_weighed_together() -> None:
    outcomes = run_ranks_to_end(2, replicas)
    assert [o.value for o in outcomes] == [[], []]
