"""One tape's F, I and W: the order they come in, what is held between, what else may happen around them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from split_loops import assert_same, batches, leaf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.runtime.split_backward import SplitError, Tape, prepare, prepared
from runtime_cases import Do

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("small_work_is_deferred")]


def checkpointed(inner: nn.Module, reentrant: bool) -> nn.Module:
    return Do(lambda ls, x: checkpoint(ls[0], x, use_reentrant=reentrant), inner)


def mlp(width: int = 6) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.3), nn.Linear(2 * width, width)
    )


def record(stage: nn.Module, x: Tensor) -> tuple[Tape, Any]:
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
    stage = Do(lambda ls, x: (ls[0](x), ls[1](x), x.detach()), nn.Linear(3, 3), nn.Linear(3, 1))
    prepare(stage)
    tape, outputs = record(stage, torch.randn(2, 3))
    tape.backward_input(outputs, [torch.ones(2, 3), None, torch.ones(2, 3)])
    tape.backward_weight()
    assert stage.layers[0].weight.grad is not None
    assert stage.layers[1].weight.grad is None


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


# -- what is held -------------------------------------------------------------------------------------------


def test_held_bytes_count_each_memory_once() -> None:
    stage = Do(lambda ls, x: ls[0](x) * ls[1](x), nn.Linear(4, 8), nn.Linear(4, 8))
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


# -- in place -----------------------------------------------------------------------------------------------


def test_an_input_changed_in_place_before_i_is_noticed() -> None:
    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        h = x * 1
        y: Tensor = layers[0](h)
        h.add_(1)
        return y

    stage = Do(run, nn.Linear(4, 4))
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
    blocks = [checkpointed(mlp(), reentrant) for _ in range(2)]
    stage = nn.Sequential(nn.Linear(6, 6), *blocks, nn.Linear(6, 6))
    held = assert_same(stage, batches(2, 3, 6))
    outside = 6 * 4 * 4 * (2 * 3 * 6)  # runs, tensors, bytes, elements: the two linears around the blocks
    assert held == outside if reentrant else held > outside


def test_checkpoint_holds_no_activations_before_i() -> None:
    inner = mlp(16)
    stage = checkpointed(inner, False)
    alive: list[weakref.ref[Tensor]] = []
    inner[2].register_forward_hook(lambda _m, _x, y: alive.append(weakref.ref(y)))
    prepare(stage)
    tape, y = record(stage, leaf(torch.randn(8, 16)))
    gc.collect()
    assert [ref() for ref in alive] == [None]
    tape.backward_input([y], [torch.ones(8, 16)])
    tape.backward_weight()


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
