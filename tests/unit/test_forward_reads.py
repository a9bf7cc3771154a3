"""What a cut model's forward reads besides its inputs may change after the cut, as in a plain loop."""

from __future__ import annotations

import argparse
import copy
import itertools
import multiprocessing
import os
import pickle
import random
import threading
import types
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.runtime import PartitionError, RuntimeFailure
from plain_loop import differences, gradients
from runtime_cases import lin

pytestmark = pytest.mark.unit

MSE = nn.MSELoss()
SCALE = 1.0
TABLE: dict[str, dict[str, list[float]]] = {"scales": {"of blocks": [1.0, 2.0]}}
settings = types.ModuleType("settings")
of_context: ContextVar[float] = ContextVar("of_context", default=1.0)
of_thread = threading.local()
shared = multiprocessing.Value("d", 1.0)


@dataclass
class Deep:
    scale: float = 1.0


@dataclass
class Config:
    scale: float = 1.0
    activation: str = "relu"
    deep: Deep = field(default_factory=Deep)


@dataclass(slots=True)
class Slotted:
    scale: float = 1.0


class OfClass:
    scale = 1.0


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


def helper(x: Tensor) -> Tensor:
    return x


def activated(model: Any, x: Tensor) -> Tensor:
    found: Tensor = getattr(torch, model.config.activation)(x - 0.1)
    return found


def by_type(model: Any, x: Tensor) -> Tensor:
    found: Tensor = x * type(model).scale
    return found


def by_training(model: Any, x: Tensor) -> Tensor:
    return 2 * x if model.blocks[0].linear.weight.requires_grad else x


def by_attribute(x: Tensor) -> Tensor:
    found: Tensor = x * by_attribute.scale  # type: ignore[attr-defined]
    return found


def by_default(x: Tensor, scales: list[float] = [1.0]) -> Tensor:  # noqa: B006
    return x * scales[0]


def counted(scale: float) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    def multiply(x: Tensor) -> Tensor:
        return x * scale

    def change(new: float) -> None:
        nonlocal scale
        scale = new

    return multiply, change


class Block(nn.Module):
    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = lin(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Reader(nn.Module):
    """Reads what `read` reads after its blocks."""

    scale = 1.0

    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.config, self.slotted, self.of_class = Config(), Slotted(), OfClass()
        self.namespace = types.SimpleNamespace(inside=argparse.Namespace(scale=1.0))
        self.table = {"a": {"b": 1.0}}
        self.multiply, self.change = counted(1.0)
        self.partial = partial(lambda x, by: x * by["scale"], by={"scale": 1.0})
        self.number: float = 2
        self.array, self.tensors = np.ones(2), [torch.ones(1)]
        self.large = np.ones(1 << 15)
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 + epoch)
        self.read = read

    @property
    def property(self) -> float:
        return self.config.deep.scale

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.read(self, x)


forward_of_reader = Reader.forward


def doubled(model: Reader, x: Tensor) -> Tensor:
    return 2 * forward_of_reader(model, x)


