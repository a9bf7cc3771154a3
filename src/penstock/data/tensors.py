"""The one place where data meets torch, so that preparing data starts without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.data.batches import Batch

if TYPE_CHECKING:
    import torch

__all__ = ["to_tensors"]


def to_tensors(batch: Batch, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as int64[B, T] tensors, inputs and targets; on the CPU they share the batch's memory.

    Args:
        batch: the batch.
        device: where the tensors lie.

    Examples:
        >>> import penstock as ps
        >>> import numpy as np
        >>> inputs, targets = ps.data.to_tensors(ps.data.Batches(np.arange(100) % 7, batch_size=2, context=8)[0])
        >>> inputs.shape, inputs.dtype
        (torch.Size([2, 8]), torch.int64)
    """
    import torch

    return torch.from_numpy(batch.inputs).to(device), torch.from_numpy(batch.targets).to(device)
