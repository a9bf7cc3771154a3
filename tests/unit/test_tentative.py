"""The rule `tentative`: late forwards read weights that the known part of their window's gradient has moved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.schedule import Op

pytestmark = pytest.mark.unit

ADAM = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": ADAM,
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),
    "Muon": partial(ps.runtime.MuonAdamW, lr=0.01),
}


def one_stage(row: str, rule: str = "tentative", num: int = 6) -> ps.Schedule:
    text = f"""
        schedule mine: 1 rank, 1 stage, {num} microbatches
        pipeline 0: stages on ranks 0
        updates every 2 microbatches, weights by {rule}
        rank 0 | {row}
    """
    schedule = ps.parse(text)
    ps.check(schedule)
    return schedule


def trained(schedule: ps.Schedule, optimizer: Callable[..., torch.optim.Optimizer]) -> list[Tensor]:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double() for _ in range(schedule.num_stages)]
    pipe = ps.Pipeline(
        stages, schedule, loss_fn=nn.MSELoss(), optimizer=optimizer, precision=ps.PrecisionOptions(clip_norm=0.5)
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        size = schedule.num_microbatches * 2, 4
        pipe.step(*(torch.randn(*size, generator=generator, dtype=torch.float64) for _ in range(2)))
    found = [each.detach().clone() for each in pipe.parameters()]
    pipe.close()
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_with_the_whole_window_known_late_forwards_read_what_they_would_without_delay(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    late = one_stage("F0 F1 B0 B1 PREDICT0 F2 F3 U0 B2 B3 PREDICT1 F4 U1 F5 B4 B5 U2")
    drained = one_stage("F0 F1 B0 B1 U0 F2 F3 B2 B3 U1 F4 F5 B4 B5 U2", "none")
    assert ps.schedule.known_to(late) == {(0, 0): (0, 1), (0, 1): (2, 3)}
    for found, wanted in zip(trained(late, optimizer), trained(drained, optimizer), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)


def test_with_nothing_known_it_is_xpipe() -> None:
    row = "F0 F1 F2 B0 B1 U0 F3 F4 B2 B3 U1 F5 B4 B5 U2"
    found, wanted = trained(one_stage(row), ADAM), trained(one_stage(row, "xpipe"), ADAM)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["amdp", "pipedream-2bw"])
def test_late_forwards_alone_are_predicted_and_none_waits(name: str) -> None:
    plain = ps.build(name, 8, 96, window=32)
    schedule = ps.schedule.with_tentative_updates(plain)
    ps.check(schedule)
    assert ps.parse(str(schedule)) == schedule
    assert ps.simulate(schedule).makespan == ps.simulate(plain).makespan
    known = ps.schedule.known_to(schedule)
    assert all(set(known[stage, update]) <= {*range(32 * update, 32 * update + 32)} for stage, update in known)
    # The last two stages meet no update between a forward and its backward, and so have nothing to predict.
    assert {stage for stage, _ in known} == set(range(6 if name == "amdp" else 7))
    shares = [len(known[stage, 1]) / 32 for stage in range(6)]
    assert name != "amdp" or shares == [0.75, 0.75, 0.75, 1.0, 1.0, 1.0]


def test_the_known_part_is_divided_by_the_weight_of_its_own_losses() -> None:
    """One microbatch of the first window has 7 of 8 targets that count, and the other 1 of 8."""
    schedule = one_stage("F0 F1 B0 PREDICT0 F2 B1 U0 B2 F3 B3 U1", num=4)
    stage, loss = nn.Linear(3, 5, bias=False), nn.CrossEntropyLoss(ignore_index=-1)
    inputs, targets = torch.randn(32, 3), torch.randint(5, (32,))
    targets[:1], targets[8:15] = -1, -1
    first = stage.weight.detach().clone()

    def gradient(m: int, weight: Tensor) -> Tensor:
        """Of the sum over a microbatch's targets."""
        read = weight.clone().requires_grad_()
        part = slice(8 * m, 8 * m + 8)
        nn.functional.cross_entropy(inputs[part] @ read.T, targets[part], ignore_index=-1, reduction="sum").backward()
        assert read.grad is not None
        return read.grad

    tentative = first - gradient(0, first) / 7
    second = first - (gradient(0, first) + gradient(1, first)) / 8
    third = second - (gradient(2, tentative) + gradient(3, second)) / 16
    pipe = ps.Pipeline([stage], schedule, loss_fn=loss, optimizer=partial(torch.optim.SGD, lr=1.0))
    pipe.step(inputs, targets)
    (found,) = pipe.parameters()
    torch.testing.assert_close(found.detach(), third, rtol=0, atol=1e-6)


