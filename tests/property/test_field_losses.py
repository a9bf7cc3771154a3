"""Losses as people write them: the step's is the batch's, or the first step says that it is not."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import penstock as ps
from loss_forms import RIGHT, WRONG, batch_of, model_of, of_whole
from penstock.runtime.errors import RuntimeFailure
from plain_loop import differences, gradients, plain_evaluate, plain_step
from recomputed import with_recompute
from tiers import examples

pytestmark = pytest.mark.property

SCHEDULES = ["1f1b", "gpipe", "zb-h1", "recomputed"]


def schedule_of(name: str, num: int) -> ps.Schedule:
    if name == "recomputed":
        return with_recompute(ps.build("1f1b", 2, num))
    return ps.build(name, 2, num)


@pytest.mark.slow
@settings(max_examples=examples(400), deadline=None)
@given(
    name=st.sampled_from([*RIGHT]),
    schedule=st.sampled_from(SCHEDULES),
    num=st.integers(1, 6),
    extra=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_a_right_loss_is_that_of_the_whole_batch(name: str, schedule: str, num: int, extra: int, seed: int) -> None:
    form = RIGHT[name]
    schedule = "1f1b" if schedule == "recomputed" and not form.may_repeat else schedule
    model, loss_fn = model_of(form), form.make()
    x, y = batch_of(form, num + extra, seed)
    plain, own = copy.deepcopy(model), copy.deepcopy(loss_fn)
    with ps.Pipeline(model, schedule_of(schedule, num), loss_fn=loss_fn) as pipe:
        for step in (1, 2):
            found = pipe.step(x, y, update=False)
            assert torch.equal(found.loss, plain_step(plain, x, y, num, own, step=step))
            assert differences(gradients(plain), gradients(model)) == []
        if isinstance(loss_fn, nn.Module):  # the check has left its state alone
            assert vars(loss_fn).get("calls") == vars(own).get("calls")
            assert all(map(torch.equal, loss_fn.buffers(), own.buffers()))
        if form.is_whole:
            assert torch.allclose(pipe.evaluate(x, y).loss, plain_evaluate(plain, x, y, num, own))
    if form.is_whole:
        loss, wanted = of_whole(model, x, y, own)
        assert torch.allclose(found.loss, loss, rtol=1e-4, atol=1e-6)
        for one, other in zip(gradients(model).values(), wanted, strict=True):
            assert one is not None
            assert torch.allclose(one, 2 * other, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using a target size")
@settings(max_examples=examples(120), deadline=None)
@given(
    name=st.sampled_from([*WRONG]),
    schedule=st.sampled_from(SCHEDULES),
    num=st.integers(2, 5),
    seed=st.integers(0, 99),
)
def test_a_wrong_loss_is_told_in_the_first_step(name: str, schedule: str, num: int, seed: int) -> None:
    assume(num < 5 or name != "a microbatch in which nothing counts, hidden")  # nothing counts in the first two then
    form = WRONG[name]
    x, y = batch_of(form, 3 * num, seed)
    with ps.Pipeline(model_of(form), schedule_of(schedule, num), loss_fn=form.make()) as pipe:
        for _ in range(2):
            with pytest.raises(RuntimeFailure, match=r"loss_fn gives .* for microbatches 0 and 1 together"):
                pipe.step(x, y)
    meant: Any = form.make()
    meant = meant if isinstance(meant, nn.Module) else partial(meant)
    meant.by_microbatch = True
    with ps.Pipeline(model_of(form), schedule_of(schedule, num), loss_fn=meant) as pipe:
        pipe.step(x, y)
