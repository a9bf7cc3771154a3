"""Activations that wait in host memory: the same loss and gradients, less held, and what stays is said."""

from __future__ import annotations

import copy
import gc
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from offload_programs import offloaded
from penstock.control import Configuration
from penstock.control.configuration import peaks, with_host_copies
from penstock.dispatch import Dispatch
from penstock.planning import slow_link_schedule
from penstock.planning.joint.away import with_host_memory
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.stage.host_memory import SavedSlot
from penstock.runtime.stage.registered_ops import require_round_trips
from penstock.schedule import Op
from penstock.schedule.async_ops import without_offload
from plain_loop import differences, gradients, plain_step
from runtime_cases import CASES, compare
from tiers import in_turn

pytestmark = pytest.mark.unit


RUNS = [
    ("1f1b", 4, "dynamic", False, 1),
    ("zb-h1", 3, "frozen", True, 2),
    ("interleaved-1f1b", 2, "frozen", False, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_model_as_the_plain_loop(name: str) -> None:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for schedule, ranks, dispatch, defer, every in in_turn(RUNS, list(CASES).index(name)):
            built = offloaded(ps.build(schedule, ranks, 4), every)
            found += [f"{schedule} {ranks} {dispatch} {every}: {d}" for d in compare(name, built, dispatch, defer)]
    assert not found, "\n".join(found)


class Doubling(nn.Module):
    """Changes views in place, and saves views of one tensor, expanded ones among them."""

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, x * 2], 1)
        left, right = both[:, : x.shape[1]], both[:, x.shape[1] :]
        wide = left.mul_(1.5).sin() * right.t().contiguous().t().cos() * right
        return wide + wide.mean(1, keepdim=True).expand_as(wide).exp()


def stages(num: int = 3) -> list[nn.Module]:
    torch.manual_seed(3)
    made: list[nn.Module] = []
    for s in range(num):
        made.append(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8), Doubling()))
        if s % 2:
            made[-1] = nn.Sequential(nn.LayerNorm(8), nn.ReLU(inplace=True), made[-1], nn.BatchNorm1d(8), nn.Tanh())
    return made


@pytest.mark.parametrize(
    ("name", "num_ranks", "dispatch", "every"),
    [
        ("1f1b", 3, "frozen", 1), ("1f1b", 1, "frozen", 2), ("gpipe", 3, "hinted", 1), ("zb-h1", 3, "frozen", 2),
        ("zb-h1", 3, "dynamic", 1), ("zb-v", 2, "frozen", 1), ("chimera", 2, "frozen", 1),
    ],
)  # fmt: skip
def test_as_the_plain_loop(name: str, num_ranks: int, dispatch: str, every: int) -> None:
    built = ps.build(name, num_ranks, 4)
    schedule = offloaded(built, every)
    plain, piped = stages(built.num_stages), stages(built.num_stages)
    pipe = ps.Pipeline(piped, schedule, loss_fn=nn.MSELoss(), dispatch=dispatch)
    whole = ps.Pipeline(plain, built, loss_fn=nn.MSELoss(), dispatch="frozen")
    for _ in range(2):
        x, y = torch.randn(12, 8), torch.randn(12, 8)
        want = whole.step(x.clone(), y, update=False).loss
        assert torch.equal(want, pipe.step(x.clone(), y, update=False).loss)
    assert not differences(gradients(plain), gradients(piped))
    assert pipe.host_memory()[0] > 0
    kinds = [timed.op.kind for timed in pipe.timeline().ops]
    assert (
        kinds.count("OFFLOAD")
        == kinds.count("RELOAD")
        == sum(op.kind == "OFFLOAD" for r in schedule.order for op in r)
    )


def test_a_plan_is_run_to_the_bit_and_holds_less() -> None:
    costs = replace(ps.Costs.uniform(3, f=10, i=10, w=10), other={"OFFLOAD": 2.0, "RELOAD": 2.0})
    plan = ps.plan(costs, 3, 6, ps.Links({(1, 2): 40.0}), max_in_flight=2, offload=4, time_limit=0.5)
    plain, piped = stages(), stages()
    x, y = torch.randn(12, 8), torch.randn(12, 8)
    want = plain_step(plain, x.clone(), y, 6, nn.MSELoss(), step=1)
    pipe = ps.Pipeline(piped, plan.schedule, loss_fn=nn.MSELoss())
    assert torch.equal(want, pipe.step(x, y, update=False).loss)
    assert not differences(gradients(plain), gradients(piped))


