"""Which modules defer their weights, what is left to I, and that a stage is put back as it was."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from split_loops import assert_same, batches, leaf, plain_loop, split_loop
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import penstock as ps
from penstock.runtime.split_backward import Tape, prepare, prepared, unprepare

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("small_work_is_deferred")]


def tokens(*shape: int, num: int = 3) -> list[Tensor]:
    return [torch.randint(7, shape) for _ in range(num)]


class Scaled(nn.Linear):
    """A subclass with its own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * 2, self.bias)


class Raw(nn.Module):
    """Uses a module's weight without calling the module."""

    def __init__(self, module: nn.Linear | nn.Embedding, times: int = 1) -> None:
        super().__init__()
        self.module, self.times = module, times

    def forward(self, x: Tensor) -> Tensor:
        y = self.module(x)
        for _ in range(self.times):
            y = F.linear(torch.tanh(y), self.module.weight)
            if y.shape[-1] != self.module.weight.shape[1]:
                y = y @ self.module.weight
        return y


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


def test_modules_that_are_left_alone_are_right() -> None:
    lazy = nn.LazyLinear(4)
    lazy(torch.randn(2, 4))
    stage = nn.Sequential(
        Scaled(4, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        lazy,
        nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        nn.Conv1d(3, 3, 2, padding="same"),
        nn.ConvTranspose1d(3, 3, 2),
    )
    assert assert_same(stage, batches(2, 3, 4)) > 0


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


@pytest.mark.parametrize("times", [2, 3, 4])
def test_a_linear_used_several_times(times: int) -> None:
    linear = nn.Linear(4, 4)
    stage = nn.Sequential(*[m for _ in range(times) for m in (linear, nn.Tanh())])
    assert assert_same(stage, batches(5, 4)) > 0


def test_tied_embedding_and_head() -> None:
    table, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = table.weight
    assert assert_same(nn.Sequential(table, nn.Linear(4, 4), nn.Tanh(), head), tokens(2, 3)) > 0


def test_one_bias_of_two_linears() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.bias = a.bias
    assert assert_same(nn.Sequential(a, nn.Tanh(), b, nn.Tanh(), a), batches(5, 4)) > 0


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_a_weight_also_used_without_its_module(kind: str, times: int) -> None:
    module = nn.Linear(4, 4) if kind == "linear" else nn.Embedding(7, 4)
    stage = nn.Sequential(Raw(module, times), nn.Linear(4, 4), nn.Tanh())
    if kind == "linear":
        stage.append(module)
    assert assert_same(stage, batches(5, 4, num=5) if kind == "linear" else tokens(5, num=5)) > 0


def test_a_bias_shared_with_a_module_whose_weight_is_used_raw() -> None:
    raw, other = Raw(nn.Linear(4, 4)), nn.Linear(4, 4)
    other.bias = raw.module.bias
    third = nn.Linear(4, 4)
    third.weight = other.weight
    assert_same(nn.Sequential(third, nn.Tanh(), other, nn.Tanh(), raw), batches(5, 4, num=5))
    assert_same(nn.Sequential(raw, nn.Tanh(), other, nn.Tanh(), third), batches(5, 4, num=5))


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


CHANGES = [("stride", 2), ("padding", 2), ("padding", (1,)), ("dilation", 2), ("stride", (2,))]


@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_a_convolution_whose_option_was_set_to_one_number(name: str, value: object) -> None:
    stage = nn.Sequential(make(nn.Conv2d(3, 4, 3, padding=1), name, value), nn.Conv2d(4, 3, 1))
    assert assert_same(stage, batches(2, 3, 8, 8)) > 0


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


def test_under_autocast_a_call_within_a_transform_is_left_to_autograd_and_leaves_nothing_behind() -> None:
    class Tangent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return torch.func.jvp(self.linear, (x,), (torch.ones_like(x),))[1] + self.linear(x)

    assert_same(nn.Sequential(Tangent(), nn.Linear(6, 6, dtype=torch.bfloat16)), batches(3, 6))
    assert assert_same(nn.Sequential(Wrapped(nn.Linear(6, 6))), batches(3, 6)) > 0


class Wrapped(nn.Module):
    """Calls a layer under autocast."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = self.layer(x)
        return y


def test_a_module_that_is_not_called_keeps_no_gradient() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    assert assert_same(Half(), batches(3, 4)) > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_of_other_dtypes(dtype: torch.dtype) -> None:
    stage = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3, bias=False), nn.Conv1d(5, 2, 2)).to(dtype)
    assert assert_same(stage, [x.to(dtype) for x in batches(2, 5, 6)]) > 0


def test_autocast_inside_the_stage_with_shared_and_mixed_weights() -> None:
    class Amp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = torch.tanh(self.a(x) + self.b(x))
                return self.a(torch.tanh(self.a(y)))

    assert assert_same(Amp(), batches(3, 6)) > 0


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
