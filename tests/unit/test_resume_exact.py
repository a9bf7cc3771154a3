"""A pipeline that is saved and loaded goes on bit for bit; one that cannot changes nothing."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, MultiStepLR, ReduceLROnPlateau, SequentialLR

import penstock as ps
from checkpoint_cases import flip_tensor
from packed import packed
from penstock.runtime.checkpoint import CheckpointError, DamagedCheckpointError, Reader
from penstock.runtime.checkpoint.object_state import digest_of, pack, unpack
from penstock.runtime.checkpoint.save_load import export_model

pytestmark = pytest.mark.unit

WIDTH = 6


class Scaled(nn.Module):
    """Divides by a running maximum that it keeps as extra state, as layers in eight bits do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.largest = 0, torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.largest = torch.maximum(self.largest, x.detach().abs().max()) * (1 + 0.01 * self.calls)
        return x / self.largest

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "history": (self.largest.clone(), [None, 0.5])}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.largest = state["calls"], state["history"][0].clone()


class Counting(nn.Module):
    """Has a buffer that state dicts leave out, and what it returns depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("none", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(1)
        return x * (1 + 0.1 * self.seen)


def model(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for layer in (*extra, nn.Tanh(), nn.BatchNorm1d(WIDTH)):
        layers += [nn.Linear(WIDTH, WIDTH), layer]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def pipeline(net: nn.Module, schedule: str = "1f1b", ranks: int = 2, **options: Any) -> ps.Pipeline:
    given = {"loss_fn": nn.MSELoss(), "optimizer": torch.optim.AdamW, **options}
    return ps.Pipeline(net, ps.build(schedule, ranks, 4), **packed(**given))  # type: ignore[arg-type]


def train(pipe: ps.Pipeline, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        losses.append(pipe.step(x, x.sum(1, keepdim=True)).loss)
    return losses


def state_of(pipe: ps.Pipeline) -> dict[str, Any]:
    """All of a pipeline that a load may change, as bytes and text."""
    stages = pipe._local.model.copies.here
    found: dict[str, Any] = {"counts": (pipe.num_steps, pipe.num_updates, pipe._seed)}
    for key, stage in stages.items():
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            found[f"{key}{name}"] = tensor.detach().clone()
            found[f"{key}{name}.grad"] = None if tensor.grad is None else tensor.grad.clone()
        for name, module in stage.named_modules():
            if isinstance(module, Scaled):
                found[f"{key}{name}"] = repr(module.get_extra_state())
    found["optimizer"] = repr(None if pipe.optimizer is None else pipe.optimizer.state_dict())
    return found


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[k], right[k]) if isinstance(left[k], Tensor) else left[k] == right[k] for k in left
    )


def goes_on(make: Callable[[], ps.Pipeline], then: Callable[[], ps.Pipeline], folder: Path) -> None:
    """What is saved after three steps and loaded gives the losses of who never stopped."""
    straight = make()
    train(straight, range(3))
    straight.save(folder)
    expected = train(straight, range(3, 6))
    resumed = then()
    resumed.load(folder)
    assert torch.equal(torch.stack(train(resumed, range(3, 6))), torch.stack(expected))


@pytest.mark.parametrize("then", [("1f1b", 2), ("zb-h1", 4), ("gpipe", 1), ("interleaved-1f1b", 2)])
def test_extra_state_was_not_saved(tmp_path: Path, then: tuple[str, int]) -> None:
    goes_on(lambda: pipeline(model(Scaled())), lambda: pipeline(model(Scaled()), *then), tmp_path)


def test_extra_state_of_two_pipelines_was_not_saved(tmp_path: Path) -> None:
    """In one process they share a module."""
    goes_on(lambda: pipeline(model(Scaled()), "chimera"), lambda: pipeline(model(Scaled()), "chimera"), tmp_path)


def test_a_buffer_that_is_not_persistent_was_not_saved(tmp_path: Path) -> None:
    goes_on(lambda: pipeline(model(Counting())), lambda: pipeline(model(Counting()), "zb-v"), tmp_path)


def test_modules_without_parameters_and_tied_weights(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        net = model(Scaled(), Counting())
        net[4].weight = net[0].weight
        return net

    goes_on(lambda: pipeline(tied()), lambda: pipeline(tied(), "1f1b", 1), tmp_path)


class Turned(nn.Module):
    """Multiplies by a buffer of a module that others share."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.linear, self.rope = nn.Linear(WIDTH, WIDTH), rope

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.rope.t


