"""Parameters that several stages share, one process a rank: several pipelines, replicas, shards of stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import asynchronous_runs as runs
import penstock as ps
import tie_runs
import tied_updates_loop as loop
from penstock.models import parallelize
from penstock.runtime import RuntimeFailure
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


def updates(rank: int) -> dict[str, list[str]]:
    run = loop.unlike_the_loop
    amdp, double = ps.build("amdp", 4, 16, window=4), ps.build("pipedream-2bw", 4, 16, window=4)
    return {
        "amdp": run(amdp, runs.ADAM),
        "amdp, functions": run(amdp, runs.ADAM, "functions"),
        "amdp, every copy steps": run(amdp, runs.ADAM, "functions", zero=False, clip_norm=0.05),
        "pipedream": run(ps.build("pipedream", 4, 8, window=1), runs.ADAM, "functions"),
        "pipedream-2bw": run(double, runs.ADAM, "functions"),
        "pipedream-2bw, over delegates": run(double, runs.ADAM, transport="delegate"),
        "windows of chimera": run(ps.passes.repeat_windows(ps.build("chimera", 4, 8), 3), runs.ADAM),
        "windows of zb-v": run(ps.passes.repeat_windows(ps.build("zb-v", 4, 8), 3), runs.ADAM, "functions"),
    }


def meshes(rank: int) -> dict[str, list[str]]:
    run = tie_runs.wrong_mesh
    return {
        "fsdp 1f1b": run((2, 2, 1), "1f1b", "fsdp"),
        "fsdp zb-v": run((2, 2, 1), "zb-v", "fsdp"),
        "fsdp zb-v, a list": run((2, 2, 1), "zb-v", "fsdp", "list"),
        "fsdp interleaved, functions": run((2, 2, 1), "interleaved-1f1b", "fsdp", "functions"),
        "fsdp, an optimizer": run((2, 2, 1), "zb-v", "fsdp", instance=True),
        "fsdp of two pipelines": run((2, 2, 1), "chimera", "fsdp"),
        "fsdp of two pipelines, functions": run((2, 2, 1), "bitpipe", "fsdp", "functions"),
        "fsdp of two pipelines, an optimizer": run((2, 2, 1), "dualpipe", "fsdp", instance=True),
        "zero1 zb-v": run((2, 2, 1), "zb-v", "zero1"),
        "replicas zb-v": run((2, 2, 1), "zb-v"),
        "replicas of two pipelines": run((2, 2, 1), "chimera"),
        "replicas of two pipelines, functions": run((2, 2, 1), "bitpipe", given="functions"),
        "shards, 1f1b": run((2, 1, 2), "1f1b", parallelize=tie_runs.by_columns),
        "shards, zb-v": run((2, 1, 2), "zb-v", parallelize=tie_runs.by_columns),
        "shards, zb-v, an optimizer": run((2, 1, 2), "zb-v", parallelize=tie_runs.by_columns, instance=True),
        "shards, zb-v, functions": run((2, 1, 2), "zb-v", given="functions", parallelize=tie_runs.by_columns),
        "nothing to cut": run((2, 1, 2), "zb-v", parallelize=parallelize),
        "fsdp of one rank's pipeline": run((1, 4, 1), "zb-v", "fsdp"),
        "fsdp of one stage": run((1, 4, 1), "1f1b", "fsdp", layers=3),
        "shards of one stage": run((1, 1, 4), "1f1b", layers=3, parallelize=tie_runs.by_columns),
        "frozen at first": run((2, 2, 1), "zb-v", thaw=True),
        "frozen at first, zero1": run((2, 2, 1), "zb-v", "zero1", thaw=True),
    }


def refusals(rank: int) -> dict[str, list[str]]:
    """Of what cannot be run right, the messages that say something else."""
    asynchronous = ps.build("amdp", 4, 16, window=4)
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    said: dict[str, tuple[str, str]] = {}
    for given in tie_runs.GIVEN:
        source, tied = tie_runs.as_given(tie_runs.tied_model(4), given)
        made = tie_runs.refused(source, ps.build("xpipe", 4, 16, window=4), tied=tied)
        said[f"ties and predictions, {given}"] = made, "a tied parameter that another stage owns"
    sparse = tie_runs.sparse_model(4)
    said["sparse and updates"] = tie_runs.refused(sparse, asynchronous), "the pipelines of amdp send one another"
    tied_sparse = tie_runs.refused(tie_runs.sparse_model(4, tied=True), ps.build("1f1b", 4, 4))
    said["sparse and tied"] = tied_sparse, "0.table.weight has sparse gradients, and what processes send one another"
    for sharding in ("none", "zero1", "fsdp"):
        found = tie_runs.refused(tie_runs.sparse_model(2), ps.build("1f1b", 2, 4), mesh=mesh, sharding=sharding)
        said[f"sparse and {sharding}"] = found, "sparse gradients, and what 2 replicas add up are dense ones"
    return {each: [] if want in found else [found] for each, (found, want) in said.items()}


def sparse(rank: int) -> dict[str, list[str]]:
    return {name: tie_runs.wrong_sparse(name, 4) for name in ("zb-v", "chimera", "bitpipe")}


def casts(rank: int) -> dict[str, list[str]]:
    found = {}
    for uses in (["m"] * 4, ["l", "ml", "lm", "m"], ["l", "l", "lm", "mm"], ["m", "", "l", "lml"]):
        for name in ("1f1b", "zb-h1", "chimera"):
            schedule = ps.build(name, 4, 8)
            found[f"{name} {uses}"] = tie_runs.wrong_casts(tie_runs.using(uses), schedule)
    return found


@pytest.mark.parametrize(
    "run",
    [
        *(pytest.param(each, marks=pytest.mark.slow) for each in (several_pipelines, updates, meshes)),
        refusals,
        sparse,
        casts,
    ],
)
def test_ties_between_processes(run: Any) -> None:
    outcomes = run_ranks(4, run, deadline=100)
    assert all(o.code == 0 for o in outcomes), "\n".join(o.text[-2000:] for o in outcomes)
    found = [f"rank {o.rank}, {each}: {text}" for o in outcomes for each, texts in o.value.items() for text in texts]
    assert not found, "\n".join(found)


class Borrowing(nn.Module):
    """Uses a parameter that another layer has, and that it does not register."""

    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        self.own, self._lent = nn.Linear(4, 4), [lender]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x) + x @ self._lent[0].weight


def borrow(rank: int) -> str:
    torch.manual_seed(0)
    lender = nn.Linear(4, 4)
    model = nn.Sequential(lender, Borrowing(lender))
    pipe = ps.Pipeline(model, ps.build("1f1b", 2, 2), loss_fn=nn.MSELoss(), optimizer=torch.optim.AdamW, timeout=5)
    x = torch.randn(8, 4)
    try:
        pipe.step(x, x)
    except RuntimeFailure as error:
        return f"{type(error).__name__}: {error}"
    return "a step was made without it"


def test_a_parameter_of_another_stage_that_no_module_holds_loses_no_gradient() -> None:
    first, second = run_ranks(2, borrow)
    assert first.value.startswith(("PeerLost", "DeadlineExceeded")), first.text
    assert "uses 0.weight, a parameter of stage 0" in second.value, second.text
