"""Gradients of the windows of a pass: sums that take turns in `.grad`."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from penstock.runtime.parameters.gradients import GradientSums

pytestmark = pytest.mark.unit


def test_a_sum_that_was_taken_leaves_nothing_behind() -> None:
    """Regression: of each update of a pass a list of None stayed until the pass ended, and was looked through again
    at every later one, in time by the square of their number."""
    parameter = Parameter(torch.zeros(4))
    windows = GradientSums([parameter])
    windows.begin()
    for window in range(50):
        windows.select(window)
        parameter.grad = torch.full((4,), float(window))
        windows.select(window + 1)
        parameter.grad = torch.ones(4)
        (taken,) = windows.take(window)
        assert taken is not None
        assert taken[0] == window
        windows.take(window + 1)
        assert not windows.aside
    assert windows.peak_bytes == 2 * 16
    windows.end(None)
    assert parameter.grad is None