class Gated(nn.Module):
    """Multiplies by a buffer of its own between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 1)
        self.register_buffer("mask", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.mask
        return self.last(x)


def turned() -> nn.Sequential:
    rope = nn.Module()
    rope.register_buffer("t", torch.rand(WIDTH))
    return nn.Sequential(*(Turned(rope) for _ in range(4)), nn.Linear(WIDTH, 1))


@pytest.mark.parametrize(("kind", "shared"), [(turned, "0.rope.t"), (Gated, "mask")])
def test_a_buffer_of_several_stages_was_stored_by_the_names_of_one_cut(
    kind: Callable[[], nn.Module], shared: str, tmp_path: Path
) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return kind()

    goes_on(lambda: pipeline(made()), lambda: pipeline(made(), ranks=4), tmp_path)
    names = [name for name, _ in (*made().named_parameters(), *made().named_buffers())]
    assert shared in names
    assert load_file(export_model(tmp_path / "model.safetensors", tmp_path)).keys() == set(names)


def test_copies_of_a_buffer_in_stages_that_were_moved_are_stored_once(tmp_path: Path) -> None:
    stages = ps.split(Gated(), 2)
    for stage in stages:
        stage.double()  # makes new buffers, as a move to a GPU does
    saved = pipeline(stages).save(tmp_path)  # type: ignore[arg-type]
    assert [name for name in Reader(saved).names() if "mask" in name] == ["model/mask"]


def test_extra_state_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    class Bad(Scaled):
        value: Any = None

        def get_extra_state(self) -> Any:
            return {"deep": [1, self.value]}

    pipe = pipeline(model(Bad()))
    for value, words in [
        (object(), r"the extra state of 1 \(Bad\) cannot be stored: Unsupported global: GLOBAL object was not an"),
        (lambda: 0, r"the extra state of 1 \(Bad\) cannot be stored: Can't pickle"),
    ]:
        Bad.value = value
        with pytest.raises(CheckpointError, match=words):
            pipe.save(tmp_path)
    circle: list[Any] = []
    circle.append(circle)
    Bad.value = circle
    with pytest.raises(CheckpointError, match="RecursionError"):
        pipe.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def refusals() -> dict[str, tuple[Callable[[], ps.Pipeline], str]]:
    class Fails(Scaled):
        def set_extra_state(self, state: Any) -> None:
            super().set_extra_state(state)
            if self.calls == 12:
                raise ValueError("not this one")

    class Widened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.other

    sgd = torch.optim.SGD
    return {
        "optimizer": (lambda: pipeline(model(Scaled()), optimizer=sgd), "holds AdamW, this run has SGD"),
        "extra": (lambda: pipeline(model(Fails())), r"extra state of 1 \(Fails\) was not taken: ValueError: not"),
        "no extra": (lambda: pipeline(model(nn.Identity())), "has extra state of 1, and no module here takes it"),
        "more extra": (
            lambda: pipeline(nn.Sequential(*model(Scaled()), Scaled())),
            r"has no extra state of 7 \(Scaled\): load what it was written with",
        ),
        "names": (lambda: pipeline(nn.Sequential(*model(Scaled()), Widened())), r"model/7\.other is None there"),
        "types": (lambda: pipeline(model(Scaled()).double()), r"float32\) there and .*float64\) here"),
    }


@pytest.mark.parametrize("kind", refusals())
def test_a_load_that_fails_changed_the_weights(tmp_path: Path, kind: str) -> None:
    saved = pipeline(model(Scaled()))
    train(saved, range(3))
    saved.save(tmp_path)
    make, words = refusals()[kind]
    pipe = make()
    if kind != "types":
        train(pipe, range(5, 7))
    before = state_of(pipe)
    with pytest.raises(CheckpointError, match=words):
        pipe.load(tmp_path)
    assert same(state_of(pipe), before)


class Loader:
    """A data loader's place, and whether it takes one."""

    def __init__(self, position: int = 0) -> None:
        self.position, self.refuses = position, False

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "generator": torch.Generator().manual_seed(self.position).get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        if self.refuses:
            self.refuses = False
            raise RuntimeError("no such epoch")


def test_regression_a_save_after_going_back_was_passed_over_by_the_next_load_without_a_word(tmp_path: Path) -> None:
    pipe = pipeline(model())
    train(pipe, range(1))
    first = pipe.save(tmp_path, keep=9)
    train(pipe, range(1, 3))
    last = pipe.save(tmp_path, keep=9)
    assert not any("later" in notice for notice in pipe.notices)
    pipe.load(first)
    train(pipe, range(1, 2))
    pipe.save(tmp_path, keep=9)
    assert [n for n in pipe.notices if n.startswith(f"{last} is later than what was saved beside it")]


