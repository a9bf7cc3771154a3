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
    """
    import torch

    return torch.from_numpy(batch.inputs).to(device), torch.from_numpy(batch.targets).to(device)
