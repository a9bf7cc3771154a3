"""Mistakes that the split backward once made, and their neighbours: each was a silently wrong or unequal gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from split_loops import assert_same, batches, plain_loop, split_loop
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from penstock.runtime.split_backward import Tape, prepare, unprepare
from runtime_cases import Do

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("small_work_is_deferred")]


# -- gradients of gradients ---------------------------------------------------------------------------------


class Penalized(nn.Module):
    """A loss with the slope of a network by its input in it."""

    def __init__(self, net: nn.Module, cast: bool, kept: bool = True, cut: bool = False) -> None:
        super().__init__()
        self.net, self.cast, self.kept, self.cut = net, cast, kept, cut

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.cast):
            if x.is_floating_point():
                x = x.detach().requires_grad_() if self.cut else x * 1
            y = self.net(x) if self.kept else checkpoint(self.net, x, use_reentrant=False)
            by = x if x.is_floating_point() else next(self.net.parameters())
            (slope,) = torch.autograd.grad(y.float().square().sum(), by, create_graph=True)
        return y.float().sum() + slope.square().sum()


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)),
        (3, 4),
    ),
    "linear without bias": (lambda: nn.Sequential(nn.Linear(4, 6, False), nn.Tanh(), nn.Linear(6, 1, False)), (3, 4)),
    "three dimensions": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), (2, 3, 4)),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.Tanh(), nn.Conv1d(4, 2, 2)), (2, 3, 6)),
    "padded convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.Tanh(), nn.Conv2d(3, 2, 1)),
        (2, 2, 4, 4),
    ),
    "shared": (lambda: nn.Sequential(*[m for _ in range(2) for m in [nn.Linear(4, 4), nn.Tanh()]] * 2), (3, 4)),
}


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("cut", [True, False], ids=["of a leaf", "through"])
@pytest.mark.parametrize(
    ("name", "cast"),
    [(n, c) for n in NETS for c in (False, True)],
)
def test_gradient_penalty(name: str, cast: bool, kept: bool, cut: bool) -> None:
    make, shape = NETS[name]
    stage = nn.Sequential(nn.Linear(shape[-1], shape[-1]), Penalized(make(), cast, kept, cut))
    assert (assert_same(stage, batches(*shape)) > 0) is not cut


@pytest.mark.parametrize("cast", [False, True])
def test_gradient_penalty_of_an_embedding(cast: bool) -> None:
    table = nn.Embedding(7, 4)
    stage = Penalized(nn.Sequential(table, nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), cast)
    assert_same(stage, [torch.randint(7, (3, 2)) for _ in range(3)])


@pytest.mark.parametrize("cast", [False, True])
def test_an_inner_update_by_gradients_of_weights(cast: bool) -> None:
    """As in meta-learning: a step along the weights' own gradients, through which the loss is differentiated."""

    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        (net,) = layers
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            loss = net(torch.tanh(net(x))).float().square().mean()
            slopes = torch.autograd.grad(loss, [net.weight, net.bias], create_graph=True)
            weight, bias = (p - 0.1 * g for p, g in zip(net.parameters(), slopes))
            return F.linear(x, weight, bias).float()

    assert_same(Do(run, nn.Linear(4, 4)), batches(3, 4))


# -- hooks --------------------------------------------------------------------------------------------------


def main_grad(p: nn.Parameter, log: list[Tensor]) -> None:
    """As Megatron keeps gradients: taken from `.grad` as soon as autograd has added to it."""
    node = p.expand_as(p).grad_fn.next_functions[0][0]
    kept.append(node)

    def take(*_: object) -> None:
        assert p.grad is not None
        log.append(p.grad.clone())
        p.grad = None

    node.register_hook(take)


kept: list[object] = []


def before_adding(p: nn.Parameter, log: list[Tensor]) -> None:
    node = get_gradient_edge(p).node
    kept.append(node)
    node.register_prehook(lambda grads: log.append(grads[0].clone()))


def on_tensor(p: nn.Parameter, log: list[Tensor]) -> None:
    p.register_hook(lambda g: log.append(g.clone()))


def after_adding(p: nn.Parameter, log: list[Tensor]) -> None:
    p.register_post_accumulate_grad_hook(lambda q: log.append(q.grad.clone()))


def on_several(p: nn.Parameter, log: list[Tensor]) -> None:
    register_multi_grad_hook([p], lambda grads: log.append(grads[0].clone()))


def on_any(p: nn.Parameter, log: list[Tensor]) -> None:
    register_multi_grad_hook([p], lambda g: log.append(g.clone()), mode="any")


