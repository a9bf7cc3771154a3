"""Case 15: an option leaves out an update whose gradient is not finite, without a scaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.runtime.errors import RuntimeFailure

SKIP = ps.PrecisionOptions(skip_not_finite=True)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def batch(step: int, is_bad: bool) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    y = x.sum(1, keepdim=True)
    if is_bad:
        y[5] = float("nan")
    return x, y


def pipeline(schedule: str = "1f1b", precision: ps.PrecisionOptions = SKIP, **order: Any) -> ps.Pipeline:
    adam, order = torch.optim.AdamW, ps.build(schedule, 2, 4, **order)
    return ps.Pipeline(model(), order, loss_fn=nn.MSELoss(), optimizer=adam, precision=precision)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "chimera"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_bad_steps_leave_no_trace(schedule: str, clip_norm: float | None) -> None:
    options = ps.PrecisionOptions(clip_norm=clip_norm, skip_not_finite=True)
    seen, plain = pipeline(schedule, precision=options), pipeline(schedule, precision=options)
    for step in range(6):
        is_bad = step in (1, 4)
        before = [p.detach().clone() for p in seen.parameters()]
        result = seen.step(*batch(step, is_bad))
        assert result.skipped == is_bad
        assert (result.grad_norm is None) == (is_bad or clip_norm is None)
        if is_bad:
            assert all(torch.equal(p, old) for p, old in zip(seen.parameters(), before, strict=True))
            assert all(p.grad is None for p in seen.parameters())
        else:
            assert torch.equal(plain.step(*batch(step, False)).loss, result.loss)
    assert seen.num_updates == plain.num_updates == 4
    assert all(torch.equal(a, b) for a, b in zip(seen.parameters(), plain.parameters(), strict=True))


def test_gradients_of_several_steps_are_left_out_together_and_clip_may_come_between() -> None:
    pipe = pipeline()
    pipe.step(*batch(0, True), update=False)
    pipe.clip(1.0)
    pipe.step(*batch(1, False), update=False)
    assert pipe.update() is None
    assert pipe.num_updates == 0
    assert not pipe.step(*batch(2, False)).skipped
    assert pipe.num_updates == 1


def test_without_the_option_the_update_is_made() -> None:
    pipe = pipeline(precision=ps.PrecisionOptions())
    assert not pipe.step(*batch(0, True)).skipped
    assert any(p.isnan().any() for p in pipe.parameters())


def test_checkpoints_do_not_ask_for_the_option(tmp_path: Path) -> None:
    pipe = pipeline()
    pipe.step(*batch(0, False), update=False)  # gradients that wait are not multiplied by anything
    pipe.save(tmp_path)
    after = pipeline(precision=ps.PrecisionOptions())
    after.load(tmp_path)
    pipe.update(), after.update()
    assert all(torch.equal(a, b) for a, b in zip(pipe.parameters(), after.parameters(), strict=True))


def test_updates_as_ops_refuse_it_with_the_reason() -> None:
    with pytest.raises(RuntimeFailure, match=r"skip_not_finite.*each stage makes its own before all are there"):
        pipeline("amdp", window=2)
