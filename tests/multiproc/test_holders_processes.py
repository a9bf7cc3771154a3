"""What one of several holders of a tensor changes between two steps: an error names it after ten steps at the latest.

What all change alike is right.

Holders are copies of a stage in several pipelines, the stages that share a tied weight, ranks that share a stage,
shards and replicas.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from packed import packed
from penstock.runtime import RuntimeFailure
from penstock.runtime.tensors.dtensor import local
from processes import run_ranks_to_end
from tiers import in_turn, others_nightly
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc

WIDTH, NUM_SAMPLES = 4, 16
MSE = nn.MSELoss()


class Case(NamedTuple):
    """Attributes:
    schedule: its name, number of ranks and microbatches, options. mesh: None for a pipeline alone.
    tied: the first and the last stage share a weight. options: of the pipeline.
    """

    schedule: tuple[str, int, int, dict[str, Any]]
    mesh: tuple[int, int] | None = None
    tied: bool = False
    options: Mapping[str, Any] = MappingProxyType({})

    @property
    def num_processes(self) -> int:
        return self.schedule[1] if self.mesh is None else self.mesh[0] * self.mesh[1]


CASES = {
    "copies": Case(("chimera", 2, 4, {})),
    "copies that all step": Case(("chimera", 2, 4, {}), options={"zero": False}),
    "tied": Case(("1f1b", 2, 4, {}), tied=True),
    "updates as ops": Case(("amdp", 4, 8, {"window": 4})),
    "updates as ops of all copies": Case(("amdp", 4, 8, {"window": 4}), options={"zero": False}),
    "tied updates as ops": Case(("pipedream-2bw", 2, 4, {"window": 2}), tied=True),
    "updates as ops of replicas": Case(("pipedream-2bw", 1, 4, {"window": 2}), mesh=(1, 2)),
    "replicas": Case(("1f1b", 1, 2, {}), mesh=(1, 2)),
    "zero1": Case(("1f1b", 1, 2, {}), mesh=(1, 2), options={"sharding": "zero1"}),
    "fsdp": Case(("1f1b", 1, 2, {}), mesh=(1, 2), options={"sharding": "fsdp"}),
    "tied and replicas": Case(("1f1b", 2, 2, {}), mesh=(2, 2), tied=True),
    "copies and replicas": Case(("chimera", 2, 4, {}), mesh=(2, 2)),
}
OF_TWO_KINDS = "copies that all step", "tied and replicas", "copies and replicas"
"""Holders of which others are one kind or the other."""
OF_REPLICAS = "replicas", "zero1", "fsdp"


def parameter_of(pipe: ps.Pipeline) -> nn.Parameter:
    """One that others hold too: the first stage's weight, or what is tied to it."""
    return next(p for stage in pipe._local.model.copies.stages.values() for p in stage.parameters())


def cleared(pipe: ps.Pipeline) -> None:
    assert pipe.optimizer is not None
    pipe.optimizer.state.clear()


def loaded(pipe: ps.Pipeline) -> None:
    assert pipe.optimizer is not None
    pipe.optimizer.load_state_dict(copy.deepcopy(pipe.optimizer.state_dict()))


def given_gradient(pipe: ps.Pipeline) -> None:
    parameter = parameter_of(pipe)
    parameter.grad = torch.ones_like(parameter)


def with_rate(pipe: ps.Pipeline) -> None:
    assert pipe.optimizer is not None
    pipe.optimizer.param_groups[0]["lr"] = 0.5


def written(pipe: ps.Pipeline) -> None:
    with torch.no_grad():
        parameter_of(pipe).mul_(2)


def given_data(pipe: ps.Pipeline) -> None:
    parameter = parameter_of(pipe)
    parameter.data = parameter.data * 2


