"""Split backward of stages that torch.compile has taken over: what waits for W, and that gradients are the same bits.

The reference is always the same stage compiled by the same backend, in a plain loop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.runtime.split_backward import SplitReport, Tape, prepare, prepared, unprepare
from plain_loop import plain_step
from tiers import others_nightly

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def small_work_is_deferred(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(prepared, "COMPILED_MERGE_WORK", 0)
    monkeypatch.setattr(prepared, "MERGE_WORK", 0)
    yield
    torch.set_num_threads(threads)
    torch.compiler.reset()


class Block(nn.Module):
    """Norms, attention, and an MLP: what is split, and what is not."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Recurrent(nn.Module):
    """Calls one layer again and again, twice of these alike, so that a compiler calls it once for both."""

    def __init__(self, times: int = 3) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(16, 16), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x + self.layer(x) + self.layer(x)


class Raw(nn.Module):
    """Uses a weight without calling its module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.layer(x)) @ self.layer.weight
        return y


class Words(nn.Module):
    """An embedding, of words made of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.table((x.abs() * 5).long().clamp(max=10))))
        return y


class Image(nn.Module):
    """Convolutions, one of which pads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.relu(self.second(torch.relu(self.first(x))))
        return y


class Checkpointed(nn.Module):
    """Runs a compiled block again in the backward."""

    def __init__(self, backend: str, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.block = torch.compile(Block(), backend=backend)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant)
        return y


Compile = Callable[[nn.Module], nn.Module]


def whole(backend: str) -> Compile:
    return lambda module: torch.compile(module, backend=backend)  # type: ignore[return-value]


def in_place(backend: str) -> Compile:
    def compile_it(module: nn.Module) -> nn.Module:
        module.compile(backend=backend)
        return module

    return compile_it


def as_it_is(module: nn.Module) -> nn.Module:
    return module


def equal_grads(p: Tensor, other: Tensor) -> bool:
    return p.grad is not None and other.grad is not None and torch.equal(p.grad, other.grad)


def assert_same(
    stage: nn.Module,
    compiled: Compile,
    *shape: int,
    waits: bool = True,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> SplitReport:
    """F0 I0 F1 I1 F2 I2 W0 ...: the bits of a plain loop, though every W comes two microbatches late."""
    twin = copy.deepcopy(stage)
    plain, split = compiled(stage), compiled(twin)
    report = prepare(split)
    late: list[Tape] = []
    for number in range(4):
        x, here = torch.randn(*shape), torch.Generator().manual_seed(number)
        wanted, given = x.clone().requires_grad_(), x.clone().requires_grad_()
        with around():
            y = plain(wanted)
        g = torch.randn(y.shape, generator=here).to(y.dtype)
        y.backward(g)
        tape = Tape(report.shared)
        with tape.recording(), around():
            z = split(given)
        assert torch.equal(y, z)
        tape.backward_input([z], [g])
        assert (wanted.grad is None) == (given.grad is None)
        assert wanted.grad is None or given.grad is None or torch.equal(wanted.grad, given.grad)
        assert (tape.deferred_bytes > 0) == waits
        late.append(tape)
        if len(late) > 2:
            late.pop(0).backward_weight()
    for tape in late:
        tape.backward_weight()
        assert tape.deferred_bytes == 0
    for (name, p), other in zip(stage.named_parameters(), twin.parameters()):
        assert equal_grads(p, other), name
    return report


BACKENDS = ("eager", "aot_eager")


STAGES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "blocks": (lambda: nn.Sequential(Block(), Block()), (2, 5, 16), True),
    "recurrent": (Recurrent, (3, 16), True),
    "raw": (Raw, (3, 16), False),
    "words": (Words, (4, 7), True),
    "image": (Image, (2, 2, 6, 6), True),
    "layer": (lambda: nn.Linear(6, 5), (3, 6), True),
}
"""By name what makes a stage, the shape of its input, and whether its weight gradients wait."""
BY_DAY = [
    ("recurrent", "eager"),
    ("words", "eager"),
    *((name, "aot_eager") for name in STAGES if name != "recurrent"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), others_nightly(product(STAGES, BACKENDS), BY_DAY))
def test_weight_gradients_of_a_compiled_stage_wait(name: str, backend: str) -> None:
    make, shape, waits = STAGES[name]
    report = assert_same(make(), whole(backend), *shape, waits=waits)
    share = report.shared.share()
    assert share is not None
    assert (share.share > 0.8) == waits
    assert not waits or all(name.endswith("weight") for name in report.deferred)


@pytest.mark.slow
def test_one_compiled_in_place_and_under_autocast() -> None:
    assert_same(Block(), in_place("aot_eager"), 2, 5, 16)
    assert_same(
        nn.Sequential(Block()), whole("aot_eager"), 2, 5, 16, around=lambda: torch.autocast("cpu", torch.bfloat16)
    )


def test_compiled_as_one_graph() -> None:
    assert_same(Block(), lambda module: torch.compile(module, backend="aot_eager", fullgraph=True), 2, 5, 16)  # type: ignore[arg-type, return-value]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "make",
    [lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)), Block],
    ids=["few kernels", "block"],
)
def test_by_the_compiler_that_writes_kernels(make: Callable[[], nn.Module]) -> None:
    """Each kernel is compiled as C++, for seconds."""
    assert_same(make(), whole("inductor"), 2, 5, 16)


def test_compiled_layers_among_others() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
            self.block = torch.compile(Block(), backend="aot_eager")

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.block(torch.tanh(self.first(x))))
            return y

    report = assert_same(Mixed(), as_it_is, 2, 5, 16)
    assert {"first.bias", "block._orig_mod.up.weight"} <= set(report.deferred)
    assert "block._orig_mod.up.bias" in report.shared.others


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_compiled_block_that_is_run_again_in_the_backward(use_reentrant: bool) -> None:
    report = assert_same(Checkpointed("aot_eager", use_reentrant), as_it_is, 2, 5, 16)
    share = report.shared.share()
    assert share is not None
    assert ("block._orig_mod.up.weight" in sum(share.reasons.values(), ())) == use_reentrant


def test_more_calls_than_one_number_counts() -> None:
    assert_same(Recurrent(times=6), whole("aot_eager"), 2, 16)


def test_prepared_put_back_and_prepared_again_around_runs() -> None:
    """A switch of the schedule while training: compiled code that is there already must notice."""
    stage = Block()
    twin = copy.deepcopy(stage)
    plain, split = (torch.compile(module, backend="aot_eager") for module in (stage, twin))
    for turn in range(4):
        x = torch.randn(2, 5, 16)
        plain(x).sum().backward()
        if turn % 2:
            report = prepare(split)
            tape = Tape(report.shared)
            with tape.recording():
                y = split(x)
            tape.backward_input([y.sum()], [None])
            assert tape.deferred_bytes > 0
            tape.backward_weight()
            unprepare(split)
        else:
            split(x).sum().backward()
    assert all(torch.equal(p.grad, other.grad) for p, other in zip(stage.parameters(), twin.parameters()))


@pytest.mark.slow
def test_whoever_runs_the_graph_otherwise_gets_every_gradient() -> None:
    stage = Block()
    compiled = torch.compile(stage, backend="aot_eager")
    x = torch.randn(2, 5, 16)
    wanted = torch.autograd.grad(compiled(x).sum(), list(stage.parameters()))
    report = prepare(compiled)
    tape = Tape(report.shared)
    with tape.recording():
        y = compiled(x)
    again = torch.autograd.grad(y.sum(), list(stage.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(wanted, again))
    assert not torch.equal(compiled(x), torch.zeros_like(x))  # without a tape: as the user compiled it


def test_hooks_on_a_weight_see_whole_gradients_in_time() -> None:
    stage = Block()
    seen: list[Tensor] = []
    stage.up.weight.register_hook(lambda grad: seen.append(grad.clone()))
    compiled = torch.compile(stage, backend="aot_eager")
    report = prepare(compiled)
    x = torch.randn(2, 5, 16)
    tape = Tape(report.shared)
    with tape.recording():
        y = compiled(x)
    tape.backward_input([y.sum()], [None])
    assert stage.up.weight.grad is not None
    assert stage.down.weight.grad is None
    assert len(seen) == 1
    assert torch.equal(seen[0], stage.up.weight.grad)
    tape.backward_weight()
    assert stage.down.weight.grad is not None


def test_gradients_that_are_to_be_differentiated_are_refused() -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = torch.compile(stage, backend="eager")
    report = prepare(compiled)
    tape = Tape(report.shared)
    x = torch.randn(3, 4, requires_grad=True)
    with tape.recording():
        y = compiled(x)
    with pytest.raises(RuntimeError, match=r"differentiated again.*leave this part uncompiled"):
        torch.autograd.grad(y.square().sum(), [stage[0].weight], create_graph=True)


def test_calls_that_never_came_are_an_error() -> None:
    """A graph that is replayed without Python, as by CUDA graphs, gives a gradient of the tap and no calls."""
    layer = nn.Linear(4, 4)
    report = prepare(torch.compile(layer, backend="eager"))
    tape = Tape(report.shared)
    with tape.recording():
        (prepared,) = report.shared.compiled
        assert prepared.tap is not None
        tap = prepared.tap[1]
    with pytest.raises(RuntimeError, match=r"without calling back.*use a schedule without W"):
        tap[0].backward()


def test_small_work_stays_in_the_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "COMPILED_MERGE_WORK", 1 << 30)
    report = assert_same(Block(), whole("aot_eager"), 2, 5, 16, waits=False)
    share = report.shared.share()
    assert share is not None
    assert share.share == 0
    assert any("compiled" in why for why in share.reasons)


@pytest.mark.slow
def test_a_pipeline_of_compiled_stages() -> None:
    stages = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()), Block(), nn.Sequential(Block(), nn.Linear(16, 1))]
    twins = copy.deepcopy(stages)
    compiled = [torch.compile(stage, backend="aot_eager") for stage in stages]
    schedule = ps.build("zb-h1", num_ranks=3, num_microbatches=6)
    x, y = torch.randn(12, 5, 16), torch.randn(12, 5, 1)
    with ps.Pipeline(compiled, schedule, loss_fn=nn.MSELoss()) as pipe:
        result = pipe.step(x, y, update=False)
        shares = pipe.deferred_share()
        assert set(shares) == {0, 1, 2}
        assert all(share.share > 0.9 for share in shares.values())
        assert not pipe.notices
    plain = nn.Sequential(*[torch.compile(twin, backend="aot_eager") for twin in twins])
    assert torch.equal(result.loss, plain_step(plain, x, y, 6, nn.MSELoss()))
    for stage, twin in zip(stages, twins):
        for p, other in zip(stage.parameters(), twin.parameters()):
            assert equal_grads(p, other)