HOOKS = {f.__name__: f for f in (main_grad, before_adding, on_tensor, after_adding, on_several, on_any)}


def hooked_loops(
    stage: nn.Module, hook: Callable[[nn.Module, list[Tensor]], None], inputs: list[Tensor], prepared: bool
) -> None:
    """Both loops, with a hook that logs gradients, show it the same ones."""
    twin = copy.deepcopy(stage)
    if prepared:
        prepare(twin)
    want: list[Tensor] = []
    got: list[Tensor] = []
    hook(stage, want)
    hook(twin, got)
    expected, found = plain_loop(stage, inputs), split_loop(twin, inputs)
    for name, grad in expected.items():
        other = found[name]
        assert (grad is None) == (other is None), name
        assert grad is None or torch.equal(grad, other), name
    assert len(want) == len(got) > 0
    assert all(torch.equal(a, b) for a, b in zip(want, got))


@pytest.mark.parametrize("prepared", [False, True], ids=["hook first", "prepared first"])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("kind", list(HOOKS))
def test_whoever_waits_for_a_weights_gradient_sees_it(kind: str, name: str, prepared: bool) -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    hooked_loops(stage, lambda s, log: HOOKS[kind](getattr(s[2], name), log), batches(3, 4), prepared)


@pytest.mark.parametrize("where", ["itself", "around it", "before"])
def test_hooks_of_modules_see_the_weights_gradient(where: str) -> None:
    """What a hook of a module, or of one around it, reads in `.grad` is what a plain backward left there."""

    def hook(stage: nn.Module, log: list[Tensor]) -> None:
        def note(*_: object) -> None:
            log.append(torch.zeros(()) if weight.grad is None else weight.grad.clone())

        weight = stage[1][0].weight
        if where == "before":
            stage[1][0].register_full_backward_pre_hook(note)
        else:
            (stage[1] if where == "around it" else stage[1][0]).register_full_backward_hook(note)

    stage = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
    hooked_loops(stage, hook, batches(3, 4), True)


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_comes_between_two_microbatches(kind: str) -> None:
    class Late(nn.Module):
        """Registers a hook on its own weight in its third forward."""

        def __init__(self, log: list[Tensor]) -> None:
            super().__init__()
            self.linear, self.calls, self.log = nn.Linear(4, 4), 0, log

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                HOOKS[kind](self.linear.weight, self.log)
            return self.linear(x)

    def hook(stage: nn.Module, log: list[Tensor]) -> None:
        stage[0].log = log

    # The split loop runs F2 between I0 and I1: the hook must see microbatch 1 there, as in a loop in that order.
    stage, inputs = nn.Sequential(Late([]), nn.Tanh(), nn.Linear(4, 4)), batches(3, 4, num=4)
    twin = copy.deepcopy(stage)
    want: list[Tensor] = []
    got: list[Tensor] = []
    hook(stage, want)
    hook(twin, got)
    losses = [stage(x).square().sum() for x in inputs[:2]]
    losses[0].backward()
    for m in (2, 3):
        losses.append(stage(inputs[m]).square().sum())
        losses[m - 1].backward()
    losses[3].backward()
    found = split_loop(twin, inputs)
    for name, p in stage.named_parameters():
        assert (p.grad is None) == (found[name] is None), name
        assert p.grad is None or torch.equal(p.grad, found[name]), name
    assert len(want) == len(got) == 3
    assert all(torch.equal(a, b) for a, b in zip(want, got))


# -- second uses --------------------------------------------------------------------------------------------


def sometimes(layer: nn.Module, uses: int, first: bool) -> nn.Module:
    """Uses a layer's weight again, by itself, in the microbatches whose first number says so."""

    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        def again(x: Tensor) -> Tensor:
            for _ in range(uses):
                x = torch.tanh(F.linear(x, layers[0].weight) + layers[0].bias)
            return x

        more = x.flatten()[0] > 5
        x = again(x) if first and more else x
        x = torch.tanh(layers[0](x))
        return again(x) if not first and more else x

    return Do(run, layer)


def marked(inputs: list[Tensor], where: tuple[int, ...]) -> list[Tensor]:
    for m in where:
        inputs[m].flatten()[0] = 6.0
    return inputs


@pytest.mark.parametrize("uses", [1, 2, 3])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("where", [(3,), (2, 4), (1,)])
def test_a_second_use_in_some_microbatches(uses: int, first: bool, where: tuple[int, ...]) -> None:
    stage = nn.Sequential(sometimes(nn.Linear(4, 4), uses, first), nn.Linear(4, 4))
    assert assert_same(stage, marked(batches(3, 4, num=6), where)) > 0


