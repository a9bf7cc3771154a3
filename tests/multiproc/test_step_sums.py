"""What ranks sum at the end of a step: a late link delays all of it once.

In a ring of gloo's, one link that is 60 ms late delayed each sum of 8 ranks by 1.5 s, and a step had three of them,
one after the other.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock as ps
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh import collective
from penstock.runtime.mesh.peers import FIRST_BYTES, GroupPeers
from processes import Outcome, run_ranks

pytestmark = pytest.mark.multiproc


def values(outcomes: list[Outcome]) -> list[Any]:
    assert all(each.code == 0 for each in outcomes), "\n".join(each.text[-2000:] for each in outcomes)
    return [each.value for each in outcomes]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 1))


def pipeline(num_ranks: int, mesh: Any = None) -> ps.Pipeline:
    return ps.Pipeline(
        model(),
        ps.build("1f1b", num_ranks, 4),
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        mesh=mesh,
        precision=ps.PrecisionOptions(clip_norm=0.1),
        transport="gloo",
    )


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=made), torch.randn(8, 1, generator=made)


def watched(rank: int) -> list[str]:
    """What the sums of a step do, in order."""
    seen: list[str] = []
    begun = GroupPeers.begin_sum

    def watching(self: GroupPeers, terms: Tensor) -> Any:
        number = sum(each.startswith("begin") for each in seen)
        seen.append(f"begin {number}")
        wait = begun(self, terms)

        def waits() -> Tensor:
            seen.append(f"wait {number}")
            return wait()

        return waits

    pipe = pipeline(2)
    pipe.sum_each_step(lambda: (1.0, float(rank)))
    pipe.step(*batch())
    GroupPeers.begin_sum = watching  # type: ignore[method-assign]
    pipe.step(*batch())
    GroupPeers.begin_sum = begun  # type: ignore[method-assign]
    assert pipe.step_sums == (2.0, 1.0)
    pipe.close()
    return seen


def test_norm_losses_and_what_processes_tell_cross_a_late_link_together() -> None:
    for seen in values(run_ranks(2, watched)):
        assert sorted(seen[:2]) == ["begin 0", "begin 1"], seen
        assert sorted(seen[2:]) == ["wait 0", "wait 1"], seen


def few_and_many(rank: int, few_bytes: int) -> tuple[Any, ...]:
    """What ranks tell and sum, few values and many."""
    collective.FEW_BYTES = few_bytes
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    here = GroupPeers(group, timeout=60.0)
    sizes = (0, FIRST_BYTES - 30, FIRST_BYTES, 40_000)
    told = [here.gather((rank, "x" * (size if rank == 1 else 3))) for size in sizes]
    lengths = [[len(text) for _, text in each] for each in told]
    order = [[number for number, _ in each] for each in told]
    values = torch.tensor([0.1 * (rank + 1), 1e16 if rank == 0 else -5e15, rank], dtype=torch.float64)
    first, second = here.begin_sum(values), here.begin_sum(torch.full((7, 2), rank + 1))
    summed = second(), first()
    here.gather(None)
    return lengths, order, summed[0].tolist(), summed[1].tolist()


@pytest.mark.parametrize("few_bytes", [1 << 20, 0], ids=["direct", "ring"])
def test_all_get_the_same_whichever_way_it_takes(few_bytes: int) -> None:
    found = values(run_ranks(3, few_and_many, few_bytes))
    lengths, order, whole, total = found[0]
    assert lengths == [[3, size, 3] for size in (0, FIRST_BYTES - 30, FIRST_BYTES, 40_000)]
    assert order == [[0, 1, 2]] * 4
    assert whole == [[6, 6]] * 7
    assert total[1:] == [0.0, 3.0]
    assert total[0] == pytest.approx(0.6)
    assert all(each == found[0] for each in found)


def told_over_a_mesh(rank: int) -> tuple[float, ...]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with pipeline(2, mesh) as pipe:
        pipe.sum_each_step(lambda: (1.0, 10.0**rank))
        pipe.step(*batch())
        return pipe.step_sums


def test_values_of_all_processes_of_a_mesh_are_summed() -> None:
    assert values(run_ranks(4, told_over_a_mesh)) == [(4.0, 1111.0)] * 4


def after_an_error(rank: int) -> tuple[str, list[float]]:
    pipe = pipeline(2)
    with pytest.raises(RuntimeFailure) as refused:
        pipe.step(*batch(rank))
    norms = [float(pipe.step(*batch()).grad_norm) for _ in range(2)]  # type: ignore[arg-type]
    pipe.close()
    return str(refused.value), norms


def test_a_step_that_is_refused_leaves_no_sum_for_the_next() -> None:
    """The norm is on its way when ranks find that they were given different batches."""
    found = values(run_ranks(2, after_an_error))
    assert "same inputs" in found[0][0]
    with pipeline_here() as pipe:
        plain = [float(pipe.step(*batch()).grad_norm) for _ in range(2)]  # type: ignore[arg-type]
    assert [norms for _, norms in found] == [plain, plain]


def pipeline_here() -> ps.Pipeline:
    """Both ranks in this process."""
    return ps.Pipeline(
        model(),
        ps.build("1f1b", 2, 4),
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        precision=ps.PrecisionOptions(clip_norm=0.1),
    )


def test_what_one_process_tells_is_all_there_is() -> None:
    with pipeline_here() as pipe:
        pipe.step(*batch())
        assert pipe.step_sums == ()
        pipe.sum_each_step(lambda: (float(os.getpid()),))
        pipe.step(*batch())
        assert pipe.step_sums == (os.getpid(),)


def summing_fails(rank: int, at: int) -> tuple[list[str], tuple[float, ...], list[float]]:
    """What is said of steps and evaluations in which the function of one process raises, and the steps after them."""
    said, calls = [], 0

    def values() -> list[float]:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == at:
            return [1.0 / (calls - at)]
        return [1.0, float(rank)] if rank == 0 or calls != at + 1 else [1.0]

    with pipeline(2) as pipe:
        pipe.sum_each_step(values)
        for step in range(at + 1):
            try:
                (pipe.evaluate if step % 2 else pipe.step)(*batch())
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        losses = [float(pipe.step(*batch()).loss) for _ in range(2)]
        return said, pipe.step_sums, losses


@pytest.mark.parametrize("at", [1, 2])
def test_bug_others_waited_for_a_process_whose_function_of_sum_each_step_raised(at: int) -> None:
    """Also of one that returns fewer numbers than before."""
    (others, *sums), (mine, *same) = values(run_ranks(2, summing_fails, at))
    assert mine[0] == "ZeroDivisionError: float division by zero"
    assert mine[1] == "RuntimeFailure: it returned 1 numbers, and 2 before; return equally many"
    for here, there in zip(others, mine, strict=True):
        words = there.removeprefix("RuntimeFailure: ")
        assert here == f"PeerFailed: rank 1 could not do its part of the step: {words}; in the function that " + (
            "sum_each_step(values) was given"
        )
    assert sums == same
    assert sums[0] == (2.0, 1.0)


def unequal_sums(rank: int) -> list[str]:
    said = []
    with pipeline(2) as pipe:
        pipe.sum_each_step(lambda: [1.0] * (rank + 1))
        for run in (pipe.step, pipe.evaluate):
            try:
                run(*batch())
            except RuntimeFailure as error:
                said.append(str(error))
    return said


def test_bug_processes_that_sum_other_numbers_of_values_ended_in_an_error_of_the_transport() -> None:
    for said in values(run_ranks(2, unequal_sums)):
        assert len(said) == 2
        assert all("returned 1 numbers in one process and 2 in another" in each for each in said)
