"""Costs by name: formulas against real modules and the published profile, sizes, texts, refusals."""

from __future__ import annotations

import dataclasses
from operator import truediv

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import penstock as ps
from penstock.cost.conditions import LinkQueue
from penstock.cost.presets import (
    A100,
    A800,
    H800,
    PRESETS,
    Accelerator,
    BERTShape,
    GPTShape,
    costs_preset,
    is_preset,
    parse_preset,
)
from penstock.models import GPTConfig, build_layers

pytestmark = pytest.mark.unit

TOY = GPTShape(num_blocks=3, width=24, num_heads=4, vocab_size=100, num_positions=16, sequence=16)

PROFILED = {
    "gpt2-7b": [(8, 10, 5), (9, 10, 6), (9, 10, 6), (9, 9, 6)],
    "gpt2-14b": [(8, 10, 5), *[(9, 10, 6)] * 6, (9, 9, 6)],
    "gpt2-60b": [(10, 11, 5), *[(11, 13, 6)] * 6, (12, 11, 6)],
}
"""F, I and W of each stage in whole ms, as the authors' profiler found them (artifact, experiments/single)."""


def toy_config() -> GPTConfig:
    return GPTConfig(vocab_size=100, context=16, depth=3, width=24, num_heads=4, tied=True)


def num_parameters(shape: GPTShape) -> float:
    """Of the whole model on one device, with the weight that embedding and head share counted once."""
    whole = dataclasses.replace(shape, tensor_parallel=1)
    return sum(layer.parameters for layer in whole.layers()) - whole.padded_vocab * whole.width


def test_parameters_are_those_of_a_real_model() -> None:
    layers = build_layers(toy_config(), range(5), seed=0)
    counts = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    padding = (TOY.padded_vocab - TOY.vocab_size) * TOY.width
    assert sum(layer.parameters for layer in TOY.layers()) == sum(counts) + 2 * padding
    assert [layer.parameters for layer in TOY.layers()[1:4]] == counts[1:4]


def test_operations_are_those_of_a_real_model() -> None:
    """Torch counts the products of a forward, attention's too where it computes the whole square of scores."""
    layers = build_layers(toy_config(), range(5), seed=0)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    value = layers[0](tokens)
    counted = []
    for layer in layers[1:]:
        counter = FlopCounterMode(display=False)
        with counter, sdpa_kernel(SDPBackend.MATH):
            value = layer(value)
        counted.append(counter.get_total_flops())
    shape = dataclasses.replace(TOY, vocab_size=128)  # padded is as given
    expected = [layer.f for layer in shape.layers()[1:]]
    assert counted[:3] == expected[:3]
    assert counted[3] * 128 / 100 == pytest.approx(expected[3])


def test_i_and_w_make_the_backward_of_two_forwards_of_products() -> None:
    for layer in TOY.layers()[1:]:
        assert layer.i + layer.w == pytest.approx(2 * layer.f)


@pytest.mark.parametrize("name", PROFILED)
def test_the_published_profile(name: str) -> None:
    costs = costs_preset(name)
    assert costs.num_stages == len(PROFILED[name])
    for stage, (f, i, w) in enumerate(PROFILED[name]):
        measured = (costs.f[stage], costs.i[stage], costs.w[stage])
        assert measured == pytest.approx((f, i, w), rel=0.22)
    total = sum(costs.f + costs.i + costs.w)
    assert total == pytest.approx(sum(map(sum, PROFILED[name])), rel=0.07)


@pytest.mark.parametrize(
    ("name", "billions", "stages"),
    [("gpt2-7b", 7, 4), ("gpt2-14b", 14, 8), ("gpt2-30b", 30, 8), ("gpt2-60b", 60, 8), ("gpt2-140b", 140, 8)],
)
def test_models_are_as_large_as_they_are_named(name: str, billions: float, stages: int) -> None:
    preset = PRESETS[name]
    assert num_parameters(preset.shape) / 1e9 == pytest.approx(billions, rel=0.06)
    assert preset.num_stages == stages == costs_preset(name).num_stages
    assert len({len(part) for part in preset.stages()}) == 1
    costs, placement = preset.costs(), ps.placements.one_to_one(stages)
    room = ps.simulation.room_for_activations(placement, costs, preset.device.memory)
    assert min(map(truediv, room, costs.activation)) >= 2 * stages  # what the paper's runs hold fits