def test_a_second_use_of_a_weight_that_two_modules_share() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    stage = nn.Sequential(sometimes(a, 2, False), b, nn.Tanh(), b)
    assert assert_same(stage, marked(batches(3, 4, num=6), (2, 4))) > 0


@pytest.mark.parametrize("how", ["vmap", "plain", "beside"])
def test_a_module_that_waits_in_some_microbatches_alone(how: str) -> None:
    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        (linear,) = layers
        if x.flatten()[0] < 5:
            return linear(x)
        match how:
            case "vmap":
                return torch.func.vmap(linear)(x)
            case "plain":
                return nn.Linear.forward(linear, x)
        return F.linear(x.detach(), linear.weight) + linear(x)

    stage = nn.Sequential(Do(run, nn.Linear(4, 4)), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    assert assert_same(stage, marked(batches(3, 4, num=6), (2, 3, 5))) > 0


@pytest.mark.parametrize("inner", ["first", "last", "between"])
def test_a_module_also_called_in_a_reentrant_checkpoint(inner: str) -> None:
    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        if inner != "first":
            x = torch.tanh(layers[0](x))
        x = torch.tanh(checkpoint(layers[0], x, use_reentrant=True))
        return x if inner == "last" else torch.tanh(layers[0](x))

    assert_same(nn.Sequential(nn.Linear(4, 4), Do(run, nn.Linear(4, 4)), nn.Linear(4, 4)), batches(3, 4))


# -- whole backwards among split ones ------------------------------------------------------------------------


def test_a_whole_backward_between_i_and_w_of_earlier_microbatches() -> None:
    """B adds to a gradient after the Ws before it would have, though they are still to come."""
    stage = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    twin, inputs = copy.deepcopy(stage), batches(3, 4, num=4)
    want = plain_loop(stage, inputs)
    prepare(twin)
    tapes = [Tape() for _ in inputs]
    for m, tape in enumerate(tapes):
        with tape.recording():
            loss = twin(inputs[m]).square().sum()
        if m == 2:
            loss.backward()
        else:
            tape.backward_input([loss], [None])
    for m in (0, 1, 3):
        tapes[m].backward_weight()
    assert all(torch.equal(p.grad, want[name]) for name, p in twin.named_parameters())


# -- transformers' Conv1D ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (4,), (1, 4), (1, 1, 4)])
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("cast", [False, True])
def test_conv1d_of_transformers_waits(shape: tuple[int, ...], column_major: bool, cast: bool) -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D

    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        first, second, last = layers
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = second(torch.tanh(first(x)))
            return last(second(torch.tanh(first(y)))).float()

    stage = Do(run, conv1d(6, 4), conv1d(4, 6), nn.Linear(4, 4))
    if column_major:
        stage.layers[0].weight = nn.Parameter(stage.layers[0].weight.detach().t().contiguous().t())
    assert not prepare(stage).shared.others
    unprepare(stage)
    assert assert_same(stage, batches(*shape)) > 0
    column = nn.Sequential(Do(lambda _, x: x.t()), conv1d(3, 4))
    assert assert_same(column, batches(4, 5)) > 0


# -- changes in place -----------------------------------------------------------------------------------------


def changed_in_place(_: nn.ModuleList, y: Tensor) -> Tensor:
    """Changes its input, of which it has made a view."""
    view = y.flatten()[::2] if y.dim() < 2 else y.transpose(-1, -2)
    y = y.mul_(1.5).add_(0.25)
    return y + torch.tanh(y) * 0.3 + (view * view).sum() * 0.01 + view.mean() * 0.5


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(4, 4), (2, 3, 4)),
        (lambda: nn.Linear(4, 4), (2, 2, 3, 4)),
        (lambda: nn.Linear(4, 4), (5, 4)),
        (lambda: nn.Linear(4, 4), (4,)),
        (lambda: nn.Linear(4, 4, bias=False), (2, 3, 4)),
        (lambda: nn.Sequential(Do(lambda _, x: x.transpose(0, 1)), nn.Linear(4, 4)), (2, 3, 4)),
        (lambda: nn.Conv1d(3, 4, 1), (3, 5)),
        (lambda: nn.Conv1d(3, 4, 1), (2, 3, 5)),
        (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (3, 5, 5)),
    ],
)
def test_an_output_changed_in_place_after_a_view_of_it(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Where the plain module returns a view, the sum of what the change and the view give goes by its base."""
    stage = nn.Sequential(make(), Do(changed_in_place), nn.Flatten(0), nn.Tanh())
    assert assert_same(stage, batches(*shape)) > 0