def test_a_running_pipeline_begins_and_ends_to_move_activations_with_the_same_bits() -> None:
    """What a controller decides where a link is late: a small batch meets both, and caps hold in each step."""
    start = ps.build("zb-h1", 3, 6)
    costs = with_host_copies(ps.Costs.uniform(3, f=10, i=10, w=10))
    caps, late = tuple(peaks(start, costs)), ps.Links({(1, 2): 60.0})
    hosted = with_host_memory(slow_link_schedule(costs, 6, late), costs, late, caps, [8.0] * 3)
    assert hosted is not None
    assert without_offload(hosted).order != hosted.order
    plain = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8)) for _ in range(3)]
    piped = copy.deepcopy(plain)
    pipe = ps.Pipeline(piped, start, loss_fn=nn.MSELoss())
    whole = ps.Pipeline(plain, start, loss_fn=nn.MSELoss())
    for schedule, dispatch, size in [
        (hosted, "frozen", 12), (hosted, "dynamic", 12), (hosted, "dynamic", 5), (start, "frozen", 12),
        (hosted, "hinted", 12),
    ]:  # fmt: skip
        pipe.reconfigure(Configuration(schedule, Dispatch(dispatch), (), caps))
        x, y = torch.randn(size, 8), torch.randn(size, 8)
        want = whole.step(x.clone(), y, update=False).loss
        assert torch.equal(want, pipe.step(x.clone(), y, update=False).loss)
        assert (pipe.host_memory()[0] > 0) == (schedule is hosted)
        held = pipe.timeline().peak_activations
        assert all(peak <= cap + 1e-9 for peak, cap in zip(held, caps, strict=True))
    assert not differences(gradients(plain), gradients(piped))


class Watched(nn.Module):
    """Saves one tensor that nobody else has, and counts how many such are on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        out = torch.cat([x * self.weight, x]).sin()
        slots = [each.tensor for each in gc.get_objects() if type(each) is SavedSlot]
        self.seen.append(sum(tensor is not None and tensor.numel() == 2 * x.numel() for tensor in slots))
        return out[: len(x)]


@pytest.mark.slow
def test_what_a_forward_saved_is_gone_before_the_next_and_is_counted() -> None:
    schedule = offloaded(ps.build("gpipe", 1, 4))
    stage = Watched()
    pipe = ps.Pipeline([stage], schedule, loss_fn=nn.MSELoss())
    pipe.step(torch.randn(4096, 4), torch.randn(4096, 4), update=False)
    assert stage.seen == [1] * 4
    one = 2 * 1024 * 4 * 4  # bytes; and what the loss saves, half as much
    assert 4 * one <= pipe.host_memory()[0] <= 4 * 2 * one
    pipe.step(torch.randn(4096, 4), torch.randn(4096, 4), update=False)
    assert stage.seen == [1] * 8


class Spoiling(nn.Module):
    """Changes what `sin` saved."""

    def forward(self, x: Tensor) -> Tensor:
        inner = x * 2
        out = inner.sin()
        inner.add_(1)
        return out


def test_what_was_changed_in_place_is_refused_as_autograd_does() -> None:
    pipe = ps.Pipeline(
        [nn.Sequential(nn.Linear(4, 4), Spoiling())], offloaded(ps.build("gpipe", 1, 2)), loss_fn=nn.MSELoss()
    )
    with pytest.raises(RuntimeFailure, match="changed in place after its forward had saved it"):
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))


def test_one_of_the_two_ops_without_the_other_is_refused_before_the_first_step() -> None:
    schedule = offloaded(ps.build("1f1b", 2, 4), every=2)
    graph = schedule.graph
    crossed = tuple(
        replace(r, microbatches=(1, 2)) if (r.kind, r.stage) == ("OFFLOAD", 1) else r for r in graph.registered
    )
    rows = (schedule.order[0], tuple(_next(op) if op == Op("OFFLOAD", 1, 0) else op for op in schedule.order[1]))
    with pytest.raises(RuntimeFailure, match="microbatch 0 of stage 1 has one of OFFLOAD and RELOAD alone"):
        require_round_trips(replace(schedule, order=rows, stage_graph=replace(graph, registered=crossed)))
    shared = replace(schedule.placement, shared=((0, (0, 1)),))
    with pytest.raises(
        RuntimeFailure, match=r"microbatch 0 of stage 0 has one .* or belongs to a stage that several ranks share"
    ):
        require_round_trips(replace(schedule, placement=shared))


def _next(op: Op) -> Op:
    return op._replace(microbatch=op.microbatch + 1)


def test_functions_of_the_users_own_run_in_their_place() -> None:
    seen: list[str] = []
    schedule = offloaded(ps.build("1f1b", 2, 2))
    own = {kind: (lambda call: seen.append(str(call.op))) for kind in ("OFFLOAD", "RELOAD")}
    pipe = ps.Pipeline(stages(2), schedule, loss_fn=nn.MSELoss(), ops=own)
    pipe.step(torch.randn(8, 8), torch.randn(8, 8))
    assert len(seen) == 8
    assert pipe.host_memory() == [0]
