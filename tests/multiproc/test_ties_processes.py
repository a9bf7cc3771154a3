"""Parameters that several stages share, one process a rank: several pipelines, replicas, shards of stages."""

from __future__ import annotations

from typing import Any

import pytest

import tie_runs
from penstock.models import parallelize
from processes import run_ranks

pytestmark = pytest.mark.multiproc


def several_pipelines(rank: int) -> dict[str, list[str]]:
    return {
        f"{name} {options} {given} zero={zero}": tie_runs.wrong_copies(name, options, given, zero)
        for name, options in tie_runs.SCHEDULES
        for given in tie_runs.GIVEN
        for zero in (True, False)
        if zero or name == "chimera"
    }


def meshes(rank: int) -> dict[str, list[str]]:
    run = tie_runs.wrong_mesh
    return {
        "fsdp 1f1b": run((2, 2, 1), "1f1b", "fsdp"),
        "fsdp zb-v": run((2, 2, 1), "zb-v", "fsdp"),
        "fsdp zb-v, a list": run((2, 2, 1), "zb-v", "fsdp", "list"),
        "fsdp interleaved, functions": run((2, 2, 1), "interleaved-1f1b", "fsdp", "functions"),
        "fsdp, an optimizer": run((2, 2, 1), "zb-v", "fsdp", instance=True),
        "zero1 zb-v": run((2, 2, 1), "zb-v", "zero1"),
        "replicas zb-v": run((2, 2, 1), "zb-v"),
        "replicas of two pipelines": run((2, 2, 1), "chimera"),
        "shards, 1f1b": run((2, 1, 2), "1f1b", parallelize=tie_runs.by_columns),
        "shards, zb-v": run((2, 1, 2), "zb-v", parallelize=tie_runs.by_columns),
        "shards, zb-v, an optimizer": run((2, 1, 2), "zb-v", parallelize=tie_runs.by_columns, instance=True),
        "shards, zb-v, functions": run((2, 1, 2), "zb-v", given="functions", parallelize=tie_runs.by_columns),
        "nothing to cut": run((2, 1, 2), "zb-v", parallelize=parallelize),
        "fsdp of one rank's pipeline": run((1, 4, 1), "zb-v", "fsdp"),
    }


@pytest.mark.parametrize("run", [several_pipelines, meshes])
def test_tied_weights_train_as_in_one_process(run: Any) -> None:
    outcomes = run_ranks(4, run, deadline=100)
    assert all(o.code == 0 for o in outcomes), "\n".join(o.text[-2000:] for o in outcomes)
    found = [f"rank {o.rank}, {each}: {text}" for o in outcomes for each, texts in o.value.items() for text in texts]
    assert not found, "\n".join(found)