def test_layers_that_do_not_divide_go_to_inner_stages() -> None:
    preset = PRESETS["gpt2-14b"]  # 48 layers
    for count in (1, 2, 5, 7, 31, 47, 48):
        parts = preset.stages(count)
        assert [layer for part in parts for layer in part] == list(range(48))
        assert len(parts) == count
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) == sizes[-1]
    assert [len(part) for part in preset.stages(5)] == [9, 10, 10, 10, 9]


def test_what_does_not_depend_on_the_cut() -> None:
    four, eight = costs_preset("gpt2-14b", 4), costs_preset("gpt2-14b", 8)
    for row in ("f", "i", "w", "activation"):
        assert sum(getattr(four, row)) == pytest.approx(sum(getattr(eight, row)))
    assert four.message_bytes == (2 * 1024 * 5120,) * 3 + (0,)


def test_more_samples_and_devices() -> None:
    one = costs_preset("gpt2-14b", 8)
    two = costs_preset("gpt2-14b", 8, microbatch_size=2)
    assert two.f == pytest.approx([2 * f for f in one.f])
    assert two.message_bytes[0] == 2 * one.message_bytes[0]
    shared = costs_preset("gpt2-14b", 8, tensor_parallel=4)
    assert one.w[3] / 4 == pytest.approx(shared.w[3])
    assert one.f[3] / 4 < shared.f[3] < one.f[3]  # an all-reduce is not free
    assert shared.activation[3] < one.activation[3] / 2
    slow = costs_preset("gpt2-14b", 8, device="a100")
    assert slow.f[3] > 1.5 * one.f[3]
    assert slow == costs_preset("gpt2-14b", 8, device=A100)


def test_amdp_gpt_has_the_parameters_of_its_paper() -> None:
    shape = PRESETS["amdp-gpt"].shape
    assert (shape.num_blocks, shape.num_heads, shape.width, shape.sequence) == (48, 25, 1600, 1024)
    assert num_parameters(shape) == 1_557_686_400
    assert shape.padded_vocab == shape.vocab_size == dataclasses.replace(shape, vocab_size=50257).padded_vocab


def test_amdp_bert_has_the_parameters_of_its_paper_with_half_the_positions() -> None:
    shape = PRESETS["amdp-bert"].shape
    assert (shape.num_blocks, shape.num_heads, shape.width, shape.sequence) == (32, 32, 1600, 1024)
    assert num_parameters(dataclasses.replace(shape, num_positions=512, sequence=512)) == 1_036_179_458
    assert num_parameters(shape) == 1_036_179_458 + 512 * 1600


def test_a_bert_counted_layer_by_layer() -> None:
    """The numbers of a module put together here: torch counts them."""
    h, v, n = 24, 128, 16
    linear, norm = torch.nn.Linear, torch.nn.LayerNorm
    block = [norm(h), linear(h, 3 * h), linear(h, h), norm(h), linear(h, 4 * h), linear(4 * h, h)]
    embedding = [torch.nn.Embedding(rows, h) for rows in (v, n, 2)]
    head = [norm(h), linear(h, h), norm(h), linear(h, v), linear(h, h), linear(h, 2)]
    counts = [sum(p.numel() for m in layer for p in m.parameters()) for layer in (embedding, block, block, head)]
    shape = BERTShape(2, h, num_heads=4, vocab_size=v, num_positions=n, sequence=n)
    assert [layer.parameters for layer in shape.layers()] == counts


def test_splits_of_layers() -> None:
    even = PRESETS["amdp-gpt"]
    assert [len(part) for part in even.stages(8)] == [7, 6, 6, 6, 6, 6, 6, 7]
    assert [len(part) for part in even.stages(16)] == [4, *[3] * 14, 4]
    balanced = dataclasses.replace(even, split="balanced")
    for preset in (even, balanced, dataclasses.replace(even, split="layers")):
        for count in (1, 4, 7, 48):
            assert [layer for part in preset.stages(count) for layer in part] == list(range(50))

    def costliest(split: str) -> float:
        costs = costs_preset("amdp-gpt", 8, split=split)  # type: ignore[arg-type]
        return max(f + b for f, b in zip(costs.f, costs.b, strict=True))

    assert costliest("balanced") < costliest("layers") <= costliest("even")
    assert parse_preset("amdp-gpt:split=balanced") == balanced
    with pytest.raises(ps.CostError, match="49 stages: it has 48 blocks"):
        even.stages(49)
    with pytest.raises(ps.CostError, match="no split 'halves' of layers; there are layers, even, balanced"):
        parse_preset("amdp-gpt:split=halves")


