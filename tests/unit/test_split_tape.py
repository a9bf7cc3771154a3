"""One tape's F, I and W: the order they come in, what is held between, what else may happen around them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from split_loops import assert_same, batches, leaf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.runtime.split_backward import SplitError, Tape, prepare, prepared

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("small_work_is_deferred")]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def mlp(width: int = 6) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.3), nn.Linear(2 * width, width)
    )


def record(stage: nn.Module, x: Tensor) -> tuple[Tape, Tensor]:
    tape = Tape()
    with tape.recording():
        y = stage(x)
    return tape, y


# -- order --------------------------------------------------------------------------------------------------


def test_w_alone_touches_the_deferred_weights() -> None:
    stage = mlp()
    prepare(stage)
    x = leaf(torch.randn(2, 6))
    tape, y = record(stage, x)
    tape.backward_input([y], [torch.ones_like(y)])
    assert x.grad is not None
    assert stage[0].weight.grad is not None
    assert stage[1].weight.grad is None
    assert stage[4].bias.grad is None
    tape.backward_weight()
    assert all(p.grad is not None for p in stage.parameters())


# -- outputs ------------------------------------------------------------------------------------------------


def test_outputs_without_a_gradient_take_no_part() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.a(x), self.b(x), x.detach()

    stage = Two()
    prepare(stage)
    tape = Tape()
    with tape.recording():
        outputs = stage(torch.randn(2, 3))
    tape.backward_input(outputs, [torch.ones(2, 3), None, torch.ones(2, 3)])
    tape.backward_weight()
    assert stage.a.weight.grad is not None
    assert stage.b.weight.grad is None


def test_a_loss_beside_other_outputs_has_gradient_one() -> None:
    stage = nn.Linear(3, 3)
    prepare(stage)
    x = leaf(torch.randn(2, 3))
    tape, y = record(stage, x)
    tape.backward_input([y.sum(), y], [None, torch.ones_like(y)])
    tape.backward_weight()
    want = torch.autograd.grad(2 * stage(x).sum(), [x, stage.weight])
    assert all(torch.allclose(a, b) for a, b in zip(want, [x.grad, stage.weight.grad]))


def test_no_gradient_at_all() -> None:
    stage = mlp()
    prepare(stage)
    tape, y = record(stage, torch.randn(2, 6))
    tape.backward_input([y], [None])
    tape.backward_weight()
    assert all(p.grad is None for p in stage.parameters())


def test_a_gradient_that_ends_before_the_module_leaves_none() -> None:
    class Ends(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, g: Tensor) -> None:
            return None

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return Ends.apply(self.linear(x)) + x

    assert_same(Stage(), batches(2, 3))


# -- what is held -------------------------------------------------------------------------------------------


def test_held_bytes_count_each_memory_once() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 8), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) * self.k(x)

    stage = Fork()
    prepare(stage)
    tape, y = record(stage, torch.randn(5, 4))
    assert tape.deferred_bytes == 0
    tape.backward_input([y], [torch.randn(5, 8)])
    assert tape.deferred_bytes == 4 * (5 * 4 + 2 * 5 * 8)
    tape.backward_weight()
    assert tape.deferred_bytes == 0


def test_i_frees_what_w_does_not_need() -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Tanh(), nn.Linear(4, 4))
    outputs: list[weakref.ref[Tensor]] = []
    nodes: list[weakref.ref[object]] = []

    def watch(_module: nn.Module, _inputs: object, y: Tensor) -> None:
        outputs.append(weakref.ref(y))
        if isinstance(y.grad_fn, torch.autograd.function.FunctionCtx):
            nodes.append(weakref.ref(y.grad_fn))

    for module in stage:
        module.register_forward_hook(watch)
    prepare(stage)
    tape, y = record(stage, torch.randn(5, 4))
    tape.backward_input([y], [torch.randn(5, 4)])
    del y
    gc.collect()
    assert len(nodes) == 2
    assert not any(node() for node in nodes)
    assert not any(ref() is not None for n, ref in enumerate(outputs) if n != 2)
    assert tape.deferred_bytes == 4 * 4 * (5 * 4)
    tape.backward_weight()


def test_a_received_gradient_overwritten_before_w_is_noticed() -> None:
    stage = nn.Linear(4, 4)
    prepare(stage)
    for victim in (0, 1):
        x, g = torch.randn(5, 4), torch.randn(5, 4)
        tape, y = record(stage, x)
        tape.backward_input([y], [g])
        (x, g)[victim].add_(1)
        with pytest.raises(SplitError, match="modified in place between I and W"):
            tape.backward_weight()


def test_gradients_that_share_memory_with_what_is_held() -> None:
    """The position's gradient is the output's own memory, to which the next I adds in place."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Linear(4, 4)
            self.position = nn.Parameter(torch.randn(20))

        def forward(self, x: Tensor) -> Tensor:
            return self.token(x) + self.position.view(5, 4)

    assert assert_same(Stage(), batches(5, 4)) > 0


