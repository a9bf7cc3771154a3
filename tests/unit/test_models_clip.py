"""The CLIP: towers the same however they are cut, the contrast by its definition, and three modalities that find each
other."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.data import DataError, PairedSamples, TokenForm, VectorForm
from penstock.models import (
    CLIP,
    CLIPConfig,
    Contrast,
    ContrastiveLoss,
    TowerConfig,
    clip_presets,
    retrieval_accuracy,
    tower_layers,
    tower_stage,
)

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]

NANO = clip_presets["nano"]
DATA = PairedSamples({"audio": VectorForm(8, 6), "text": TokenForm(6, 32), "video": VectorForm(12, 10)})


def batch(numbers: range | list[int]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in DATA.samples(numbers).items()}


@pytest.mark.parametrize("cuts", [[1, 3], [2, 1, 1], [1, 1, 1, 1]])
def test_any_partition_of_a_tower_holds_the_same_weights_under_the_same_names(cuts: list[int]) -> None:
    whole = {name: value for name, value in CLIP(NANO, seed=3).state_dict().items() if name != "contrast.log_scale"}
    parts: dict[str, Tensor] = {}
    for tower in reversed(list(NANO.towers)):
        start = 4
        for cut in reversed(cuts):
            start -= cut
            torch.rand(start + 1)
            parts |= tower_stage(NANO, tower, range(start, start + cut), seed=3).state_dict()
    assert set(parts) == set(whole)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_towers_of_one_shape_have_weights_of_their_own() -> None:
    twins = CLIPConfig({"left": NANO.towers["audio"], "right": NANO.towers["audio"]}, shared_width=8)
    left, right = (tower_layers(twins, name, [1])[0].get_parameter("mlp.up.weight") for name in twins.towers)
    assert not torch.equal(left, right)


def test_the_formula_counts_what_is_built_and_the_presets_are_flexpipes() -> None:
    for config in (NANO, dataclasses.replace(NANO, shared_width=7)):
        assert sum(p.numel() for p in CLIP(config).parameters()) == config.num_parameters
    config = clip_presets["flexpipe-audio-text-video"]
    published = {"audio": 3.0e9, "text": 1.7e9, "video": 5.5e9}
    for name, size in published.items():
        assert config.tower_parameters(name) == pytest.approx(size, rel=0.03)
    assert clip_presets["flexpipe-audio-text"].num_parameters == pytest.approx(4.7e9, rel=0.02)


def test_every_pair_of_towers_is_compared_by_cosine_and_scale() -> None:
    contrast = Contrast(NANO)
    said = {name: torch.nn.functional.normalize(torch.randn(4, 32), dim=-1) for name in NANO.towers}
    logits = contrast(said)
    assert NANO.pairs == [("audio", "text"), ("audio", "video"), ("text", "video")]
    assert logits.shape == (3, 4, 4)
    assert torch.allclose(logits[1, 2, 3], said["audio"][2] @ said["video"][3] / 0.07, atol=1e-4)
    for name in NANO.towers:
        value: Any = batch(range(4))[name]
        for layer in tower_layers(NANO, name):
            value = layer(value)
        assert torch.allclose(value.norm(dim=-1), torch.ones(4))


def test_the_loss_by_its_definition_also_for_partners_in_another_order() -> None:
    logits = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0))
    there, back = logits.log_softmax(-1), logits.log_softmax(-2)
    wanted = -torch.stack([(there[p, b, b] + back[p, b, b]) / 2 for p in range(2) for b in range(5)]).mean()
    assert torch.allclose(ContrastiveLoss()(logits), wanted)
    order = torch.tensor([3, 1, 4, 0, 2])
    shuffled = torch.empty_like(logits)
    shuffled[:, :, order] = logits  # the partner of sample b is now number order[b]
    assert torch.allclose(ContrastiveLoss()(shuffled, order), wanted)
    assert retrieval_accuracy(torch.eye(4).expand(2, 4, 4)).tolist() == [1.0, 1.0]


@pytest.mark.nightly
def test_three_towers_find_each_others_samples_also_of_combinations_never_seen() -> None:
    seen = 152  # of the 216 combinations, the first in each round of numbers
    pool = batch([number for number in range(216 * 4) if number % 216 < seen][:576])
    model, loss_fn = CLIP(NANO), ContrastiveLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(72):
        first = 32 * step % 576
        loss = loss_fn(model({name: value[first : first + 32] for name, value in pool.items()}))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] / 3
    fresh = range(216 * 50 + seen, 216 * 51)
    with torch.no_grad():
        found = retrieval_accuracy(model(batch(fresh)))
    assert found.min() > 10 / len(fresh), "ten times chance, in each pair"


def test_a_tower_runs_through_a_pipeline() -> None:
    # The other towers' words stand still, as a batch of targets: a chain is what one schedule runs.
    given = batch(range(6))
    with torch.no_grad():
        still = tower_stage(NANO, "audio", range(4))(given["audio"])

    class OfOne(ContrastiveLoss):
        def __call__(self, said: Tensor, other: Tensor) -> Tensor:
            return super().__call__((said @ other.T)[None] * 5)

    loss_fn = OfOne()
    built = ps.build("1f1b", 2, 3)
    stages = [tower_stage(NANO, "text", part) for part in (range(2), range(2, 4))]
    pipe = ps.Pipeline(stages, built, loss_fn=loss_fn)
    loss = pipe.step(given["text"], still, update=False).loss
    whole = tower_stage(NANO, "text", range(4))
    parts = [loss_fn(whole(given["text"][i : i + 2]), still[i : i + 2]) for i in (0, 2, 4)]
    total = sum(part / 3 for part in parts)
    assert torch.allclose(torch.as_tensor(loss), torch.as_tensor(total).detach())
    total.backward()  # type: ignore[union-attr]
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    found = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    assert set(found) == set(gradients)
    assert all(torch.allclose(found[name], gradients[name], atol=1e-6) for name in found)  # type: ignore[arg-type]


def test_samples_depend_on_seed_and_number_alone_and_all_modalities_tell_the_same() -> None:
    many, again = DATA.samples(range(30)), DATA.samples([29, 4])
    assert all(np.array_equal(many[name][[29, 4]], again[name]) for name in many)
    combinations = {tuple(DATA.factors(number)) for number in range(216)}
    assert len(combinations) == DATA.num_combinations == 216
    for number in (0, 4, 216 + 4):
        values = DATA.factors(number)
        told = DATA.samples([number])
        words = sorted(token for token in told["text"][0].tolist() if token < 18)
        assert words == [6 * factor + value for factor, value in enumerate(values)]
        shown = DATA._patterns["audio"][np.arange(3), values].sum(0)
        assert np.abs(told["audio"][0] - shown).max() <= 0.5 + 1e-6
    same, other = DATA.samples([4, 220])["audio"]
    assert not np.array_equal(same, other), "noise of their own"
    moved = PairedSamples({"audio": VectorForm(8, 6)}, seed=1)
    assert not np.array_equal(moved.samples([0])["audio"], many["audio"][:1])


def test_wrong_sizes_and_inputs_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="neither; give vocab_size or num_features"):
        TowerConfig(context=4, depth=1, width=8, num_heads=2)
    with pytest.raises(ValueError, match="a tower of width 8 with 3 heads"):
        TowerConfig(context=4, depth=1, width=8, num_heads=3, vocab_size=5)
    with pytest.raises(ValueError, match="a CLIP of 1 towers"):
        CLIPConfig({"text": NANO.towers["text"]})
    with pytest.raises(ValueError, match="no tower 'picture'; there are audio, text, video"):
        tower_layers(NANO, "picture")
    with pytest.raises(ValueError, match="layer 4 asked of a tower of 4 layers"):
        tower_layers(NANO, "text", [4])
    with pytest.raises(ValueError, match="samples of length 9 given to a tower of context 8"):
        tower_layers(NANO, "audio", [0])[0](torch.zeros(1, 9, 6))
    with pytest.raises(ValueError, match="nothing given for tower 'video'"):
        CLIP(NANO)({"audio": torch.zeros(1, 8, 6), "text": torch.zeros(1, 6, dtype=torch.long)})
    with pytest.raises(DataError, match="3 factors of 6 values need at least 3 tokens out of 19"):
        PairedSamples({"text": TokenForm(6, 18)})
    with pytest.raises(DataError, match="0 modalities"):
        PairedSamples({})
