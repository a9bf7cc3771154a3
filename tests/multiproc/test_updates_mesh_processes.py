"""Updates as ops of the schedule over replicas of the pipeline, one process a rank of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

import asynchronous_runs as runs
import compatibility_cells as cells
import penstock as ps
import tie_runs
import tied_updates_loop as loop
import window_runs
from backends import Backend
from penstock.runtime.tensors.dtensor import whole as gathered
from processes import run_ranks_to_end
from tiers import NIGHTLY, chosen, in_turn
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc


def mesh() -> Any:
    return init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "tp"))


def unlike(name: str, num: int, window: int, given: str = "sequential", **options: Any) -> list[str]:
    """What is not as in the loop, of a schedule for two ranks."""
    optimizer = runs.MOMENTUM if "spectrain" in name else runs.ADAM
    return loop.unlike_the_loop(built(name, num, window), optimizer, given, num_replicas=2, **options)


def built(name: str, num: int, window: int) -> ps.Schedule:
    """A schedule for two ranks, whose name may be followed by a rule."""
    order, _, rule = name.partition(", ")
    schedule = ps.build(order, 2, num, window=window)
    return loop.with_rule(schedule, rule) if rule else schedule


def beside_the_loop(rank: int) -> dict[str, list[str]]:
    """Two replicas' sums are the same in either order, so that nothing may differ in a bit."""
    groups = mesh()

    def run(*case: Any, **options: Any) -> list[str]:
        return unlike(*case, mesh=groups, **options)

    cases = {
        "amdp": lambda: run("amdp", 8, 4),
        "amdp, functions, zero1": lambda: run("amdp", 8, 4, "functions", sharding="zero1"),
        "amdp, every copy steps": lambda: run("amdp", 8, 4, zero=False, clip_norm=0.05),
        "amdp, a window a step": lambda: run("amdp", 8, 8),
        "pipedream, zero1": lambda: run("pipedream", 4, 1, "list", sharding="zero1"),
        "pipedream-2bw": lambda: run("pipedream-2bw", 8, 4, "functions"),
        "pipedream-2bw, zero1": lambda: run("pipedream-2bw", 8, 4, sharding="zero1"),
    }
    by_day = ("amdp, functions, zero1", "pipedream-2bw")
    return {name: case() for name, case in chosen(cases, by_day).items()}


def in_parts_beside_the_loop(rank: int) -> dict[str, list[str]]:
    """Where each replica keeps a part of every parameter."""
    groups = mesh()

    def run(*case: Any, **options: Any) -> list[str]:
        return unlike(*case, mesh=groups, sharding="fsdp", **options)

    cases = {
        "amdp": lambda: run("amdp", 8, 4),
        "amdp, functions, clipped": lambda: run("amdp", 8, 4, "functions", clip_norm=0.05),
        "pipedream": lambda: run("pipedream", 4, 1, "list"),
        "pipedream-2bw, dynamic": lambda: run("pipedream-2bw", 8, 4, dispatch="dynamic"),
    }
    return {name: case() for name, case in chosen(cases, ("amdp, functions, clipped",)).items()}


def predicting(rank: int) -> dict[str, list[str]]:
    """By rules that predict weights, from what each replica has of the optimizer's state."""
    groups = mesh()

    def run(*case: Any, **options: Any) -> list[str]:
        return unlike(*case, mesh=groups, **options)

    cases = {
        "xpipe": lambda: run("xpipe", 8, 2),
        "xpipe, zero1": lambda: run("xpipe", 4, 1, "functions", sharding="zero1"),
        "xpipe, fsdp": lambda: run("xpipe", 4, 1, "list", sharding="fsdp", clip_norm=0.05),
        "spectrain, zero1": lambda: run("spectrain", 4, 1, sharding="zero1"),
        "spectrain, fsdp": lambda: run("spectrain", 4, 1, "functions", sharding="fsdp"),
        "amdp, xpipe": lambda: run("amdp, xpipe", 8, 2),
        "amdp, xpipe, every copy steps": lambda: run("amdp, xpipe", 8, 2, zero=False),
        "amdp, xpipe, zero1": lambda: run("amdp, xpipe", 8, 2, "functions", sharding="zero1"),
        "amdp, xpipe, fsdp": lambda: run("amdp, xpipe", 8, 2, "functions", sharding="fsdp"),
        "amdp, tentative, fsdp, dynamic": lambda: run("amdp, tentative", 8, 2, sharding="fsdp", dispatch="dynamic"),
    }
    by_day = ("spectrain, fsdp", "amdp, xpipe, zero1", "amdp, tentative, fsdp, dynamic")
    return {name: case() for name, case in chosen(cases, by_day).items()}