CHANGES: dict[str, tuple[Callable[[ps.Pipeline], object], str]] = {
    "nothing": (lambda pipe: None, ""),
    "written": (written, " between process"),
    "data": (given_data, " between process"),
    "frozen": (lambda pipe: parameter_of(pipe).requires_grad_(False), " between process"),
    "rate": (with_rate, " between process"),
    "gradient": (given_gradient, " between process"),
    "cleared": (cleared, " between process"),
    "loaded": (loaded, ""),
}
"""What a caller may do to a pipeline between two steps, and what the error says of it. Other objects with the same
values are no change.
"""
AT_ONCE = "frozen", "rate"
"""Changes that the next step refuses where replicas differ: their sums of gradients would differ in length."""
STAY = "written", "data"
"""Changes that make the values of holders differ unless one of them sends its own."""


def loaded_with_other_state(pipe: ps.Pipeline, rank: int) -> None:
    loaded(pipe)
    assert pipe.optimizer is not None
    for held in pipe.optimizer.state.values():
        held["exp_avg"].mul_(rank + 2)


def given_other_gradient(pipe: ps.Pipeline, rank: int) -> None:
    parameter = parameter_of(pipe)
    parameter.grad = torch.full_like(parameter, rank + 1)


def written_otherwise(pipe: ps.Pipeline, rank: int) -> None:
    with torch.no_grad():
        parameter_of(pipe).mul_(rank + 2)


def given_other_data(pipe: ps.Pipeline, rank: int) -> None:
    parameter = parameter_of(pipe)
    parameter.data = parameter.data * (rank + 2)


OTHERWISE: dict[str, Callable[[ps.Pipeline, int], object]] = {
    "written": written_otherwise,
    "data": given_other_data,
    "gradient": given_other_gradient,
    "loaded": loaded_with_other_state,
}
"""The same, of each rank by an amount of its own."""

OWNER_SENDS = "zero1", "fsdp", "copies", "copies and replicas", "updates as ops", "tied updates as ops"
"""Cases in which one holder steps a parameter and sends it to the others, which are alike again then."""
NOT_TOLD = {
    # Options of what only the owner's copy steps, in another rank.
    "copies": ("rate",),
    "updates as ops": ("rate",),
    "tied updates as ops": ("rate",),
}
"""Changes at once of what concerns one holder alone."""


def made(case: Case, model: nn.Module | None = None) -> ps.Pipeline:
    name, num_ranks, num_microbatches, options = case.schedule
    schedule = ps.build(name, num_ranks, num_microbatches, **options)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(schedule.num_stages)]
    if case.tied:
        layers[-1].weight = layers[0].weight
    mesh = None if case.mesh is None else init_device_mesh("cpu", case.mesh, mesh_dim_names=("pp", "dp"))
    adam = partial(torch.optim.AdamW, lr=0.1)
    given = packed(loss_fn=MSE, optimizer=adam, mesh=mesh, timeout=PATIENCE, **case.options)
    return ps.Pipeline(nn.Sequential(*layers), schedule, **given)


def whole_model(pipe: ps.Pipeline) -> dict[str, list[Any]]:
    """By name all values that processes have of a parameter."""
    mine: dict[str, list[float]] = {}
    for stage in pipe._local.model.copies.stages.values():
        for name, parameter in stage.named_parameters():
            mine[pipe._local.model.ties.owned_name(name)] = local(parameter.detach()).reshape(-1).tolist()
    found: dict[str, list[Any]] = {}
    for part in pipe.gather(mine):
        for name, values in part.items():
            found.setdefault(name, []).append(values)
    return found


NUM_STEPS = 10
"""Steps within which holders compare values once."""
DIVERGED = "holders became other models"


def said_of(name: str, change: Callable[[ps.Pipeline], object] | None, num_steps: int = NUM_STEPS) -> str:
    """What is said where this rank changes something after the first step; an empty string where holders agree."""
    pipe = made(CASES[name])
    torch.manual_seed(1)
    x, y = torch.randn(NUM_SAMPLES, WIDTH), torch.randn(NUM_SAMPLES, WIDTH)
    pipe.step(x, y)
    if change is not None:
        change(pipe)
    try:
        for _ in range(num_steps):
            pipe.step(x, y)
    except RuntimeFailure as error:
        return str(error)
    finally:
        pipe.close()
    holders = whole_model(pipe) if name != "fsdp" else {}
    if any(values != those[0] for those in holders.values() for values in those):
        return DIVERGED
    return ""


