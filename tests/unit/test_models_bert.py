"""The BERT: its parameters counted exactly, the same weights however it is cut, and it learns."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.data import DataError, MaskedText
from penstock.models import (
    BERTConfig,
    BERTLoss,
    bert_costs,
    bert_layers,
    bert_presets,
    bert_stage,
    bert_tied_parameters,
    presets,
)
from penstock.runtime import partition
from plain_loop import plain_step

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]

CONFIG = BERTConfig(vocab_size=14, context=12, depth=3, width=12, num_heads=3)
TEXT = np.tile(np.arange(11, dtype=np.int64), 40)


def run(layers: list[nn.Module], value: object) -> dict[str, Tensor]:
    for layer in layers:
        value = layer(value)
    return value  # type: ignore[return-value]


def batch(numbers: range, text: MaskedText) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    made = text.samples(numbers)
    inputs = {"tokens": torch.from_numpy(made.tokens), "segments": torch.from_numpy(made.segments)}
    return inputs, {"tokens": torch.from_numpy(made.labels), "next": torch.from_numpy(made.follows)}


def count(layers: list[nn.Module]) -> int:
    return sum(p.numel() for p in {id(p): p for layer in layers for p in layer.parameters()}.values())


def test_the_presets_of_amdp_have_the_published_numbers_of_parameters() -> None:
    # By formula, for a billion weights are too many for a test; the formulas against small models built.
    assert presets["amdp-gpt"].num_parameters == 1_557_686_400
    assert bert_presets["amdp"].num_parameters == 1_036_179_458
    assert dataclasses.replace(bert_presets["amdp"], context=1024).num_parameters == 1_036_179_458 + 512 * 1600


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("next_sentence", [False, True])
def test_the_formula_counts_what_is_built(tied: bool, next_sentence: bool) -> None:
    config = dataclasses.replace(CONFIG, tied=tied, next_sentence=next_sentence, num_segments=3)
    assert count(bert_layers(config)) == config.num_parameters


@pytest.mark.parametrize("cuts", [[1, 4], [2, 2, 1], [1, 1, 1, 1, 1]])
def test_any_partition_holds_the_same_weights_under_the_same_names(cuts: list[int]) -> None:
    whole = bert_stage(CONFIG, range(5), seed=3).state_dict()
    parts: dict[str, Tensor] = {}
    start = 5
    for cut in reversed(cuts):
        start -= cut
        torch.rand(start + 1)
        parts |= bert_stage(CONFIG, range(start, start + cut), seed=3).state_dict()
    assert set(parts) == set(whole)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_every_token_sees_every_other_and_none_sees_padding() -> None:
    layers = bert_layers(CONFIG)
    tokens = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(0))
    real = torch.ones(2, 8, dtype=torch.bool)
    real[1, 6:] = False
    out = run(layers, {"tokens": tokens, "real": real})
    assert out["tokens"].shape == (2, 8, 14)
    assert out["next"].shape == (2, 2)
    changed = tokens.clone()
    changed[:, 7] = (tokens[:, 7] + 1) % 11
    other = run(layers, {"tokens": changed, "real": real})
    assert not torch.allclose(other["tokens"][0, :7], out["tokens"][0, :7], atol=1e-4)
    assert torch.equal(other["tokens"][1, :6], out["tokens"][1, :6])
    cropped = run(layers, {"tokens": tokens[1:, :6]})
    assert torch.allclose(cropped["tokens"][0], out["tokens"][1, :6], atol=1e-5)
    assert torch.allclose(run(layers, tokens)["tokens"][0], out["tokens"][0], atol=1e-5)


def test_loss_by_its_definition_and_any_microbatches_make_the_batch() -> None:
    inputs, targets = batch(range(6), MaskedText(TEXT, 11, 12))
    targets["tokens"][2, :] = -100
    targets["tokens"][3, 1:4] = 5
    output = run(bert_layers(CONFIG), inputs)
    logs, follows = output["tokens"].log_softmax(-1), output["next"].log_softmax(-1)
    each = []
    for b in range(6):
        terms = [-logs[b, t, c] for t, c in enumerate(targets["tokens"][b].tolist()) if c != -100]
        each.append((torch.stack(terms).mean() if terms else 0.0) - follows[b, targets["next"][b]])
    assert torch.allclose(BERTLoss()(output, targets), torch.stack(each).mean())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_pipeline_gives_the_plain_loops_loss_and_gradients(schedule: str) -> None:
    built = ps.build(schedule, 2, 3)
    inputs, targets = batch(range(6), MaskedText(TEXT, 11, 12))
    inputs["real"] = torch.ones(6, 12, dtype=torch.bool)
    parts = partition(bert_costs(CONFIG), built.num_stages)
    pipe = ps.Pipeline(
        [bert_stage(CONFIG, part) for part in parts],
        built,
        loss_fn=BERTLoss(),
        parallel=ps.ParallelOptions(tied=bert_tied_parameters(CONFIG)),
    )
    result = pipe.step(inputs, targets, update=False)
    model = nn.Sequential(*bert_layers(CONFIG))
    loss = plain_step(model, inputs, targets, 3, BERTLoss())
    assert torch.equal(torch.as_tensor(result.loss), loss)
    plain = {f"layers.{name}": parameter.grad for name, parameter in model.named_parameters()}
    found = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    assert set(found) == set(plain)
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.nightly
def test_a_tiny_one_learns_to_fill_in_masked_tokens_and_what_follows() -> None:
    text = MaskedText(TEXT, 11, 12)
    config = dataclasses.replace(CONFIG, width=32, num_heads=4, depth=2)
    layers = bert_layers(config)
    optimizer = torch.optim.AdamW(nn.ModuleList(layers).parameters(), lr=2e-3)
    for step in range(280):
        inputs, targets = batch(range(16 * step, 16 * step + 16), text)
        loss = BERTLoss()(run(layers, inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    inputs, targets = batch(range(100_000, 100_256), text)
    output, labels = run(layers, inputs), targets["tokens"]
    right = (output["tokens"].argmax(-1) == labels)[labels != -100].float().mean()
    assert right > 0.5, "1 in 11 by chance"
    assert (output["next"].argmax(-1) == targets["next"]).float().mean() > 0.7, "1 in 2 by chance"


def test_samples_depend_on_seed_and_number_alone_and_are_masked_as_said() -> None:
    text = MaskedText(TEXT, 11, 40, seed=5)
    many = text.samples(range(400))
    again = text.samples([7, 399])
    assert all(np.array_equal(a[[7, 399]], b) for a, b in zip(many, again))
    assert not np.array_equal(MaskedText(TEXT, 11, 40, seed=6).samples([7]).tokens, again.tokens[:1])
    assert text.num_tokens == 14
    assert np.all(many.tokens[:, 0] == 11)
    assert np.all((many.tokens == 12).sum(1) == 2)
    guessed = many.labels != -100
    assert np.all(guessed.sum(1) == round(0.15 * 37))
    assert not guessed[:, 0].any()
    masked = (many.tokens == 13)[guessed].mean()
    kept = (many.tokens == many.labels)[guessed].mean()
    assert masked == pytest.approx(0.8, abs=0.03)
    assert kept == pytest.approx(0.1 + 0.1 / 11, abs=0.03)
    assert np.all((many.tokens == 13) <= guessed)
    assert many.follows.mean() == pytest.approx(0.5, abs=0.08)
    original = np.where(guessed, many.labels, many.tokens)
    first_end = 1 + 19 - 1  # the first part has a token more where they do not halve
    follows = (original[:, first_end + 2] - original[:, first_end]) % 11 == 1
    assert np.all(follows[many.follows == 1])
    assert np.all(many.segments[:, : first_end + 2] == 0)
    assert np.all(many.segments[:, first_end + 2 :] == 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "width 12 with 5 heads"),
        ({"num_segments": 0}, "num_segments 0"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_wrong_inputs_targets_and_texts_are_refused_by_name() -> None:
    layers = bert_layers(CONFIG)
    with pytest.raises(ValueError, match="13 tokens given to a BERT of context 12"):
        run(layers, torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(ValueError, match="given input_ids; it takes tokens"):
        run(layers, {"input_ids": torch.zeros(1, 3, dtype=torch.long)})
    with pytest.raises(ValueError, match="layer 5 asked of a BERT of 5 layers"):
        bert_layers(CONFIG, [5])
    output = run(layers, torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="an output 'next'"):
        BERTLoss()(output, {"tokens": torch.zeros(1, 3, dtype=torch.long)})
    with pytest.raises(DataError, match="at least 5"):
        MaskedText(TEXT, 11, 4)
    with pytest.raises(DataError, match="a text of 9 tokens"):
        MaskedText(TEXT[:9], 11, 12)
    with pytest.raises(DataError, match="token 10 of the text is outside the vocabulary of 9"):
        MaskedText(TEXT, 9, 40).samples([0])
