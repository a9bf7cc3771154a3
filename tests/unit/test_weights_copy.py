"""One copy's weights: what is held and when it goes, gradients window by window, steps, checkpoints in mid-window."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock as ps
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.gradients import summed
from penstock.runtime.parameters.rules import rule_of
from penstock.runtime.parameters.versions import CopyWeights
from penstock.runtime.tensors.dtensor import local
from penstock.schedule import Schedule, Updates

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]


def pipedream(num_ranks: int, num: int, window: int, rule: str) -> Schedule:
    schedule = replace(ps.build("pipedream", num_ranks, num, window=window), updates=Updates(window, None, rule))
    ps.check(schedule)
    return schedule


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def linear(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(num_stages)]


def batch(num: int, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    x, y = ([torch.randn(2, 4, generator=draw) for _ in range(num)] for _ in "xy")
    return x, y


def weights_of(stage: nn.Module, rule: str, window: int = 1, num: int = 4, owns: bool = True) -> CopyWeights:
    """The weights of the first of two stages."""
    return CopyWeights(stage, pipedream(2, num, window, rule), 0, rule_of(rule), owns)


def parameters_of(stages: Sequence[nn.Module]) -> list[Tensor]:
    return [p.detach().clone() for stage in stages for p in stage.parameters()]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- what is held ------------------------------------------------------------------------------------------------


def test_a_version_is_freed_when_its_last_microbatch_is_done() -> None:
    stage = linear(1)[0]
    w = weights_of(stage, "pipedream")
    optimizer = sgd(list(w.masters.values()))
    w.begin(optimizer, None, None)
    outputs = {}
    for m in (0, 1):
        w.before_forward(m)
        outputs[m] = stage(torch.ones(2, 4)).sum()
    first = weakref.ref(stage[0].weight.data.untyped_storage())
    w.before_backward(0)
    outputs.pop(0).backward()
    w.done(0)
    w.apply(0, [w.gradients(0)])
    assert first() is not None  # microbatch 1 read it
    w.before_backward(1)
    assert w.mismatch == {0: 0, 1: 1}
    outputs.pop(1).backward()
    w.done(1)
    assert first() is None
    assert same([p.data for p in stage.parameters()], list(w.masters.values()))


def test_forwards_in_flight_do_not_notice_a_step_in_place() -> None:
    """With the module's own parameters stepped, autograd refuses the second backward."""
    for rule in ("none", "pipedream"):
        stage = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        w = weights_of(stage, rule)
        w.begin(sgd(list(w.masters.values())), None, None)
        versions = [p._version for p in stage.parameters()]
        outputs = []
        for m in (0, 1):
            w.before_forward(m)
            outputs.append(stage(torch.ones(2, 4)).square().sum())
        for m in (0, 1):
            w.before_backward(m)
            outputs[m].backward()
            w.done(m)
            w.apply(m, [w.gradients(m)])
        w.end()
        assert [p._version for p in stage.parameters()] == versions


# -- gradients and steps -----------------------------------------------------------------------------------------


def test_each_window_has_accumulators_of_its_own() -> None:
    stage = nn.Linear(1, 1, bias=False)
    w = weights_of(stage, "none", window=2)
    w.begin(sgd(list(w.masters.values())), None, None)

    def add(m: int, value: float, before=w.before_backward) -> None:
        if before == w.before_backward:
            w.before_forward(m)
        before(m)
        gradient = torch.full((1, 1), value)
        stage.weight.grad = gradient if stage.weight.grad is None else stage.weight.grad + gradient

    add(0, 1.0)
    add(1, 2.0)
    add(2, 4.0)  # an I of window 1 ...
    add(1, 8.0, before=w.before_weight)  # ... before a W of window 0
    add(3, 16.0)
    assert [float(g) for g in w.gradients(0)] == [11.0]
    assert w.gradients(0) == [None]  # taken out
    assert [float(g) for g in w.gradients(1)] == [20.0]
    w.end()
    assert stage.weight.grad is None
    assert w.bytes()["gradients"] == 8


