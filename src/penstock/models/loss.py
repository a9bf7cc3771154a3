"""The language-model loss, with the weight a microbatch has in the mean over the batch.

A batch is the mean over its tokens, whatever the microbatches it is cut into; so a microbatch with many masked
tokens must count for less. The runtime asks the loss for that count.

Where a head is sharded over the vocabulary its logits are a DTensor, and each rank has those of some tokens (`V/n`).
They are never brought together: what goes between ranks are three numbers a token, a largest and two sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.runtime.tensor_parallel import largest, span, summed
from penstock.runtime.tensors.dtensor import is_sharded, local

__all__ = ["CrossEntropy", "token_losses"]


def token_losses(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Negative log-likelihood, in nats, of each target: logits[..., V] and targets[...] to [...], 0 where ignored.

    Logits sharded over V give the same on every rank, with the gradient of its own part on each.
    """
    if is_sharded(logits):
        return _apart(logits, targets, ignore_index)
    each = functional.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=ignore_index, reduction="none"
    )
    return each.view(targets.shape)


def _apart(logits: Any, targets: Tensor, ignore_index: int) -> Tensor:
    """loss = log(sum over V of exp(z)) - z[target], where z = logits - their largest.

    Each sum's gradient is the same on all ranks, so that of a rank's own logits is softmax - 1[target] as ever.
    """
    if not logits.placements[0].is_shard(logits.dim() - 1):
        raise ValueError(f"logits laid out as {logits.placements}; a loss takes plain ones, or sharded by vocabulary")
    mesh, vocabulary = logits.device_mesh, logits.shape[-1]
    own = span(vocabulary, mesh)
    z = local(logits).float()  # ..., V/n
    lowest = z.new_full((*z.shape[:-1], 1), -torch.inf)
    z = z - largest(torch.cat([lowest, z.detach()], -1).amax(-1), mesh).unsqueeze(-1)
    counts = targets != ignore_index
    # A target that is on no rank stays out of range on all, for torch to refuse.
    elsewhere = ~counts | (targets >= 0) & (targets < own.start) | (targets >= own.stop) & (targets < vocabulary)
    place = (targets - own.start).masked_fill(elsewhere, 0).unsqueeze(-1)
    of_target = z.gather(-1, place).squeeze(-1) if own else z.sum(-1)
    sums = summed(torch.stack([z.exp().sum(-1), of_target.masked_fill(elsewhere, 0.0)]), mesh)  # 2, ...
    return (sums[0].log() - sums[1]).masked_fill(~counts, 0.0)


class CrossEntropy:
    """Mean negative log-likelihood, in nats, of the targets that are not `ignore_index`.

    Args:
        ignore_index: targets with this value count for nothing.

    Examples:
        >>> import penstock as ps
        >>> import torch
        >>> loss = ps.models.CrossEntropy()(torch.zeros(1, 2, 4), torch.tensor([[1, -100]]))
        >>> round(loss.item(), 3)
        1.386
    """

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits[B, T, V] and targets[B, T] to a scalar; 0, with gradients of 0, if every target is masked."""
        if is_sharded(logits):
            total = token_losses(logits, targets, self.ignore_index).sum()
        else:
            total = functional.cross_entropy(
                logits.flatten(0, -2).float(), targets.flatten(), ignore_index=self.ignore_index, reduction="sum"
            )
        # Divided here because torch's own mean over no targets is 0/0.
        return total / (targets != self.ignore_index).sum().clamp(min=1)

    def weight(self, targets: Tensor) -> int:
        """How many of targets[B, T] are not masked."""
        return int((targets != self.ignore_index).sum())

    def __repr__(self) -> str:
        return f"CrossEntropy(ignore_index={self.ignore_index})"
