"""Programs that make no sense are refused by name, at once, and never half built."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps

one_to_one, table = ps.placements.one_to_one, ps.placements.table


def build(rules: Any = None, **more: Any) -> ps.Schedule:
    """Two ranks, four microbatches."""
    return ps.Program(one_to_one(2), 4, ps.Rules() if rules is None else rules, **more).build()


def branch(**more: Any) -> ps.Branch:
    return ps.Branch(one_to_one(2), 4, **more)


def two_towers(*ops: ps.NewOp) -> ps.Schedule:
    return ps.Program.of_branches({"image": branch(), "text": branch()}, ops=ops).build()


ENDS = (("image", -1), ("text", -1))


def gather(k: int, **more: Any) -> ps.NewOp:
    return ps.NewOp("GATHER", ENDS[0], {("F", e): k for e in ENDS}, {("B", e): k for e in ENDS}, on=ENDS, **more)


def one_op(*args: Any, **more: Any) -> ps.Schedule:
    return build(ops=[ps.NewOp(*args, **more)])


def raises(view: ps.program.View, op: ps.Op) -> bool:
    raise KeyError("mine")


CASES: dict[str, tuple[Callable[[], Any], str, str]] = {
    # what is no op, no table, no yes or no
    "an op that is no list": (
        lambda: build(ops=ps.NewOp("X", 0, {("F", 0): 1})),
        "options",
        r"ops is NewOp\(.*\): give a list of ps.NewOp",
    ),
    "ops by their names": (
        lambda: build(ops=["OFFLOAD"]),
        "options",
        r"ops is \['OFFLOAD'\]: give a list of ps.NewOp",
    ),
    "a group without a stage": (
        lambda: one_op("X", 0, {"F": 1}),
        "dependencies",
        r"op kind X: after has 'F'; give how many of which kind and stage, like \{\(\"F\", 0\): 1\}",
    ),
    "one stage where several are asked": (
        lambda: one_op("X", 0, {("F", 0): 1}, on=0),
        "kind",
        r"op kind X: on is 0; give a tuple of stages, like \(0, 1\)",
    ),
    "a time in words": (lambda: one_op("X", 0, {("F", 0): 1}, time="2"), "kind", "takes '2' ms and 0.0 of memory"),
    "a split in words": (
        lambda: build(split="no"),
        "options",
        "split is 'no': give True, False or a function of the stage",
    ),
    "a table of one row without its brackets": (
        lambda: table([0, 1, 0, 1]),
        "placement",
        r"row 0 of the table is 0: give each pipeline a list of ranks, \[\[0, 1, 0, 1\]\] for one pipeline",
    ),
    # limits
    "cap below one microbatch": (
        lambda: build(ps.Rules(max_in_flight=0)),
        "memory",
        "needs 1 forwards .* is 0; raise",
    ),
    "warm-up above the cap": (
        lambda: build(ps.Rules(warmup=3, max_in_flight=2)),
        "memory",
        "rank 0 is to run 3 forwards as warm-up, but max_in_flight is 2; raise it to 3, or lower the warm-up",
    ),
    "warm-up above the memory": (
        lambda: build(ps.Rules(warmup=3, memory_limit=2)),
        "deadlock",
        "0F2 rank 0 holds 2 of at most 2 of memory",
    ),
    "one entry too many": (
        lambda: build(ps.Rules(warmup=[1, 2, 3])),
        "rules",
        "3 entries; give one per rank, 2 in all",
    ),
    "negative warm-up": (lambda: build(ps.Rules(warmup=-1)), "rules", "warmup of rank 0 is -1"),
    "half a warm-up": (lambda: build(ps.Rules(warmup=[1.5, 1])), "rules", "1.5: give a whole number"),  # type: ignore[list-item]
    "warm-up by stage": (lambda: build(ps.Rules(warmup={0: 1})), "rules", "give one number, or one per rank"),  # type: ignore[arg-type]
    "cap of a stage that is not there": (
        lambda: build(ps.Rules(max_in_flight={5: 1})),
        "rules",
        "max_in_flight names stage 5; stages go from 0 to 1",
    ),
    "cap of a stage below 1": (
        lambda: build(ps.Rules(max_in_flight={0: 0})),
        "rules",
        "of stage 0 is 0: .* at least 1",
    ),
    # rules
    "kinds": (lambda: ps.Rules("bwd-first"), "rules", "give 'backward-first', 'forward-first', 'interleaved'"),
    "unit of 0": (lambda: ps.Rules(units=(0, 1)), "rules", r"units \(0, 1\): give how many forwards"),
    "interval of 0": (lambda: ps.breadth_first(0), "rules", "interval is 0: give at least 1, or None"),
    "traversal by name": (lambda: ps.Rules(forward="depth-first"), "rules", r"or ps.program.by_microbatch\(\)"),  # type: ignore[arg-type]
    "patience": (lambda: ps.Rules(patience=-1), "rules", "patience is -1"),
    "check that is none": (lambda: ps.Rules(check=3), "rules", "check is 3: give a function"),  # type: ignore[arg-type]
    "rules by name": (lambda: build("1f1b"), "rules", "the rules of rank 0 are '1f1b': give ps.Rules"),
    "rules of a rank that is not there": (
        lambda: build({2: ps.Rules()}),
        "rules",
        "for rank 2; ranks go from 0 to 1",
    ),
    # placements
    "stage on no rank": (lambda: table([[0, None]]), "placement", r"stage 1 of pipeline 0 is on no rank \(None\)"),
    "gap in the ranks": (lambda: table([[0, 2]]), "placement", "rank 1 hosts no stage"),
    "circle with a gap": (lambda: ps.placements.circular(4, 3), "placement", "leave rank 3 without one"),
    "pipelines of two lengths": (lambda: table([[0, 1], [0]]), "placement", r"lengths are \[2, 1\]"),
    "no pipeline": (lambda: table([]), "placement", "at least one pipeline"),
    "no rank": (lambda: one_to_one(0), "placement", "over 0 ranks: give at least 1"),
    "no wave": (lambda: ps.placements.wave(2, 0), "placement", "0 waves: give at least 1"),
    "half a pipeline": (lambda: ps.placements.multi_directional(3), "placement", "an even number of ranks, got 3"),
    "a list": (lambda: ps.Program([[0, 1]], 4), "placement", "give one of ps.placements"),  # type: ignore[arg-type]
    "no microbatch": (lambda: ps.Program(one_to_one(2), 0), "options", "a program of 0 microbatches"),
    "pipeline that is not there": (lambda: build(pipelines=[0, 1, 0, 0]), "placement", "one from 0 to 0"),
    # stages and branches
    "graph of another size": (
        lambda: build(stages=ps.schedule.StageGraph(3, ((0, 1),))),
        "stages",
        "the stage graph has 3 stages, the placement 2",
    ),
    "no branch": (lambda: ps.Program.of_branches({}), "stages", "no branches: give at least one"),
    "branch that is a placement": (
        lambda: ps.Program.of_branches({"a": one_to_one(2)}),  # type: ignore[dict-item]
        "stages",
        "branch a is Placement.*: give a ps.Branch",
    ),
    "feeds nobody": (
        lambda: ps.Program.of_branches({"a": branch(feeds=("b",))}),
        "stages",
        "branch a feeds 'b', but there are a",
    ),
    "feeds a word": (lambda: branch(feeds="b"), "stages", r"feeds is 'b': give a tuple of branches, \('b',\)"),
    "branch without microbatches": (lambda: ps.Branch(one_to_one(2), 0), "options", "has 0 microbatches"),
    "branch both ways": (
        lambda: ps.Branch(ps.placements.bidirectional(one_to_one(2)), 4),
        "placement",
        "a branch has 2 pipelines",
    ),
    "shared rank under two rules": (
        lambda: ps.Program.of_branches(
            {"a": branch(ranks=(0, 1)), "b": branch(ranks=(1, 2), rules=ps.Rules("forward-first"))}
        ),
        "rules",
        "branch b shares rank 1 with another whose rules differ",
    ),
    "branch on one rank of two": (
        lambda: ps.Program.of_branches({"a": branch(ranks=(0,))}),
        "placement",
        r"branch a is placed over 2 ranks and given \(0,\)",
    ),
    "one entry per rank of the branch": (
        lambda: ps.Program.of_branches({"a": branch(rules=ps.Rules(warmup=[1])), "b": branch()}),
        "rules",
        "warmup has 1 entries; give one per rank of the branch, 2 in all",
    ),
    # registered ops
    "groups that do not divide": (
        lambda: two_towers(gather(3)),
        "dependencies",
        "GATHER: its groups ask for 1.33333",
    ),
    "a group of 0": (lambda: ps.NewOp("G", 1, after={("F", 1): 0}), "dependencies", "goes in groups of 0"),
    "after nothing": (lambda: ps.NewOp("G", 1), "kind", "say what comes before or after it"),
    "none of them": (lambda: ps.NewOp("G", 1, num_ops=0), "kind", "op kind G has 0 ops"),
    "after a W where none is": (
        lambda: one_op("G", 1, after={("W", 1): 1}),
        "kind",
        "G goes before or after W of stage 1, which is not there",
    ),
    "on a stage that is not there": (
        lambda: one_op("G", 7, after={("F", 1): 1}),
        "stages",
        "no stage is called 7: give a number from 0 to 1",
    ),
    "in a branch that is not there": (
        lambda: two_towers(ps.NewOp("G", ("audio", 0), num_ops=1)),
        "stages",
        "no branch named 'audio': there are image, text",
    ),
    "beyond a branch": (
        lambda: two_towers(ps.NewOp("G", ("text", 2), num_ops=1)),
        "stages",
        "branch text has 2 stages, so none is number 2",
    ),
    "registered twice": (
        lambda: build(ops=[ps.NewOp("G", 1, after={("F", 1): 1})] * 2),
        "kind",
        "registered twice for one stage",
    ),
    "ops with two pipelines": (
        lambda: ps.Program(
            ps.placements.bidirectional(one_to_one(2)), 4, ops=[ps.NewOp("G", 1, after={("F", 1): 2})]
        ).build(),
        "placement",
        "2 ops of kind G of stage 1 on a placement with 2 pipelines: each op belongs to one microbatch there",
    ),
    # users' functions
    "check that raises": (
        lambda: build(ps.Rules(check=raises)),
        "rules",
        "rank 0 at 0 ms: check function raises raised KeyError: 'mine', asked about 0F0; see the exception above",
    ),
    "check that forgets to answer": (
        lambda: build(ps.Rules(check=lambda view, op: None)),  # type: ignore[arg-type, return-value]
        "rules",
        "the check function returned None for 0F0; return True or False",
    ),
    "choose that returns an op that is not ready": (
        lambda: build(ps.Rules(choose=lambda view, ready: ps.Op("B", 0, 0))),
        "rules",
        "rank 0 at 0 ms: the choose function returned 0B0; return one of 0F0, or None to idle",
    ),
    "limit that is none": (
        lambda: build(ps.Rules(max_in_flight=lambda view, op: None)),  # type: ignore[arg-type, return-value]
        "rules",
        "the max_in_flight function returned None for 0F0; return a number of forwards",
    ),
    "split that raises": (lambda: build(split=lambda stage: 1 // 0 > 0), "rules", "split raised ZeroDivisionError"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_makes_no_sense_is_refused_by_name(name: str) -> None:
    make, rule, words = CASES[name]
    with pytest.raises(ps.ScheduleError) as caught:
        make()
    assert re.search(words, str(caught.value)), str(caught.value)
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: build(costs=ps.Costs.uniform(2, f=-1)), "f of stage 0 is -1.0"),
        (lambda: build(costs=ps.Costs.uniform(2, w=float("nan"))), "w of stage 0 is nan"),
        (lambda: build(costs=ps.Costs.uniform(3)), "the costs are for 3 stages, the placement has 2"),
        (lambda: build(links=ps.Links({(0, 7): 1.0})), "link 0:7: ranks go from 0 to 1"),
    ],
    ids=["negative", "no number", "of three stages", "link to nowhere"],
)
def test_costs_that_make_no_sense_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ps.CostError, match=words):
        make()


def test_the_error_of_a_function_keeps_its_cause_and_its_place() -> None:
    with pytest.raises(ps.ScheduleError) as caught:
        build({1: ps.Rules(check=raises)})
    assert isinstance(caught.value.__cause__, KeyError)
    assert (caught.value.rank, caught.value.op) == (1, ps.Op("F", 1, 0))


def test_a_schedule_error_of_a_function_comes_through_as_it_is() -> None:
    def refuse(view: ps.program.View, op: ps.Op) -> bool:
        raise ps.ScheduleError("not with me", rule="mine")

    with pytest.raises(ps.ScheduleError, match=r"^not with me$"):
        build(ps.Rules(check=refuse))


def test_stepping_ends_in_the_same_error_as_building() -> None:
    program = ps.Program(one_to_one(2), 4, ps.Rules(warmup=[1, 3], max_in_flight=[2, 3]))
    with pytest.raises(ps.ScheduleError) as built:
        program.build()
    steps: list[ps.program.Step] = []
    with pytest.raises(ps.ScheduleError) as stepped:
        steps.extend(ps.program.Stepper(program))
    assert str(stepped.value) == str(built.value)
    chosen = [str(step.chosen) for step in steps if step.chosen is not None]
    assert chosen == ["0F0", "0F1", "1F0", "1F1"]


def test_numpy_numbers_are_numbers() -> None:
    np = pytest.importorskip("numpy")
    rules = ps.Rules(warmup=np.array([2, 1]), max_in_flight=np.int64(2))
    same = ps.Rules(warmup=[2, 1], max_in_flight=2)
    assert ps.Program(one_to_one(2), np.int64(4), rules).build() == build(same)
    assert build(ps.Rules(check=lambda view, op: np.bool_(True))) == build()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"links": {(0, 1): 5.0}}, "links are dict: give ps.Links"),
        ({"costs": {"f": 1}}, "costs are dict: give ps.Costs"),
    ],
)
def test_costs_and_links_that_are_none_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ps.CostError, match=message):
        build(**more)
