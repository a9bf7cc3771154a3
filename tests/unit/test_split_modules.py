"""Which modules defer their weights, what is left to I, and that a stage is put back as it was."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from split_loops import assert_same, batches, leaf, plain_loop, split_loop
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.runtime.split_backward import Tape, prepare, prepared, unprepare
from runtime_cases import Do, mlp

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("small_work_is_deferred")]


def tokens(*shape: int, num: int = 3) -> list[Tensor]:
    return [torch.randint(7, shape) for _ in range(num)]


class Scaled(nn.Linear):
    """A subclass with its own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * 2, self.bias)


def raw(module: nn.Linear | nn.Embedding, times: int = 1) -> nn.Module:
    """Uses a module's weight without calling the module."""

    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        y, weight = layers[0](x), layers[0].weight
        for _ in range(times):
            y = F.linear(torch.tanh(y), weight)
            y = y if y.shape[-1] == weight.shape[1] else y @ weight
        return y

    return Do(run, module)


def again(*layers: nn.Module, times: int = 2) -> nn.Sequential:
    """The layers, one after another, so many times."""
    return nn.Sequential(*[layer for _ in range(times) for layer in (*layers, nn.Tanh())])


def tied(owner: nn.Module, other: nn.Module, name: str = "weight") -> tuple[nn.Module, nn.Module]:
    setattr(other, name, getattr(owner, name))
    return owner, other


def cast(function: Callable[..., Tensor], *layers: nn.Module) -> nn.Module:
    """Layers that run under autocast."""

    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return function(layers, x)

    return Do(run, *layers)


def checkpointed(inner: nn.Module, reentrant: bool = False) -> nn.Module:
    return Do(lambda ls, x: checkpoint(ls[0], x, use_reentrant=reentrant), inner)


def swapped(*layers: nn.Module) -> nn.Sequential:
    """Layers whose input and output lie the other way round."""
    return nn.Sequential(Do(lambda _, x: x.transpose(0, 1)), *layers, Do(lambda _, x: x.transpose(0, 1)))


def as_real(*layers: nn.Module) -> nn.Sequential:
    """Complex layers, and the real numbers of what they return, which a real loss can be made of."""
    return nn.Sequential(*layers, Do(lambda _, y: torch.view_as_real(y.resolve_conj()))).to(torch.complex64)


def conjugated() -> nn.Module:
    return Do(lambda _, x: x.conj())


class Ends(torch.autograd.Function):
    """Passes a value on, and no gradient back."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, g: Tensor) -> None:
        return None


class Product(nn.Module):
    """Multiplies by a parameter of its own, which no rule knows."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.conj()


def convolution(**options: Any) -> nn.Module:
    """A convolution whose options are set after it was made, as one number each."""
    layer = nn.Conv2d(3, 4, 3, padding=1)
    for name, value in options.items():
        setattr(layer, name, value)
    return nn.Sequential(layer, nn.Conv2d(4, 3, 1))


def column_major(dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(4, 6, dtype=dtype)
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return layer


def other_types() -> nn.Module:
    """A module whose bias is of another type than its weight does what torch does, an error included."""
    layers = nn.Linear(4, 4).double(), nn.Linear(4, 4), nn.Linear(4, 4)
    layers[2].bias = nn.Parameter(layers[2].bias.detach().double())

    def run(ls: nn.ModuleList, x: Tensor) -> Tensor:
        y = ls[0](x.double()).float()
        with torch.autocast("cpu", torch.bfloat16):
            y = ls[1](y)
        return y.float() + ls[2](x.transpose(0, 1)).transpose(0, 1)

    return Do(run, *layers)


def lazy() -> nn.Module:
    layer = nn.LazyLinear(4)
    layer(torch.randn(2, 4))
    return layer


def bias_shared_with_a_raw_weight(raw_first: bool) -> nn.Sequential:
    first, other = nn.Linear(4, 4), nn.Linear(4, 4)
    tied(first, other, "bias")
    layers = [*tied(other, nn.Linear(4, 4))[::-1], raw(first)]
    return again(*(layers[::-1] if raw_first else layers), times=1)


def functional_call(ls: nn.ModuleList, x: Tensor) -> Tensor:
    return torch.func.functional_call(ls[0], {name: p * 2 for name, p in ls[0].named_parameters()}, (x,))


def tangent(ls: nn.ModuleList, x: Tensor) -> Tensor:
    return torch.func.jvp(ls[0], (x,), (torch.ones_like(x),))[1] + ls[0](x)


def amp_checkpoint(reentrant: bool) -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), checkpointed(mlp(6), reentrant), nn.Linear(6, 6))
    return cast(lambda ls, x: ls[0](x), net)