class Said(NamedTuple):
    """What is said of a change that one rank alone makes, that all make, and that each makes by another amount."""

    alone: str
    together: str
    otherwise: str


def all_said(rank: int, name: str, changes: Sequence[str]) -> dict[str, Said]:
    """By change, what is said of it."""
    is_last = rank == CASES[name].num_processes - 1
    found = {}
    for change in changes:
        work = CHANGES[change][0]
        otherwise = said_of(name, partial(OTHERWISE[change], rank=rank)) if change in OTHERWISE else ""
        num_steps = 1 if change in AT_ONCE and name in OF_REPLICAS else NUM_STEPS
        found[change] = Said(said_of(name, work if is_last else None, num_steps), said_of(name, work), otherwise)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", others_nightly(CASES, [name for name in CASES if name not in OF_TWO_KINDS]))
def test_bug_what_one_holder_changed_between_steps_made_them_other_models(name: str) -> None:
    """Copies in several pipelines and tied weights did without a word, and so did one replica's optimizer state. So
    did all holders where each changed what it holds by an amount of its own.
    """
    told = [change for change in CHANGES if change not in NOT_TOLD.get(name, ())]
    changes = in_turn(told, list(CASES).index(name), 2)
    outcomes = run_ranks_to_end(CASES[name].num_processes, all_said, name, changes)
    assert all(o.value == outcomes[0].value for o in outcomes)
    for change, (alone, together, otherwise) in outcomes[0].value.items():
        assert together == "", change
        assert DIVERGED not in (alone, otherwise), change
        if change in AT_ONCE or (change in STAY and name not in OWNER_SENDS):
            assert CHANGES[change][1] in alone, f"{change}: {alone}"
            assert bool(otherwise) == (change in OTHERWISE), f"{change}: {otherwise}"
        assert not alone or CHANGES[change][1], f"{change}: {alone}"
        assert not alone or "change it alike on every process" in alone


def mended(rank: int) -> list[str]:
    """What is said of values that each replica changed otherwise, and once all have the same again."""
    pipe = made(CASES["replicas"])
    x, y = torch.ones(NUM_SAMPLES, WIDTH), torch.zeros(NUM_SAMPLES, WIDTH)
    said = []
    for change in (written_otherwise, written_to_zero):
        change(pipe, rank)
        try:
            pipe.step(x, y)
            said.append("")
        except RuntimeFailure as error:
            said.append(str(error))
    pipe.close()
    return said


def written_to_zero(pipe: ps.Pipeline, rank: int) -> None:
    with torch.no_grad():
        parameter_of(pipe).zero_()


def test_values_that_holders_were_refused_for_are_right_once_all_have_the_same() -> None:
    for outcome in run_ranks_to_end(2, mended):
        otherwise, alike = outcome.value
        assert otherwise.startswith("parameter 0.weight differs between process 0 and process 1, so")
        assert alike == ""


def rounded_otherwise(rank: int) -> tuple[str, float]:
    """What is said where one replica's weights differ by rounding, and by how much they do in the end."""

    def nudge(pipe: ps.Pipeline) -> None:
        with torch.no_grad():
            weight = parameter_of(pipe)
            weight.copy_(torch.nextafter(weight, torch.ones_like(weight)))

    pipe = made(CASES["replicas"])
    x, y = torch.ones(NUM_SAMPLES, WIDTH), torch.zeros(NUM_SAMPLES, WIDTH)
    if rank == 1:
        nudge(pipe)
    try:
        for _ in range(NUM_STEPS + 1):
            pipe.step(x, y)
    except RuntimeFailure as error:
        return str(error), 0.0
    first, second = (torch.tensor(each) for each in pipe.gather(parameter_of(pipe).tolist()))
    pipe.close()
    return "", float((first - second).abs().max())


def test_bug_replicas_on_processors_that_round_otherwise_were_refused() -> None:
    """The same optimizer gives other last bits by the kernels of another processor."""
    for outcome in run_ranks_to_end(2, rounded_otherwise):
        said, difference = outcome.value
        assert said == ""
        assert 0 < difference < 1e-5


