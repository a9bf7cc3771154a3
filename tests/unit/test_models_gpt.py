"""The GPT's layers: the same weights however they are cut, causal, and small enough to check by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from penstock.models import GPTConfig, build_layers, gpt_stage, presets, sample, tied_parameters

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]

CONFIG = GPTConfig(vocab_size=11, context=8, depth=3, width=12, num_heads=3)


def run(layers: list[torch.nn.Module], tokens: torch.Tensor) -> torch.Tensor:
    value = tokens
    for layer in layers:
        value = layer(value)
    return value


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cuts", [[5], [1, 4], [2, 2, 1], [1, 1, 1, 1, 1]])
def test_any_partition_holds_the_same_weights_under_the_same_names(tied: bool, cuts: list[int]) -> None:
    config = dataclasses.replace(CONFIG, tied=tied)
    whole = gpt_stage(config, range(5), seed=3).state_dict()
    parts: dict[str, torch.Tensor] = {}
    # The last stage first, and the global generator moved in between: neither may matter.
    start = 5
    for cut in reversed(cuts):
        start -= cut
        torch.rand(start + 1)
        parts |= gpt_stage(config, range(start, start + cut), seed=3).state_dict()
    assert set(parts) == set(whole)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_seed_and_index_both_change_the_weights() -> None:
    def weight(seed: int, index: int) -> torch.Tensor:
        return build_layers(CONFIG, [index], seed)[0].get_parameter("attention.qkv.weight")

    assert not torch.equal(weight(0, 1), weight(0, 2))
    assert not torch.equal(weight(0, 1), weight(1, 1))


def test_building_draws_nothing_from_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    build_layers(CONFIG)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_tied_weight_is_one_parameter_together_and_equal_apart() -> None:
    config = dataclasses.replace(CONFIG, tied=True)
    together = gpt_stage(config, range(5))
    group = tied_parameters(config)[0]
    assert group == ["layers.0.token.weight", "layers.4.output.weight"]
    assert together.get_parameter(group[0]) is together.get_parameter(group[1])
    apart = [gpt_stage(config, [0]).get_parameter(group[0]), gpt_stage(config, [4]).get_parameter(group[1])]
    assert apart[0] is not apart[1]
    assert torch.equal(apart[0], apart[1])
    assert tied_parameters(CONFIG) == []


def test_logits_have_the_right_shape_and_see_no_later_token() -> None:
    layers = build_layers(CONFIG)
    tokens = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(0))
    logits = run(layers, tokens)
    assert logits.shape == (2, 8, 11)
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 11
    other = run(layers, changed)
    assert torch.allclose(other[:, :5], logits[:, :5], atol=1e-6)
    assert not torch.allclose(other[:, 5:], logits[:, 5:], atol=1e-4)


def test_attention_is_what_its_formula_says() -> None:
    attention = build_layers(CONFIG, [1])[0].attention
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))
    query, key, value = attention.qkv(x).unflatten(-1, (3, 3, 4)).unbind(-2)  # each B, T, H, 4
    scores = torch.einsum("bthd,bshd->bhts", query, key) / 2.0
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(-1)
    expected = attention.out(torch.einsum("bhts,bshd->bthd", scores, value).flatten(2))
    assert torch.allclose(attention(x), expected, atol=1e-5)


def test_a_context_too_long_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"9 tokens given to a GPT of context 8"):
        run(build_layers(CONFIG, [0]), torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "width 12 with 5 heads"),
        ({"depth": 0}, "depth 0; it must be at least 1"),
        ({"dropout": 1.0}, "dropout 1.0"),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_a_layer_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="layer 5 asked of a GPT of 5 layers"):
        build_layers(CONFIG, [4, 5])


def test_dropout_and_bias_are_what_the_config_says() -> None:
    bare = build_layers(dataclasses.replace(CONFIG, bias=False))
    assert not [name for layer in bare for name, _ in layer.named_parameters() if name.endswith("bias")]
    block = build_layers(dataclasses.replace(CONFIG, dropout=0.5), [1])[0]
    x = torch.randn(1, 4, 12)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_the_gpt2_preset_has_the_published_number_of_parameters() -> None:
    # Counted by formula, and the formula against a small one built: 124M weights would make this test slow.
    config = presets["gpt2-124m"]
    width = config.width
    block = 12 * width**2 + 13 * width
    total = (config.vocab_size + config.context) * width + config.depth * block + 2 * width
    assert total == 124_439_808
    small = dataclasses.replace(config, width=24, num_heads=2, depth=1, vocab_size=7)
    built = {id(p): p.numel() for layer in build_layers(small) for p in layer.parameters()}
    assert sum(built.values()) == (7 + 1024) * 24 + 12 * 24**2 + 13 * 24 + 2 * 24


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_formula_counts_what_is_built(tied: bool, bias: bool) -> None:
    config = dataclasses.replace(CONFIG, tied=tied, bias=bias)
    built = {id(p): p.numel() for layer in build_layers(config) for p in layer.parameters()}
    assert config.num_parameters == sum(built.values())


@pytest.mark.parametrize(
    ("name", "vocabularies", "published"),
    [
        ("flexpipe-5b", (64, 128, 256, 512, 1000), (5.4, 5.7, 6.3, 7.7, 10.2)),
        ("flexpipe-16b", (256, 512, 1000, 1100, 1200), (18.2, 20.3, 24.3, 25.1, 25.9)),
    ],
)
def test_flexpipes_models_have_their_sizes_at_every_vocabulary(
    name: str, vocabularies: tuple[int, ...], published: tuple[float, ...]
) -> None:
    assert presets[name].vocab_size == 1000 * vocabularies[0]
    for thousands, billions in zip(vocabularies, published, strict=True):
        config = dataclasses.replace(presets[name], vocab_size=1000 * thousands)
        assert config.num_parameters / 1e9 == pytest.approx(billions, abs=0.06)


def successor(tokens: torch.Tensor) -> torch.Tensor:
    """Logits of a model that knows one thing: the token after t is t + 1, of 5."""
    return torch.nn.functional.one_hot((tokens + 1) % 5, 5) * 50.0


def test_greedy_sampling_takes_the_likeliest_token_and_crops_to_the_context() -> None:
    seen: list[int] = []

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.shape[1])
        return successor(tokens)

    out = sample(logits, torch.tensor([[0], [3]]), num_tokens=5, context=3, temperature=0)
    assert out.tolist() == [[0, 1, 2, 3, 4, 0], [3, 4, 0, 1, 2, 3]]
    assert seen == [1, 2, 3, 3, 3]


def test_sampling_is_decided_by_the_seed_alone_and_kept_to_top_k() -> None:
    flat = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4]).expand(1, 1, 5)

    def draw(seed: int, top_k: int | None = None, temperature: float = 1.0) -> list[int]:
        torch.rand(1)
        logits = sample(
            lambda tokens: flat.expand(1, tokens.shape[1], 5),
            torch.tensor([[0]]),
            60,
            context=4,
            seed=seed,
            top_k=top_k,
            temperature=temperature,
        )
        return logits[0, 1:].tolist()

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert set(draw(1)) == {0, 1, 2, 3, 4}
    assert set(draw(1, top_k=2)) == {3, 4}
    assert draw(1, top_k=1) == [4] * 60
    assert draw(1, temperature=1e-4) == [4] * 60


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": torch.tensor([1, 2])}, "prompt of shape"),
        ({"prompt": torch.zeros(1, 0, dtype=torch.long)}, "at least one token"),
        ({"temperature": -1.0}, "temperature of -1"),
        ({"top_k": 0}, "top_k 0"),
    ],
)
def test_sampling_refuses_what_it_cannot_do(wrong: dict[str, object], message: str) -> None:
    arguments = {"prompt": torch.tensor([[0]]), "num_tokens": 1, "context": 4} | wrong
    with pytest.raises(ValueError, match=message):
        sample(successor, **arguments)
