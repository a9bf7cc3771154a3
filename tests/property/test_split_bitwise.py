"""The split backward gives every gradient to the last bit, whatever the shapes, the layouts and the op order."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock.runtime.split_backward.prepared as slot_module
from penstock.runtime.split_backward import Tape, prepare
from tiers import examples

pytestmark = pytest.mark.property

Grads = dict[str, Tensor | None]


@pytest.fixture(autouse=True, scope="module")
def everything_is_worth_deferring() -> Iterator[None]:
    before, threads = slot_module.MERGE_WORK, torch.get_num_threads()
    slot_module.MERGE_WORK = 0
    torch.set_num_threads(1)
    yield
    slot_module.MERGE_WORK = before
    torch.set_num_threads(threads)


class Layout(nn.Module):
    """Turns a contiguous tensor into one laid out otherwise."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "swapped" if x.dim() > 1:
                return x.transpose(0, 1).contiguous().transpose(0, 1)
            case "column-major" if x.dim() > 1:
                return x.transpose(-1, -2).contiguous().transpose(-1, -2)
            case "strided":
                return torch.stack([x, x], -1)[..., 0]
            case "narrowed":
                return torch.cat([x, x], -1)[..., : x.shape[-1]]
            case "expanded" if x.dim() > 1:
                return x[:1].expand(x.shape)
        return x


class Loss(nn.Module):
    """Scalars whose gradients arrive in different layouts: full, broadcast, transposed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, y: Tensor) -> Tensor:
        match self.kind:
            case "sum":
                return y.sum()
            case "row mean" if y.dim() > 1:
                return (y.mean(0) ** 2).sum()
            case "transposed" if y.dim() > 1:
                return (y.transpose(0, 1).contiguous() ** 2).sum()
        return (y * torch.sin(torch.arange(y.numel(), dtype=torch.float32)).view(y.shape)).sum()


def loop(stage: nn.Module, inputs: list[Tensor], amp: bool, first: bool = False) -> tuple[list[Tensor | None], Grads]:
    got = []
    for x in inputs:
        x = leaf(x, first)
        with torch.autocast("cpu", torch.bfloat16) if amp else nullcontext():
            loss = stage(x)
        loss.backward()
        got.append(x.grad)
    return got, {name: p.grad for name, p in stage.named_parameters()}


def split(
    stage: nn.Module, inputs: list[Tensor], amp: bool, order: list[int], first: bool = False
) -> tuple[list[Tensor | None], Grads]:
    """F, I, W in the order that `order` draws: the next op of the microbatch's kind, if it is its turn."""
    prepare(stage)
    leaves = [leaf(x, first) for x in inputs]
    tapes = [Tape() for _ in inputs]
    losses: list[Tensor] = []
    done = {"F": 0, "I": 0, "W": 0}
    while done["W"] < len(inputs):
        kind = "FIW"[order.pop() if order else 2]
        if kind == "W" and done["W"] == done["I"]:
            kind = "I"
        if kind == "I" and done["I"] == done["F"]:
            kind = "F"
        if kind == "F" and done["F"] == len(inputs):
            kind = "I" if done["I"] < len(inputs) else "W"
        m = done[kind]
        done[kind] += 1
        if kind == "F":
            with tapes[m].recording(), torch.autocast("cpu", torch.bfloat16) if amp else nullcontext():
                losses.append(stage(leaves[m]))
        elif kind == "I":
            tapes[m].backward_input([losses[m]], [None])
        else:
            tapes[m].backward_weight()
            assert tapes[m].deferred_bytes == 0
    return [x.grad for x in leaves], {name: p.grad for name, p in stage.named_parameters()}


def leaf(x: Tensor, first: bool) -> Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point() and not first)


def check(stage: nn.Module, inputs: list[Tensor], order: list[int], amp: bool, first: bool = False) -> None:
    twin = copy.deepcopy(stage)
    want_inputs, want = loop(stage, inputs, amp, first)
    got_inputs, got = split(twin, inputs, amp, list(order), first)
    for m, (a, b) in enumerate(zip(want_inputs, got_inputs)):
        assert same(a, b), f"input of microbatch {m}"
    for name in want:
        assert same(want[name], got[name]), name


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype


