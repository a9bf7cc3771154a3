"""What autocast does to a prepared module: its parameters are cast as the plain module's are, its backward is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_PRODUCTS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def autocast(t: Tensor) -> Tensor:
    """`t` in the type of the autocast region that is entered, as part of the graph.

    While a region of autocast lasts, torch casts a parameter once, and every op in the region uses that one copy:
    their gradients meet at it, in the lower precision. A copy of our own beside it would round otherwise. Nothing
    public asks for autocast's copy, so a product with nothing is made of it, whose node keeps what it was given.
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
        kept: Tensor
        if t.dim() == 2:
            kept = torch.mm(_nothing(dtype, t.device, t.shape[0]), t).grad_fn._saved_mat2  # type: ignore[union-attr]
        elif t.dim() == 1:
            kept = torch.matmul(_nothing(dtype, t.device, t.shape[0]), t).grad_fn._saved_vec  # type: ignore[union-attr]
        else:
            nothing = _nothing(dtype, t.device, *t.shape[1:])
            kept = _PRODUCTS[t.dim()](nothing, t).grad_fn._saved_weight  # type: ignore[union-attr]
    return kept


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


@lru_cache(maxsize=64)
def _nothing(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """No rows of a shape; autograd keeps what they are multiplied with."""
    return torch.empty(0, *shape, dtype=dtype, device=device, requires_grad=True)


def _same(t: Tensor) -> Tensor:
    return t