def test_parts_are_added_pipelines_in_order_and_left_as_they_are() -> None:
    big, small = torch.full((1, 1), 2.0**24), torch.ones(1, 1)
    parts = [[big.clone(), None], [small.clone(), None], [small.clone(), torch.ones(1)]]
    total = summed(parts)
    assert float(total[0]) == 2.0**24  # (big + 1) + 1; big + (1 + 1) is another number
    assert same([total[1]], [torch.ones(1)])
    assert float(parts[0][0]) == 2.0**24
    assert float(parts[1][0]) == 1


def test_clipping_is_by_the_stage_alone_as_torch_clips() -> None:
    stage = nn.Linear(3, 3)
    twin = copy.deepcopy(stage)
    w = weights_of(stage, "none")
    w.begin(torch.optim.SGD(w.masters.values(), lr=0.1), None, 0.5)
    gradients = [torch.randn(3, 3), torch.randn(3)]
    for p, g in zip(twin.parameters(), gradients, strict=True):
        p.grad = g.clone()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    kept = [g.clone() for g in gradients]
    w.apply(0, [gradients])
    assert same(parameters_of([stage]), parameters_of([twin]))
    assert same(gradients, kept)


def test_a_step_moves_this_stage_alone_at_its_own_rate_and_skips_parameters_without_a_gradient() -> None:
    stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
    schedule = pipedream(2, 4, 1, "none")
    both = [CopyWeights(stage, schedule, i, rule_of("none"), True) for i, stage in enumerate(stages)]
    optimizer = torch.optim.SGD([p for w in both for p in w.masters.values()], lr=123.0, weight_decay=0.5)
    for w in both:
        w.begin(optimizer, [0.5, 0.25, 0.5, 0.5], None)
    before = parameters_of(stages)
    both[0].apply(0, [[torch.zeros(2, 2), None]])
    after = parameters_of(stages)
    assert torch.equal(after[0], before[0] * 0.75)  # 1 - rate * decay
    assert same(after[1:], before[1:])
    both[0].apply(1, [[torch.zeros(2, 2), None]])
    assert torch.equal(stages[0].weight.detach(), after[0] - 0.125 * after[0])
    assert optimizer.param_groups[0]["lr"] == 123.0
    assert all(p.grad is None for w in both for p in w.masters.values())


def test_a_window_without_any_gradient_or_with_zeros_is_an_update_like_others() -> None:
    stage = nn.Linear(2, 2)
    w = weights_of(stage, "pipedream")
    w.begin(torch.optim.AdamW(w.masters.values(), weight_decay=0.0), None, 1.0)
    before = parameters_of([stage])
    w.apply(0, [[None, None]])
    w.apply(1, [[torch.zeros(2, 2), torch.zeros(2)]])
    assert w.num_updates == 2
    w.end()
    assert same(parameters_of([stage]), before)


def test_a_copy_without_the_optimizers_state_takes_values_over() -> None:
    for rule in ("none", "pipedream", "pipedream-2bw"):
        owner, other = nn.Linear(2, 2), nn.Linear(2, 2)
        first = weights_of(owner, rule, window=2)
        second = weights_of(other, rule, window=2, owns=False)
        assert second.masters == {}
        first.begin(torch.optim.SGD(first.masters.values(), lr=0.1), None, None)
        second.begin(None, None, None)
        second.before_forward(0)
        held = parameters_of([other])
        first.apply(0, [[torch.ones(2, 2), torch.ones(2)]])
        sent = first.versions.copies()
        second.versions.take(sent)
        for value in sent:  # what was sent is not held: the wire may use its memory again
            value.zero_()
        second.before_backward(0)
        assert same(parameters_of([other]), parameters_of([owner]) if rule == "none" else held)
        second.done(0)
        second.end()
        first.end()
        assert same(parameters_of([other]), parameters_of([owner]))