def shared_in_checkpoints() -> nn.Module:
    shared = Do(
        lambda ls, x: ls[0](ls[1](F.relu(ls[0](x), inplace=True))),
        nn.Linear(6, 6),
        nn.Conv1d(3, 3, 3, padding=1, padding_mode="circular"),
    )
    return nn.Sequential(checkpointed(shared), shared, checkpointed(shared))


def relu_in_place(bias: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5, bias), nn.ReLU(inplace=True), nn.Linear(5, 5), nn.ReLU(inplace=True))


def every_rule() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 3, 1), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))


CHANGES = [("stride", 2), ("padding", 2), ("padding", (1,)), ("dilation", 2), ("stride", (2,))]


STAGES: dict[str, tuple[Callable[[], nn.Module], Sequence[int]]] = {
    "modules that are left alone": (
        lambda: nn.Sequential(
            Scaled(4, 4),
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            lazy(),
            nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
            nn.Conv1d(3, 3, 2, padding="same"),
            nn.ConvTranspose1d(3, 3, 2),
        ),
        (2, 3, 4),
    ),
    **{f"a linear used {n} times": (lambda n=n: again(nn.Linear(4, 4), times=n), (5, 4)) for n in (2, 3, 4)},
    "one bias of two linears": (
        lambda: nn.Sequential(again(*(pair := tied(nn.Linear(4, 4), nn.Linear(4, 4), "bias")), times=1), pair[0]),
        (5, 4),
    ),
    **{
        f"a linear's weight used raw {n} times": (
            lambda n=n: nn.Sequential(raw(layer := nn.Linear(4, 4), n), nn.Linear(4, 4), nn.Tanh(), layer),
            (5, 4),
        )
        for n in (1, 2, 3)
    },
    "a bias shared with a raw weight, which is last": (lambda: bias_shared_with_a_raw_weight(False), (5, 4)),
    "a bias shared with a raw weight, which is first": (lambda: bias_shared_with_a_raw_weight(True), (5, 4)),
    "a module that is not called": (lambda: Do(lambda ls, x: ls[0](x), nn.Linear(4, 4), nn.Linear(4, 4)), (3, 4)),
    "shared weights under autocast": (
        lambda: cast(
            lambda ls, x: ls[0](torch.tanh(ls[0](torch.tanh(ls[0](x) + ls[1](x))))), nn.Linear(6, 6), nn.Linear(6, 6)
        ),
        (3, 6),
    ),
    "a transform under autocast, left to autograd": (
        lambda: nn.Sequential(cast(tangent, nn.Linear(6, 6)), nn.Linear(6, 6, dtype=torch.bfloat16)),
        (3, 6),
    ),
    "a layer under autocast": (lambda: cast(lambda ls, x: ls[0](x), nn.Linear(6, 6)), (3, 6)),
    **{
        f"a convolution whose {name} was set to {value}": (
            lambda name=name, value=value: convolution(**{name: value}),
            (2, 3, 8, 8),
        )
        for name, value in CHANGES
    },
    "a gradient that ends before the module": (
        lambda: Do(lambda ls, x: Ends.apply(ls[0](x)) + x, nn.Linear(3, 3)),
        (2, 3),
    ),
    # The position's gradient is the output's own memory, to which the next I adds in place.
    "gradients that share memory with what is held": (
        lambda: Do(lambda ls, x: ls[0](x) + ls[1].weight.view(5, 4), nn.Linear(4, 4), Product(20)),
        (5, 4),
    ),
    **{
        f"outputs of {shape} changed in place{' with a bias' * bias}": (lambda bias=bias: relu_in_place(bias), shape)
        for shape in ((3, 4), (2, 3, 4), (4,))
        for bias in (True, False)
    },
    "a functional call with other tensors": (lambda: Do(functional_call, nn.Linear(4, 4)), (3, 4)),
    "a layer and a convolution that checkpoints share": (shared_in_checkpoints, (2, 3, 6)),
    "a checkpoint under autocast": (lambda: amp_checkpoint(False), (2, 3, 6)),
    "a reentrant checkpoint under autocast": (lambda: amp_checkpoint(True), (2, 3, 6)),
    "parameters of several types": (other_types, (3, 2, 4)),
}
"""By name what makes a stage, and the shape of its inputs."""
HOLD_NOTHING = {
    "a bias shared with a raw weight, which is last",
    "a bias shared with a raw weight, which is first",
    "a transform under autocast, left to autograd",
    "a gradient that ends before the module",
    "a functional call with other tensors",
    "parameters of several types",
}
"""Stages of which every weight gradient may be computed in I."""


