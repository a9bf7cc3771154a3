"""Megatron-Core runs planned warm-ups and plans: losses and gradients are those of its own functions, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import megatron_runs
from megatron_runs import Run
from processes import run_ranks_to_end

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.nightly,
    pytest.mark.skipif(megatron_runs.IS_MISSING, reason="needs megatron, which `make megatron` installs"),
]

Kinds = dict[str, dict[str, Run]]


def results(function: Callable[..., Kinds]) -> list[Kinds]:
    outcomes = run_ranks_to_end(megatron_runs.RANKS, function)
    return [o.value for o in outcomes]


def wrong_values(ranks: list[Kinds]) -> list[str]:
    return [
        f"rank {rank}, {kind}: {name}"
        for rank, kinds in enumerate(ranks)
        for kind, runs in kinds.items()
        for name, run in runs.items()
        if (run["losses"], run["grads"]) != (runs["theirs"]["losses"], runs["theirs"]["grads"])
    ]


@pytest.fixture(scope="module")
def toys() -> list[Kinds]:
    return results(megatron_runs.toy)


def test_losses_and_gradients_of_a_toy_are_megatrons(toys: list[Kinds]) -> None:
    assert wrong_values(toys) == []
    for kind, runs in toys[-1].items():
        assert all(len(run["losses"]) >= 4 for run in runs.values()), kind
        assert all(bool(run["grads"]) == ("only" not in kind) for run in runs.values()), kind


def test_plans_run_in_another_order(toys: list[Kinds]) -> None:
    runs = toys[0]["1f1b"]
    first = [[event[0] for event in runs[name]["events"]].index("backward") for name in runs]
    assert dict(zip(runs, first, strict=True)) == {
        "theirs": 4, "follow 1f1b": 4, "follow planned": 7, "follow gpipe": 8, "follow placed": 7,
        "[4, 3, 2, 1]": 4, "[7, 5, 3, 1]": 7, "[8, 8, 8, 8]": 8, "[9, 4, 4, 2]": 8, "[1, 1, 1, 1]": 1,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["hooks", "function", "tokens", "chunks, hooks", "chunks, function"])
def test_reductions_timers_checkpoints_and_ends_stand_where_megatron_has_them(toys: list[Kinds], kind: str) -> None:
    for kinds in toys:
        expected = kinds[kind]["theirs"]["events"]
        assert any(event[0] == "finalize" for event in expected)
        assert [name for name, run in kinds[kind].items() if run["events"] != expected] == []


def test_losses_and_gradients_of_megatrons_gpt_are_megatrons() -> None:
    ranks = results(megatron_runs.gpt)
    assert wrong_values(ranks) == []
    assert [len(kinds["2 ranks"]["theirs"]["losses"]) for kinds in ranks] == [0, 0, 8, 8], "two replicas"
    assert len(ranks[3]["4 ranks"]["theirs"]["grads"]) > 10


def test_a_step_that_does_not_fit_the_plan_is_refused() -> None:
    outcomes = run_ranks_to_end(2, megatron_runs.refusals)
    for outcome in outcomes:
        assert [text.split(";")[0] for text in outcome.value] == [
            "the plan has (2, 2, 8) ranks, stages and microbatches, Megatron (2, 2, 3)",
            "the plan has (2, 4, 8) ranks, stages and microbatches, Megatron (2, 2, 8)",
            "the plan has (4, 4, 8) ranks, stages and microbatches, Megatron (2, 2, 8)",
            "moe_paged_stash counts on Megatron's own order of ops",
            "the model has 1 chunks, the data 2 iterators",
            "give both a p2p_communicator and a ProcessGroupCollection as pg_collection, or neither",
            "Megatron's calculator of microbatches is not set",
        ]
