"""`len(x)` in a traced forward was called a value of a tensor, and the hint left out the ways that keep the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.cost.cut import PartitionError

pytestmark = pytest.mark.unit


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)


class ByLength(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(self.b(x) / len(x))


class ByShape(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(self.b(x) / x.shape[0])


X, Y = torch.randn(8, 4), torch.randn(8, 4)


def loss(model: Any) -> Tensor:
    with ps.Pipeline(model, ps.build("1f1b", 2, 2), loss_fn=nn.MSELoss()) as pipe:
        return pipe.step(X, Y, update=False).loss


def test_the_hint_names_the_ways_out_and_both_lead_out() -> None:
    model = ByLength()
    with pytest.raises(PartitionError, match=r"asks for the length.*example=\.\.\.\), or write x\.shape\[0\], at"):
        loss(model)
    plain = sum(nn.functional.mse_loss(model(x), y) for x, y in zip(X.chunk(2), Y.chunk(2), strict=True)) / 2
    torch.testing.assert_close(loss(ps.split(model, 2, example=X[:4])), plain)
    other = ByShape()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(loss(other), plain)


def test_an_example_of_another_length_is_refused() -> None:
    with pytest.raises(PartitionError, match="a microbatch gives 4 where the example gave 8"):
        loss(ps.split(ByLength(), 2, example=X))


CODE = """
class Made(Layers):
    def forward(self, x):
        x = self.a(x)
        {line}
        return self.c(self.b(x))
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "if x.sum() > 0: x = self.b(x)",
            r"takes a branch that depends on the values of a tensor.*, at <string>:5\.",
        ),
        ("self.last = x", r"the forward changes 'last' of a Made, which tracing would do once\."),
        ("x = x / len(x)", r"asks for the length.*, at <string>:5\."),
    ],
)
def test_a_class_without_source_is_named_by_its_line(line: str, said: str) -> None:
    made: dict[str, Any] = {"Layers": Layers}
    exec(CODE.format(line=line), made)
    with pytest.raises(PartitionError, match=said):
        loss(made["Made"]())
    exec(CODE.format(line="pass"), made)
    assert loss(made["Made"]()).isfinite()