def test_what_takes_no_state_back_either_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    """The error was the object's own, and those after it were left with what had been loaded."""
    pipe, kept, bad = pipeline(model()), Loader(3), Loader()
    pipe.save(tmp_path, stateful={"a": kept, "b": bad})
    kept.position = 5
    bad.load_state_dict = lambda state: {}[state["position"]]  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"state of b \(Loader\) was not taken: KeyError: 0"):
        pipe.load(tmp_path, stateful={"a": kept, "b": bad})
    assert kept.position == 5


def test_a_checkpoint_with_a_number_too_long_was_never_found_again(tmp_path: Path) -> None:
    pipe = pipeline(model())
    assert pipe.save(tmp_path, number=10**18).name == "step-1000000000000000000"
    pipe.load(tmp_path)


def schedulers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "cosine": CosineAnnealingLR(optimizer, 9),
        "milestones": MultiStepLR(optimizer, [2, 4, 4]),
        "plateau": ReduceLROnPlateau(optimizer, patience=1),
        "sequence": SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 5)], [3]),
    }


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_learning_rate_schedule_and_a_loader_go_on(tmp_path: Path) -> None:
    def run(pipe: ps.Pipeline, kept: dict[str, Any], steps: range) -> list[float]:
        rates = []
        for step in steps:
            train(pipe, range(step, step + 1))
            for name, each in kept.items():
                if name != "loader":
                    each.step(*([1.0] if name == "plateau" else []))
            kept["loader"].position += 2
            assert pipe.optimizer is not None
            rates.append(pipe.optimizer.param_groups[0]["lr"])
        return rates

    pipe = pipeline(model())
    assert pipe.optimizer is not None
    kept = {**schedulers(pipe.optimizer), "loader": Loader()}
    run(pipe, kept, range(3))
    pipe.save(tmp_path, stateful=kept, meta={"epoch": 4})
    expected = run(pipe, kept, range(3, 8))

    again = pipeline(model(), "zb-h1", 4)
    assert again.optimizer is not None
    fresh = {**schedulers(again.optimizer), "loader": Loader()}
    assert again.load(tmp_path, stateful=fresh) == {"epoch": 4}
    assert fresh["loader"].position == 6
    assert not any("state" in notice for notice in again.notices)
    assert run(again, fresh, range(3, 8)) == expected
    assert fresh["milestones"].milestones == Counter([2, 4, 4])


