"""The captioner: images see themselves alone, samples their own words, and a microbatch may have no image."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.data import CaptionedImages, DataError
from penstock.models import (
    CrossEntropy,
    captioner_costs,
    captioner_costs_by_length,
    captioner_layers,
    captioner_presets,
    captioner_stage,
)

pytestmark = pytest.mark.unit

NANO = replace(captioner_presets["nano"], image_width=16, width=24, depth=2, side=8)
SAMPLES = CaptionedImages(NANO.num_features, NANO.side, NANO.vocab_size, NANO.context, seed=3)


def given(numbers: list[int]) -> tuple[dict[str, Tensor], Tensor]:
    made = {name: torch.from_numpy(value) for name, value in SAMPLES.batch(numbers)._asdict().items()}
    return made, made.pop("targets")


def said(layers: Any, numbers: list[int]) -> Tensor:
    value: Any = given(numbers)[0]
    for layer in layers:
        value = layer(value)
    assert isinstance(value, Tensor)
    return value[0]


def by_count(count: int, after: int = 0) -> int:
    """A sample with so many images."""
    return next(k for k in range(after, 1000) if len(SAMPLES.sizes(k).images) == count)


def test_samples_in_one_row_see_nothing_of_each_other() -> None:
    layers = captioner_layers(NANO)
    numbers = [by_count(2), by_count(0), by_count(1), by_count(3)]
    together = said(layers, numbers)
    apart = torch.cat([said(layers, [number]) for number in numbers])
    assert together.shape == (sum(SAMPLES.sizes(k).length for k in numbers), NANO.vocab_size)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


def test_a_word_depends_on_all_patches_before_it_and_on_no_word_behind() -> None:
    layers, number = captioner_layers(NANO), by_count(2)
    first, second = SAMPLES.sizes(number).patches
    inputs, _ = given([number])

    def ends(inputs: dict[str, Tensor]) -> Tensor:
        value: Any = inputs
        for layer in layers:
            value = layer(value)
        found: Tensor = value[0]
        return found

    before = ends(inputs)
    changed = ends({**inputs, "patches": inputs["patches"].index_add(1, torch.tensor([first]), torch.ones(1, 1, 12))})
    assert torch.equal(changed[:first], before[:first])  # the first image does not see the second
    assert not torch.equal(changed[first + second :], before[first + second :])
    tokens = inputs["tokens"].clone()
    tokens[0, -1] = (tokens[0, -1] + 1) % NANO.vocab_size
    assert torch.equal(ends({**inputs, "tokens": tokens})[:-1], before[:-1])


def test_a_microbatch_without_any_image_leaves_the_tower_a_gradient_of_zero() -> None:
    layers = captioner_layers(NANO)
    inputs, targets = given([by_count(0), by_count(0, after=by_count(0) + 1)])
    assert inputs["patches"].shape == (1, 0, NANO.num_features)
    value: Any = inputs
    for layer in layers:
        value = layer(value)
    CrossEntropy()(value, targets).backward()
    assert all(float(p.grad.abs().sum()) == 0 for p in layers[1].parameters() if p.grad is not None)
    assert all(p.grad is not None for p in layers[-2].parameters())


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_the_pipeline_s_gradients_are_those_of_the_plain_loop_to_the_bit(name: str) -> None:
    schedule = ps.build(name, 2, 4)
    bins = [[by_count(0)], [0, 1, 2], [3, 4], [5]]
    batch = [given(each) for each in bins]
    parts = [range(1), range(1, 3), range(3, 5), range(5, 7)] if name == "zb-v" else [range(3), range(3, 7)]
    pipe = ps.Pipeline(
        [captioner_stage(NANO, part) for part in parts], schedule, loss_fn=CrossEntropy(), optimizer=torch.optim.SGD
    )
    found = pipe.step([inputs for inputs, _ in batch], [targets for _, targets in batch], update=False)
    layers, counts = captioner_layers(NANO), [CrossEntropy().weight(targets) for _, targets in batch]
    total: Any = None
    for (inputs, targets), count in zip(batch, counts, strict=True):
        value: Any = inputs
        for layer in layers:
            value = layer(value)
        loss = CrossEntropy()(value, targets) * (count / sum(counts))
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert float(found.loss) == float(total)
    wanted = {f"layers.{k}.{name}": p.grad for k, layer in enumerate(layers) for name, p in layer.named_parameters()}
    own = dict(pipe.named_parameters())
    assert set(own) == set(wanted)
    for key, parameter in own.items():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, wanted[key]), key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": torch.tensor([[2, 2]])}, "images of 4 patches in all were given with patches"),
        ({"sizes": torch.tensor([[9, 1]]), "patches": torch.zeros(1, 9, 12)}, "there are at most 8: crop it"),
    ],
)
def test_images_that_do_not_fit_are_named(change: dict[str, Tensor], message: str) -> None:
    inputs, _ = given([by_count(1)])
    with pytest.raises(ValueError, match=message):
        captioner_layers(NANO, [0])[0]({**inputs, **change})


def test_texts_that_do_not_fit_are_named() -> None:
    join, images = (
        captioner_layers(NANO, [3])[0],
        {"images": torch.zeros(1, 4, 16), "image_lengths": torch.tensor([4])},
    )
    words = {"tokens": torch.zeros(1, 70, dtype=torch.int64), "num_words": torch.tensor([70])}
    with pytest.raises(ValueError, match="70 words given to a captioner of context 64"):
        join({**images, **words, "images_of": torch.tensor([1])})
    with pytest.raises(ValueError, match=r"1 images and tokens.* were given for 1 samples with 2 images"):
        join({**images, **words, "images_of": torch.tensor([2])})
    with pytest.raises(ValueError, match="layer 7 asked of a captioner of 7 layers"):
        captioner_layers(NANO, [7])
    with pytest.raises(ValueError, match="image tower"):
        replace(NANO, image_heads=3)


# Costs


def test_costs_follow_from_each_tower_s_own_lengths() -> None:
    costs = captioner_costs_by_length(NANO, [range(3), range(3, 5), range(5, 7)])
    assert costs.tower_names == ("images", "words")
    small, large = ({"images": [[16] * k], "words": [[16 * k + 10]]} for k in (1, 4))
    one, four = costs.of(small), costs.of(large)
    assert four.duration("F", 0, 0) == pytest.approx(4 * one.duration("F", 0, 0))  # each image sees itself alone
    assert four.duration("F", 1, 0) > one.duration("F", 1, 0) * 74 / 26
    whole = costs.of({"images": [[64]], "words": [[74]]})
    assert whole.duration("F", 0, 0) > four.duration("F", 0, 0)
    # By length and by layer they are the same FLOPs: 10**9 take a ms.
    layers = captioner_costs(NANO, [16] * 4, 74)
    assert four.duration("F", 0, 0) == pytest.approx(sum(layers[:3]) * 1e-9)
    assert four.duration("F", 2, 0) == pytest.approx(sum(layers[5:]) * 1e-9)


# Data


def test_samples_are_those_of_their_number_and_seed() -> None:
    again = CaptionedImages(NANO.num_features, NANO.side, NANO.vocab_size, NANO.context, seed=3)
    for mine, theirs in zip(SAMPLES.batch([5, 900]), again.batch([5, 900]), strict=True):
        assert np.array_equal(mine, theirs)
    other = CaptionedImages(NANO.num_features, NANO.side, NANO.vocab_size, NANO.context, seed=4)
    assert [other.sizes(k) for k in range(20)] != [SAMPLES.sizes(k) for k in range(20)]


def test_sizes_have_a_long_tail_and_keep_their_limits() -> None:
    data = CaptionedImages(4, 32, 48, 256)
    sizes = [data.sizes(number) for number in range(2000)]
    patches = np.array([length for each in sizes for length in each.patches])
    assert {len(each.images) for each in sizes} == {0, 1, 2, 3}
    assert patches.max() <= 32 * 32
    assert np.percentile(patches, 95) > 3 * np.median(patches)
    assert max(each.num_words for each in sizes) <= 256
    assert max(each.length for each in sizes) <= data.longest
    for number in range(50):
        words = data.words(number)
        assert len(words) == sizes[number].num_words + 1
        assert min(words) >= 0
        assert max(words) < 48
        if sizes[number].images:
            assert data.image(number, 0).shape == (sizes[number].patches[0], 4)


def test_words_on_images_tell_their_factors_and_those_behind_follow_one_another() -> None:
    number = by_count(2)
    begin, *told = SAMPLES.words(number)[:7]
    assert begin == 0
    values = [word - 1 - 6 * (place % 3) for place, word in enumerate(told)]
    assert values == [*SAMPLES.factors(number, 0), *SAMPLES.factors(number, 1)]
    story = SAMPLES.words(number)[7:]
    assert all((after - before) % 29 == 1 for before, after in pairwise(story))
    assert len(story) > 1


@pytest.mark.parametrize("wrong", [(0, 8, 48, 64), (4, 1, 48, 64), (4, 8, 20, 64), (4, 8, 48, 10)])
def test_data_too_small_to_tell_factors_is_refused(wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(DataError, match="there must be at least 1, 2, 11 and 21"):
        CaptionedImages(*wrong)
    with pytest.raises(IndexError):
        SAMPLES.sizes(-1)