def set_global(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: globals().__setitem__(name, value)


def put(owner: Callable[[Any], Any], name: str, value: Any = 2.0) -> Callable[[Any], None]:
    return lambda model: setattr(owner(model), name, value)


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], None]]] = {
    "config": (lambda m, x: x * m.config.scale, put(lambda m: m.config, "scale")),
    "config in config": (lambda m, x: x * m.config.deep.scale, put(lambda m: m.config.deep, "scale")),
    "text": (activated, put(lambda m: m.config, "activation", "tanh")),
    "slots": (lambda m, x: x * m.slotted.scale, put(lambda m: m.slotted, "scale")),
    "namespace": (lambda m, x: x * m.namespace.inside.scale, put(lambda m: m.namespace.inside, "scale")),
    "dict in dict": (lambda m, x: x * m.table["a"]["b"], lambda m: m.table["a"].update(b=2.0)),
    "class of the config": (lambda m, x: x * m.of_class.scale, put(lambda m: OfClass, "scale")),
    "class": (lambda m, x: x * m.scale, put(lambda m: Reader, "scale")),
    "class by type": (by_type, put(lambda m: Reader, "scale")),
    "global": (lambda m, x: x * SCALE, set_global("SCALE", 2.0)),
    "global of a helper": (lambda m, x: scaled(x), set_global("SCALE", 2.0)),
    "helper": (lambda m, x: helper(x), set_global("helper", lambda x: 2 * x)),
    "inside a global": (
        lambda m, x: sum((x * s for s in TABLE["scales"]["of blocks"]), x),
        lambda m: TABLE["scales"]["of blocks"].__setitem__(0, 3.0),
    ),
    "module of Python": (lambda m, x: x * settings.SCALE, put(lambda m: settings, "SCALE")),
    "variable of a function around": (lambda m, x: m.multiply(x), lambda m: m.change(2.0)),
    "partial": (lambda m, x: m.partial(x), lambda m: m.partial.keywords["by"].update(scale=2.0)),
    "property": (lambda m, x: x * m.property, put(lambda m: m.config.deep, "scale")),
    "layer": (lambda m, x: x * m.blocks[0].factor, put(lambda m: m.blocks[0], "factor")),
    "class of a layer": (lambda m, x: x * m.blocks[3].of_class, put(lambda m: Block, "of_class")),
    "mode of a layer": (lambda m, x: x * 2 if m.blocks[1].training else x, lambda m: m.blocks[1].eval()),
    "array": (lambda m, x: x * float(m.array[0]), lambda m: m.array.fill(2.0)),
    "large array": (lambda m, x: x * float(m.large[7]), lambda m: m.large.__setitem__(7, 2.0)),
    "context variable": (lambda m, x: x * of_context.get(), lambda m: of_context.set(2.0)),
    "variable of a thread": (lambda m, x: x * of_thread.scale, put(lambda m: of_thread, "scale")),
    "number shared with processes": (lambda m, x: x * shared.value, put(lambda m: shared, "value")),
    "learning-rate schedule": (
        lambda m, x: x * (1 + m.schedule.last_epoch),
        put(lambda m: m.schedule, "last_epoch", 1),
    ),
    "forward of the class": (lambda m, x: x, put(lambda m: Reader, "forward", doubled)),
    "number of a tensor in a list": (lambda m, x: x * float(m.tensors[0]), lambda m: m.tensors[0].fill_(2.0)),
    "whether a weight is trained": (by_training, lambda m: m.blocks[0].linear.weight.requires_grad_(False)),
    "environment": (
        lambda m, x: x * float(os.environ.get("SCALE_OF_A_TEST", "1")),
        lambda m: os.environ.update(SCALE_OF_A_TEST="2"),
    ),
    "attribute of a function": (lambda m, x: by_attribute(x), put(lambda m: by_attribute, "scale")),
    "list as a default": (lambda m, x: by_default(x), lambda m: by_default.__defaults__[0].__setitem__(0, 2.0)),
    "type of a number": (lambda m, x: x * (len(repr(m.number))), put(lambda m: m, "number")),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_forward_read_deeper_inside_or_outside_was_taken_as_at_the_cut(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner in (OfClass, Reader):
        monkeypatch.setattr(owner, "scale", 1.0)
    monkeypatch.setattr(Block, "of_class", 1.0)
    monkeypatch.setattr(Reader, "forward", Reader.forward)
    of_context.set(1.0)
    of_thread.scale = shared.value = 1.0
    monkeypatch.setattr(settings, "SCALE", 1.0, raising=False)
    monkeypatch.setattr(by_attribute, "scale", 1.0, raising=False)
    monkeypatch.setenv("SCALE_OF_A_TEST", "1")
    for name in ("SCALE", "helper"):
        monkeypatch.setitem(globals(), name, globals()[name])
    monkeypatch.setitem(globals(), "TABLE", copy.deepcopy(TABLE))
    torch.manual_seed(5)
    read, change = CASES[case]
    model = Reader(read)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    pipe = ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=MSE)
    losses = []
    for number in range(3):
        if number == 1:
            change(model)
        model.zero_grad()
        for x_m, y_m in zip(x.chunk(4), y.chunk(4), strict=True):
            (MSE(model(x_m), y_m) / 4).backward()
        want = {name: None if grad is None else grad.clone() for name, grad in gradients([model]).items()}
        model.zero_grad()
        losses.append(pipe.step(x, y, update=False).loss)
        assert not differences(want, gradients([model]))
    assert losses[0] != losses[1], "the change makes no difference, so this shows nothing"
    assert losses[1] == losses[2]


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


class Balanced(nn.Module):
    """Its blocks leave a loss of their own in an attribute, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaving() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + sum(block.left for block in self.blocks)


class Leaving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.left = lin(), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.left = x.square().mean()
        return x


def test_what_blocks_left_in_attributes_was_read_as_it_was_at_the_cut() -> None:
    model, x, y = Balanced(), torch.randn(8, 8), torch.randn(8, 8)
    pipe = ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=MSE)
    with pytest.raises(PartitionError, match=r"reads attribute 'left' of a Leaving.*layer return it, at .*sum"):
        pipe.step(x, y)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(lin() for _ in range(4))
        self.state: dict[str, Any] = {"inside": {"calls": 0, "kept": {}}}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.counted(x)

    def counted(self, x: Tensor) -> Tensor:
        self.state["inside"]["calls"] += 1
        return x * self.state["inside"]["calls"]


class Keeps(Counts):
    def counted(self, x: Tensor) -> Tensor:
        return x * self.state["inside"]["kept"].setdefault("scale", 3.0)


class KeepsTensor(Counts):
    def counted(self, x: Tensor) -> Tensor:
        kept = self.state["inside"]["kept"]
        if "mask" not in kept:
            kept["mask"] = torch.ones(8)
        return x * kept["mask"]


class Takes(Counts):
    """The next one of an iterator, each time."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = itertools.count(1)

    def counted(self, x: Tensor) -> Tensor:
        return x * next(self.scales)


class CountsInFunction(Counts):
    def counted(self, x: Tensor) -> Tensor:
        return in_function(x)


def in_function(x: Tensor) -> Tensor:
    in_function.calls += 1  # type: ignore[attr-defined]
    return x * in_function.calls  # type: ignore[attr-defined]


in_function.calls = 0  # type: ignore[attr-defined]


class ReadsGradient(Counts):
    def counted(self, x: Tensor) -> Tensor:
        return 2 * x if self.blocks[0].weight.grad is None else x


class AsksForGradients(Counts):
    def counted(self, x: Tensor) -> Tensor:
        return 2 * x if torch.is_grad_enabled() else x


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Counts, r"changes what lies in its attribute 'state', which tracing would do once, at .*\+= 1"),
        (KeepsTensor, r"changes what lies in its attribute 'state', which tracing would do once, at .*kept = "),
        (Takes, r"uses the iterator in its attribute 'scales', .*, at .*next\("),
        (CountsInFunction, r"changes what lies in in_function, which tracing would do once"),
        (ReadsGradient, r"reads the gradient of a tensor, .*, at .*grad is None"),
        (AsksForGradients, r"asks whether gradients are on, which differs in an evaluation.*, at .*is_grad_enabled"),
    ],
)
def test_a_state_deeper_inside_was_changed_once_and_kept_what_tracing_had_put_in(
    kind: type[Counts], words: str
) -> None:
    model = kind()
    with pytest.raises(PartitionError, match=words):
        ps.split(model, 2)
    kept = model.state["inside"]["kept"]
    assert not kept, kept


