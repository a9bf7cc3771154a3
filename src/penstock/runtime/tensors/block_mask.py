"""BlockMask of torch's flex attention, as an input: cut along its batch, and held beside the tensors.

It is a value of tensors and a function `mask_mod(b, h, q, kv)`. A microbatch's mask has its samples' blocks. Its
`mask_mod` counts samples from the microbatch's first one:

    mask[B = 4]  ->  mask[0:2], mask_mod(b, ...)    mask[2:4], mask_mod(b + 2, ...)
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_block_mask(value: Any) -> bool:
    """Whether a value is torch's BlockMask. If nothing has imported flex attention, nothing is."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    return flex is not None and isinstance(value, flex.BlockMask)


def num_samples_of(mask: Any) -> int | None:
    """The samples of a mask; None for one that is the same for all samples."""
    blocks: Tensor = mask.kv_num_blocks  # [B, H, Q blocks]; an indexed mask may have fewer dimensions
    return None if blocks.dim() < 3 or blocks.shape[0] == 1 else blocks.shape[0]


def split_block_mask(mask: Any, num: int) -> list[Any]:
    """Cuts a mask along its batch, as evenly as possible, the larger parts first."""
    found, start = [], 0
    for blocks in mask.kv_num_blocks.tensor_split(num):
        part = mask[start : start + len(blocks)]
        part.mask_mod = _counted_from(start, mask.mask_mod, blocks.device)
        found.append(part)
        start += len(blocks)
    return found


def _counted_from(start: int, mask_mod: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    first = torch.tensor(start, dtype=torch.int32, device=device)  # a number would be compiled for each microbatch

    def microbatch_mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask_mod(b + first, h, q, kv)

    return microbatch_mask_mod


class HeldMask:
    """A mask in the skeleton of a value. Its text is the same for masks with the same blocks."""

    def __init__(self, mask: Any) -> None:
        self._mask = mask

    def on(self, device: torch.device | None) -> Any:
        """The mask, on a device; where it is if that is None."""
        return self._mask if device in (None, self._mask.kv_num_blocks.device) else self._mask.to(device)

    def __repr__(self) -> str:
        mask = self._mask
        tensors = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        blocks = repr([None if each is None else each.tolist() for each in tensors])
        return f"BlockMask {tuple(mask.shape)} {hashlib.sha256(blocks.encode()).hexdigest()}"
