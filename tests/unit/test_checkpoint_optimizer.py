"""Optimizer state by parameter name: training goes on bit for bit, whatever the ranks that hold it."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from penstock.runtime.checkpoint import CheckpointError, Reader
from penstock.runtime.checkpoint.dcp import write
from penstock.runtime.checkpoint.optimizer import merged_meta, optimizer_tensors, stage_optimizer

pytestmark = pytest.mark.unit

MAKERS: dict[str, Callable[[list[dict]], Optimizer]] = {
    "sgd": lambda groups: SGD(groups, lr=0.1),
    "momentum": lambda groups: SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda groups: Adam(groups, lr=0.01, betas=(0.8, 0.95), amsgrad=True),
    "adamw": lambda groups: AdamW(groups, lr=0.01, weight_decay=0.1),
    "adagrad": lambda groups: Adagrad(groups, lr=0.1, lr_decay=0.01),
    "nadam": lambda groups: NAdam(groups, lr=0.01),
    "radam": lambda groups: RAdam(groups, lr=0.01),
    "rmsprop": lambda groups: RMSprop(groups, lr=0.01, centered=True, momentum=0.5),
    "adam-tensor-lr": lambda groups: Adam(groups, lr=torch.tensor(0.01), foreach=False),
}


def load(optimizer: Optimizer, names: dict[Tensor, str], reader: Reader) -> None:
    stage_optimizer(optimizer, names, reader, reader.meta.get("optimizer"))()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    net.scale = nn.Parameter(torch.tensor(1.5))  # 0-dim
    net.idle = nn.Parameter(torch.ones(3))  # gets no gradient
    return net


def groups(parameters: list[nn.Parameter]) -> list[dict]:
    """Two groups on every rank: matrices, and the rest."""
    return [
        {"params": [each for each in parameters if each.dim() > 1]},
        {"params": [each for each in parameters if each.dim() <= 1], "lr": 0.003},
    ]


def train(net: nn.Sequential, optimizers: list[Optimizer], steps: range) -> None:
    for step in steps:
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        (net(data) * net.scale).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.9


def split(net: nn.Sequential, num_ranks: int) -> list[list[nn.Parameter]]:
    """Each rank gets some matrices and some others."""
    parameters = sorted(net.parameters(), key=lambda each: -each.dim())
    return [parameters[rank::num_ranks] for rank in range(num_ranks)]


@pytest.mark.parametrize("kind", MAKERS)
def test_training_continues_bit_for_bit_on_other_ranks(tmp_path: Path, kind: str) -> None:
    make = MAKERS[kind]
    straight = layers()
    optimizers = [make(groups(part)) for part in split(straight, 3)]
    train(straight, optimizers, range(4))
    names = {parameter: name for name, parameter in straight.named_parameters()}
    tensors: dict[str, Tensor] = {f"model/{name}": each for name, each in straight.named_parameters()}
    metas = []
    for optimizer in optimizers:
        state, meta = optimizer_tensors(optimizer, names)
        tensors |= state
        metas.append(meta)
    reader = Reader(write(tmp_path, 4, tensors, {"optimizer": merged_meta(metas)}))
    train(straight, optimizers, range(4, 8))

    resumed = layers()
    names = {parameter: name for name, parameter in resumed.named_parameters()}
    with torch.no_grad():
        for parameter, name in names.items():
            parameter.copy_(reader.load([f"model/{name}"])[f"model/{name}"])
    others = [make(groups(part)) for part in split(resumed, 2)]
    for optimizer in others:
        load(optimizer, names, reader)
    train(resumed, others, range(4, 8))
    for (name, left), right in zip(straight.named_parameters(), resumed.parameters()):
        assert torch.equal(left, right), name


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("first", [torch.float32, torch.complex64])
def test_regression_state_of_complex_beside_real_parameters_could_not_be_loaded(
    tmp_path: Path, kind: str, first: torch.dtype
) -> None:
    """What the first parameter of a group keeps was asked of all of them."""
    second = torch.complex64 if first is torch.float32 else torch.float32
    parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (first, second)]
    names: dict[Tensor, str] = {parameter: f"p{place}" for place, parameter in enumerate(parameters)}
    one = MAKERS[kind]([{"params": parameters}])
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    one.step()
    tensors, meta = optimizer_tensors(one, names)
    reader = Reader(write(tmp_path, 1, tensors, {"optimizer": meta}))
    fresh = MAKERS[kind]([{"params": parameters}])
    load(fresh, names, reader)
    for parameter in parameters:
        assert fresh.state[parameter].keys() == one.state[parameter].keys()
        for key, value in one.state[parameter].items():
            assert torch.equal(torch.as_tensor(fresh.state[parameter][key]), torch.as_tensor(value)), key


class Odd(Optimizer):
    """State and options that are not tensors."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "pair": (1, (2.5, "x")), "hook": len, "none": None})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"calls": 3, "factor": 0.1, "on": True, "pair": (1, [2.5, None]), "text": "é"}


