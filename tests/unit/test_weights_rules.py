"""What each rule asks of the optimizer and of the schedule, and what it reads off the order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

import penstock as ps
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.rules import rule_of
from penstock.schedule import Schedule, ScheduleError, Updates, count_mismatch
from penstock.schedule.updates import RULES
from penstock.schedule.weight_versions import (
    backward_steps,
    forward_steps,
    moment,
    predictions_of,
    reads_of,
    tied_reads_of,
    updates_ahead,
    why_none_is_predicted,
)

pytestmark = pytest.mark.unit


def some() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


OPTIMIZERS = {
    "SGD": lambda: SGD(some(), lr=0.1),
    "momentum": lambda: SGD(some(), lr=0.1, momentum=0.9),
    "nesterov": lambda: SGD(some(), lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: Adam(some()),
    "AdamW": lambda: AdamW(some()),
    "amsgrad": lambda: Adam(some(), amsgrad=True),
    "NAdam": lambda: NAdam(some()),
    "none": lambda: None,
}
TAKEN = {"spectrain": {"momentum"}, "xpipe": {"Adam", "AdamW"}, "vnag": {"NAdam"}}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_takes_the_optimizers_it_has_a_formula_for(rule: str) -> None:
    assert rule_of(rule).name == rule
    for name, make in OPTIMIZERS.items():
        optimizer: Optimizer | None = make()
        if name in TAKEN.get(rule, set(OPTIMIZERS)):
            rule_of(rule).require(optimizer)
            continue
        with pytest.raises(RuntimeFailure) as caught:
            rule_of(rule).require(optimizer)
        for word in (repr(rule), type(optimizer).__name__, "use torch.optim."):
            assert word in str(caught.value)


def test_an_unknown_rule_names_those_there_are() -> None:
    with pytest.raises(ScheduleError, match=r"no rule named 'stale'.*none, pipedream, pipedream-2bw, spectrain"):
        rule_of("stale")


def with_rule(schedule: Schedule, rule: str) -> Schedule:
    assert schedule.updates is not None
    return replace(schedule, updates=Updates(schedule.updates.window, None, rule))


def test_steps_ahead_are_those_between_a_forward_and_its_own_update() -> None:
    # F0 F1 F2 B0 U0 F3 B1 U1 F4 B2 U2 F5 B3 U3 B4 U4 B5 U5
    schedule = ps.build("pipedream", 3, 6, window=1)
    assert updates_ahead(schedule, 0) == {0: 0, 1: 1, 2: 2, 3: 2, 4: 2, 5: 2}
    assert updates_ahead(schedule, 2) == dict.fromkeys(range(6), 0)
    # With one microbatch a window they are just the updates between its forward and its backward.
    for (stage, _, m), num in count_mismatch(schedule).items():
        assert updates_ahead(schedule, stage)[m] == num
    # F0 F1 F2 B0 F3 B1 U0 F4 B2 F5 B3 U1 B4 B5 U2
    assert updates_ahead(ps.build("pipedream", 3, 6, window=2), 0) == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1, 5: 1}
    assert updates_ahead(ps.build("1f1b", 3, 6), 0) == {}


def test_a_tied_parameter_stands_for_what_its_owners_stage_reads_in_the_same_op() -> None:
    # rank 0 | F0 F1 F2 .  .  B0 U0 F3 B1 U1 F4 B2 U2 F5 B3 U3 .  B4 U4 .  B5 U5
    # rank 1 | .  F0 F1 .  B0 U0 F2 B1 U1 F3 B2 U2 F4 B3 U3 F5 B4 U4 .  B5 U5
    # rank 2 | .  .  F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 F4 B4 U4 F5 B5 U5
    schedule = ps.build("xpipe", 3, 6, window=1)
    owner, middle, last = reads_of(schedule, 0)[0], *(tied_reads_of(schedule, 0, stage)[0] for stage in (1, 2))
    came = {0: 0, 1: 0, 2: 0, 3: 1, 4: 2, 5: 3}  # the updates of stage 0 before each of its forwards
    assert owner.moments == middle.moments == last.moments == {m: moment(count) for m, count in came.items()}
    assert owner.forward == middle.forward == last.forward == {m: m for m in range(6)}  # up to its own update
    assert owner.backward == middle.backward == last.backward == {m: m for m in range(6)}
    # Stage 0 has made m updates by its backward of m. The last stage runs both ops of m when min(m, 2) are missing.
    assert [last.needed(moment(count)) for count in range(6)] == [(1, 2), (2,), (2,), (2,), (), ()]
    # On stage 1 B3 comes behind F4, which has brought a second update.
    assert middle.needed(moment(2)) == (1, 2)
    assert predictions_of(schedule) == {
        (0, 0): {moment(count): (1, 2) if not count else (2,) for count in range(4)},
        (0, 1): {moment(count): (1,) for count in range(5)},
    }
    assert predictions_of(schedule, [[0, 1]])[0, 0][moment(2)] == (1, 2)
    assert not reads_of(ps.build("pipedream", 3, 6, window=1), 0)


def test_of_several_pipelines_the_owner_predicts_what_all_copies_ask_for() -> None:
    schedule = with_rule(ps.build("amdp", 4, 16, window=4), "xpipe")
    alone, owner = predictions_of(schedule), predictions_of(schedule, one_copy_steps=True)
    for stage in range(4):
        of_copies = [alone.get((pipeline, stage), {}) for pipeline in range(2)]
        want = {when: {*of_copies[0].get(when, ()), *of_copies[1].get(when, ())} for when in range(8)}
        assert {when: {*owner[0, stage].get(when, ())} for when in range(8)} == want
        assert owner.get((1, stage)) == alone.get((1, stage))


def test_steps_of_spectrain_are_the_references() -> None:
    assert [forward_steps(k, 4, 1) for k in range(4)] == [3, 2, 2, 1]
    assert [backward_steps(k, 1) for k in range(4)] == [0, 0, 1, 1]
    assert [forward_steps(k, 8, 4) for k in range(8)] == [1, 1, 1, 1, 1, 1, 1, 0]


def test_a_rule_that_predicts_nothing_in_an_order_says_why() -> None:
    for window in range(1, 6):
        schedule = with_rule(ps.build("pipedream", 4, 12, window=window), "spectrain")
        assert (why_none_is_predicted(schedule) is None) == (window < 4)
    amdp = with_rule(ps.build("amdp", 4, 16, window=4), "spectrain")
    assert why_none_is_predicted(amdp) == (
        "rule 'spectrain' predicts no weights here, so that each stage reads its newest ones, as by rule 'none': it "
        "looks at most 3 microbatches ahead, fewer than the 4 that an update gathers; shorter windows, or a rule "
        "that counts updates (xpipe, tentative), would predict some"
    )
    for rule in ("spectrain", "xpipe", "tentative"):
        drained = with_rule(ps.build("amdp", 4, 16, window=4, max_mismatch=0), rule)
        assert "no update of a stage comes between" in (why_none_is_predicted(drained) or "")
        assert rule == "spectrain" or why_none_is_predicted(with_rule(amdp, rule)) is None
    assert why_none_is_predicted(with_rule(amdp, "none")) is None
    assert why_none_is_predicted(ps.build("1f1b", 4, 8)) is None


@pytest.mark.parametrize("b2", [0.5, 0.999])
def test_one_step_ahead_of_adam_is_the_step_it_takes_with_the_same_moments(b2: float) -> None:
    """A gradient equal to the first moment, whose square is the second's mean, leaves Adam's direction as it is."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    optimizer = Adam([weight], lr=0.01, betas=(0.5, b2), eps=2.0**-20)
    gradient = torch.tensor([0.5, -0.25, 2.0], dtype=torch.float64)
    for _ in range(5):
        weight.grad = gradient.clone()
        optimizer.step()
    group, state = optimizer.param_groups[0], optimizer.state[weight]
    out = torch.empty_like(weight.data)
    rule_of("xpipe").predict(out, weight.data, 3, 0.01, group, state)
    direction = (state["exp_avg"] / (1 - 0.5**5)) / ((state["exp_avg_sq"] / (1 - b2**5)).sqrt() + 2.0**-20)
    torch.testing.assert_close(out, weight.data - 3 * 0.01 * direction, rtol=1e-14, atol=0)
    before = weight.data.clone()
    for _ in range(3):
        weight.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(weight.data, out, rtol=1e-12, atol=0)
    assert not torch.equal(before, out)


def test_nothing_is_predicted_before_the_first_update() -> None:
    weight = torch.tensor([1.0, 2.0])
    for name, group in (("spectrain", {}), ("xpipe", {"betas": (0.9, 0.999), "eps": 1e-8})):
        out = torch.zeros(2)
        rule_of(name).predict(out, weight, 5, 0.1, group, {})
        assert torch.equal(out, weight)