def with_other_rates(rank: int, name: str) -> tuple[str, str]:
    """What is said of a step to which the last rank gives other rates, and to which all give the same."""
    said = []
    for own in (0.25, 0.5):
        pipe = made(CASES[name])
        torch.manual_seed(1)
        x, y = torch.randn(NUM_SAMPLES, WIDTH), torch.randn(NUM_SAMPLES, WIDTH)
        try:
            pipe.step(x, y, rates=[0.5, own if rank == CASES[name].num_processes - 1 else 0.5])
            said.append("")
        except RuntimeFailure as error:
            said.append(str(error))
        finally:
            pipe.close()
    return said[0], said[1]


@pytest.mark.parametrize("name", ["updates as ops of replicas", "updates as ops of all copies"])
def test_bug_rates_of_a_step_that_one_holder_alone_was_given_made_them_other_models(name: str) -> None:
    outcomes = run_ranks_to_end(CASES[name].num_processes, with_other_rates, name)
    for alone, together in (o.value for o in outcomes):
        assert "between process 0 and process" in alone
        assert together == ""


def in_an_open_window(rank: int) -> None:
    for work in OF_WINDOWS:
        pipe = made(CASES["updates as ops"])
        x, y = torch.ones(NUM_SAMPLES, WIDTH), torch.zeros(NUM_SAMPLES, WIDTH)
        pipe.step(x, y, update=False)
        work(pipe)
        pipe.step(x, y)
        pipe.close()


def without_gradients(pipe: ps.Pipeline) -> None:
    for parameter in pipe.parameters():
        parameter.grad = None


OF_WINDOWS: list[Callable[[ps.Pipeline], object]] = [
    ps.Pipeline.zero_grad,
    without_gradients,
    lambda pipe: [parameter.grad.mul_(2) for parameter in pipe.parameters() if parameter.grad is not None],
]


@pytest.mark.slow
def test_what_copies_have_summed_of_an_open_window_may_be_cleared_or_changed_by_all() -> None:
    run_ranks_to_end(4, in_an_open_window)


def frozen_by_name(pipe: ps.Pipeline) -> None:
    for name, parameter in pipe.named_parameters():
        if name == "0.weight":
            parameter.requires_grad_(False)


def with_one_frozen_by_name(rank: int, name: str) -> tuple[str, set[str]]:
    """What is said where every rank freezes a parameter by its name, and the names that this rank has."""
    pipe = made(CASES[name])
    names = {each for each, _ in pipe.named_parameters()}
    assert sorted(map(id, pipe.parameters())) == sorted(id(p) for _, p in pipe.named_parameters())
    pipe.close()
    return said_of(name, frozen_by_name), names


@pytest.mark.parametrize("name", ["copies", "tied"])
def test_bug_a_parameter_that_all_ranks_froze_by_its_name_was_frozen_in_its_owner_alone(name: str) -> None:
    outcomes = run_ranks_to_end(2, with_one_frozen_by_name, name)
    for said, names in (o.value for o in outcomes):
        assert said == ""
        assert "0.weight" in names


class Merging(nn.Linear):
    """Adds a number to its weight in evaluation mode, and takes it out again, as adapters are added."""

    has_added = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode is self.has_added:
            with torch.no_grad():
                self.weight += -0.5 if mode else 0.5
            self.has_added = not mode
        return self


def evaluated_by_copies(rank: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Merging(WIDTH, WIDTH) for _ in range(2)))
    pipe = ps.Pipeline(
        model, ps.build("chimera", 2, 4), loss_fn=MSE, optimizer=partial(torch.optim.SGD, lr=0.1), timeout=PATIENCE
    )
    x = torch.randn(8, WIDTH)
    return [float((pipe.step if step % 2 else pipe.evaluate)(x, x).loss) for step in range(4)]


def test_weights_that_evaluation_mode_changes_in_all_copies_were_changed_in_the_middle_of_a_step() -> None:
    found = run_ranks_to_end(2, evaluated_by_copies)
    assert [outcome.value for outcome in found] == [evaluated_by_copies(0)] * 2