def test_state_of_the_model_by_stage() -> None:
    preset = PRESETS["amdp-gpt"]
    costs = preset.costs(8)
    copies = 1_557_686_400 + 50304 * 1600  # the first and the last stage both hold the shared weight
    assert sum(costs.weight_bytes) == sum(costs.gradient_bytes) == sum(costs.update_bytes) == 2 * copies
    assert sum(costs.optimizer_bytes) == 12 * copies
    assert costs.duration("U", 3) == pytest.approx(30 * costs.weight_bytes[3] / 2 / A800.hbm_gb / 1e6)
    assert costs.duration("U", 3, owns=False) == pytest.approx(costs.duration("U", 3) / 5)
    arrival = preset.links().delay_of(0, 1, 2e6, 5.0, LinkQueue())
    assert arrival.arrived == pytest.approx(5.0 + 2e6 / 200e9 * 1e3)


TABLE_3 = {
    "amdp-gpt": {(4, 16): 25.2, (4, 64): 36.3, (8, 32): 44.0, (8, 128): 61.9},
    "amdp-bert": {(4, 16): 26.0, (4, 64): 37.1, (8, 32): 45.2, (8, 128): 64.8},
}
"""AMDP's throughput of DAPPLE, ktokens/s by ranks and samples an update: what the device's share is fitted to."""


@pytest.mark.parametrize("name", TABLE_3)
def test_the_share_fits_the_published_throughput(name: str) -> None:
    for (num_ranks, samples), expected in TABLE_3[name].items():
        schedule = ps.build("1f1b", num_ranks, samples // 4)
        makespan = ps.simulate(schedule, costs_preset(name, num_ranks)).makespan
        assert samples * 1024 / makespan == pytest.approx(expected, rel=0.015)


def test_texts() -> None:
    assert parse_preset("gpt2-14b") == PRESETS["gpt2-14b"]
    changed = parse_preset("gpt2-14b:tp=2,microbatch=2,sequence=2048,vocab=32000,device=a100,tflops=250")
    assert changed.costs(8) != costs_preset("gpt2-14b", 8)
    assert changed.shape.tensor_parallel == changed.shape.microbatch_size == 2
    assert (changed.device.tflops, changed.device.share_f) == (250, A100.share_f)
    assert is_preset("gpt2-7b:tp=2")
    assert not is_preset("gpt2-8b")
    assert not is_preset("costs/gpt2-7b.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "gpt2-8b",
            [
                "no costs named 'gpt2-8b'",
                "did you mean",
                "gpt2-7b, gpt2-14b, gpt2-30b, gpt2-60b, gpt2-140b, amdp-gpt, amdp-bert",
            ],
        ),
        ("gpt2-7b:gpus=4", ["no option 'gpus'", "tp, microbatch"]),
        ("gpt2-7b:tp=two", ["tp is 'two'", "whole number"]),
        ("gpt2-7b:tp=3", ["tensor parallel is 3", "divide 32"]),
        ("gpt2-7b:tp=2,tp=4", ["tp is given twice"]),
        ("gpt2-7b:microbatch=0", ["microbatch size is 0", "at least 1"]),
        ("gpt2-7b:sequence=4096", ["4096 tokens", "2048 positions"]),
        ("gpt2-7b:device=b200", ["no device named 'b200'", "h800, a100, a800"]),
        ("gpt2-7b:tflops=-1", ["tflops -1", "above 0"]),
        ("gpt2-7b:share_f=2", ["share_f 2", "at most 1"]),
        ("gpt2 7b", ["write a name"]),
    ],
)
def test_wrong_texts(text: str, words: list[str]) -> None:
    with pytest.raises(ps.CostError) as caught:
        parse_preset(text)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_wrong_values() -> None:
    with pytest.raises(ps.CostError, match='arguments of their own, such as device="a100"'):
        costs_preset("gpt2-7b:device=a100", 4)
    with pytest.raises(ps.CostError, match="60 stages: it has 48 layers; give 1 to 48"):
        costs_preset("gpt2-14b", 60)
    with pytest.raises(ps.CostError, match="group_gb 0"):
        Accelerator(tflops=1, share_f=1, share_i=1, share_w=1, memory=1, group_gb=0, hbm_gb=1, link_gb=1)
    with pytest.raises(ps.CostError, match=r"share_w 1\.5"):
        dataclasses.replace(H800, share_w=1.5)