layouts = st.sampled_from(["plain", "swapped", "column-major", "strided", "narrowed", "expanded"])
losses = st.sampled_from(["weighted", "sum", "row mean", "transposed"])
orders = st.lists(st.integers(0, 2), max_size=12)
sizes = st.one_of(st.integers(1, 4), st.sampled_from([7, 16, 33, 64]))


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(
    shape=st.lists(sizes, max_size=3),
    width=st.tuples(sizes, sizes),
    bias=st.booleans(),
    frozen=st.sampled_from(["", "weight", "bias", "both"]),
    column_major=st.booleans(),
    before=layouts,
    loss=losses,
    amp=st.booleans(),
    double=st.booleans(),
    first=st.booleans(),
    order=orders,
    seed=st.integers(0, 99),
)
@example([], (1, 16), False, "", False, "plain", "weighted", False, False, False, [], 0)
@example([64], (33, 17), True, "", True, "plain", "weighted", False, True, False, [], 0)
@example([64], (33, 17), True, "", False, "column-major", "weighted", False, True, False, [], 0)
@example([64], (33, 17), True, "", False, "plain", "row mean", False, True, True, [], 0)
@example([8, 8], (33, 17), True, "", False, "swapped", "transposed", False, True, False, [], 0)
def test_linear(
    shape: list[int],
    width: tuple[int, int],
    bias: bool,
    frozen: str,
    column_major: bool,
    before: str,
    loss: str,
    amp: bool,
    double: bool,
    first: bool,
    order: list[int],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    layer = nn.Linear(*width, bias=bias)
    if column_major:
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    layer.weight.requires_grad_(frozen not in ("weight", "both"))
    if bias:
        layer.bias.requires_grad_(frozen not in ("bias", "both"))
    stage = nn.Sequential(Layout(before), layer, nn.Tanh(), nn.Linear(width[1], 3), Loss(loss))
    inputs = [torch.randn(*shape, width[0]) for _ in range(3)]
    if double and not amp:
        stage, inputs = stage.double(), [x.double() for x in inputs]
    if first and not any(p.requires_grad for p in layer.parameters()):
        layer.weight.requires_grad_()
    check(stage, inputs, order, amp, first)


@settings(max_examples=examples(80), deadline=None)
@given(
    dims=st.integers(1, 3),
    batch=st.integers(0, 3),
    groups=st.sampled_from([1, 2]),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.sampled_from([0, 1, "same", "valid"]),
    dilation=st.integers(1, 2),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    bias=st.booleans(),
    channels_last=st.booleans(),
    amp=st.booleans(),
    double=st.booleans(),
    order=orders,
)
def test_convolution(
    dims: int,
    batch: int,
    groups: int,
    channels: tuple[int, int],
    kernel: int,
    stride: int,
    padding: int | str,
    dilation: int,
    mode: str,
    bias: bool,
    channels_last: bool,
    amp: bool,
    double: bool,
    order: list[int],
) -> None:
    torch.manual_seed(0)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    stride = 1 if padding == "same" else stride
    come, go = channels[0] * groups, channels[1] * groups
    layer = kind(come, go, kernel, stride, padding, dilation, groups, bias, mode)
    size = [come, *[6, 7, 5][:dims]]
    inputs = [torch.randn(*([batch] if batch else []), *size) for _ in range(3)]
    stage = nn.Sequential(layer, nn.Tanh(), Loss("weighted"))
    if channels_last and dims == 2:
        stage = stage.to(memory_format=torch.channels_last)
    if double and not amp:
        stage, inputs = stage.double(), [x.double() for x in inputs]
    check(stage, inputs, order, amp)


@settings(max_examples=examples(80), deadline=None)
@given(
    rows=st.integers(2, 9),
    width=sizes,
    shape=st.lists(st.integers(1, 5), max_size=3),
    padding=st.sampled_from([None, 0, -1]),
    by_frequency=st.booleans(),
    sparse=st.booleans(),
    max_norm=st.sampled_from([None, 0.5]),
    tied=st.booleans(),
    loss=losses,
    amp=st.booleans(),
    order=orders,
)
def test_embedding(
    rows: int,
    width: int,
    shape: list[int],
    padding: int | None,
    by_frequency: bool,
    sparse: bool,
    max_norm: float | None,
    tied: bool,
    loss: str,
    amp: bool,
    order: list[int],
) -> None:
    torch.manual_seed(0)
    sparse = sparse and not tied and not by_frequency and bool(shape)
    table = nn.Embedding(rows, width, padding, max_norm, scale_grad_by_freq=by_frequency, sparse=sparse)
    head = nn.Linear(width, rows, bias=False)
    if tied:
        if max_norm is not None:
            return
        head.weight = table.weight
    stage = nn.Sequential(table, nn.Tanh(), head, Loss(loss))
    inputs = [torch.randint(rows, shape) for _ in range(3)]
    if sparse:
        want, got = copy.deepcopy(stage), stage
        loop(want, inputs, amp)
        split(got, inputs, amp, list(order))
        assert torch.equal(want[0].weight.grad.to_dense(), got[0].weight.grad.to_dense())
        return
    check(stage, inputs, order, amp)
