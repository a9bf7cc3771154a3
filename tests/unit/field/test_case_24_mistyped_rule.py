"""A rule of `ps.BatchRules` for a key that no batch has was ignored: the samples were cut along dimension 0."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import penstock as ps

pytestmark = pytest.mark.unit


class Places(nn.Module):
    """Takes positions [T, B], which have as many entries in dimension 0 as the batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.layer(x) if positions is None else self.layer(x) + positions.mean()


def pipeline(model: Any = None, **rules: Any) -> ps.Pipeline:
    model = model or [Places(), nn.Linear(4, 4)]
    return ps.Pipeline(model, ps.build("1f1b", 2, 2), loss_fn=nn.MSELoss(), batch=ps.BatchRules(**rules))


X, Y = torch.randn(4, 4), torch.randn(4, 4)
GIVEN = {"x": X, "positions": torch.randn(4, 4)}
SAID = r"a rule for inputs\['position'\]; the keys in inputs are 'x', 'positions': did you mean positions\?"


def test_a_mistyped_key_is_refused_in_the_first_step_and_in_verify() -> None:
    with pipeline(inputs={"position": 1}) as pipe:
        for run in (pipe.step, pipe.verify):
            with pytest.raises(ps.RuntimeFailure, match=SAID):
                run(GIVEN, Y)
    rules, model = ps.BatchRules(inputs={"position": 1}), nn.Sequential(Places())
    with pytest.raises(ps.RuntimeFailure, match=SAID):
        ps.plain_step(model, GIVEN, Y, loss_fn=nn.MSELoss(), num_microbatches=2, batch=rules)


class Pair(NamedTuple):
    x: Tensor
    positions: Tensor


@pytest.mark.parametrize(
    ("rules", "inputs", "targets", "said"),
    [
        ({"inputs": {2: 1}}, (X, X), Y, r"inputs\[2\]; the keys in inputs are 0, 1: name one"),
        (
            {"inputs": {"z": {"b": 1}}},
            {"x": X, "z": {"a": X}},
            Y,
            r"inputs\['z'\]\['b'\].*in inputs\['z'\] are 'a': name",
        ),
        ({"inputs": {"position": 1}}, Pair(X, X), Y, r"are 0, 1, 'x', 'positions': did you mean positions"),
        ({"targets": {"label": 0}}, X, {"labels": Y}, r"targets\['label'\].*are 'labels': did you mean labels"),
    ],
)
def test_the_key_is_named_at_every_depth(rules: Any, inputs: Any, targets: Any, said: str) -> None:
    with pipeline(**rules) as pipe, pytest.raises(ps.RuntimeFailure, match=said):
        pipe.step(inputs, targets)


def test_a_later_batch_and_an_evaluation_may_lack_the_key() -> None:
    with pipeline(inputs={"positions": 1, ...: 0}) as pipe:
        pipe.evaluate({"x": X}, Y)
        pipe.step(GIVEN, Y)
        pipe.step({"x": X}, Y)