def test_state_of_the_caller_that_does_not_fit(tmp_path: Path) -> None:
    pipe = pipeline(model())
    for name, each, words in [
        ("a@b", Loader(), "has the name 'a@b': give names without @"),
        ("loader", object(), "'object' object has no attribute 'state_dict'"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            pipe.save(tmp_path, stateful={name: each})
    bad = Loader()
    bad.state_dict = lambda: {"rows": [iter([])]}  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"the state of loader \(Loader\) cannot be stored: .*GLOBAL iter"):
        pipe.save(tmp_path, stateful={"loader": bad})
    given: list[tuple[dict[str, Any], str]] = [
        ({"meta": {"optimizer": 1}}, "meta has the key 'optimizer'"),
        ({"meta": {"a": object()}}, "meta must be plain JSON"),
        ({"number": -1}, "number= is at least 0"),
        ({"keep": 0}, "keep= is at least 1"),
    ]
    for arguments, words in given:
        with pytest.raises(CheckpointError, match=words):
            pipe.save(tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []
    train(pipe, range(1))
    pipe.save(tmp_path, stateful={"loader": Loader(5), "other": Loader(7)})
    then = pipeline(model())
    before = state_of(then)
    loader, other = Loader(1), Loader(2)
    with pytest.raises(CheckpointError, match=r"has no state of scheduler \(Loader\)"):
        then.load(tmp_path, stateful={"scheduler": loader})
    other.refuses = True
    with pytest.raises(CheckpointError, match=r"state of other \(Loader\) was not taken: RuntimeError: no"):
        then.load(tmp_path, stateful={"loader": loader, "other": other})
    assert (loader.position, other.position) == (1, 2)
    assert same(state_of(then), before)
    then.load(tmp_path, stateful={"loader": loader})
    assert loader.position == 5
    assert "has the state of other, which was not loaded" in " ".join(then.notices)


def three(folder: Path, pipe: ps.Pipeline) -> list[Path]:
    return [train(pipe, range(step, step + 1)) and pipe.save(folder, keep=3) for step in range(3)]  # type: ignore[misc]


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of a tensor": (flip_tensor, r"__0_0\.distcp is not what was"),
    "a bit of the manifest": (lambda p: flip(p / "manifest.json", 99), r"manifest\.json is damaged"),
    "a file": (lambda p: (p / "__0_0.distcp").unlink(), r"__0_0\.distcp is missing"),
    "half a file": (
        lambda p: (p / "__0_0.distcp").write_bytes((p / "__0_0.distcp").read_bytes()[:99]),
        "has 99 bytes, the manifest says",
    ),
    "the manifest": (lambda p: (p / "manifest.json").unlink(), r"is not a checkpoint: it has no manifest\.json"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_newest_checkpoint_offers_the_one_before(tmp_path: Path, harm: str) -> None:
    _, second, third = three(tmp_path, pipeline(model(Scaled())))
    act, words = HARMS[harm]
    act(third)
    pipe = pipeline(model(Scaled()))
    before = state_of(pipe)
    offer = rf'{words}.*; .*step-00000002 before it is whole: load\("{second}"\), or give .*fallback=True\)'
    for meant in (tmp_path, third):
        with pytest.raises(DamagedCheckpointError, match=offer) as caught:
            pipe.load(meant)
        assert caught.value.older == second
    assert same(state_of(pipe), before)
    pipe.load(tmp_path, fallback=True)
    assert pipe.num_steps == 2
    assert "step-00000002 was loaded instead" in " ".join(pipe.notices)
    assert "set aside as step-00000003.damaged" in " ".join(pipe.notices)
    pipe.load(tmp_path)  # the damaged one is not the newest any more
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000002",
        "step-00000003.damaged",
    ]


def test_bug_a_load_with_fallback_read_all_in_process_0_while_the_others_waited(tmp_path: Path) -> None:
    """Each process reads what it takes: what nobody takes may be damaged, and a load as long as any other."""
    pipe, unread = pipeline(model()), Loader()
    unread.state_dict = lambda: {"rows": torch.zeros(1000)}  # type: ignore[method-assign,assignment,return-value]
    pipe.save(tmp_path)
    train(pipe, range(1))
    flip_tensor(pipe.save(tmp_path, stateful={"unread": unread}))
    pipe.load(tmp_path, fallback=True)
    assert pipe.num_steps == 1
    assert "step-00000001 has the state of unread, which was not loaded" in " ".join(pipe.notices)


def test_all_are_damaged(tmp_path: Path) -> None:
    for path in three(tmp_path, pipeline(model())):
        flip_tensor(path)
    pipe = pipeline(model())
    before = state_of(pipe)
    with pytest.raises(DamagedCheckpointError, match=r"step-00000003.*checksum differs; use an older"):
        pipe.load(tmp_path, fallback=True)
    assert same(state_of(pipe), before)
    assert len(list(tmp_path.glob("step-*.damaged"))) == 0


def test_no_fallback_past_another_model_or_a_newer_format(tmp_path: Path) -> None:
    pipe = pipeline(model())
    three(tmp_path, pipe)
    with pytest.raises(CheckpointError, match="is of another model"):
        pipeline(model(nn.Tanh())).load(tmp_path, fallback=True)
    index = tmp_path / "step-00000003" / "manifest.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"version": 5}))
    with pytest.raises(CheckpointError, match="format version 5, and this release of penstock reads 4"):
        pipe.load(tmp_path, fallback=True)


def test_a_checkpoint_under_the_name_of_another_step(tmp_path: Path) -> None:
    pipe = pipeline(model())
    path = three(tmp_path, pipe)[0]
    shutil.copytree(path, tmp_path / "step-00000009")
    with pytest.raises(DamagedCheckpointError, match="is of step 1, and its folder of another"):
        pipe.load(tmp_path)
    shutil.copytree(path, tmp_path / "best")
    pipe.load(tmp_path / "best")
    assert pipe.num_steps == 1


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream-2bw"])
def test_a_load_takes_steps_in_proportion_to_the_parameters(tmp_path: Path, schedule: str) -> None:
    """It went through all names once for each parameter: ten seconds for two thousand."""

    def calls(num: int) -> int:
        folder = tmp_path / str(num)
        given = {"window": 2} if schedule != "1f1b" else {}
        pipe = ps.Pipeline(
            nn.Sequential(*(nn.Linear(2, 2) for _ in range(num))),
            ps.build(schedule, 2, 4, **given),
            loss_fn=nn.MSELoss(),
            optimizer=torch.optim.AdamW,
        )
        pipe.step(torch.ones(4, 2), torch.ones(4, 2))
        pipe.save(folder)
        count = 0

        def note(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(note)
        try:
            pipe.load(folder)
        finally:
            sys.setprofile(None)
        return count

    first, second = calls(50), calls(200)
    assert second < 5 * first


VALUES: list[Any] = [
    None,
    True,
    2**200,
    -0.0,
    float("inf"),
    "é\ud800",
    [1, (2, [3])],
    {1: "a", "1": "b", (2, 3): {}, None: ()},
    OrderedDict(b=1, a=2),
    Counter("hello"),
    {1, 2},
    frozenset({"a"}),
    b"\x00\xff",
    bytearray(b"x"),
    1 + 2j,
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cpu"),
    np.float64(0.1),
    np.int32(7),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    found = unpack(pack(value, "it"))
    assert (type(found), found) == (type(value), value)
    assert repr(found) == repr(value)
    assert digest_of(copy.deepcopy(value)) == digest_of(value)


def test_regression_equal_sets_were_stored_in_different_orders_and_seemed_to_differ_between_processes() -> None:
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other)  # as those of text are in two processes
    assert digest_of(one) == digest_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), ("1", 1), ([1], (1,)), ({"a": 1}, {"a": 2}), (torch.zeros(2), torch.zeros(1, 2)), (0.0, -0.0)],
)
def test_values_that_differ_have_other_digests(one: Any, other: Any) -> None:
    assert digest_of(one) != digest_of(other)
    assert digest_of([one]) != digest_of([other])


