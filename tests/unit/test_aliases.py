"""Outputs that share memory. They arrive as separate tensors, as if a loop made copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import branches_runs
import penstock as ps
from alias_cases import ALIASES, CLOSE
from backends import Backend, processes
from packed import packed
from penstock.runtime import RuntimeFailure
from plain_loop import differences, gradients
from recomputed import with_recompute
from runtime_cases import Case, Do, batches, compare_case, lin, plain_case
from tiers import in_turn
from waiting import PATIENCE

RUNS = [("1f1b", 4, "dynamic"), ("zb-h1", 3, "frozen"), ("zb-v", 2, "frozen"), ("gpipe", 2, "frozen")]


def wrong(name: str) -> list[str]:
    found = []
    for schedule, ranks, dispatch in RUNS:
        built = ps.build(schedule, ranks, 4)
        torch.manual_seed(7)
        made = ALIASES[name](built.num_stages, 4)
        plain = plain_case(made, 4)
        for each in (built, with_recompute(built)):
            found += [
                f"{each.name} {ranks}: {text}" for text in compare_case(copy.deepcopy(made), each, dispatch, plain)
            ]
    return found


@pytest.mark.parametrize("name", ALIASES)
def test_as_the_plain_loop(name: str) -> None:
    found = wrong(name)
    assert not found, "\n".join(found)


BETWEEN = [("1f1b", "dynamic"), ("zb-v", "frozen")]


def run_cases(rank: int) -> dict[str, list[str]]:
    found = {}
    for number, (name, make) in enumerate(ALIASES.items()):
        for schedule, dispatch in in_turn(BETWEEN, number):
            built = ps.build(schedule, 2, 4)
            torch.manual_seed(7)
            made = make(built.num_stages, 4)
            plain = plain_case(made, 4)
            for each in in_turn((built, with_recompute(built)), number // 2):
                found[f"{each.name} {name}"] = compare_case(copy.deepcopy(made), each, dispatch, plain)
    return found


@pytest.mark.parametrize("backend", [processes(2)])
def test_between_processes_as_the_plain_loop(backend: Backend) -> None:
    assert not backend.wrong(run_cases)


@pytest.mark.parametrize("name", CLOSE)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_close_to_the_plain_loop(name: str, schedule: str) -> None:
    torch.manual_seed(7)
    made = CLOSE[name](3, 4)
    plain = plain_case(made, 4)
    pipe = ps.Pipeline(made.model, ps.build(schedule, 3, 4), loss_fn=made.loss_fn)
    inputs, targets = made.steps[0]
    torch.testing.assert_close(pipe.step(inputs, targets, update=False).loss, plain.losses[0])
    found = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    torch.testing.assert_close(found, {name: plain.gradients[0][name] for name in found})


MSE = nn.MSELoss()


def step(stages: list[nn.Module], name: str = "1f1b", **options: Any) -> ps.Pipeline:
    pipe = ps.Pipeline(stages, ps.build(name, len(stages), 4), loss_fn=MSE, **packed(**options))
    pipe.step(*batches(4, 8)[0], update=False)
    return pipe


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("through", [0, 1, 2])
def test_what_an_earlier_stage_still_needs_is_changed(through: int, name: str) -> None:
    """A stage's input that went on to later stages could be changed there unseen: the backward of the stage before,
    which had kept it, went on with other numbers.
    """
    first = Do(lambda ls, x: ls[0](x).tanh(), lin())  # tanh keeps its output for the backward
    second = Do(lambda ls, x: (ls[0](torch.ones_like(x)), x), lin())
    on = [Do(lambda ls, x, y: (ls[0](x), y), lin()) for _ in range(through)]
    last = Do(lambda ls, x, y: ls[0](x) + y.mul_(2), lin())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step([first, second, *on, last], name)


class Returns(nn.Module):
    """Returns something of its own beside its output."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.what = lin(), what
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("table", torch.ones(2, 8))

    def forward(self, x: Tensor) -> Any:
        own = {
            "parameter": self.scale,
            "a view of a parameter": self.scale.view(2, 4),
            "a parameter without gradient": self.scale.detach(),
            "buffer": self.table,
            "a view of a buffer": self.table[0],
        }[self.what]
        return self.layer(x), own