def test_a_stage_without_parameters_takes_part() -> None:
    w = weights_of(nn.Tanh(), "spectrain")
    assert w.masters == {}
    w.begin(sgd([nn.Parameter(torch.zeros(1))]), None, 1.0)
    w.before_forward(0)
    w.before_backward(0)
    w.done(0)
    assert w.gradients(0) == []
    w.apply(0, [[]])
    assert (w.num_updates, w.versions.copies(), w.state()) == (1, [], {})
    w.end()
    assert w.bytes() == {"parameters": 0, "versions": 0, "gradients": 0}


def test_frozen_parameters_and_buffers_are_left_alone_and_shared_ones_count_once() -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    stage[2].weight = stage[0].weight
    stage[0].bias.requires_grad_(False)
    w = weights_of(stage, "pipedream")
    assert list(w.masters) == ["0.weight", "1.weight", "1.bias", "2.bias"]
    assert all(m.requires_grad for m in w.masters.values())
    bias, mean = stage[0].bias.data_ptr(), stage[1].running_mean
    w.begin(sgd(list(w.masters.values())), None, None)
    w.before_forward(0)
    w.apply(0, [[torch.ones_like(p) for p in w.masters.values()]])
    w.before_forward(1)
    assert stage[2].weight is stage[0].weight
    assert stage[0].bias.data_ptr() == bias
    assert stage[1].running_mean is mean
    w.end()


# -- passes, checkpoints -----------------------------------------------------------------------------------------


def test_after_a_pass_nothing_of_it_is_left_however_it_went() -> None:
    for rule in ("none", "pipedream", "pipedream-2bw", "spectrain"):
        stage = linear(1)[0]
        w = weights_of(stage, rule)
        optimizer = sgd(list(w.masters.values()))
        w.begin(optimizer, None, None)
        w.before_forward(0)
        stage(torch.ones(2, 4)).sum().backward()
        w.apply(0, [[torch.ones_like(m) for m in w.masters.values()]])
        w.end()  # with microbatch 0 still in flight
        assert same(parameters_of([stage]), list(w.masters.values()))
        assert all(p.grad is None for p in stage.parameters())
        assert set(w.state()) <= {f"versions/{name}" for name in w.masters}
        w.begin(optimizer, None, None)
        assert w.versions.most == (2 if rule in ("pipedream-2bw", "spectrain") else 1)
        with pytest.raises(KeyError):
            w.before_backward(0)


@pytest.mark.parametrize("rule", ["none", "pipedream", "spectrain"])
def test_what_others_write_into_the_parameters_between_passes_is_what_the_next_one_starts_from(rule: str) -> None:
    stages = linear(2)
    pipe = ps.Pipeline(stages, pipedream(2, 4, 1, rule), loss_fn=nn.MSELoss(), optimizer=sgd)
    pipe.step(*batch(4))
    with torch.no_grad():
        for p in pipe.parameters():
            p.fill_(0.25)
    pipe.step(*batch(4), rates=[0.0] * 4)
    assert all(bool((p == 0.25).all()) for p in parameters_of(stages))


@pytest.mark.parametrize(
    ("rule", "owns"),
    [("spectrain", True), *((r, o) for r in ("none", "pipedream", "pipedream-2bw") for o in (True, False))],
)
def test_a_pass_that_broke_off_leaves_nothing_once_weights_are_loaded(rule: str, owns: bool) -> None:
    """As a pipeline loads: into the parameters, whatever they hold, then from there."""
    stage = linear(1)[0]
    w = weights_of(stage, rule, owns=owns)
    optimizer = sgd(list(w.masters.values())) if owns else None
    w.begin(optimizer, None, None)
    for m in (0, 1):
        w.before_forward(m)
    for n in (0, 1):
        values = [torch.ones_like(p) for p in stage.parameters()]
        if owns:
            w.apply(n, [values])
        else:
            w.versions.take(values)
    w.before_backward(0)  # parameters hold an old version, or a prediction
    with torch.no_grad():
        for p in stage.parameters():
            p.copy_(torch.full_like(p, 0.25))
    w.fill({name: p.detach() for name, p in stage.named_parameters()})
    w.num_updates = 17
    w.load_state({})
    w.begin(optimizer, None, None)
    assert w.versions.most == (2 if rule == "spectrain" else 1)
    for values in (w.versions.copies(), parameters_of([stage])):
        assert all(bool((p == 0.25).all()) for p in values)
    w.end()


