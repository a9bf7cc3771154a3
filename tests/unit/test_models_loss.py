"""The loss: a mean over unmasked tokens, and the weight that puts microbatches back together."""

from __future__ import annotations

import pytest
import torch

from penstock.models import CrossEntropy

pytestmark = pytest.mark.unit


def make(batch: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, 4, 6, generator=generator, requires_grad=True)
    return logits, torch.randint(0, 6, (batch, 4), generator=generator)


def test_mean_over_unmasked_tokens_by_the_definition() -> None:
    logits, targets = make(3)
    targets[0, :2] = -100
    logs = logits.log_softmax(-1)
    terms = [-logs[b, t, targets[b, t]] for b in range(3) for t in range(4) if targets[b, t] != -100]
    assert torch.allclose(CrossEntropy()(logits, targets), torch.stack(terms).mean())
    assert CrossEntropy().weight(targets) == 10


def test_all_masked_gives_zero_loss_weight_and_gradient() -> None:
    logits, targets = make(2)
    targets[:] = 5
    loss_fn = CrossEntropy(ignore_index=5)
    loss = loss_fn(logits, targets)
    loss.backward()
    assert loss.item() == 0.0
    assert loss_fn.weight(targets) == 0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_ragged_microbatches_weighted_make_the_whole_batch() -> None:
    logits, targets = make(7)
    targets[0] = -100
    targets[3, 1:] = -100
    loss_fn = CrossEntropy()
    pieces = [slice(0, 1), slice(1, 4), slice(4, 7)]
    weights = [loss_fn.weight(targets[piece]) for piece in pieces]
    assert weights == [0, 9, 12]
    total = sum(loss_fn(logits[piece], targets[piece]) * weight for piece, weight in zip(pieces, weights))
    assert torch.allclose(total / sum(weights), loss_fn(logits, targets))


def test_bf16_logits_are_summed_in_float32() -> None:
    logits, targets = make(3)
    loss = CrossEntropy()(logits.bfloat16(), targets)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, CrossEntropy()(logits.bfloat16().float(), targets))