@pytest.mark.parametrize(
    "what",
    ["parameter", "a view of a parameter", "a parameter without gradient", "buffer", "a view of a buffer"],
)
def test_a_parameter_or_buffer_of_another_stage_is_changed_in_a_copy(what: str) -> None:
    def changes(ls: Any, x: Tensor, own: Tensor) -> Tensor:
        with torch.no_grad():
            own[..., 0].mul_(1.5)
        return ls[0](x)

    stages = [Returns(what), Do(changes, lin())]
    pipe = step(stages)
    pipe.evaluate(*batches(4, 8)[0])
    assert torch.equal(stages[0].scale, torch.ones(8))
    assert torch.equal(stages[0].table, torch.ones(2, 8))


@pytest.mark.parametrize("what", ["parameter", "a view of a parameter", "buffer"])
def test_a_parameter_or_buffer_of_another_stage_is_read(what: str) -> None:
    stages = [Returns(what), Do(lambda ls, x, own: ls[0](x) + own.sum(), lin())]
    torch.manual_seed(1)
    made = Case(stages, batches(4, 8))
    assert not compare_case(made, ps.build("zb-h1", 2, 4), "frozen")


class Passed(torch.autograd.Function):
    """A tensor with a graph of its own in the memory of another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


@pytest.mark.parametrize("changed", [False, True])
def test_two_graphs_write_to_one_memory(changed: bool) -> None:
    def stages(copies: bool) -> list[nn.Module]:
        def first(ls: Any, x: Tensor) -> Any:
            h = ls[0](x)
            return h, Passed.apply(h).clone() if copies else Passed.apply(h)

        torch.manual_seed(1)
        return [Do(first, lin()), Do(lambda ls, x, y: ls[0](x + (y.add_(1) if changed else y)), lin())]

    steps = batches(4, 8)
    plain = plain_case(Case(stages(True), steps), 4)
    assert not compare_case(Case(stages(False), steps), ps.build("1f1b", 2, 4), "frozen", plain)


@pytest.mark.parametrize("name", ["a fork that joins", "a skip"])
def test_what_goes_to_two_stages_is_changed_by_one(name: str) -> None:
    """Each target has a tensor of its own, so the others do not see the change."""
    losses = []
    for inplace in (False, True):
        torch.manual_seed(1)
        stages = branches_runs.stages_of(name)
        stages[1] = nn.Sequential(nn.ReLU(inplace=inplace), nn.Linear(6, 6))
        pipe = ps.Pipeline(stages, branches_runs.schedule_of(name), loss_fn=MSE)
        losses.append(pipe.step(*branches_runs.batch_of(name, 1), update=False).loss)
    assert torch.equal(*losses)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        found: Tensor = self.linear(x) * self.n
        return found


def test_a_buffer_that_a_backward_needs_was_changed_in_place_and_torch_alone_said_so() -> None:
    pipe = ps.Pipeline([Counting(), Counting()], ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss())
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        pipe.step(torch.randn(8, 8), torch.randn(8, 8))
    assert any("stage 0 changes a buffer in place" in note for note in caught.value.__notes__)


def test_outputs_that_share_memory_join_others() -> None:
    """A stage with two sources, each of which gives views of its output, and which changes one of each in place."""

    def views(ls: Any, x: Tensor) -> Any:
        h = ls[0](x)
        return h, h[:, 2:5]

    def copies(ls: Any, x: Tensor) -> Any:
        h, view = views(ls, x)
        return h, view.clone()

    def joins(ls: Any, one: Any, other: Any) -> Tensor:
        one[1].mul_(1.5)
        other[0].add_(ls[1].bias)
        return ls[0](one[0].tanh() * other[0]) + other[1].sum(1, keepdim=True)

    torch.manual_seed(1)
    stages = [
        nn.Linear(6, 6),
        Do(views, lin(6, 6)),
        nn.Linear(6, 6),
        Do(views, lin(6, 6)),
        Do(joins, lin(6, 6), lin(6, 6)),
    ]
    plain = copy.deepcopy(stages)
    for stage in (1, 3):
        plain[stage].function = copies
    inputs, targets = branches_runs.batch_of("two towers", 1)
    total = torch.zeros(())
    for m in range(8):
        a, b = (inputs[stage].chunk(8)[m] for stage in (0, 2))
        loss = MSE(plain[4](plain[1](plain[0](a)), plain[3](plain[2](b))), targets.chunk(8)[m]) / 8
        loss.backward()
        total = total + loss.detach()
    for split in (False, True):
        given = copy.deepcopy(stages)
        pipe = ps.Pipeline(given, branches_runs.schedule_of("two towers", split), loss_fn=MSE)
        assert torch.equal(pipe.step(inputs, targets, update=False).loss, total)
        assert not differences(gradients(plain), gradients(given))


def test_outputs_that_share_memory_are_cut_for_another_stage() -> None:
    losses = []
    for copies in (False, True):
        torch.manual_seed(1)
        stages = branches_runs.stages_of("a large loss")
        stages[4] = Do(lambda ls, a, b: ls[0](a[0] * b) + a[1].mean(1, keepdim=True), lin(6, 6))
        stages[1] = Do(lambda ls, x: (x, x[:, 1:].clone() if copies else x[:, 1:]), lin(6, 6))  # noqa: B023
        pipe = ps.Pipeline(stages, branches_runs.schedule_of("a large loss"), loss_fn=MSE)
        losses.append(pipe.step(*branches_runs.batch_of("a large loss", 1), update=False).loss)
    assert torch.equal(*losses)


def test_a_change_of_one_output_is_not_seen_in_another() -> None:
    def first(ls: Any, x: Tensor) -> Any:
        h = ls[0](x)
        return h, h[:, 2:6]

    def last(ls: Any, h: Tensor, view: Tensor) -> Tensor:
        h.mul_(0)
        assert view.abs().sum() > 0
        return ls[0](h) + view.sum(1, keepdim=True)

    step([Do(first, lin()), Do(last, lin())])


def given_again(rank: int, batches: str) -> dict[str, str]:
    """What is said of a second step, or evaluation, with the tensors of the first, by what the first layer is."""
    replicas = batches == "replica"
    mesh = init_device_mesh("cpu", (1, 2) if batches == "replicas" else (2, 1), mesh_dim_names=("pp", "dp"))
    first: dict[str, nn.Module] = {"in place": nn.ReLU(inplace=True), "copy": nn.ReLU(), "drawn": InPlaceDropout()}
    found = {}
    for name, layer in first.items():
        for evaluates in (False, True):
            model = nn.Sequential(layer, *(nn.Linear(8, 8) for _ in range(3)))
            pipe = ps.Pipeline(
                model,
                ps.build("1f1b", mesh.size(0), 4),
                loss_fn=nn.MSELoss(),
                timeout=PATIENCE,
                mesh=mesh,
                parallel=ps.ParallelOptions(batches="replica" if replicas else "whole"),
            )
            call = pipe.evaluate if evaluates else pipe.step
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
            y = x.clone()
            call(x, y)
            try:
                call(x, y)
                found[f"{name}, {evaluates}"] = "nothing"
            except RuntimeFailure as error:
                found[f"{name}, {evaluates}"] = str(error)
    if rank:
        x = x + 1
    try:  # no layer changes these
        call(x, y)
    except RuntimeFailure as error:
        found["other"] = str(error)
    return found


class InPlaceDropout(nn.Module):
    """Changes its input in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training, inplace=True)


@pytest.mark.multiproc
@pytest.mark.parametrize("batches", ["whole", "replicas", "replica"])
def test_a_batch_that_the_first_stage_had_changed_was_called_another_one(batches: str) -> None:
    """The reason given was that ranks were given different ones."""
    for found in Backend(2).values(given_again, batches):
        for case in ("in place, False", "in place, True", "drawn, False"):
            assert "If the first stage changes its inputs in place" in found[case], found
            assert "x.clone()" in found[case]
        assert {found[case] for case in ("copy, False", "copy, True", "drawn, True")} == {"nothing"}
        assert "given" in found["other"]