def test_state_and_options_that_are_not_tensors(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Odd([parameter])
    optimizer.step()
    state = dict(optimizer.state[parameter])
    tensors, meta = optimizer_tensors(optimizer, {parameter: "a/b.c"})
    reader = Reader(write(tmp_path, 1, tensors, {"optimizer": meta}))
    fresh = Odd([parameter])
    fresh.param_groups[0] |= {"pair": (), "lr": 5.0}
    load(fresh, {parameter: "a/b.c"}, reader)
    assert fresh.state[parameter] == state
    assert type(fresh.state[parameter]["on"]) is bool
    group = fresh.param_groups[0]
    assert (group["pair"], group["lr"], group["hook"], group["none"]) == ((1, (2.5, "x")), 0.1, len, None)


def test_regression_numbers_of_numpy_among_the_options_were_left_out(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2))
    saved, fresh = (SGD([parameter], lr=np.float32(lr)) for lr in (0.25, 0.5))
    meta = optimizer_tensors(saved, {parameter: "a"})[1]
    load(fresh, {parameter: "a"}, Reader(write(tmp_path, 1, {}, {"optimizer": meta})))
    assert fresh.param_groups[0]["lr"] == 0.25


def test_regression_tensors_in_a_tuple_of_options_became_floats_which_round_otherwise(tmp_path: Path) -> None:
    def make(beta: float) -> Adam:
        return Adam([parameter], lr=0.1, betas=(torch.tensor(beta), torch.tensor(0.99)), foreach=False)

    parameter = nn.Parameter(torch.ones(2))
    tensors, meta = optimizer_tensors(make(0.8), {parameter: "a"})
    fresh = make(0.9)
    load(fresh, {parameter: "a"}, Reader(write(tmp_path, 1, tensors, {"optimizer": meta})))
    beta = fresh.param_groups[0]["betas"][0]
    assert isinstance(beta, Tensor)
    assert torch.equal(beta, torch.tensor(0.8))


@pytest.mark.parametrize("value", [torch.arange(3.0), np.arange(3.0), [torch.arange(3.0)], {"n": torch.arange(3.0)}])
def test_regression_data_among_the_options_was_left_out_without_a_word(tmp_path: Path, value: object) -> None:
    parameter = nn.Parameter(torch.ones(2))
    saved, fresh = SGD([parameter], lr=1.0), SGD([parameter], lr=1.0)
    saved.param_groups[0]["kept"] = value
    meta = optimizer_tensors(saved, {parameter: "a"})[1]
    load(fresh, {parameter: "a"}, Reader(write(tmp_path, 1, {}, {"optimizer": meta})))
    assert repr(fresh.param_groups[0]["kept"]) == repr(value)


def test_parameters_among_the_options_stay_those_of_the_process(tmp_path: Path) -> None:
    saved, here = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    first, then = (SGD([{"params": [each], "all": [each]}], lr=1.0) for each in (saved, here))
    meta = optimizer_tensors(first, {saved: "a"})[1]
    load(then, {here: "a"}, Reader(write(tmp_path, 1, {}, {"optimizer": meta})))
    assert then.param_groups[0]["all"][0] is here


