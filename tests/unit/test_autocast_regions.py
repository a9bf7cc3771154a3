"""Regions without autocast in a backward: on a GPU that runs in a thread of its own, in the middle of a forward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from penstock.runtime.split_backward.autocast import without_autocast

pytestmark = pytest.mark.unit


def keeps_copies(region: Callable[[], AbstractContextManager[object]]) -> bool:
    """Whether a weight that a forward uses before and after the region, which another thread enters, is cast once."""
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(2, 4)

    def backward() -> None:
        with region():
            assert not torch.is_autocast_enabled("cpu")

    with torch.autocast("cpu", torch.bfloat16):
        before = nn.functional.linear(x, weight).grad_fn
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        after = nn.functional.linear(x, weight).grad_fn
    casts = [next(node for node, _ in each.next_functions if node is not None) for each in (before, after)]  # type: ignore[union-attr]
    return source(casts[0]) is source(casts[1])


def source(node: torch.autograd.graph.Node) -> torch.autograd.graph.Node:
    """The cast that a use comes from: the node before the weight's own."""
    while type(node).__name__ != "ToCopyBackward0":
        node = next(each for each, _ in node.next_functions if each is not None)
    return node


def test_copies_of_weights_outlive_a_region_of_another_thread() -> None:
    """Seed 62468 on a GPU: a double backward in a forward dropped the copy of a tied weight, whose gradient was then
    added up in float32, where a plain loop adds it up in bfloat16."""
    assert keeps_copies(lambda: without_autocast("cpu"))


def test_torchs_own_region_drops_them() -> None:
    """Should this fail, `without_autocast` is needed no more."""
    assert not keeps_copies(lambda: torch.autocast("cpu", enabled=False))
