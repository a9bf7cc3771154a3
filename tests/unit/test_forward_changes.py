"""What a cut model's forward sets or asks by itself, which its trace would do once; and a model that changes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.runtime import PartitionError
from runtime_cases import lin

pytestmark = pytest.mark.unit

MSE = nn.MSELoss()


class Dropped(nn.Module):
    """Asks a layer that it does not call for its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.drop = nn.ModuleList(lin() for _ in range(4)), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * 3 if self.drop.training else x


def test_an_evaluation_took_the_branch_of_training_where_a_forward_asked_a_layer_for_its_mode() -> None:
    model, x, y = Dropped(), torch.randn(8, 8), torch.randn(8, 8)
    pipe = ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=MSE)
    pipe.step(x, y, update=False)
    found = pipe.evaluate(x, y).loss
    with torch.no_grad():
        torch.testing.assert_close(found, MSE(model.eval()(x), y))


class Does(nn.Module):
    """Does something of its own after its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(lin() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.own(x)

    def own(self, x: Tensor) -> Tensor:
        return x


class SetsOfLayer(Does):
    """Sets something of its last block before it calls it, and puts it back."""

    def __init__(self, put: Callable[[Any, bool], object]) -> None:
        super().__init__()
        self.put, self.block = put, nn.Sequential(lin(), nn.BatchNorm1d(8))
        self.weight_of_another = torch.ones(8, 8)

    def own(self, x: Tensor) -> Tensor:
        self.put(self, True)
        x = self.block(x)
        self.put(self, False)
        return x


def put_weight(model: SetsOfLayer, sets: bool) -> None:
    model.block[0]._parameters["weight"], model.weight_of_another = (  # as torch.func.functional_call does
        model.weight_of_another,
        model.block[0]._parameters["weight"],
    )


class SavesOnHost(Does):
    def own(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return x.tanh()


REFUSED: dict[str, tuple[Callable[[], Does], str]] = {
    "an attribute": (
        lambda: SetsOfLayer(lambda model, sets: setattr(model.block[1], "momentum", 0.5 if sets else 0.1)),
        "changes 'momentum' of a BatchNorm1d, which tracing would do once",
    ),
    "a mode": (
        lambda: SetsOfLayer(lambda model, sets: model.block.train(not sets)),
        "changes 'training' of a Linear",
    ),
    "a parameter": (lambda: SetsOfLayer(put_weight), "cannot assign 'Proxy.*' as parameter 'weight_of_another'"),
    "an attribute after the call": (
        lambda: SetsOfLayer(lambda model, sets: sets or setattr(model.block[1], "momentum", 0.5)),
        "changes 'momentum' of a BatchNorm1d",
    ),
    "saved tensors": (SavesOnHost, "sets hooks for what its layers save .*, at .*save_on_cpu"),
}


@pytest.mark.parametrize("example", [None, torch.ones(4, 8)], ids=["no example", "example"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_forward_asks_or_sets_by_itself_was_done_once(case: str, example: Tensor | None) -> None:
    """A plain loop does it in each forward; the trace had what came of it in the first.

    Without an example, a mode that is set and put back is found by `verify` (`test_verify.py`).
    """
    if case == "a mode" and example is None:
        return
    kind, words = REFUSED[case]
    model = kind()
    before = _of_layers(model)
    with pytest.raises(PartitionError, match=words):
        ps.split(model, 2, example=example)
    assert _of_layers(model) == before


def _of_layers(model: nn.Module) -> list[dict[str, Any]]:
    layers = [module for module in model.modules() if module is not model]
    return [{**vars(layer), "_parameters": {**layer._parameters}} for layer in layers]


def test_stages_of_a_traced_model_are_pickled() -> None:
    stages = ps.split(nn.Sequential(*(lin() for _ in range(4))), 2)
    assert len(pickle.loads(pickle.dumps(list(stages)))) == 2