class Averaging(torch.optim.SGD):
    """Keeps averages in a dict with parameters as keys, and the parameters in a list."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)
        self.average: dict[Tensor, Tensor] = {}
        self.all = list(params)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step(closure)
        for p in self.all:
            self.average.setdefault(p, p.detach().clone()).lerp_(p, 0.5)


def test_what_an_optimizer_keeps_of_its_parameters_stays_of_these() -> None:
    """A tentative step put copies of the parameters in the place of those in the optimizer's attributes."""
    schedule = one_stage("F0 F1 B0 PREDICT0 F2 B1 U0 B2 F3 B3 U1", num=4)
    pipe = ps.Pipeline([nn.Linear(3, 5)], schedule, loss_fn=nn.MSELoss(), optimizer=Averaging)
    pipe.step(torch.randn(8, 3), torch.randn(8, 5))
    optimizer: Any = pipe.optimizer
    stepped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert list(map(id, optimizer.all)) == list(map(id, optimizer.average)) == stepped


REFUSED = {
    "belongs to the rule": ("F0 F1 B0 PREDICT0 B1 U0 F2 F3 B2 B3 U1", "none"),
    "needs whole ones": ("F0 F1 I0 W0 PREDICT0 F2 B1 U0 F3 B2 B3 U1", "tentative"),
    "after its copy's update": ("F0 F1 B0 B1 U0 PREDICT0 F2 F3 B2 B3 U1", "tentative"),
    "from the owner to the owner": ("F0 F1 B0 GIVE0 PREDICT0 F2 B1 U0 F3 B2 B3 U1", "tentative"),
    "number goes from 0 to 1": ("F0 F1 B0 PREDICT7 F2 B1 U0 F3 B2 B3 U1", "tentative"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_check_refuses(why: str) -> None:
    with pytest.raises(ps.ScheduleError, match=why):
        one_stage(*REFUSED[why], num=4)


def test_a_copys_predict_needs_the_owners() -> None:
    schedule = ps.schedule.with_tentative_updates(ps.build("amdp", 4, 24, window=8))
    bare = tuple(tuple(op for op in row if op != Op("PREDICT", 0, 0)) for row in schedule.order)
    with pytest.raises(ps.ScheduleError, match="the owner has no PREDICT of update 0"):
        ps.check(
            ps.Schedule("mine", schedule.placement, bare, schedule.microbatch_pipeline, updates=schedule.updates)
        )


def test_backwards_in_halves_and_schedules_without_updates_are_refused() -> None:
    with pytest.raises(ps.ScheduleError, match="needs whole ones"):
        ps.schedule.with_tentative_updates(ps.schedule.with_updates(ps.build("zb-h1", 4, 8), 4))
    with pytest.raises(ps.ScheduleError, match="no updates as ops"):
        ps.schedule.with_tentative_updates(ps.build("1f1b", 4, 8))


def test_a_predict_holds_the_optimizers_state_of_its_stage_twice() -> None:
    costs = ps.Costs([1.0] * 4, [1.0] * 4, [1.0] * 4, weight_bytes=[1.0] * 4, optimizer_bytes=[4.0, 5.0, 6.0, 7.0])
    plain = ps.build("pipedream-2bw", 4, 32, window=16)
    schedule = ps.schedule.with_tentative_updates(plain)
    held = ps.footprint(schedule, costs).ranks
    # Stage 3 has no late forward. Others hold what is predicted, and what ops read; and weights and state twice.
    assert [rank.optimizer for rank in held] == [4.0 + 5.0, 5.0 + 6.0, 6.0 + 7.0, 7.0]
    assert [rank.versions for rank in held] == [2.0, 2.0, 2.0, 0.0]