def test_plain_data_among_the_options_comes_back(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2))
    kept = {"n": 0, 3: {1}, "z": 1j}
    saved, fresh = SGD([parameter], lr=1.0), SGD([parameter], lr=1.0)
    saved.param_groups[0]["kept"] = kept
    meta = optimizer_tensors(saved, {parameter: "a"})[1]
    load(fresh, {parameter: "a"}, Reader(write(tmp_path, 1, {}, {"optimizer": meta})))
    assert fresh.param_groups[0]["kept"] == kept


def test_errors(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2))
    adam = Adam([parameter])
    adam.state[parameter]["history"] = [torch.ones(2), len]
    with pytest.raises(CheckpointError, match=r"Adam's state 'history' of a cannot be stored: .*GLOBAL len was not"):
        optimizer_tensors(adam, {parameter: "a"})
    adam.state[parameter] = {"a/b": 1}
    with pytest.raises(CheckpointError, match="Adam's state of a has the key 'a/b'"):
        optimizer_tensors(adam, {parameter: "a"})
    del adam.state[parameter]
    adam.state["all"]["calls"] = 3
    with pytest.raises(CheckpointError, match="Adam keeps state under 'all', which is no parameter"):
        optimizer_tensors(adam, {parameter: "a"})
    del adam.state["all"]
    reader = Reader(write(tmp_path, 1, {}, {"optimizer": optimizer_tensors(adam, {parameter: "a"})[1]}))
    with pytest.raises(CheckpointError, match="holds Adam, this run has SGD"):
        load(SGD([parameter], lr=1.0), {parameter: "a"}, reader)
    with pytest.raises(CheckpointError, match="holds no optimizer"):
        load(adam, {parameter: "a"}, Reader(write(tmp_path, 2, {}, {})))


class Historic(Adam):
    """Of a class of one's own nothing is known of what it keeps."""


def test_tensors_inside_state_of_another_kind(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2))
    adam = Historic([parameter])
    adam.state[parameter] = {"history": [torch.ones(2), (torch.zeros(3), 1)], "exp_avg": torch.full((2,), 5.0)}
    tensors, meta = optimizer_tensors(adam, {parameter: "a/b"})
    fresh = Historic([parameter])
    reader = Reader(write(tmp_path, 1, tensors, {"optimizer": meta}))
    load(fresh, {parameter: "a/b"}, reader)
    assert repr(fresh.state[parameter]) == repr({k: adam.state[parameter][k] for k in ("exp_avg", "history")})


class Mode(IntEnum):
    FAST = 1


def reloaded(tmp_path: Path, given: list[object], fresh: list[object]) -> list[dict]:
    """The groups, which have such an option `kept`, after a load of a checkpoint in which they had others."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in given]
    names = {parameter: f"p{place}" for place, parameter in enumerate(parameters)}
    saved, loaded = (
        SGD([{"params": [p], "kept": each} for p, each in zip(parameters, values, strict=True)], lr=1.0)
        for values in (given, fresh)
    )
    tensors, meta = optimizer_tensors(saved, names)
    load(loaded, names, Reader(write(tmp_path, 1, tensors, {"optimizer": meta})))
    return loaded.param_groups


def test_bug_options_of_a_subclass_of_a_plain_type_were_dropped(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"SGD's parameter group 0 cannot be stored: .*Mode"):
        reloaded(tmp_path, [Mode.FAST], [Mode.FAST])


def test_bug_groups_that_share_an_option_here_got_that_of_the_last_group(tmp_path: Path) -> None:
    shared: list[int] = []
    first, second = reloaded(tmp_path, [[1], [2]], [shared, shared])
    assert (first["kept"], second["kept"]) == ([1], [2])


def test_bug_a_device_among_the_options_was_that_of_another_process(tmp_path: Path) -> None:
    (group,) = reloaded(tmp_path, [torch.device("cuda", 3)], [torch.device("cpu")])
    assert group["kept"] == torch.device("cpu")