class DrawsItsOwn(Counts):
    """Leaves out its last step at random, as layer drop does, by a generator of its own."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def counted(self, x: Tensor) -> Tensor:
        draw = getattr(self.generator, "random", None) or self.generator.rand
        return 2 * x if draw() < 0.5 else x


class SetsOfLayer(Counts):
    """Sets something of its last block before it calls it, and puts it back."""

    def __init__(self, put: Callable[[Any, bool], object]) -> None:
        super().__init__()
        self.put, self.block = put, nn.Sequential(lin(), nn.BatchNorm1d(8))
        self.weight_of_another = torch.ones(8, 8)

    def counted(self, x: Tensor) -> Tensor:
        self.put(self, True)
        x = self.block(x)
        self.put(self, False)
        return x


def put_weight(model: SetsOfLayer, sets: bool) -> None:
    model.block[0]._parameters["weight"], model.weight_of_another = (  # as torch.func.functional_call does
        model.weight_of_another,
        model.block[0]._parameters["weight"],
    )


class SavesOnHost(Counts):
    def counted(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return x.tanh()


class AsksForAutocast(Counts):
    def counted(self, x: Tensor) -> Tensor:
        return 2 * x if torch.is_autocast_enabled("cpu") else x


class ReadsMuch(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.words = [[number] for number in range(20_001)]

    def counted(self, x: Tensor) -> Tensor:
        return x * self.words[1][0]


REFUSED: dict[str, tuple[Callable[[], Counts], str]] = {
    "random.Random": (lambda: DrawsItsOwn(random.Random(1)), "changes what lies in its attribute 'generator'"),
    "numpy's generator": (lambda: DrawsItsOwn(np.random.default_rng(1)), "lies in its attribute 'generator'"),
    "numpy's older one": (lambda: DrawsItsOwn(np.random.RandomState(1)), "lies in its attribute 'generator'"),
    "the system's": (lambda: DrawsItsOwn(random.SystemRandom()), "may draw random numbers from its attribute 'gen"),
    "an attribute": (
        lambda: SetsOfLayer(lambda model, sets: setattr(model.block[1], "momentum", 0.5 if sets else 0.1)),
        "changes 'momentum' of a BatchNorm1d, one of its layers, which tracing would do once",
    ),
    "a mode": (
        lambda: SetsOfLayer(lambda model, sets: model.block.train(not sets)),
        "changes 'training' of a Sequential, one of its layers",
    ),
    "a parameter": (lambda: SetsOfLayer(put_weight), "changes 'weight' of a Linear, one of its layers"),
    "an attribute after the call": (
        lambda: SetsOfLayer(lambda model, sets: sets or setattr(model.block[1], "momentum", 0.5)),
        "changes 'momentum' of a BatchNorm1d, one of its layers",
    ),
    "saved tensors": (SavesOnHost, "sets hooks for what its layers save .*, at .*save_on_cpu"),
    "autocast": (AsksForAutocast, "asks for autocast, which is on when stages run, .*, at .*is_autocast_enabled"),
    "more than is watched": (ReadsMuch, "reads its attribute 'words', where more than 20,000 objects lie"),
}


@pytest.mark.parametrize("example", [None, torch.ones(4, 8)], ids=["no example", "example"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_forward_drew_or_set_by_itself_was_done_once(case: str, example: Tensor | None) -> None:
    """A plain loop does it in each forward; the trace had what came of it in the first."""
    kind, words = REFUSED[case]
    model = kind()
    before = _of_layers(model)
    with pytest.raises(PartitionError, match=words):
        ps.split(model, 2, example=example)
    assert _of_layers(model) == before
    if case.startswith(("random", "numpy")):
        assert torch.equal(model.counted(torch.ones(1)), kind().counted(torch.ones(1)))


def _of_layers(model: nn.Module) -> list[dict[str, Any]]:
    layers = [module for module in model.modules() if module is not model]
    return [{**vars(layer), "_parameters": {**layer._parameters}} for layer in layers]


@pytest.mark.parametrize("kind", ["append", "pop"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_list_that_got_or_lost_a_layer_computed_as_before(kind: str, whole: bool) -> None:
    layers = nn.Sequential(*(lin() for _ in range(4)))
    model = layers if whole else Dropped()
    pipe = ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=MSE)
    held: Any = layers if whole else model.blocks
    held.append(lin()) if kind == "append" else held.pop(3)
    now = 5 if kind == "append" else 3
    with pytest.raises(RuntimeFailure, match=f"has {now} layers, and had 4 when ps.Pipeline was made"):
        pipe.step(torch.randn(8, 8), torch.randn(8, 8))


def test_what_a_forward_keeps_from_its_first_call_on_is_no_change() -> None:
    model = Keeps()
    stages = ps.split(model, 2)
    x = torch.randn(2, 8)
    assert torch.equal(stages[1](stages[0](x)), model(x))


def test_stages_that_read_what_lies_in_this_process_alone_are_still_pickled() -> None:
    stages = ps.split(nn.Sequential(*(lin() for _ in range(4))), 2)
    assert len(pickle.loads(pickle.dumps(list(stages)))) == 2
