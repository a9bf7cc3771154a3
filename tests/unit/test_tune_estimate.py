"""Estimated bytes against what layers really keep, and estimated times against counted operations."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.models import gpt_costs, presets
from penstock.runtime import partition
from penstock.train.settings import Settings
from penstock.tune.errors import TuneError
from penstock.tune.estimate import estimate
from penstock.tune.layers import RankShare, measure_layers

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
    labels = {f"{layer} {kind}" for layer in (*told["layers"], -1) for kind in ("f", "b", "f_split", "i", "w")}
    assert set(told["times"]) == labels | {f"{layer} update" for layer in told["layers"]}
    assert all(value > 0 for label, value in told["times"].items() if not label.startswith("-1"))
    assert len(meetings) == 4  # before and after each way of running backwards
