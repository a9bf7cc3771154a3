"""What is measured of the layers of a GPT: their times in every way of running them, and their bytes."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from penstock.data import ByteTokenizer
from penstock.formats.profile import TIMES
from penstock.models import gpt_costs, gpt_stage, presets
from penstock.runtime import partition
from penstock.train.settings import Settings
from penstock.tune import layers
from penstock.tune.layers import NO_LAYER, RankShare, measure_layers
from penstock.tune.meter import NeededProfile, profile_of
from penstock.tune.tuned_model import tuned_model

pytestmark = pytest.mark.unit

CONFIG = dataclasses.replace(presets["tiny"], depth=2, vocab_size=ByteTokenizer().vocab_size)


@pytest.mark.parametrize("recompute", [False, True])
def test_bytes_are_those_of_the_real_layers(recompute: bool) -> None:
    settings = Settings(preset="tiny", depth=2, microbatches=1, threads=1)
    real = measure_layers(RankShare(settings, 2, recompute, 0, 1, 0.0), lambda: None)
    found = [real["bytes"][str(layer)] for layer in range(CONFIG.num_layers)]
    weights = [sum(p.nbytes for p in gpt_stage(CONFIG, [layer], 0).parameters()) for layer in range(4)]
    hidden = 4 * 2 * CONFIG.context * CONFIG.width
    assert [each["weight"] for each in found] == weights
    assert [each["output"] for each in found] == [hidden, hidden, hidden, 0]
    assert [each["state"] for each in found] == pytest.approx([2 * weight for weight in weights], rel=0.02)
    assert [each["activation"] == hidden for each in found[1:3]] == [recompute] * 2
    assert [each["transient"] > 10 * hidden for each in found[1:3]] == [recompute] * 2
    assert all(0 < each["held"] < 32 * hidden for each in found[1:3])


@pytest.mark.parametrize("rank", range(2))
def test_every_layer_is_timed_in_every_way(rank: int) -> None:
    settings = Settings(preset="tiny", depth=2, microbatches=1, threads=1)
    share = RankShare(settings, 1, False, rank, 2, 0.0)
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
    told = measure_layers(RankShare(settings, 1, False, 0, 1, 0.0), lambda: None)
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
