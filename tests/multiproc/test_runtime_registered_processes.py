"""Ops of registered kinds, one process a rank: tokens keep their order, through tags and through lines."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from penstock.runtime import RuntimeFailure
from penstock.runtime.tensors.dtensor import whole
from processes import appears, run_ranks, run_ranks_to_end
from registered_cases import (
    CASES,
    LOSS,
    NUM_MICROBATCHES,
    NUM_RANKS,
    batch,
    model,
    program,
)
from waiting import PATIENCE, shorten

pytestmark = pytest.mark.multiproc


def fails_at_the_second(call: ps.runtime.OpCall) -> None:
    if call.index == 1:
        raise ValueError("the disk is full")


def one_fails(rank: int, dispatch: str) -> None:
    schedule = CASES["beside its stage"]().build()
    ops = {"SNAPSHOT": fails_at_the_second}
    pipe = ps.Pipeline(model(4), schedule, loss_fn=LOSS, dispatch=dispatch, ops=ops, timeout=PATIENCE)
    pipe.step(*batch(1))


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
def test_an_error_in_a_function_ends_every_rank(dispatch: str) -> None:
    outcomes = run_ranks(NUM_RANKS, one_fails, dispatch)
    assert all(o.code == 1 for o in outcomes), "\n".join(o.text for o in outcomes)
    assert outcomes[1].text.splitlines()[-3:] == [
        "ValueError: the disk is full",
        "in function fails_at_the_second, which ops= has for kind SNAPSHOT",
        "in SNAPSHOT1 of stage 1 on rank 1",
    ]
    for rank in (0, 2):
        assert f"rank {rank} lost its connection to rank" in outcomes[rank].last_line


def takes_too_long(rank: int, folder: Path) -> None:
    """In the second step ASK takes until rank 3 has given up."""
    calls = iter(("answers", "stands still"))

    def ask(call: ps.runtime.OpCall) -> None:
        if next(calls) == "stands still":
            appears(folder / "gave up")

    asking = ps.NewOp("ASK", 0, after={("B", 0): NUM_MICROBATCHES}, run=ask)
    made = program(asking, ps.NewOp("TELL", 3, after={("ASK", 0): 1}, run=print))
    pipe = ps.Pipeline(model(NUM_RANKS), made.build(), loss_fn=LOSS, ops=made.callables, timeout=PATIENCE)
    pipe.step(*batch(1))
    if rank == 3:
        shorten(pipe, 2.0)
    try:
        pipe.step(*batch(1))
    finally:
        if rank == 3:
            (folder / "gave up").touch()


def given_different_functions(rank: int) -> list[str]:
    schedule = CASES["one after another"]().build()
    told = []
    for ops in ({"ASK": print, "TELL": print, **({"MORE": print} if rank == 2 else {})}, {"ASK": print}):
        try:
            ps.Pipeline(model(4), schedule, loss_fn=LOSS, ops=ops)
        except RuntimeFailure as error:
            told.append(str(error))
    return told


def test_what_is_told_on_all_ranks() -> None:
    outcomes = run_ranks_to_end(NUM_RANKS, given_different_functions)
    for outcome in outcomes:
        different, missing = outcome.value
        assert "rank 2 was given another ops than rank 0" in different
        assert "program has ops of kind TELL, and no function was given for them" in missing


@pytest.mark.slow
def test_a_deadline_names_the_op_that_was_waited_for(tmp_path: Path) -> None:
    outcomes = run_ranks(NUM_RANKS, takes_too_long, tmp_path)
    assert all(o.code == 1 for o in outcomes), "\n".join(o.text for o in outcomes)
    assert (
        "for 2 s: rank 3 waits to run TELL0 of stage 3, which needs ASK0 of stage 0 from rank 0"
        in outcomes[3].last_line
    )


def halve(call: ps.runtime.OpCall) -> None:
    assert call.module is not None
    for parameter in call.module.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def halved(rank: int, sharding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight after a step in which every replica halved its gradients, and that of a plain loop that did."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 2, bias=False)
    before, x, y = layer.weight.detach().clone().requires_grad_(), torch.randn(8, 4), torch.randn(8, 2)
    LOSS(x @ before.T, y).backward()
    assert before.grad is not None
    ops = [ps.NewOp("HALVE", stage=0, after={("B", 0): 2}, run=halve)]
    halving = ps.Program(ps.placements.one_to_one(1), 2, ops=ops)
    with ps.Pipeline(
        [layer],
        halving.build(),
        loss_fn=LOSS,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp")),
        ops=halving.callables,
        parallel=ps.ParallelOptions(sharding=sharding),
        timeout=PATIENCE,
    ) as pipe:
        pipe.step(x, y)
        ((_, weight),) = pipe.named_parameters()
        return whole(weight.detach()).clone(), before.detach() - 0.5 * before.grad


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_bug_what_an_op_made_of_gradients_was_lost_on_their_way_to_other_replicas(sharding: str) -> None:
    outcomes = run_ranks_to_end(2, halved, sharding)
    for found, wanted in (o.value for o in outcomes):
        torch.testing.assert_close(found, wanted)