def goes_on(
    rank: int, folder: str, shards: bool = False, shardings: tuple[str, ...] = ("none", "zero1")
) -> dict[str, list[str]]:
    """Amid a window: from a checkpoint, and handed over, to what was never interrupted.

    Args:
        shards: of the stages, and no replicas.
    """
    groups = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp")) if shards else mesh()
    cut = tie_runs.by_columns if shards else None
    found: dict[str, list[str]] = {}
    names = ("amdp", "pipedream-2bw", "amdp, xpipe")
    for number, name in enumerate(names if NIGHTLY else names[1:]):
        for sharding in ("none",) if shards else in_turn(shardings, number):

            def made(name: str = name, sharding: str = sharding) -> ps.Pipeline:
                schedule = built(name, 8, 4)
                model = tie_runs.tied_model(2)
                return ps.Pipeline(
                    model,
                    schedule,
                    loss_fn=loop.MSE,
                    optimizer=runs.ADAM,
                    mesh=groups,
                    timeout=PATIENCE,
                    parallel=ps.ParallelOptions(sharding=sharding, parallelize=cut),
                )

            whole, first, loaded, then = made(), made(), made(), made()
            data = loop.batches(8 if shards else 16, 4)
            whole.step(*data[0], update=False)
            first.step(*data[0], update=False)
            loaded.load(first.save(Path(folder) / f"{name} {sharding} {shards}"))
            first.hand_over(then)
            for number, batch in enumerate(data[1:], start=1):
                for pipe in (whole, loaded, then):
                    pipe.step(*batch, update=number % 2 == 1)
            pipes = (whole, loaded, then)
            values = [{n: gathered(p.detach()).clone() for n, p in pipe.named_parameters()} for pipe in pipes]
            found[f"loaded {name} {sharding} {shards}"] = runs.unlike(values[0], values[1])
            found[f"handed over {name} {sharding} {shards}"] = runs.unlike(values[0], values[2])
            for pipe in (whole, first, loaded, then):
                pipe.close()
    return found


def everything(rank: int, folder: str) -> dict[str, list[str]]:
    return beside_the_loop(rank) | goes_on(rank, folder) | goes_on(rank, folder, shards=True)


@pytest.mark.slow
def test_updates_over_replicas(tmp_path: Path) -> None:
    assert not Backend(4).wrong(everything, str(tmp_path))


@pytest.mark.slow
def test_predictions_over_replicas() -> None:
    assert not Backend(4).wrong(predicting)


