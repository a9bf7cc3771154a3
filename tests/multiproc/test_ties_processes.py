"""Parameters that several stages share, one process a rank: several pipelines, replicas, shards of stages."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import asynchronous_runs as runs
import penstock as ps
import tie_runs
import tied_updates_loop as loop
from backends import Backend
from penstock.models import parallelize
from processes import run_ranks
from tiers import chosen, in_turn

pytestmark = pytest.mark.multiproc


def several_pipelines(rank: int) -> dict[str, list[str]]:
    return {
        f"{name} {options} {given} zero={zero}": tie_runs.wrong_copies(name, options, given, zero)
        for number, (name, options) in enumerate(tie_runs.SCHEDULES)
        for given in in_turn(tie_runs.GIVEN, number)
        for zero in (True, False)
        if zero or name == "chimera"
    }


def updates(rank: int) -> dict[str, list[str]]:
    amdp, double = ps.build("amdp", 4, 16, window=4), ps.build("pipedream-2bw", 4, 16, window=4)
    by_rule = {rule: loop.with_rule(amdp, rule) for rule in ("xpipe", "tentative")}
    momentum = {"optimizer": runs.MOMENTUM}
    cases: dict[str, tuple[ps.Schedule, str, dict[str, Any]]] = {
        "amdp": (amdp, "sequential", {}),
        "amdp, functions": (amdp, "functions", {}),
        "amdp, every copy steps": (amdp, "functions", {"zero": False, "clip_norm": 0.05}),
        "pipedream": (ps.build("pipedream", 4, 8, window=1), "functions", {}),
        "pipedream-2bw": (double, "functions", {}),
        "pipedream-2bw, over delegates": (double, "sequential", {"transport": "delegate"}),
        "windows of chimera": (ps.passes.repeat_windows(ps.build("chimera", 4, 8), 3), "sequential", {}),
        "windows of zb-v": (ps.passes.repeat_windows(ps.build("zb-v", 4, 8), 3), "functions", {}),
        "xpipe": (ps.build("xpipe", 4, 8, window=1), "sequential", {}),
        "xpipe, over delegates": (
            ps.build("xpipe", 4, 16, window=4),
            "functions",
            {"transport": "delegate"},
        ),
        "spectrain": (ps.build("spectrain", 4, 8, window=1), "list", momentum),
        "amdp, xpipe": (by_rule["xpipe"], "functions", {}),
        "amdp, xpipe, every copy steps": (by_rule["xpipe"], "sequential", {"zero": False}),
        "amdp, tentative, clipped": (by_rule["tentative"], "sequential", {"clip_norm": 0.05}),
        "amdp, tentative, every copy steps": (by_rule["tentative"], "functions", {"zero": False}),
        "updates in zb-v, spectrain": (
            ps.schedule.with_updates(ps.build("zb-v", 4, 8), 1, rule="spectrain"),
            "list",
            momentum,
        ),
        "amdp, xpipe, dynamic": (by_rule["xpipe"], "functions", {"dispatch": "dynamic"}),
    }
    by_day = (
        "amdp, every copy steps", "pipedream", "windows of chimera", "spectrain", "xpipe, over delegates"
    )  # fmt: skip
    return {
        name: loop.unlike_the_loop(schedule, given=given, **{"optimizer": runs.ADAM, **options})
        for name, (schedule, given, options) in chosen(cases, by_day).items()
    }


def meshes(rank: int) -> dict[str, list[str]]:
    by_columns = {"parallelize": tie_runs.by_columns}
    cases: dict[str, tuple[tuple[int, int, int], str, dict[str, Any]]] = {
        "fsdp 1f1b": ((2, 2, 1), "1f1b", {"sharding": "fsdp"}),
        "fsdp zb-v": ((2, 2, 1), "zb-v", {"sharding": "fsdp"}),
        "fsdp zb-v, a list": ((2, 2, 1), "zb-v", {"sharding": "fsdp", "given": "list"}),
        "fsdp interleaved, functions": ((2, 2, 1), "interleaved-1f1b", {"sharding": "fsdp", "given": "functions"}),
        "fsdp, an optimizer": ((2, 2, 1), "zb-v", {"sharding": "fsdp", "instance": True}),
        "fsdp of two pipelines": ((2, 2, 1), "chimera", {"sharding": "fsdp"}),
        "fsdp of two pipelines, functions": ((2, 2, 1), "bitpipe", {"sharding": "fsdp", "given": "functions"}),
        "fsdp of two pipelines, an optimizer": ((2, 2, 1), "dualpipe", {"sharding": "fsdp", "instance": True}),
        "zero1 zb-v": ((2, 2, 1), "zb-v", {"sharding": "zero1"}),
        "replicas zb-v": ((2, 2, 1), "zb-v", {}),
        "replicas of two pipelines": ((2, 2, 1), "chimera", {}),
        "replicas of two pipelines, functions": ((2, 2, 1), "bitpipe", {"given": "functions"}),
        "shards, 1f1b": ((2, 1, 2), "1f1b", by_columns),
        "shards, zb-v": ((2, 1, 2), "zb-v", by_columns),
        "shards, zb-v, an optimizer": ((2, 1, 2), "zb-v", {"instance": True, **by_columns}),
        "shards, zb-v, functions": ((2, 1, 2), "zb-v", {"given": "functions", **by_columns}),
        "nothing to cut": ((2, 1, 2), "zb-v", {"parallelize": parallelize}),
        "fsdp of one rank's pipeline": ((1, 4, 1), "zb-v", {"sharding": "fsdp"}),
        "fsdp of one stage": ((1, 4, 1), "1f1b", {"sharding": "fsdp", "layers": 3}),
        "shards of one stage": ((1, 1, 4), "1f1b", {"layers": 3, **by_columns}),
        "frozen at first": ((2, 2, 1), "zb-v", {"thaw": True}),
        "frozen at first, zero1": ((2, 2, 1), "zb-v", {"sharding": "zero1", "thaw": True}),
    }
    by_day = (
        "fsdp interleaved, functions", "fsdp of two pipelines", "replicas of two pipelines, functions",
        "shards, zb-v, functions", "shards of one stage", "frozen at first, zero1",
    )  # fmt: skip
    return {
        name: tie_runs.wrong_mesh(mesh, schedule, **options)
        for name, (mesh, schedule, options) in chosen(cases, by_day).items()
    }


def refusals(rank: int) -> dict[str, list[str]]:
    """Of what cannot be run right, the messages that say something else."""
    asynchronous = ps.build("amdp", 4, 16, window=4)
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    said: dict[str, tuple[str, str]] = {}
    sparse = tie_runs.sparse_model(4)
    said["sparse and updates"] = tie_runs.refused(sparse, asynchronous), "or run several pipelines"
    said["sparse and several pipelines"] = (
        tie_runs.refused(sparse, ps.build("chimera", 4, 8)),
        "or run several pipelines",
    )
    tied_sparse = tie_runs.refused(tie_runs.sparse_model(4, tied=True), ps.build("1f1b", 4, 4))
    said["sparse and tied"] = tied_sparse, "(0.table.weight; 1.table.weight"
    for sharding in ("none", "zero1", "fsdp"):
        found = tie_runs.refused(tie_runs.sparse_model(2), ps.build("1f1b", 2, 4), mesh=mesh, sharding=sharding)
        said[f"sparse and {sharding}"] = found, "all of these add gradients up"
    shared, fresh = nn.Linear(6, 6), partial(nn.Linear, 6, 6)
    tied = [("0.weight", "3.weight"), ("0.bias", "3.bias")]
    sources = [lambda: shared, fresh, fresh, lambda: shared]
    said["functions that name what is tied"] = tie_runs.refused(sources, ps.build("1f1b", 4, 4), tied=tied), ""
    return {
        each: [] if want in found and bool(want) == bool(found) else [found] for each, (found, want) in said.items()
    }


def sparse(rank: int) -> dict[str, list[str]]:
    return {"zb-v": tie_runs.wrong_sparse("zb-v", 4)}


def casts(rank: int) -> dict[str, list[str]]:
    found = {}
    every = (["m"] * 4, ["l", "ml", "lm", "m"], ["l", "l", "lm", "mm"], ["m", "", "l", "lml"])
    for number, uses in enumerate(every):
        for name in in_turn(("1f1b", "zb-h1", "chimera"), number, 2):
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
    assert not Backend(4).wrong(run)


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
    pipe = ps.Pipeline(model, ps.build("1f1b", 2, 2), loss_fn=nn.MSELoss(), optimizer=torch.optim.AdamW)
    x = torch.randn(8, 4)
    try:
        pipe.verify(x, x)
    except ps.VerifyError as error:
        return str(error)
    return "nothing was found"


def test_a_parameter_of_another_stage_that_no_module_holds_is_found_by_verify() -> None:
    for outcome in run_ranks(2, borrow):
        assert "stage 1 uses a parameter of shape (4, 4) that none of its modules holds" in outcome.value, (
            outcome.text
        )
        assert "sentence 5 of the contract" in outcome.value
