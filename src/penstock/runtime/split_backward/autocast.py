"""Autocast's casts of parameters: prepared modules are given them as the plain modules' ops would be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_PRODUCTS: list[tuple[Any, str]] = [(torch.matmul, "_saved_vec"), (torch.mm, "_saved_mat2")]
_PRODUCTS += [(conv, "_saved_weight") for conv in (F.conv1d, F.conv2d, F.conv3d)]
"""For a parameter of one dimension, two and so on, an op that takes it second, and where that op's node keeps it."""


def autocast(t: Tensor) -> Tensor:
    """`t` in the type of the autocast region that is entered, as part of the graph.

    While a region of autocast lasts, torch casts a parameter once, and every op in the region uses that one copy:
    their gradients meet at it, in the lower precision. A copy of our own beside it would round otherwise. Nothing
    public asks for autocast's copy, so a product with nothing is made of it, whose node keeps what it was given.

    Raises:
        RuntimeError: the product has no node, as under torch.func's transforms.
    """
    if not t.is_floating_point() or t.dtype is torch.float64:
        return t
    dtype = torch.get_autocast_dtype(t.device.type)
    if t.dtype is dtype:
        return t
    if not _is_kept(t) or not 1 <= t.dim() <= 5 or not torch.is_grad_enabled():
        return t.to(dtype)
    # Without the hooks of a checkpoint around, which would take what is kept here for an activation.
    with saved_tensors_hooks(_same, _same):
        # Made for each call: one that was made under a transform is of no use after it.
        shape = t.shape[:1] if t.dim() <= 2 else t.shape[1:]
        nothing = torch.empty(0, *shape, dtype=dtype, device=t.device, requires_grad=True)
        product, kept = _PRODUCTS[t.dim() - 1]
        node = product(nothing, t).grad_fn
        if node is None:
            raise RuntimeError("nothing is recorded for autograd here")
        cast: Tensor = getattr(node, kept)
    return cast


@contextmanager
def without_autocast(device_type: str) -> Iterator[None]:
    """Within it autocast is off, and at its end no copy of a parameter is dropped.

    A region of autocast that ends drops all copies, of whatever thread, unless its thread is in another region. A
    backward on a GPU runs in a thread of autograd's, which is in none, and may run in the middle of a forward whose
    copies are still wanted.
    """
    torch.autocast_increment_nesting()
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.autocast_decrement_nesting()


def _is_kept(t: Tensor) -> bool:
    """Whether autocast keeps its copy of a tensor to the end of the region."""
    return (
        t.is_leaf
        and t.requires_grad
        and t.dtype is torch.float32
        and not t._is_view()
        and torch.is_autocast_cache_enabled()
    )


def _same(t: Tensor) -> Tensor:
    return t