@pytest.mark.parametrize("name", STAGES)
def test_a_split_stage_has_the_gradients_of_the_plain_one(name: str) -> None:
    make, shape = STAGES[name]
    held = assert_same(make(), batches(*shape, num=5))
    assert held > 0 or name in HOLD_NOTHING


@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_embeddings_weight_also_used_without_it(times: int) -> None:
    stage = nn.Sequential(raw(nn.Embedding(7, 4), times), nn.Linear(4, 4), nn.Tanh())
    assert assert_same(stage, tokens(5, num=5)) > 0


def test_tied_embedding_and_head() -> None:
    table, head = tied(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    assert assert_same(nn.Sequential(table, nn.Linear(4, 4), nn.Tanh(), head), tokens(2, 3)) > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types_of_every_rule(dtype: torch.dtype) -> None:
    assert assert_same(every_rule().to(dtype), [x.to(dtype) for x in batches(2, 3, 4)]) > 0
    table = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4)).to(dtype)
    assert assert_same(table, tokens(3, 2)) > 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 5, 4), (2, 2, 3, 4)])
@pytest.mark.parametrize("first", [nn.Linear, column_major])
def test_complex_linear(dtype: torch.dtype, shape: tuple[int, ...], first: Any) -> None:
    layer = first(4, 6) if first is nn.Linear else first()
    stage = as_real(layer, conjugated(), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)).to(dtype)
    assert assert_same(stage, [torch.randn(*shape, dtype=dtype) for _ in range(4)]) > 0


COMPLEX: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Sequential(swapped(nn.Linear(4, 6)), nn.Linear(6, 4)), (5, 3, 4)),
    (lambda: nn.Conv1d(3, 3, 2), (2, 3, 4)),
    (lambda: nn.ConvTranspose1d(3, 3, 2), (2, 3, 4)),
    (lambda: Product(3, 4, dtype=torch.complex64), (2, 3, 4)),
    (lambda: nn.Conv2d(2, 2, 2, padding=1, padding_mode="circular"), (2, 2, 4, 4)),
    (lambda: nn.Conv3d(2, 2, 1), (2, 2, 4, 4, 4)),
]


@pytest.mark.parametrize(("make", "shape"), COMPLEX)
def test_complex_layers(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    assert_same(as_real(make()), [torch.randn(*shape, dtype=torch.complex64) for _ in range(4)])


def test_ragged_microbatches_around_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MERGE_WORK", 100)
    inputs = [torch.randn(rows, 4) for rows in (2, 9, 9, 3, 1)]
    assert assert_same(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), inputs) > 0


# -- what is deferred ---------------------------------------------------------------------------------------


def test_report_names_what_waits() -> None:
    stage = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 4), Scaled(4, 4))
    report = prepare(stage)
    assert report.can_split
    assert report.reason == ""
    assert report.deferred == ("0.weight", "2.weight", "2.bias")
    assert tuple(report.shared.others) == ("1.weight", "1.bias", "3.weight", "3.bias")


def test_a_stage_without_anything_to_defer_says_so() -> None:
    stage = nn.Sequential(nn.LayerNorm(4), Scaled(4, 4))
    report = prepare(stage)
    assert not report.can_split
    assert "no linear, convolution or embedding module" in report.reason
    assert assert_same(stage, batches(3, 4)) == 0


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_pruned_modules_are_right(name: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        stage = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Conv1d(3, 3, 1))
        for n in (0, 2):
            prune.random_unstructured(stage[n], name, amount=0.5)
        return stage

    stage, twin, inputs = build(), build(), batches(2, 3, 4, num=1)
    want, got = plain_loop(stage, inputs), split_loop(twin, inputs)
    assert all(torch.equal(want[key], got[key]) for key in want)