# -- shards ------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded() -> Iterator[nn.Module]:
    """A stage of tensor parallelism, of which this one process has all: shards, and parameters that each rank has."""
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        stage = linear(1)[0]
        cut = distribute_tensor(stage[0].weight.detach(), dist.device_mesh.DeviceMesh("cpu", [0]), [Shard(0)])
        stage[0].weight = nn.Parameter(cut)
        yield stage
    finally:
        dist.destroy_process_group()


def local_values(stage: nn.Module) -> list[Tensor]:
    return [local(p.detach()).clone() for p in stage.parameters()]


@pytest.mark.parametrize("rule", ["pipedream", "pipedream-2bw"])
def test_old_versions_were_written_over_the_newest_beside_shards(sharded: nn.Module, rule: str) -> None:
    """PipeDream trained another model: an update of a norm's weight or a bias, which ranks have whole, was lost."""
    w = weights_of(sharded, rule)
    w.begin(torch.optim.SGD(list(w.masters.values()), lr=1.0), None, None)
    versions = [local_values(sharded)]
    for m in range(3):
        w.before_forward(m)
        versions.append([value - 1 for value in versions[-1]])
        w.apply(m, [[torch.ones_like(value) for value in versions[0]]])
    reads = {"pipedream": (0, 1, 2), "pipedream-2bw": (0, 0, 1)}[rule]
    for m, version in enumerate(reads):
        w.before_backward(m)
        assert same(local_values(sharded), versions[version])
        w.done(m)
        assert same([local(value) for value in w.versions.newest_values().values()], versions[3])
    w.end()
    assert same(local_values(sharded), versions[3])


def test_a_broken_step_took_loaded_values_back_from_shards(sharded: nn.Module) -> None:
    w = weights_of(sharded, "pipedream")
    w.begin(torch.optim.SGD(list(w.masters.values()), lr=1.0), None, None)
    w.before_forward(0)
    w.apply(0, [[torch.ones_like(value) for value in local_values(sharded)]])
    w.before_backward(0)
    with torch.no_grad():
        for p in sharded.parameters():
            p.fill_(0.25)
    w.fill({name: p.detach() for name, p in sharded.named_parameters()})
    for values in (local_values(sharded), w.versions.copies()):
        assert all(bool((value == 0.25).all()) for value in values)


# -- errors ------------------------------------------------------------------------------------------------------


def test_of_a_checkpoint_a_stage_takes_its_own_where_the_shapes_are_right() -> None:
    stage = nn.Linear(2, 2)
    w = weights_of(stage, "pipedream-2bw", window=2)
    w.load_state({"gradients/1.weight": torch.zeros(5), "gradients/bias": torch.ones(2)})
    assert same([stage.bias.grad], [torch.ones(2)])
    assert stage.weight.grad is None


def test_an_op_that_does_not_find_its_version_says_what_is_held() -> None:
    schedule = ps.build("pipedream", 3, 9, window=1)
    schedule = replace(schedule, updates=Updates(1, None, "pipedream-2bw"))  # which `check` refuses
    w = CopyWeights(nn.Linear(2, 2), schedule, 0, rule_of("pipedream-2bw"), True)
    w.begin(sgd(list(w.masters.values())), None, None)
    with pytest.raises(RuntimeFailure, match="after 1 updates, and this copy of the stage holds those after 0"):
        w.before_forward(2)
