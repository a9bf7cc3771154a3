"""Row 11: a microbatch in which nothing counts made the loss of its batch nan."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from loss_forms import PAD, Counted, FlatTokens, Form, batch_of, model_of, of_whole, partly_masked, tokens
from plain_loop import differences, gradients, plain_evaluate, plain_step
from recomputed import with_recompute

FORM = Form(Counted, tokens, partly_masked)


class ZeroInFront(Counted):
    """Of no tokens a number, and a gradient that is none."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return super().__call__(output, target).nan_to_num()


class OfDicts(Counted):
    def __call__(self, output: Any, target: Tensor) -> Tensor:
        return super().__call__(output["logits"], target)


def schedules() -> dict[str, ps.Schedule]:
    names = ["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved-1f1b"]
    return {name: ps.build(name, 2, 4) for name in names} | {"recomputed": with_recompute(ps.build("1f1b", 2, 4))}


@pytest.mark.parametrize("schedule", schedules().values(), ids=schedules())
@pytest.mark.parametrize("make", [Counted, ZeroInFront, OfDicts])
def test_it_adds_nothing_to_loss_and_gradients(schedule: ps.Schedule, make: type[Counted]) -> None:
    form = Form(make, (lambda x: {"logits": tokens(x), "unused": x}) if make is OfDicts else tokens, partly_masked)
    model, (x, y) = model_of(form, schedule.num_stages), batch_of(form)
    assert (y[:3] == PAD).all()
    plain = copy.deepcopy(model)
    with ps.Pipeline(model, schedule, loss_fn=make()) as pipe:
        found = pipe.step(x, y, update=False)
        assert found.losses[0] == 0
        assert torch.equal(found.loss, plain_step(plain, x, y, 4, make()))
        assert differences(gradients(plain), gradients(model)) == []
        loss, wanted = of_whole(model, x, y, make())
        assert torch.allclose(found.loss, loss)
        for one, other in zip(gradients(model).values(), wanted, strict=True):
            assert one is not None
            assert torch.allclose(one, other, atol=1e-6)
        assert torch.equal(pipe.evaluate(x, y).loss, plain_evaluate(plain, x, y, 4, make()))


def test_with_a_scaled_loss_no_update_is_left_out() -> None:
    model, (x, y) = model_of(FORM), batch_of(FORM)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    precision = ps.PrecisionOptions(autocast=torch.float16, scaler=scaler)
    sgd = partial(torch.optim.SGD, lr=0.1)
    with ps.Pipeline(model, ps.build("zb-h1", 2, 4), loss_fn=Counted(), optimizer=sgd, precision=precision) as pipe:
        before = [p.detach().clone() for p in pipe.parameters()]
        assert pipe.step(x, y).loss.isfinite()
        assert not any(map(torch.equal, before, pipe.parameters()))
    assert scaler.get_scale() == 1024.0


def test_in_windows_and_copies() -> None:
    form = FORM
    sgd = partial(torch.optim.SGD, lr=0.1)
    for name, options in (("amdp", {"window": 4}), ("chimera", {})):
        schedule = ps.build(name, 2, 8, **options)
        model, (x, y) = model_of(form, schedule.num_stages), batch_of(form, 16)
        y[:2], y[8:10] = PAD, PAD
        with ps.Pipeline(model, schedule, loss_fn=Counted(), optimizer=sgd) as pipe:
            assert pipe.step(x, y).loss.isfinite()
            assert all(p.isfinite().all() for p in pipe.parameters())


def test_a_batch_in_which_nothing_counts_trains_nothing() -> None:
    model, (x, y) = model_of(FORM), batch_of(FORM)
    with ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=nn.CrossEntropyLoss()) as pipe:
        found = pipe.step(x.clone(), torch.full((11, 3), PAD), update=False)
    assert found.loss == 0
    assert all(p.grad is None or not p.grad.any() for p in nn.ModuleList(model).parameters())
    assert FlatTokens()(tokens(x), torch.full_like(y, PAD)).isnan()


def test_a_frozen_model_and_numbers_that_are_infinite() -> None:
    """Logits of -inf, as masks make them, are multiplied by nothing."""

    def infinite(x: Tensor) -> Tensor:
        return tokens(x).masked_fill(torch.tensor([False, False, True]), -torch.inf)

    form = Form(Counted, infinite, lambda num: partly_masked(num).clamp(max=1))
    model, (x, y) = model_of(form), batch_of(form)
    model[0].requires_grad_(False)
    with ps.Pipeline(model, ps.build("zb-h1", 2, 4), loss_fn=Counted()) as pipe:
        assert pipe.step(x, y, update=False).loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model[1].parameters())