# -- in place -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (4,)])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_may_be_changed_in_place(shape: tuple[int, ...], bias: bool) -> None:
    stage = nn.Sequential(nn.Linear(4, 5, bias), nn.ReLU(inplace=True), nn.Linear(5, 5), nn.ReLU(inplace=True))
    assert assert_same(stage, batches(*shape)) > 0


def test_an_input_changed_in_place_before_i_is_noticed() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1
            y = self.linear(h)
            h.add_(1)
            return y

    stage = Stage()
    prepare(stage)
    tape, y = record(stage, leaf(torch.randn(2, 4)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        tape.backward_input([y], [torch.ones(2, 4)])


# -- other ways through the graph ---------------------------------------------------------------------------


def test_recording_without_gradients_is_harmless() -> None:
    stage = mlp().eval()
    x = torch.randn(2, 6)
    want = stage(x)
    prepare(stage)
    with torch.no_grad():
        tape, y = record(stage, x)
    with torch.inference_mode():
        _, z = record(stage, x)
    assert torch.equal(want, y)
    assert torch.equal(want, z)
    assert not y.requires_grad
    tape.backward_input([y], [torch.ones_like(y)])
    tape.backward_weight()
    assert all(p.grad is None for p in stage.parameters())


def test_a_plain_backward_of_a_recorded_forward_is_whole() -> None:
    stage = mlp().eval()
    x = torch.randn(2, 6)
    stage(x).sum().backward()
    want = [p.grad for p in stage.parameters()]
    stage.zero_grad()
    prepare(stage)
    _, y = record(stage, x)
    y.sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(want, stage.parameters()))


def test_autograd_inside_the_forward() -> None:
    class Penalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            y = self.net(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y.sum() + slope.square().sum()

    assert_same(Penalized(), batches(3, 4))


@pytest.mark.filterwarnings("ignore")
def test_function_transforms_inside_the_forward() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(self.linear)(x)

    assert_same(Mapped(), batches(3, 4))


def test_functional_call_with_other_tensors() -> None:
    class Borrowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            own = {name: p * 2 for name, p in self.linear.named_parameters()}
            return torch.func.functional_call(self.linear, own, (x,))

    assert_same(Borrowed(), batches(3, 4))


def test_the_modules_own_error_reaches_the_user() -> None:
    stage = mlp()
    prepare(stage)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        record(stage[1], torch.randn(2, 5))
    with pytest.raises(RuntimeError, match="same dtype"):
        record(stage[1], torch.randn(2, 6).double())


# -- checkpoint ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant: bool) -> None:
    blocks = [Checkpointed(mlp(), reentrant) for _ in range(2)]
    stage = nn.Sequential(nn.Linear(6, 6), *blocks, nn.Linear(6, 6))
    held = assert_same(stage, batches(2, 3, 6))
    outside = 6 * 4 * 4 * (2 * 3 * 6)  # runs, tensors, bytes, elements: the two linears around the blocks
    assert held == outside if reentrant else held > outside


def test_checkpoint_with_a_shared_linear_and_convolution() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.conv = nn.Linear(6, 6), nn.Conv1d(3, 3, 3, padding=1, padding_mode="circular")

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.conv(F.relu(self.linear(x), inplace=True)))

    shared = Twice()
    stage = nn.Sequential(Checkpointed(shared, False), shared, Checkpointed(shared, False))
    assert assert_same(stage, batches(2, 3, 6)) > 0


def test_checkpoint_holds_no_activations_before_i() -> None:
    inner = mlp(16)
    stage = Checkpointed(inner, False)
    alive: list[weakref.ref[Tensor]] = []
    inner[2].register_forward_hook(lambda _m, _x, y: alive.append(weakref.ref(y)))
    prepare(stage)
    tape, y = record(stage, leaf(torch.randn(8, 16)))
    gc.collect()
    assert [ref() for ref in alive] == [None]
    tape.backward_input([y], [torch.ones(8, 16)])
    tape.backward_weight()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_under_autocast(reentrant: bool) -> None:
    class Amp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 6), Checkpointed(mlp(), reentrant), nn.Linear(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x)

    assert assert_same(Amp(), batches(2, 3, 6)) > 0


# -- small work ---------------------------------------------------------------------------------------------


def test_small_work_is_done_in_i_until_a_larger_input_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MERGE_WORK", 100)
    stage = nn.Linear(4, 4)
    sizes: list[int] = []
    prepare(stage)
    for rows in (3, 8, 3):
        tape, y = record(stage, torch.randn(rows, 4))
        tape.backward_input([y], [torch.ones(rows, 4)])
        sizes.append(tape.deferred_bytes)
        tape.backward_weight()
    assert sizes == [0, 4 * 2 * 8 * 4, 4 * 2 * 3 * 4]


def test_ragged_microbatches_around_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MERGE_WORK", 100)
    inputs = [torch.randn(rows, 4) for rows in (2, 9, 9, 3, 1)]
    assert assert_same(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), inputs) > 0
