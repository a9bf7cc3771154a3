"""A process that can't do its part of a step: all learn why by the step's end, and the next step is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from packed import packed
from penstock.runtime.errors import PeerFailed, RuntimeFailure
from processes import run_ranks_to_end
from recomputed import with_recompute
from tiers import chosen
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc

WIDTH, NUM_SAMPLES = 4, 16


class Fails(Exception):
    """What a layer raises."""


class FailsOnce(nn.Linear):
    """The first of these layers that comes to its second forward in a process fails there, or in its backward.

    Args:
        where: "forward" or "backward". process: the number of the process; None for none.
    """

    has_failed = False

    def __init__(self, where: str, process: int | None) -> None:
        super().__init__(WIDTH, WIDTH)
        self._where, self._is_here = where, process == dist.get_rank()
        self._calls = count(1)  # a number would count twice where forwards run again, and be refused

    def forward(self, x: Tensor) -> Tensor:
        fails = next(self._calls) == 2 and self._is_here and not FailsOnce.has_failed
        FailsOnce.has_failed |= fails
        if fails and self._where == "forward":
            raise Fails("no more of this")
        found = super().forward(x)
        if fails:
            found.register_hook(self._raise)
        return found

    def _raise(self, gradient: Tensor) -> None:
        raise Fails("no more of this")


class Case(NamedTuple):
    """A schedule by its name, number of ranks and microbatches; the mesh; options of the pipeline; and how many
    microbatches an update has, where updates are ops.
    """

    schedule: tuple[str, int, int]
    mesh: tuple[int, int] | None = None
    where: str = "forward"
    process: int = 1
    recomputed: bool = False
    tied: bool = False
    options: Mapping[str, Any] = MappingProxyType({})
    window: int | None = None


CASES = {
    "1f1b": Case(("1f1b", 4, 8)),
    "by gloo": Case(("1f1b", 4, 8), options={"transport": "gloo"}),
    "directly": Case(("1f1b", 4, 8), options={"transport": "direct"}),
    "by delegates": Case(("1f1b", 4, 8), options={"transport": "delegate"}),
    "dynamic": Case(("1f1b", 4, 8), options={"dispatch": "dynamic"}),
    "in a backward": Case(("1f1b", 4, 8), where="backward"),
    "in the last backward": Case(("gpipe", 4, 2), where="backward", process=0),
    "split": Case(("zb-v", 4, 8), where="backward"),
    "recomputed": Case(("1f1b", 4, 8), recomputed=True),
    "tied": Case(("interleaved-1f1b", 4, 8), tied=True),
    "copies": Case(("chimera", 4, 8)),
    "clipped": Case(("1f1b", 4, 8), options={"clip_norm": 0.1}),
    "replicas": Case(("1f1b", 2, 4), mesh=(2, 2)),
    "zero1": Case(("zb-h1", 2, 4), mesh=(2, 2), where="backward", options={"sharding": "zero1"}),
    "fsdp": Case(("1f1b", 2, 4), mesh=(2, 2), options={"sharding": "fsdp"}),
}


def made(case: Case, fails: bool) -> ps.Pipeline:
    schedule = ps.build(*case.schedule, **({} if case.window is None else {"window": case.window}))
    schedule = with_recompute(schedule) if case.recomputed else schedule
    torch.manual_seed(0)
    layers = [FailsOnce(case.where, case.process if fails else None) for _ in range(schedule.num_stages)]
    if case.tied:
        layers[-1].weight = layers[0].weight
    mesh = None if case.mesh is None else init_device_mesh("cpu", case.mesh, mesh_dim_names=("pp", "dp"))
    adam = partial(torch.optim.AdamW, lr=0.1)
    given = packed(loss_fn=nn.MSELoss(), optimizer=adam, mesh=mesh, timeout=PATIENCE, **case.options)
    return ps.Pipeline(layers, schedule, **given)


def fails_and_goes_on(rank: int, name: str) -> tuple[str, bool]:
    """What is said of a step that fails in one process, and whether two steps after that are as without it."""
    case, found = CASES[name], []
    said, FailsOnce.has_failed = "", False
    for fails in (True, False):
        pipe = made(case, fails)
        torch.manual_seed(1)
        x, y = torch.randn(NUM_SAMPLES, WIDTH), torch.randn(NUM_SAMPLES, WIDTH)
        if fails:
            try:
                pipe.step(x, y)
            except (Fails, PeerFailed) as error:
                said = f"{type(error).__name__}: {error}"
        losses = [pipe.step(x, y).loss for _ in range(2)]
        found.append(torch.stack([*losses, *(p.detach().sum() for p in whole(pipe))]))
        pipe.close()
    return said, torch.equal(*found)


def whole(pipe: ps.Pipeline) -> list[Tensor]:
    """The parameters here, or the parts of them."""
    return [getattr(parameter, "to_local", lambda one=parameter: one)() for parameter in pipe.parameters()]


def all_fail_and_go_on(rank: int) -> dict[str, tuple[str, bool]]:
    return {name: fails_and_goes_on(rank, name) for name in chosen(CASES, list(CASES)[::2])}


@pytest.mark.slow
def test_bug_others_waited_for_a_rank_whose_layer_failed_and_the_pipeline_was_broken() -> None:
    outcomes = run_ranks_to_end(4, all_fail_and_go_on)
    for outcome in outcomes:
        for name, (said, is_right) in outcome.value.items():
            case = CASES[name]
            who = "rank" if case.mesh is None else "process"
            if outcome.rank == case.process:
                assert said == "Fails: no more of this", name
            else:
                words = f"{who} {case.process} could not do its part of the step: Fails: no more of this; "
                assert said.startswith(f"PeerFailed: {words}"), name
            assert is_right, name


def refused_alone(rank: int) -> dict[str, str]:
    """By what rank 1 alone does before a call, what is said of that."""
    found = {}
    x, y = torch.randn(NUM_SAMPLES, WIDTH), torch.randn(NUM_SAMPLES, WIDTH)
    for name, (call, around, change) in ALONE.items():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp")) if name == "a type of parts" else None
        options = packed(mesh=mesh, sharding="fsdp" if mesh else "copies", timeout=PATIENCE)
        sgd = partial(torch.optim.SGD, lr=0.1)
        schedule = ps.build("1f1b", 1 if mesh else 2, 4)
        with ps.Pipeline(model, schedule, loss_fn=nn.MSELoss(), optimizer=sgd, **options) as pipe:
            pipe.step(x, y)
            if rank == 1:
                change(model)
            try:
                with around() if rank == 1 else nullcontext():
                    call(pipe, x, y)
                found[name] = ""
            except RuntimeError as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


ALONE: dict[str, tuple[Callable[..., object], Callable[[], Any], Callable[[nn.Sequential], object]]] = {
    "autocast": (ps.Pipeline.step, partial(torch.autocast, "cpu", torch.bfloat16), lambda model: None),
    "autocast of an evaluation": (
        ps.Pipeline.evaluate,
        partial(torch.autocast, "cpu", torch.bfloat16),
        lambda model: None,
    ),
    "inference mode": (ps.Pipeline.step, torch.inference_mode, lambda model: None),
    "a type": (ps.Pipeline.step, nullcontext, nn.Module.half),
    "a type of parts": (ps.Pipeline.step, nullcontext, nn.Module.half),
}
"""By name a call, what is around it on rank 1, and what that changes before."""

SAID = {
    "autocast": "step() was called under torch.autocast, which",
    "autocast of an evaluation": "evaluate() was called under torch.autocast, which",
    "inference mode": "step() was called under torch.inference_mode()",
    "a type": "mat1 and mat2 must have the same dtype",
}


def test_bug_what_one_rank_alone_was_refused_let_the_others_wait() -> None:
    """And autocast around the steps of one rank, or of all whose updates are ops, trained with other numbers."""
    first, second = run_ranks_to_end(2, refused_alone)
    parts = (
        "parameter 0.weight, parameter 0.bias, parameter 1.weight and 1 more differ between process 0 and process 1"
    )
    for name, said in second.value.items():
        if name == "a type of parts":
            assert said.startswith(f"BrokenContract: {parts}")
            assert first.value[name] == said
        else:
            kind = "RuntimeError" if name == "a type" else "RuntimeFailure"
            assert said.startswith(f"{kind}: {SAID[name]}"), name
            words = "PeerFailed: rank 1 could not do its part of the step: "
            told = SAID[name] if kind == "RuntimeFailure" else f"{kind}: {SAID[name]}"
            assert first.value[name].startswith(words + told), name


def fails_among_updates(rank: int) -> list[str]:
    """What is said of a step whose updates are ops, and of the next one."""
    FailsOnce.has_failed = False
    pipe = made(Case(("amdp", 4, 8), window=4), fails=True)
    x, y, said = torch.randn(NUM_SAMPLES, WIDTH), torch.randn(NUM_SAMPLES, WIDTH), []
    for _ in range(3):
        try:
            pipe.step(x, y)
            said.append("")
        except (Fails, RuntimeFailure) as error:
            said.append(f"{type(error).__name__}: {error}")
    pipe.close()
    return said


def test_where_updates_are_ops_a_step_that_failed_asks_for_a_checkpoint_on_every_rank() -> None:
    outcomes = run_ranks_to_end(4, fails_among_updates)
    for outcome in outcomes:
        failed, then, *later = outcome.value
        assert "Fails: no more of this" in failed
        assert failed.startswith("PeerFailed: rank 1 ") == (outcome.rank != 1)
        assert then.startswith("RuntimeFailure: an earlier step broke off (")
        assert later == [then]  # and not within what the one before said
