"""Each queue of ops runs its microbatches in the order that the schedule declares, ascending by default."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock as ps
from ordered_loop import MSE, SGD, SOME_WORTH, ordered_step, wrong
from penstock.cli import main
from penstock.control.configuration import Configuration, Job
from penstock.control.decide import Measured, candidates
from penstock.dispatch import Dispatch
from penstock.formats import from_json, to_json
from penstock.passes import (
    add_communication,
    add_reductions,
    recompute,
    remove_communication,
    reorder_microbatches,
    separate_gradients,
)
from penstock.runtime.mesh.peers import schedule_digest
from penstock.schedule import declare_shown_order
from plain_loop import differences
from runtime_cases import W

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]

HEAD = "schedule mine: 1 rank, 1 stage, 3 microbatches\npipeline 0: stages on ranks 0\n"

SWAPPED = {
    "forwards out of order": "rank 0 | F1 F0 F2 B0 B1 B2",
    "backwards out of order": "rank 0 | F0 F1 F2 B0 B2 B1",
    "input halves out of order": "rank 0 | F0 F1 F2 I1 I0 I2 W0 W1 W2",
    "weight halves out of order": "rank 0 | F0 F1 F2 I0 I1 I2 W0 W2 W1",
    "a whole backward before the weight half of an earlier one": "rank 0 | F0 F1 F2 I0 B1 B2 W0",
    "a whole backward before the input half of an earlier one": "rank 0 | F0 F1 F2 B1 I0 W0 B2",
    "recomputations out of order": "rank 0 | F0 F1 F2 R1 R0 B0 B1 B2",
}

ONE_BY_ONE = """
schedule slices: 2 ranks, 2 stages, 4 microbatches
pipeline 0: stages on ranks 0 1
order of B on stages 0 1: 1 0 3 2
rank 0 | F0 F1 F2 .  .  B1 B0 F3 .  .  B3 B2
rank 1 | .  F0 F1 .  B1 B0 F2 .  F3 B3 B2
"""


def one_by_one() -> ps.Schedule:
    """Two slices of a sequence at a time, whose backwards come in reverse."""
    return ps.parse(ONE_BY_ONE)


def refusal(schedule: ps.Schedule) -> ps.ScheduleError:
    with pytest.raises(ps.ScheduleError) as caught:
        ps.check(schedule)
    return caught.value


@pytest.mark.parametrize("name", SWAPPED)
def test_an_undeclared_order_is_refused(name: str) -> None:
    error = refusal(ps.parse(HEAD + SWAPPED[name]))
    assert error.rule == "microbatches"
    assert error.op is not None
    assert f"rank 0, step {error.step}, {error.op.short()} of stage 0" in str(error)


def test_the_error_says_what_came_first_what_is_expected_and_how_to_declare() -> None:
    error = refusal(ps.parse(HEAD + SWAPPED["backwards out of order"]))
    assert str(error) == (
        "rank 0, step 5, B1 of stage 0: B2 of stage 0 comes before it, at step 4, but the order of B of stage 0, "
        "which I, W and R keep too, is 0 1 2. Sums depend on it: keep the order, or declare another with "
        "ps.schedule.declare_order(schedule, backward=[...]), for a file with ps.load(..., declare_order=True) or "
        "penstock show --declare-order --out (rule: microbatches)\n"
        "  rank 0 | F0 F1 F2 B0 B2 B1\n"
        "                          ^^"
    )


def test_a_declared_order_is_asked_for() -> None:
    ps.check(one_by_one())
    ascending = replace(one_by_one(), microbatch_orders=())
    assert refusal(ascending).rule == "microbatches"
    assert refusal(ps.schedule.declare_order(ps.build("gpipe", 2, 4), backward="reversed")).rule == "microbatches"
    mixed = ps.parse(HEAD + "order of B on stage 0: 2 1 0\nrank 0 | F0 F1 F2 I2 B1 W2 B0")
    assert refusal(mixed).op == ps.Op("W", 0, 2)


def test_with_several_pipelines_each_has_its_own_order() -> None:
    base = ps.build("chimera", 2, 4)
    moved = reorder_microbatches(base, [2, 3, 0, 1], [2, 3, 0, 1])
    assert moved.microbatches_of("F", 0, 0) == (2, 0)
    assert moved.microbatches_of("W", 1, 1) == (3, 1)
    first = reorder_microbatches(base, "reversed", "reversed", pipelines=[0])
    assert first.microbatches_of("F", 1, 0) == (2, 0)
    assert first.microbatches_of("F", 1, 1) == (1, 3)
    assert ps.parse(str(first)) == first != moved
    assert "in pipeline 0" in str(refusal(replace(first, microbatch_orders=())))


def test_an_order_that_says_nothing_is_none() -> None:
    base = ps.build("zb-v", 2, 4)
    same = ps.schedule.declare_order(base, range(4), "ascending")
    assert same == base
    assert hash(same) == hash(base)
    assert schedule_digest(same) == schedule_digest(base)
    there_and_back = reorder_microbatches(reorder_microbatches(base, "reversed", "reversed"), range(4), range(4))
    assert there_and_back == base


def test_the_order_is_part_of_the_value() -> None:
    base = ps.build("gpipe", 2, 3)
    declared = ps.schedule.declare_order(base, backward=np.array([2, 1, 0]))
    assert declared.order == base.order
    assert declared != base
    assert schedule_digest(declared) != schedule_digest(base)
    assert declared.microbatches_of("I", 1) == (2, 1, 0)
    assert tuple(declared.microbatches_of("F", 1)) == (0, 1, 2)
    swapped = replace(declared, microbatch_orders=declared.microbatch_orders[::-1])
    assert swapped == declared


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ([ps.schedule.MicrobatchOrder("B", 0, (0, 2, 1))], None),
        (
            [ps.schedule.MicrobatchOrder("B", 0, (0, 2))],
            "is 0 2, and 1 is missing; give each of its microbatches once",
        ),
        ([ps.schedule.MicrobatchOrder("B", 0, (0, 2, 1, 3))], "3 is none of them"),
        ([ps.schedule.MicrobatchOrder("F", 1, (0, 2, 1, 1))], "some are there twice"),
        ([ps.schedule.MicrobatchOrder("W", 0, (0, 2, 1))], "declared for W of stage 0: declare that of F, that of B"),
        ([ps.schedule.MicrobatchOrder("U", 0, (0, 2, 1))], "declared for U of stage 0"),
        ([ps.schedule.MicrobatchOrder("GATHER", 0, (1, 0))], "declared for GATHER of stage 0"),
        ([ps.schedule.MicrobatchOrder("F", 5, (0, 2, 1))], "stage 5, which is not there"),
        ([ps.schedule.MicrobatchOrder("F", 0, (0, 2, 1), 1)], "in pipeline 1, where there are none"),
        (
            [ps.schedule.MicrobatchOrder("F", 0, (0, 2, 1)), ps.schedule.MicrobatchOrder("F", 0, (2, 0, 1))],
            "is declared twice",
        ),
    ],
)
def test_declarations_that_make_no_sense_are_refused(
    orders: list[ps.schedule.MicrobatchOrder], message: str | None
) -> None:
    base = ps.build("gpipe", 2, 3)
    if message is None:
        assert replace(base, microbatch_orders=tuple(orders)).microbatch_orders == tuple(orders)
        return
    with pytest.raises(ps.ScheduleError, match=message) as caught:
        replace(base, microbatch_orders=tuple(orders))
    assert caught.value.rule == "microbatches"


@pytest.mark.parametrize("order", ["backwards", "", [0, 1], [0, 0, 1], [0.5, 1, 2], None, 7])
def test_orders_that_are_none_are_refused(order: object) -> None:
    base = ps.build("gpipe", 2, 3)
    if order is None:
        assert ps.schedule.declare_order(base, order) == base
        return
    with pytest.raises(ps.ScheduleError):
        ps.schedule.declare_order(base, order)  # type: ignore[arg-type]


def test_stages_with_numbers_of_their_own() -> None:
    graph = ps.schedule.StageGraph(2, ((0, 1),), num_microbatches=(4, 2))
    base = ps.Program(ps.placements.one_to_one(2), 4, stages=graph).build()
    moved = reorder_microbatches(base, [1, 0], [1, 0], stages=[1])
    assert moved.microbatches_of("B", 1) == (1, 0)
    assert list(moved.microbatches_of("B", 0)) == [0, 1, 2, 3]
    with pytest.raises(ps.ScheduleError, match="2 is missing"):
        ps.schedule.declare_order(base, [1, 0])


def test_registered_ops_have_an_order_too() -> None:
    base = ps.build("distmm", 2, 4, gather_every=2)
    rows = [[op._replace(microbatch=1 - op.microbatch) if op.kind == "GATHER" else op for op in row]
            for row in base.order]  # fmt: skip
    swapped = replace(base, order=tuple(map(tuple, rows)))
    assert refusal(swapped).rule in ("order", "microbatches")
    graph = ps.schedule.StageGraph(1, (), registered=(ps.schedule.Registered("LOG", 0, 2),))
    logs = replace(ps.parse(HEAD + "rank 0 | F0 F1 F2 B0 B1 B2 "), stage_graph=graph)
    logs = replace(logs, order=((*logs.order[0], ps.Op("LOG", 0, 1), ps.Op("LOG", 0, 0)),))
    assert "the order of LOG of stage 0 is 0 1" in str(refusal(logs))
    declared = replace(logs, microbatch_orders=(ps.schedule.MicrobatchOrder("LOG", 0, (1, 0)),))
    ps.check(declared)
    assert declare_shown_order(logs) == declared
    assert ps.parse(str(declared)) == from_json(to_json(declared)) == declared


# -- Files ---------------------------------------------------------------------------------------------------------


def test_text_and_json_say_it_once_for_all_stages(tmp_path: Path) -> None:
    schedule = one_by_one()
    assert str(schedule).splitlines()[2] == "order of B on stages 0 1: 1 0 3 2"
    value = json.loads(to_json(schedule))
    assert value["microbatch_orders"] == [["B", 0, [0, 1], [1, 0, 3, 2]]]
    for name in ("s.json", "s.txt"):
        ps.save(schedule, tmp_path / name)
        assert ps.load(tmp_path / name) == schedule


@pytest.mark.parametrize("wrong_orders", [5, [5], [["B", 0, [0]]], [["B", 0, 0, [1, 0]]], [["B", 0, [0], ["1"]]]])
def test_json_of_another_form_is_refused(wrong_orders: object) -> None:
    value = json.loads(to_json(one_by_one())) | {"microbatch_orders": wrong_orders}
    with pytest.raises(ps.ScheduleError, match=r"field 'microbatch_orders.*': expected lists of a kind"):
        from_json(json.dumps(value))


def test_a_csv_cannot_say_it_and_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = one_by_one()
    path = tmp_path / "slices.csv"
    ps.save(schedule, path)
    assert refusal(ps.load(path)).rule == "microbatches"
    assert ps.load(path, declare_order=True).renamed("slices") == schedule
    there = tmp_path / "slices.json"
    assert main(["show", str(path), "--declare-order", "--out", str(there)]) == 0
    assert ps.load(there) == schedule
    assert main(["check", str(there)]) == 0
    assert "Microbatches run in ascending order but in 2 queues, as declared." in capsys.readouterr().out
    assert main(["check", str(path)]) == 1
    assert "penstock show --declare-order --out" in capsys.readouterr().err
    assert main(["show", str(there), "--out", str(path)]) == 0
    assert "left out: that microbatches run in the order of the rows" in capsys.readouterr().out


def test_what_is_shown_and_makes_no_one_order_stays_refused() -> None:
    shown = declare_shown_order(ps.parse(HEAD + "rank 0 | F0 F1 F2 I0 I1 I2 W0 W2 W1"))
    assert shown.microbatches_of("B", 0) == (0, 2, 1)
    assert refusal(shown).op == ps.Op("I", 0, 2)
    lacking = declare_shown_order(ps.parse(HEAD + "rank 0 | F1 F0 F2 B1 B0"))
    assert refusal(lacking).rule == "coverage"


# -- What works on schedules keeps it ------------------------------------------------------------------------------


def test_evaluation_keeps_the_order_of_forwards() -> None:
    schedule = reorder_microbatches(ps.build("1f1b", 2, 4), [3, 0, 2, 1], [3, 0, 2, 1])
    assert schedule.forward_only().microbatches_of("F", 1) == (3, 0, 2, 1)
    assert schedule.forward_only(3).microbatches_of("F", 1) == (0, 2, 1)
    assert [op.microbatch for op in schedule.forward_only(3).order[1]] == [0, 2, 1]


def test_passes_keep_the_order() -> None:
    schedule = reorder_microbatches(ps.build("1f1b", 3, 6), [3, 0, 5, 2, 1, 4], [3, 0, 5, 2, 1, 4])
    orders = schedule.microbatch_orders
    split = separate_gradients(schedule)
    assert split != schedule
    for made in (split, recompute(schedule, ps.Costs.uniform(3), 2), add_communication(schedule),
                 remove_communication(add_communication(schedule)), add_reductions(schedule),
                 ps.schedule.with_updates(schedule, 6)):  # fmt: skip
        assert made.microbatch_orders == orders
        ps.check(made)


def test_a_permutation_everywhere_is_the_same_schedule_with_other_numbers() -> None:
    order = [2, 0, 3, 1]
    for base in (ps.build("zb-v", 2, 4), add_communication(ps.build("1f1b", 2, 4))):
        moved = reorder_microbatches(base, order, order)
        assert [[op._replace(microbatch=order[op.microbatch]) for op in row] for row in base.order] == [
            list(row) for row in moved.order
        ]
        assert ps.simulate(moved).makespan == ps.simulate(base).makespan


def test_an_order_that_does_not_fit_the_rows_is_refused() -> None:
    with pytest.raises(ps.ScheduleError, match="it needs F3 of stage 0, which comes later"):
        reorder_microbatches(ps.build("1f1b", 2, 4), backward="reversed")
    with pytest.raises(ps.ScheduleError, match="of stage 0, which comes later"):
        reorder_microbatches(ps.schedule.with_updates(ps.build("1f1b", 2, 4), 2), [3, 1, 2, 0], [3, 1, 2, 0])


def test_windows_repeat_the_order() -> None:
    step = reorder_microbatches(ps.build("gpipe", 2, 3), [1, 2, 0], "reversed")
    twice = ps.passes.repeat_windows(step, 2)
    assert twice.microbatches_of("F", 0) == (1, 2, 0, 4, 5, 3)
    assert twice.microbatches_of("B", 1) == (2, 1, 0, 5, 4, 3)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_dynamic_run_keeps_the_order(name: str) -> None:
    base = ps.build(name, 3, 6)
    schedule = reorder_microbatches(base, [3, 0, 5, 2, 1, 4], [3, 0, 5, 2, 1, 4])
    ran = ps.simulate(schedule, links=ps.Links({(0, 1): 4.0}), dispatch="dynamic").executed()
    assert ran.order != schedule.order
    ps.check(ran)


def test_programs_run_queues_in_order_whatever_their_functions_choose() -> None:
    """A function is given the head of each queue, so none can give another order."""
    backwards = ps.Rules(choose=lambda view, ready: max(ready, key=lambda op: (op.microbatch, op.stage)))
    made = ps.Program(ps.placements.circular(2, 4), 4, backwards, split=True).build()
    assert made.microbatch_orders == ()


def test_what_control_proposes_keeps_the_order() -> None:
    costs = ps.Costs.uniform(3, f=10, i=10, w=10)
    start = reorder_microbatches(ps.build("zb-h1", 3, 6), [3, 0, 5, 2, 1, 4], [3, 0, 5, 2, 1, 4])
    caps = (6.0, 6.0, 6.0)
    job = Job(costs, Configuration(start, Dispatch.FROZEN, (), caps))
    late = Measured.steady(ps.Links({(0, 1): 20.0, (1, 0): 20.0}), late=frozenset({(0, 1)}))
    proposed = {each.configuration.schedule for each in candidates(job, job.start, late, [ps.build("zb-h1", 3, 6)])}
    assert len(proposed) > 2
    assert {each.microbatch_orders for each in proposed} == {start.microbatch_orders}
    for each in proposed:
        ps.check(each)


# -- The runtime ---------------------------------------------------------------------------------------------------


def test_backwards_in_reverse_are_summed_in_reverse() -> None:
    assert wrong(one_by_one()) == []


def test_windows_with_updates_between_are_steps_in_their_order() -> None:
    step = reorder_microbatches(ps.build("gpipe", 2, 3), [1, 2, 0], "reversed")
    torch.manual_seed(5)
    stages = [torch.nn.Sequential(torch.nn.Linear(W, W), torch.nn.Tanh()) for _ in range(2)]
    plain = copy.deepcopy(stages)
    x, y = torch.randn(12, W), torch.randn(12, W)
    optimizer = SGD(torch.nn.ModuleList(plain).parameters())
    for part in (slice(0, 6), slice(6, 12)):
        ordered_step(plain, x[part], y[part], step, 1)
        optimizer.step()
        optimizer.zero_grad()
    pipe = ps.Pipeline(stages, ps.passes.repeat_windows(step, 2), loss_fn=MSE, optimizer=SGD)
    pipe.step(x, y)
    mine = {n: p.detach() for n, p in pipe.named_parameters()}
    pipe.close()
    want = {n: p.detach() for n, p in torch.nn.ModuleList(plain).named_parameters()}
    assert differences(want, mine) == []


def test_a_running_pipeline_may_switch_to_another_order() -> None:
    first = separate_gradients(ps.build("gpipe", 2, 4))
    torch.manual_seed(5)
    stages = [torch.nn.Sequential(torch.nn.Linear(W, W), torch.nn.BatchNorm1d(W)) for _ in range(2)]
    plain = copy.deepcopy(stages)
    x, y = torch.randn(10, W), torch.randn(10, W)
    pipe = ps.Pipeline(stages, first, loss_fn=MSE)
    for step, then in enumerate((first, reorder_microbatches(first, [2, 0, 3, 1], "reversed"), first), start=1):
        pipe.reconfigure(Configuration(then, Dispatch.FROZEN, (), (8.0, 8.0)))
        pipe.step(x, y, update=False)
        ordered_step(plain, x, y, then, step)
        mine = {n: p.grad for n, p in pipe.named_parameters()}
        want = {n: p.grad for n, p in torch.nn.ModuleList(plain).named_parameters()}
        assert differences(want, mine) == []
        pipe.zero_grad()
        torch.nn.ModuleList(plain).zero_grad()
    pipe.close()


@pytest.mark.parametrize(
    "row",
    [
        pytest.param("order of F on stage 0: 3 0 1 2\nrank 0 | F3 F0 F1 F2 I0 I1 I2 I3 W0 W1 W2 W3", id="forwards"),
        pytest.param("rank 0 | F0 F1 F2 F3 R0 I0 R1 I1 I2 I3 W0 W1 W2 W3", id="some forwards run again"),
    ],
)
def test_what_waits_for_w_is_summed_in_order_where_forwards_come_in_another(row: str) -> None:
    """Which weight gradients are worth waiting is found out as forwards pass; one that does not wait is added in I,
    before those of microbatches whose backward came before but waited."""
    head = "schedule mine: 1 rank, 1 stage, 4 microbatches\npipeline 0: stages on ranks 0\n"
    for extra in (1, 2, 3):
        assert wrong(ps.parse(head + row), merge=SOME_WORTH, extra=extra) == []
