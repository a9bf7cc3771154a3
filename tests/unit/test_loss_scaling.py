"""Loss scaling in one process, beside a plain loop with torch's own scaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.runtime.errors import CheckpointError, RuntimeFailure
from scaled_loop import ADAMW, NUM, ScaledLoop, new_scaler, scaled_batch, scaled_model, trained_by_loop

STEPS = range(10)
SCHEDULES = {
    "1f1b": (2, {}),
    "zb-h1": (2, {}),
    "interleaved-1f1b": (2, {}),
    "zb-v": (2, {}),
    "chimera": (2, {}),
    "gpipe": (1, {}),
}


def pipeline(
    scaler: torch.amp.GradScaler | None, schedule: str = "1f1b", clip_norm: float | None = None, **more: Any
) -> ps.Pipeline:
    ranks, options = SCHEDULES[schedule]
    return ps.Pipeline(
        more.pop("model", None) or scaled_model(),
        ps.build(schedule, ranks, NUM, **options),
        loss_fn=nn.MSELoss(),
        optimizer=ADAMW,
        precision=ps.PrecisionOptions(autocast=torch.float16, clip_norm=clip_norm, scaler=scaler),
        **more,
    )


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_scales_and_weights_are_those_of_a_plain_loop(schedule: str, clip_norm: float | None) -> None:
    loop = ScaledLoop(scaled_model(), new_scaler(), clip_norm)
    scaler = new_scaler()
    num_left_out = 0
    with pipeline(scaler, schedule, clip_norm) as pipe:
        for step in STEPS:
            loss, norm = loop.step(*scaled_batch(step))
            result = pipe.step(*scaled_batch(step))
            num_left_out += step + 1 - num_left_out - pipe.num_updates
            assert torch.equal(result.loss, loss)
            assert scaler.get_scale() == loop.scaler.get_scale()
            left_out = norm is not None and not norm.isfinite()
            assert (result.grad_norm is None) == (clip_norm is None or left_out)
            if norm is not None and result.grad_norm is not None:
                assert torch.equal(result.grad_norm, norm)
        found = dict(pipe.named_parameters())
        assert all(torch.equal(found[name], p) for name, p in loop.model.named_parameters())
        assert scaler.state_dict() == loop.scaler.state_dict()
    assert num_left_out == 2  # the fourth batch and the eighth


@pytest.mark.parametrize("options", [{"init_scale": 1000.0, "growth_factor": 1.7, "backoff_factor": 0.3}])
def test_scales_that_are_no_powers_of_two_are_rounded_as_by_torch(options: dict[str, float]) -> None:
    loop, scaler = ScaledLoop(scaled_model(), new_scaler(**options)), new_scaler(**options)
    with pipeline(scaler) as pipe:
        for step in STEPS:
            loop.step(*scaled_batch(step))
            pipe.step(*scaled_batch(step))
        assert scaler.state_dict() == loop.scaler.state_dict()
        found = dict(pipe.named_parameters())
        assert all(torch.equal(found[name], p) for name, p in loop.model.named_parameters())


def test_a_scale_that_can_grow_no_more_stays() -> None:
    scaler = new_scaler(init_scale=2.0**127, growth_interval=1)
    still = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    still[1].bias.requires_grad_(True)
    with pipeline(scaler, model=still) as pipe:
        x = torch.zeros(16, 4)
        y = torch.cat(pipe.predict(x)).float()
        pipe.step(x, y)  # the gradient is 0 on any scale
        assert pipe.num_updates == 1
        assert scaler.get_scale() == 2.0**127


def test_gradients_that_wait_are_multiplied_by_the_scale_and_clipped_ones_are_not() -> None:
    loop = ScaledLoop(scaled_model(), new_scaler(), 0.05)
    with pipeline(new_scaler()) as pipe:
        for step in (0, 1):
            loop.backward(*scaled_batch(step))
            pipe.step(*scaled_batch(step), update=False)
        waiting = {name: p.grad for name, p in pipe.named_parameters()}
        assert all(torch.equal(waiting[name], p.grad) for name, p in loop.model.named_parameters())  # type: ignore
        assert torch.equal(pipe.clip(0.05), loop.update())  # type: ignore[arg-type]
        with pytest.raises(RuntimeFailure, match=r"call update\(\) or zero_grad\(\) after clip"):
            pipe.step(*scaled_batch(2))
        pipe.zero_grad()
        assert pipe.step(*scaled_batch(2)).loss.isfinite()


def test_a_clipped_gradient_is_divided_once() -> None:
    loop, scaler = ScaledLoop(scaled_model(), new_scaler(), 0.05), new_scaler()
    with pipeline(scaler) as pipe:
        for step in STEPS:
            loop.step(*scaled_batch(step))
            pipe.step(*scaled_batch(step), update=False)
            pipe.clip(0.05)
            pipe.update()
        found = dict(pipe.named_parameters())
        assert all(torch.equal(found[name], p) for name, p in loop.model.named_parameters())
        assert scaler.state_dict() == loop.scaler.state_dict()


def test_a_checkpoint_with_gradients_that_wait_goes_on_with_their_scale(tmp_path: Path) -> None:
    loop = ScaledLoop(scaled_model(), new_scaler())
    with pipeline(new_scaler()) as pipe:
        for step in range(5):
            loop.step(*scaled_batch(step))
            pipe.step(*scaled_batch(step))
        loop.backward(*scaled_batch(5))
        pipe.step(*scaled_batch(5), update=False)
        pipe.save(tmp_path)
    scaler = new_scaler(init_scale=8.0)
    with pipeline(scaler, "zb-h1") as pipe:
        pipe.load(tmp_path)
        assert scaler.get_scale() == loop.scaler.get_scale()
        loop.update()
        pipe.update()
        for step in range(6, 10):
            loop.step(*scaled_batch(step))
            pipe.step(*scaled_batch(step))
        found = dict(pipe.named_parameters())
        assert all(torch.equal(found[name], p) for name, p in loop.model.named_parameters())
        assert scaler.state_dict() == loop.scaler.state_dict()


@pytest.mark.parametrize("scaled_before", [True, False])
def test_gradients_that_wait_are_not_loaded_where_they_would_have_another_scale(
    tmp_path: Path, scaled_before: bool
) -> None:
    one, other = (new_scaler(), None) if scaled_before else (None, new_scaler())
    with pipeline(one) as pipe, pipeline(other) as then:
        pipe.step(*scaled_batch(0), update=False)
        pipe.save(tmp_path)
        before = [p.detach().clone() for p in then.parameters()]
        with pytest.raises(CheckpointError, match=r"give both PrecisionOptions\(scaler="):
            then.load(tmp_path)
        with pytest.raises(RuntimeFailure, match=r"give both PrecisionOptions\(scaler="):
            pipe.hand_over(then)
        assert all(map(torch.equal, then.parameters(), before))
        pipe.update()
        pipe.save(tmp_path)
        then.load(tmp_path)  # nothing waits: what is left is the model's
        assert all(map(torch.equal, then.parameters(), pipe.parameters()))


def test_clipped_gradients_are_not_saved(tmp_path: Path) -> None:
    with pipeline(new_scaler()) as pipe:
        pipe.step(*scaled_batch(0), update=False)
        pipe.clip(1.0)
        with pytest.raises(CheckpointError, match=r"call update\(\) after clip\(\)"):
            pipe.save(tmp_path)
        pipe.update()
        pipe.save(tmp_path)


def test_training_that_is_handed_over_goes_on_with_the_scale() -> None:
    losses, parameters, scale = trained_by_loop(STEPS)
    scaler = new_scaler(init_scale=2.0)
    with pipeline(new_scaler()) as pipe, pipeline(scaler, "zb-v") as then:
        mine = [pipe.step(*scaled_batch(step)).loss for step in range(5)]
        pipe.hand_over(then)
        mine += [then.step(*scaled_batch(step)).loss for step in range(5, 10)]
        assert all(map(torch.equal, mine, losses))
        assert scaler.get_scale() == scale
        assert all(torch.equal(dict(then.named_parameters())[name], p) for name, p in parameters.items())


def test_a_step_that_fails_leaves_the_scale() -> None:
    scaler = new_scaler()
    with pipeline(scaler) as pipe:
        before = scaler.state_dict()
        with pytest.raises(RuntimeFailure):
            pipe.step(torch.ones(16, 4), None)
        assert scaler.state_dict() == before
        pipe.step(*scaled_batch(0))
        assert pipe.num_updates == 1


def test_float16_without_a_scaler_has_a_notice_that_names_it() -> None:
    with pipeline(None) as pipe:
        assert any("PrecisionOptions(scaler=torch.amp.GradScaler" in notice for notice in pipe.notices)
    with pipeline(torch.amp.GradScaler("cpu", enabled=False)) as pipe:
        assert any("without loss scaling" in notice for notice in pipe.notices)
        pipe.step(*scaled_batch(0))
        assert pipe.num_updates == 1
    with pipeline(new_scaler()) as pipe:
        assert pipe.notices == []


def test_what_cannot_be_scaled_is_refused() -> None:
    with pytest.raises(RuntimeFailure, match=r"parameter 0\.weight is torch\.float16, and so is its gradient"):
        pipeline(new_scaler(), model=scaled_model().half())
    with pytest.raises(RuntimeFailure, match=r"updates as ops of the schedule and loss scaling"):
        ps.Pipeline(
            scaled_model(),
            ps.build("pipedream-2bw", 2, NUM, window=2),
            loss_fn=nn.MSELoss(),
            optimizer=ADAMW,
            precision=ps.PrecisionOptions(autocast=torch.float16, scaler=new_scaler()),
        )
