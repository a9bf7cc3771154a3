"""What a real pipeline holds is what its footprint says: parameters, versions, gradients, the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.models import GPTConfig, build_layers
from penstock.runtime.parameters.versions import VersionedParameters
from tied_updates_loop import with_rule
from waiting import PATIENCE

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]

CONFIG = GPTConfig(vocab_size=32, context=8, depth=2, width=8, num_heads=2)
ADAM = partial(torch.optim.AdamW, lr=1e-3)
MOMENTUM = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
NADAM = partial(torch.optim.NAdam, lr=1e-3)

STATE = {"AdamW": (8, 4), "SGD": (4, 0), "NAdam": (8, 8)}
"""Of the optimizer's state the bytes a number (moments) and a tensor (steps; NAdam's product of momenta too)."""

RUNS: list[tuple[str, int, dict[str, Any], Any, bool]] = [
    ("amdp", 16, {"window": 4}, ADAM, True),
    ("amdp", 24, {"window": 8}, ADAM, True),
    ("amdp", 24, {"window": 8}, ADAM, False),
    ("pipedream", 8, {"window": 1}, ADAM, True),
    ("pipedream", 8, {"window": 2}, MOMENTUM, True),
    ("pipedream-2bw", 12, {"window": 4}, ADAM, True),
    ("spectrain", 6, {"window": 1}, MOMENTUM, True),
    ("amdp, xpipe", 16, {"window": 4}, ADAM, True),
    ("amdp, xpipe", 16, {"window": 4}, ADAM, False),
    ("xpipe", 12, {"window": 4}, ADAM, True),
    ("vnag", 8, {"window": 1}, NADAM, True),
    ("1f1b", 4, {}, ADAM, True),
    ("chimera", 4, {}, ADAM, True),
    ("chimera", 4, {}, ADAM, False),
]
"""Schedule (and the rule, where that is another than its own), microbatches, options, optimizer, zero."""


def costs_of(layers: list[nn.Module], optimizer: Any) -> ps.Costs:
    """The costs of stages of a layer each, by their parameters."""
    sizes = [[p.numel() for p in layer.parameters()] for layer in layers]
    number, tensor = STATE[optimizer.func.__name__]
    weights = [4.0 * sum(each) for each in sizes]
    return replace(
        ps.Costs.uniform(len(layers)),
        weight_bytes=weights,
        gradient_bytes=weights,
        optimizer_bytes=[float(number * sum(each) + tensor * len(each)) for each in sizes],
    )


def held(pipe: ps.Pipeline, num_microbatches: int) -> list[tuple[int, int, int, int]]:
    """By rank: parameters, versions, gradients, optimizer; after two steps."""
    for seed in range(2):
        tokens = torch.randint(32, (num_microbatches, 8), generator=torch.Generator().manual_seed(seed))
        pipe.step(tokens, tokens)
    return [(r["parameters"], r["versions"], r["gradients"], r["optimizer"]) for r in pipe.state_bytes()]


def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize(("name", "num_microbatches", "options", "optimizer", "zero"), RUNS)
def test_a_pipeline_holds_what_its_footprint_says(
    name: str, num_microbatches: int, options: dict[str, Any], optimizer: Any, zero: bool
) -> None:
    layers = build_layers(CONFIG, range(4), seed=0)
    name, _, rule = name.partition(", ")
    schedule = ps.build(name, 4, num_microbatches, **options)
    schedule = with_rule(schedule, rule) if rule else schedule
    expected = ps.footprint(schedule, costs_of(layers, optimizer), sharding="copies" if zero else "none")
    pipe = ps.Pipeline(
        nn.Sequential(*layers),
        schedule,
        loss_fn=loss,
        optimizer=optimizer,
        timeout=PATIENCE,
        parallel=ps.ParallelOptions(sharding="copies" if zero else "none"),
    )
    assert held(pipe, num_microbatches) == [tuple(rank[:4]) for rank in expected.ranks]


def test_where_nothing_is_predicted_there_is_no_second_version() -> None:
    """XPipe's last stage has its updates right behind its backwards."""
    layers = build_layers(CONFIG, range(4), seed=0)
    schedule = ps.build("xpipe", 4, 12, window=4)
    expected = [tuple(rank[:4]) for rank in ps.footprint(schedule, costs_of(layers, ADAM)).ranks]
    pipe = ps.Pipeline(nn.Sequential(*layers), schedule, loss_fn=loss, optimizer=ADAM, timeout=PATIENCE)
    found = held(pipe, 12)
    assert found == expected
    assert [rank[1] > 0 for rank in found] == [True, True, True, False]


@pytest.mark.parametrize("sharding", ["copies", "none"])
def test_update_messages_weigh_what_copies_are_sent(sharding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, and behind them what XPipe's rule predicts for the copy."""
    layers = build_layers(CONFIG, range(4), seed=0)
    schedule = with_rule(ps.build("amdp", 4, 16, window=4), "xpipe")
    plain = costs_of(layers, ADAM)
    costs = replace(plain, update_bytes=plain.weight_bytes).with_predictions(schedule, sharding)
    came: dict[tuple[int, int], int] = {}

    def take(versions: VersionedParameters, values: Sequence[torch.Tensor]) -> None:
        came[versions._stage, versions.num_in_pass] = sum(value.nbytes for value in values)
        original(versions, values)

    original = VersionedParameters.take
    monkeypatch.setattr(VersionedParameters, "take", take)
    parallel = ps.ParallelOptions(sharding=sharding)
    with ps.Pipeline(nn.Sequential(*layers), schedule, loss_fn=loss, optimizer=ADAM, parallel=parallel) as pipe:
        held(pipe, 16)
    windows = schedule.windows
    assert windows is not None
    counted = {
        (stage, update): costs.message_size(("U", stage, 2 * update), ("U", stage, windows.number(update, 1)))
        for stage in range(4)
        for update in range(4)
    }
    if sharding == "none":
        assert not came
        assert costs == replace(plain, update_bytes=plain.weight_bytes)
        return
    assert came == counted
    assert [counted[0, update] / plain.weight_bytes[0] for update in range(4)] == [2, 2, 1, 1]