def test_parametrizing_a_prepared_module_afterwards() -> None:
    class Double(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    prepare(stage)
    parametrize.register_parametrization(stage[0], "weight", Double())
    twin = copy.deepcopy(stage)
    unprepare(twin)
    for x in (xs := batches(2, 4)):
        twin(leaf(x)).square().sum().backward()
    got = split_loop(stage, xs)
    for name, p in twin.named_parameters():
        assert torch.equal(p.grad, got[name]), name


def test_a_forward_patched_by_somebody_else_is_left_alone() -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stage[0].forward = lambda x: F.linear(x, stage[0].weight * 3)
    assert prepare(stage).deferred == ("1.weight", "1.bias")
    unprepare(stage)
    assert "forward" in stage[0].__dict__


def test_hooked_parameters_are_left_to_i() -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    seen: list[str] = []
    stage[0].weight.register_hook(lambda g: seen.append("hook") or g * 2)
    stage[1].bias.register_post_accumulate_grad_hook(lambda p: seen.append("post"))
    prepare(stage)
    tape = Tape()
    with tape.recording():
        y = stage(torch.randn(2, 4))
    tape.backward_input([y], [torch.ones(2, 4)])
    assert seen == ["post", "hook"]
    assert stage[0].weight.grad is not None
    assert stage[2].weight.grad is None
    tape.backward_weight()
    assert seen == ["post", "hook"]


def test_forward_and_backward_hooks_of_modules_fire() -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen: list[str] = []
    stage[0].register_forward_pre_hook(lambda m, x: seen.append("pre"))
    stage[0].register_forward_hook(lambda m, x, y: seen.append("post"))
    stage[1].register_full_backward_hook(lambda m, gx, gy: seen.append("backward"))
    split_loop(stage, batches(2, 4, num=1))
    assert seen == ["pre", "post", "backward"]


# -- uses of one parameter ----------------------------------------------------------------------------------


def test_tied_to_a_module_that_is_too_small_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    table, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = table.weight
    monkeypatch.setattr(prepared, "MERGE_WORK", 400)
    stage = nn.Sequential(table, nn.Tanh(), head)
    assert_same(stage, [torch.randint(7, (rows,)) for rows in (2, 3, 30, 3, 30)])


# -- other forwards and hooks -------------------------------------------------------------------------------


def test_a_forward_that_the_class_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that patch nn.Linear.forward itself had no effect on layers whose weights wait for W."""
    forward = nn.Linear.forward
    with monkeypatch.context() as patched:
        patched.setattr(nn.Linear, "forward", lambda self, x: 2 * forward(self, x))
        assert prepare(nn.Sequential(nn.Linear(4, 4), nn.Conv1d(3, 3, 1))).deferred == ("1.weight", "1.bias")


def test_a_backward_hook_of_all_modules_finds_the_gradients() -> None:
    """Such a hook of one module makes its weights' gradients complete in I; torch's hook of all modules did not."""
    seen: list[bool] = []
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hook = nn.modules.module.register_module_full_backward_hook(lambda *_: seen.append(True))
    try:
        prepare(stage)
        tape = Tape()
        with tape.recording():
            y = stage(torch.randn(2, 4))
        tape.backward_input([y], [torch.ones(2, 4)])
    finally:
        hook.remove()
    assert seen
    assert all(p.grad is not None for p in stage.parameters())
    assert tape.deferred_bytes == 0


# -- parameters ---------------------------------------------------------------------------------------------


def test_freezing_between_steps() -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    twin = copy.deepcopy(stage)
    for frozen in ([], [0], [1], [0, 1], [2], []):
        for module in (stage, twin):
            for n, p in enumerate(module.parameters()):
                p.requires_grad_(n not in frozen)
        prepare(twin)
        for x in batches(3, 4):
            stage(x).square().sum().backward()
            tape = Tape()
            with tape.recording():
                loss = twin(x).square().sum()
            tape.backward_input([loss], [None])
            tape.backward_weight()
        for a, b in zip(stage.parameters(), twin.parameters()):
            assert torch.equal(a.grad, b.grad)


def make(layer: nn.Module, name: str, value: object) -> nn.Module:
    setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    ("name", "value"), [*CHANGES, ("stride", (2, 2)), ("padding_mode", "circular"), ("dilation", (2, 2))]
)
def test_an_option_of_a_convolution_is_followed_at_the_next_step(name: str, value: object) -> None:
    """It was read when the pipeline was made, and a change went by silently."""
    follows(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.LazyLinear(2)), (4, 3, 8, 8), name, value)


@pytest.mark.parametrize(
    ("name", "value"), [("max_norm", 0.5), ("padding_idx", 0), ("scale_grad_by_freq", True), ("sparse", True)]
)
def test_an_option_of_an_embedding_is_followed_at_the_next_step(name: str, value: object) -> None:
    follows(nn.Sequential(nn.Embedding(5, 8), nn.Flatten(), nn.Linear(24, 2)), (4, 3), name, value)


def follows(model: nn.Sequential, shape: tuple[int, ...], name: str, value: object) -> None:
    x = torch.randn(*shape) if len(shape) > 2 else torch.randint(5, shape)
    y, loss_fn, old = torch.randn(4, 2), nn.MSELoss(), getattr(model[0], name)
    model(x)
    linear = model[2].in_features
    with ps.Pipeline(model, ps.build("zb-h1", 2, 2), loss_fn=loss_fn) as pipe:
        for each in (old, value, old):
            make(model[0], name, each)
            with torch.no_grad():
                width = model[1](model[0](x)).shape[1]
            if width != linear:
                model[2].weight.data, linear = torch.randn(2, width), width
            model.zero_grad()
            twin = copy.deepcopy(model)
            loss = pipe.step(x, y, update=False).loss
            assert torch.equal(loss, ps.plain_step(twin, x, y, loss_fn=loss_fn, num_microbatches=2))
            for (path, p), q in zip(model.named_parameters(), twin.parameters()):
                assert torch.equal(p.to_dense(), q.to_dense()), path
                assert p.grad is not None
                assert q.grad is not None
                assert torch.equal(p.grad.to_dense(), q.grad.to_dense()), path


# -- preparing ----------------------------------------------------------------------------------------------


def test_a_stage_is_left_as_found() -> None:
    stage = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Sequential(nn.Conv1d(3, 3, 1)))
    before = [dict(m.__dict__) for m in stage.modules()]
    keys = list(stage.state_dict())
    assert prepare(stage) == prepare(stage)
    assert list(stage.state_dict()) == keys
    unprepare(stage)
    assert [dict(m.__dict__) for m in stage.modules()] == before


def test_a_prepared_module_without_a_tape_is_the_plain_one() -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(3, 3, 1), nn.Embedding(7, 4))
    x, ids = torch.randn(2, 3, 4), torch.randint(7, (3,))
    want = [stage[0](x), stage[1](x), stage[2](ids)]
    prepare(stage)
    got = [stage[0](input=x), stage[1](x), stage[2](ids)]
    assert all(torch.equal(a, b) for a, b in zip(want, got))
    assert [type(a.grad_fn) for a in want] == [type(b.grad_fn) for b in got]


def test_copies_of_a_prepared_stage_are_their_own() -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    prepare(stage)
    twin = copy.deepcopy(stage)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.zero_()
    assert torch.count_nonzero(twin[0](torch.randn(2, 4))) == 0
    got = split_loop(twin, batches(2, 4))
    assert got["0.weight"] is not None
    assert stage[0].weight.grad is None
    buffer = io.BytesIO()
    torch.save(stage, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    x = torch.randn(2, 4)
    assert torch.equal(loaded(x), stage(x))
    assert assert_same(loaded, batches(2, 4)) > 0


# -- torch.compile ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stage_compiled_after_it_was_prepared() -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    twin = copy.deepcopy(stage)
    prepare(twin)
    compiled = torch.compile(twin, backend="eager")
    for x in batches(3, 4):
        stage(x).sum().backward()
        tape = Tape()
        with tape.recording():
            y = compiled(x)
        tape.backward_input([y.sum()], [None])
        tape.backward_weight()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(stage.parameters(), twin.parameters()))


class CompiledInside(nn.Module):
    """Compiles what is around its layer, which takes and gets what lies the other way round."""

    def __init__(self, fullgraph: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self._run = torch.compile(self._plain, backend="eager", dynamic=False, fullgraph=fullgraph)

    def _plain(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * 2

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._run(x.transpose(1, 2)).transpose(1, 2)
        return y


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_function_that_is_compiled_over_a_prepared_layer(fullgraph: bool) -> None:
    """The compiler traced the op that waits for W, with a contiguous gradient, and the bias was summed otherwise."""
    torch.compiler.reset()
    plain, split = CompiledInside(fullgraph), CompiledInside(fullgraph)
    split.load_state_dict(plain.state_dict())
    prepare(split)
    for x in batches(6, 4, 7, num=8):
        y, wanted = torch.randn(6, 4, 7), leaf(x)
        given = leaf(x)
        plain(wanted).backward(y)
        tape = Tape()
        with tape.recording():
            out = split(given)
        tape.backward_input([out], [y])
        tape.backward_weight()
        assert torch.equal(wanted.grad, given.grad)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), split.parameters()))