def given_and_kept(rank: int) -> dict[str, list[str]]:
    """An optimizer that was given has the parts, frozen parameters stay as they are, and the state is shared out."""
    groups, values, held = mesh(), [], []
    for sharding in ("copies", "fsdp"):
        schedule, model = built("amdp, xpipe", 8, 4), tie_runs.tied_model(2)
        frozen = next(parameter for parameter in model.parameters() if parameter.dim() == 1).requires_grad_(False)
        optimizer = runs.ADAM([parameter for parameter in model.parameters() if parameter is not frozen])
        pipe = ps.Pipeline(
            model,
            schedule,
            loss_fn=loop.MSE,
            optimizer=optimizer,
            mesh=groups,
            timeout=PATIENCE,
            parallel=ps.ParallelOptions(sharding=sharding),
        )
        data = loop.batches(16, 3)
        pipe.step(*data[0], update=False)
        pipe.zero_grad()  # drops the window that is open
        for batch in data[1:]:
            pipe.step(*batch)
        pipe.evaluate(*data[0])
        held.append(pipe.state_bytes()[groups.get_local_rank("pp")])
        values.append({n: gathered(p.detach()).clone() for n, p in pipe.named_parameters()})
        pipe.close()
    more = [each for each in ("parameters", "optimizer") if held[1][each] > 0.6 * held[0][each] + 16]
    return {"optimizer given": runs.unlike(*values), "kept": [f"no less of {each}: {held}" for each in more]}


def where_stages_are_shared_or_branch(rank: int, folder: str) -> dict[str, list[str]]:
    groups = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    replicas = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    cut = ps.ParallelOptions(parallelize=cells.parallelize)
    steps, loaded, place = window_runs.unlike_steps, window_runs.unlike_when_loaded, Path(folder)
    zero1, fsdp = (
        {"mesh": replicas, "parallel": ps.ParallelOptions(sharding=sharding)} for sharding in ("zero1", "fsdp")
    )
    cases = {
        "shared": lambda: steps("mllm", 4, (0, 5)),
        "shared, dynamic": lambda: steps("mllm", 4, (0, 5), dispatch="dynamic"),
        "shared and loaded": lambda: loaded("mllm", 4, (0, 5), place / "whole"),
        "shared in parts": lambda: steps("mllm", 4, (0, 5), 1e-5, parallel=cut),
        "shared in parts and loaded": lambda: loaded("mllm", 4, (0, 5), place / "parts", parallel=cut),
        "shared by shards": lambda: steps("mllm", 2, (0, 3), 1e-5, mesh=groups, parallel=cut),
        "branching": lambda: steps("fork", 4, (0, 1, 2, 3)),
        "shared, zero1, loaded": lambda: loaded("mllm", 2, (0, 3), place / "zero1", **zero1),
        "shared, fsdp, loaded": lambda: loaded("mllm", 2, (0, 3), place / "fsdp", **fsdp),
    }
    by_day = ("shared in parts and loaded", "shared, fsdp, loaded")
    return {name: case() for name, case in chosen(cases, by_day).items()}


@pytest.mark.slow
def test_updates_where_stages_are_shared_or_branch(tmp_path: Path) -> None:
    assert not Backend(4).wrong(where_stages_are_shared_or_branch, str(tmp_path))


def predicting_where_stages_are_shared_or_branch(rank: int) -> list[dict[str, Any]]:
    return [window_runs.predicting(*case) for case in window_runs.PREDICTING]


@pytest.mark.slow
def test_predictions_where_stages_are_shared_or_branch_are_those_of_one_process() -> None:
    outcomes = run_ranks_to_end(4, predicting_where_stages_are_shared_or_branch)
    with runs.one_thread():
        for number, case in enumerate(window_runs.PREDICTING):
            one, dynamic = (window_runs.predicting(*case, dispatch=each) for each in ("frozen", "dynamic"))
            assert not runs.unlike(one, dynamic)
            for outcome in outcomes:
                mine = outcome.value[number]
                assert mine.keys() <= one.keys()
                assert not runs.unlike(mine, {name: one[name] for name in mine}), (case, outcome.rank)
            assert {name for outcome in outcomes for name in outcome.value[number]} == one.keys()


def in_parts(rank: int, folder: str) -> dict[str, list[str]]:
    return in_parts_beside_the_loop(rank) | goes_on(rank, folder, shardings=("fsdp",)) | given_and_kept(rank)


@pytest.mark.slow
def test_updates_over_replicas_that_keep_parts(tmp_path: Path) -> None:
    assert not Backend(4).wrong(in_parts, str(tmp_path))