def test_regression_matrices_of_numpy_came_back_as_plain_arrays() -> None:
    with pytest.raises(CheckpointError, match=r"GLOBAL numpy\.matrix"):
        pack(np.ones((2, 2)).view(np.matrix), "it")


def test_tensors_and_arrays_inside_plain_data() -> None:
    value = {
        "t": [torch.arange(3), nn.Parameter(torch.ones(2))],
        "a": np.arange(6).reshape(2, 3),
        "b": np.array(True),
    }
    found = unpack(pack(value, "it"))
    assert torch.equal(found["t"][0], torch.arange(3))
    assert torch.equal(found["t"][1], torch.ones(2))
    assert np.array_equal(found["a"], value["a"])
    assert found["a"].dtype == value["a"].dtype
    assert found["b"].shape == ()


class Rotated(nn.Module):
    """Multiplies by complex numbers in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 2)
        self.register_buffer("shift", torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex128) @ self.weight + self.shift


def test_parameters_of_complex128_could_not_be_saved(tmp_path: Path) -> None:
    def made(schedule: str, ranks: int) -> ps.Pipeline:
        torch.manual_seed(0)
        layers = nn.Sequential(*(Rotated() for _ in range(4)))
        return pipeline(layers, schedule, ranks, loss_fn=lambda output, target: (output.abs() - target).pow(2).mean())

    with made("1f1b", 2) as pipe:
        train(pipe, range(2))
        pipe.save(tmp_path)
        want = train(pipe, range(2, 5))
    for schedule, ranks in (("1f1b", 2), ("zb-v", 2), ("1f1b", 4)):
        with made(schedule, ranks) as pipe:
            pipe.load(tmp_path)
            assert all(map(torch.equal, train(pipe, range(2, 5)), want))


class Masked(nn.Module):
    """Adds a buffer."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mask.sum(0)


def test_bug_a_buffer_that_cannot_hold_the_values_of_a_checkpoint_took_some_of_them(tmp_path: Path) -> None:
    pipe = pipeline(model(Masked(torch.arange(3.0 * WIDTH).view(3, WIDTH))))
    train(pipe, range(1))
    pipe.save(tmp_path)
    other = pipeline(model(Masked(torch.zeros(1, WIDTH).expand(3, WIDTH))), optimizer=None)
    before = state_of(other)
    with pytest.raises(CheckpointError, match="mask is expanded here, and has other values for one place"):
        other.load(tmp_path)
    assert same(before, state_of(other))


def test_an_expanded_buffer_can_be_loaded(tmp_path: Path) -> None:
    def make() -> ps.Pipeline:
        return pipeline(model(Masked(torch.full((1, WIDTH), torch.nan).expand(3, WIDTH))))

    make().save(tmp_path)
    make().load(tmp_path)


def test_bug_a_save_under_a_number_of_numpy_failed_once_all_was_written(tmp_path: Path) -> None:
    pipe = pipeline(model())
    assert pipe.save(tmp_path, number=np.int64(7), keep=np.int64(1)).name == "step-00000007"
    pipe.load(tmp_path)
