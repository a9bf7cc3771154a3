"""Sequences that lie in one row of a GPT: none sees another, and the pipeline's numbers are the plain loop's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.models import CrossEntropy, GPTConfig, build_layers, gpt_costs, gpt_costs_by_length, gpt_stage
from penstock.models.block import Attention
from penstock.runtime import partition

pytestmark = pytest.mark.unit

CONFIG = GPTConfig(vocab_size=50, context=16, depth=4, width=32, num_heads=4)
Row = dict[str, Tensor]


def row(documents: list[Tensor]) -> Row:
    return {"tokens": torch.cat(documents, 1), "lengths": torch.tensor([each.shape[1] for each in documents])}


def drawn(lengths: list[int], seed: int = 0) -> list[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 50, (1, n), generator=draws) for n in lengths]


def run(layers: list[nn.Module], value: Tensor | Row) -> Tensor:
    for layer in layers:
        value = layer(value)
    assert isinstance(value, Tensor)
    return value


def test_each_sequence_is_as_if_it_were_alone() -> None:
    layers, documents = build_layers(CONFIG), drawn([5, 16, 1, 9])
    packed = run(layers, row(documents))
    torch.testing.assert_close(packed, torch.cat([run(layers, each) for each in documents], 1))
    # A changed token changes its own sequence, from itself on, and nothing else.
    other = [each.clone() for each in documents]
    other[1][0, 3] = (other[1][0, 3] + 1) % 50
    changed = (run(layers, row(other)) != packed).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == list(range(5 + 3, 5 + 16))


def test_a_single_sequence_in_a_row_is_the_plain_model_to_the_bit() -> None:
    layers, (tokens,) = build_layers(CONFIG), drawn([12])
    assert torch.equal(run(layers, row([tokens])), run(layers, tokens))


def test_attention_without_a_causal_mask_keeps_sequences_apart_too() -> None:
    attention, x = Attention(8, 2, causal=False), torch.randn(1, 7, 8)
    alone = torch.cat([attention(part) for part in x.split([3, 4], 1)], 1)
    torch.testing.assert_close(attention(x, lengths=torch.tensor([3, 4])), alone)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": torch.zeros(1, 9, dtype=torch.int64), "lengths": torch.tensor([4, 4])}, r"sequences of 8 tokens"),
        ({"tokens": torch.zeros(2, 4, dtype=torch.int64), "lengths": torch.tensor([4, 4])}, r"one row, \[1, 8\]"),
        ({"tokens": torch.zeros(1, 17, dtype=torch.int64), "lengths": torch.tensor([17])}, "a GPT of context 16"),
    ],
)
def test_rows_that_do_not_fit_are_refused(given: Row, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_layers(CONFIG, [0])[0](given)


def test_a_row_longer_than_the_context_is_fine_where_no_sequence_is() -> None:
    assert run(build_layers(CONFIG), row(drawn([16] * 5))).shape == (1, 80, 50)


@pytest.mark.parametrize("name", ["1f1b", "zb", "zb-v", "interleaved-1f1b"])
def test_a_pipeline_gives_the_plain_loops_numbers_and_weighs_by_tokens(name: str) -> None:
    draws = torch.Generator().manual_seed(1)
    rows, targets = [], []
    for m in range(4):
        lengths = torch.randint(1, 16, (m + 1,), generator=draws).tolist()
        rows.append(row(drawn(lengths, m)))
        targets.append(torch.randint(0, 50, (1, sum(lengths)), generator=draws))
    schedule = ps.build(name, 2, 4)
    parts = partition(gpt_costs(CONFIG), schedule.num_stages)
    loss_fn = CrossEntropy()
    pipe = ps.Pipeline([lambda part=part: gpt_stage(CONFIG, list(part)) for part in parts], schedule, loss_fn=loss_fn)
    result = pipe.step(rows, targets, update=False)

    layers, total = build_layers(CONFIG), None
    tokens = sum(each.numel() for each in targets)
    for inputs, wanted in zip(rows, targets, strict=True):
        loss = loss_fn(run(layers, inputs), wanted) * (wanted.numel() / tokens)
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert torch.equal(result.loss, total)
    plain = {f"layers.{i}.{n}": p.grad for i, layer in enumerate(layers) for n, p in layer.named_parameters()}
    assert all(torch.equal(p.grad, plain[n]) for n, p in pipe.named_parameters())
    # The mean over all tokens of the update, whatever microbatch they are in.
    each = [nn.functional.cross_entropy(run(layers, r)[0], t[0], reduction="sum") for r, t in zip(rows, targets)]
    assert float(result.loss) == pytest.approx(float(sum(each).detach()) / tokens, rel=1e-5)
    assert float(pipe.evaluate(rows, targets).loss) == pytest.approx(float(result.loss), rel=1e-5)
    assert pipe.predict(torch.zeros(4, 7, dtype=torch.int64))[0].shape == (1, 7, 50)  # and plain batches in between


def test_costs_by_length_of_the_sizes_are_the_flops_of_the_model() -> None:
    parts = [range(2), range(2, 6)]
    costs = gpt_costs_by_length(CONFIG, parts).of([[16], [8, 8]])
    per_token = gpt_costs(CONFIG)  # with attention over a whole context
    for stage, part in enumerate(parts):
        assert costs.duration("F", stage, 0) == pytest.approx(16e-9 * sum(per_token[i] for i in part))
    blocks = 2 * 32 * 1e-9 * (16**2 - 2 * 8**2)
    assert costs.duration("F", 0, 0) - costs.duration("F", 0, 1) == pytest.approx(blocks)
    assert costs.duration("W", 1, 0) == pytest.approx(costs.duration("W", 1, 1))
