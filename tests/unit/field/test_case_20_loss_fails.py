"""Row 20: a loss that failed showed the user's line, and not what arrived there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from penstock.runtime.errors import RuntimeFailure


class Named(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x), "kind": "head"}


def no_class() -> Tensor:
    return torch.tensor([0, 1, 9, 0])


@pytest.mark.parametrize(
    ("loss_fn", "last", "targets", "cause", "said"),
    [
        (F.cross_entropy, Named(4, 3), no_class(), TypeError, "output {logits: float32 [2, 3], kind: 'head'}"),
        (F.cross_entropy, nn.Linear(4, 3), no_class().float()[:, None], RuntimeError, "targets float32 [2, 1]"),
        (F.cross_entropy, nn.Linear(4, 3), no_class(), IndexError, "output float32 [2, 3] and targets int64 [2]"),
        (nn.BCELoss(), nn.Linear(4, 3), torch.rand(4, 2), ValueError, "targets float32 [2, 2]"),
        (lambda o, t: (o - t["y"]).mean(), nn.Linear(4, 3), {"x": torch.rand(4, 3)}, KeyError, "{x: float32 [2, 3]}"),
        (lambda o, t: o.loss, nn.Linear(4, 3), (torch.rand(4), torch.rand(4)), AttributeError, "(float32 [2], floa"),
        (
            lambda t, o: F.cross_entropy(o, t),
            nn.Linear(4, 3),
            no_class(),
            NotImplementedError,
            "and targets int64 [2]",
        ),
        (lambda o: o.mean(), nn.Linear(4, 3), torch.rand(4), TypeError, "output float32 [2, 3]"),
    ],
)
def test_the_error_says_what_arrived(loss_fn: Any, last: nn.Module, targets: Any, cause: Any, said: str) -> None:
    x = torch.randn(4, 4)
    with ps.Pipeline([nn.Linear(4, 4), last], ps.build("1f1b", 2, 2), loss_fn=loss_fn) as pipe:
        for call in (pipe.step, pipe.evaluate):
            with pytest.raises(RuntimeFailure, match="loss_fn failed on output") as caught:
                call(x, targets)
            assert said in str(caught.value)
            assert type(caught.value.__cause__) is cause
            assert f"{cause.__name__}: {caught.value.__cause__}" in str(caught.value)


@pytest.mark.parametrize("weight", [torch.ones(2), -1, float("nan"), "all", None])
def test_a_weight_that_is_no_number_is_told(weight: Any) -> None:
    class Weighed(nn.L1Loss):
        def weight(self, targets: Tensor) -> Any:
            return weight

    model = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with (
        ps.Pipeline(model, ps.build("1f1b", 2, 2), loss_fn=Weighed()) as pipe,
        pytest.raises(RuntimeFailure, match=r"loss_fn.weight\(targets\) returned .*; return one number"),
    ):
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))


class Own(ValueError):
    """What a user's loss raises."""


def test_an_error_of_another_class_is_left_as_it_is() -> None:
    def refuses(output: Tensor, target: Tensor) -> Tensor:
        raise Own("no")

    model = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with ps.Pipeline(model, ps.build("1f1b", 2, 2), loss_fn=refuses) as pipe, pytest.raises(Own):
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))
