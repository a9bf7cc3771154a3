"""Estimated bytes against what layers really keep, and estimated times against counted operations."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from penstock.models import gpt_costs, presets
from penstock.runtime import partition
from penstock.train.settings import Settings
from penstock.tune import layers
from penstock.tune.errors import TuneError
from penstock.tune.estimate import estimate
from penstock.tune.layers import NO_LAYER, RankShare, measure_layers
from penstock.tune.meter import NeededProfile, profile_of
from penstock.tune.profile import TIMES
from penstock.tune.tuned_model import tuned_model

pytestmark = pytest.mark.unit

CONFIG = dataclasses.replace(presets["tiny"], depth=2)


@pytest.mark.parametrize(("precision", "recompute"), [("float32", False), ("bfloat16", False), ("float32", True)])
def test_bytes_are_those_of_the_real_layers(precision: str, recompute: bool) -> None:
    settings = Settings(preset="tiny", depth=2, precision=precision, microbatches=1, threads=1)
    real = measure_layers(RankShare(settings, CONFIG, 2, recompute, 0, 1, 0.0), lambda: None)
    told = estimate(CONFIG, "tiny", 2, 1.0, half=precision == "bfloat16", recompute=recompute)
    for name in ("weight", "output"):
        assert list(getattr(told, name)) == [real["bytes"][str(layer)][name] for layer in range(CONFIG.num_layers)]
    if not recompute:
        kept = [real["bytes"][str(layer)]["activation"] for layer in range(CONFIG.num_layers)]
        assert list(told.activation) == pytest.approx(kept, rel=0.02)
    else:
        assert told.activation[1:3] == tuple(real["bytes"][str(layer)]["activation"] for layer in (1, 2))
        assert told.transient == pytest.approx(real["bytes"]["1"]["transient"], rel=0.02)
    held = [real["bytes"][str(layer)]["held"] for layer in (1, 2, 3)]
    assert list(told.held[1:]) == pytest.approx(held, rel=0.02)
    state = [real["bytes"][str(layer)]["state"] for layer in range(CONFIG.num_layers)]
    assert list(told.state) == pytest.approx(state, rel=0.02)


def test_times_are_operations_over_speed() -> None:
    told = estimate(CONFIG, "tiny", microbatch_size=4, tflops=2.0)
    tokens = 4 * CONFIG.context
    assert told.f == pytest.approx([flops * tokens / 2e9 for flops in gpt_costs(CONFIG)])
    assert all(b == i + w for b, i, w in zip(told.b, told.i, told.w))
    twice = estimate(CONFIG, "tiny", microbatch_size=8, tflops=4.0)
    assert twice.f == pytest.approx(told.f)
    again = estimate(CONFIG, "tiny", microbatch_size=4, tflops=2.0, recompute=True)
    assert again.i[1] == pytest.approx(told.i[1] + told.f[1])
    assert again.i[0] == told.i[0]


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_makes_no_sense_is_refused(speed: float) -> None:
    with pytest.raises(TuneError, match="give a speed above 0"):
        estimate(CONFIG, "tiny", 1, speed)


@pytest.mark.parametrize("rank", range(2))
def test_every_layer_is_timed_in_every_way(rank: int) -> None:
    settings = Settings(preset="tiny", depth=2, microbatches=1, threads=1)
    share = RankShare(settings, CONFIG, 1, False, rank, 2, 0.0)
    meetings: list[None] = []
    told = measure_layers(share, lambda: meetings.append(None))
    assert told["layers"] == list(partition(gpt_costs(CONFIG), 2)[rank])
    assert set(told["times"]) == {f"{layer} {kind}" for layer in (*told["layers"], NO_LAYER) for kind in TIMES}
    assert all(value > 0 for label, value in told["times"].items() if not label.startswith("-1"))
    assert len(meetings) == 4  # before and after each way of running backwards


def test_bug_what_any_update_costs_was_counted_once_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 layers on one rank, that was 3 ms too much. An update without layers is timed too, and subtracted."""
    stepped: list[int] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            stepped.append(sum(p.grad is not None for group in self.param_groups for p in group["params"]))
            return super().step(closure)

    monkeypatch.setattr(layers, "optimizer_class", lambda settings: partial(Counting, lr=0.0, momentum=0.5))
    settings = Settings(preset="tiny", depth=2, microbatches=1, threads=1)
    told = measure_layers(RankShare(settings, CONFIG, 1, False, 0, 1, 0.0), lambda: None)
    assert stepped[:5] == [2, 12, 12, 3, 0], "embedding, two blocks, head, and nothing"
    assert len(stepped) % 5 == 0
    assert [told["bytes"][str(layer)]["tensors"] for layer in range(4)] == [2.0, 12.0, 12.0, 3.0]
    for layer in range(4):
        assert told["bytes"][str(layer)]["state"] == told["bytes"][str(layer)]["weight"], "a momentum each"
    times = {label: 0.25 if label.startswith(f"{NO_LAYER} ") else 1.0 for label in told["times"]}
    found = profile_of(tuned_model(settings), NeededProfile(1, 1, False), [{**told, "times": times, "step": 0.125}])
    assert (found.update, found.f) == ((0.75,) * 4, (0.75,) * 4)
    assert found.step == 0.125 + 0.25
    assert found.tensors == (2.0, 12.0, 12.0, 3.0)
