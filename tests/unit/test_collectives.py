"""Collective ops of gloo as those that do them again need them: a wait ends after its limit, so that a rank whose
group broke hears of the next one, and a rank that has its result keeps it where others need the op once more."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.mesh.collective import (
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    Reduce,
    ReduceScatter,
    is_late,
)
from penstock.runtime.transport.failover import GlooDevice

NUM_RANKS = 3
SIZE = 5
SHORT, LONG = timedelta(seconds=0.05), timedelta(seconds=60)


def groups() -> list[Any]:
    """A group of gloo for each of some ranks of this process."""
    store, device = dist.HashStore(), GlooDevice("127.0.0.1")
    made: list[Any] = [None] * NUM_RANKS

    def make(rank: int) -> None:
        made[rank] = device.group(store, rank, NUM_RANKS, timeout=60.0)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


@pytest.fixture(scope="module")
def two_groups() -> Iterator[tuple[list[Any], list[Any]]]:
    """A group for each rank, and the next, on which ops are done again."""
    found = groups(), groups()
    yield found
    for made in found:
        made.clear()
    gc.collect()


def given(rank: int) -> Tensor:
    return torch.randn(NUM_RANKS * SIZE, generator=torch.Generator().manual_seed(rank))


def parts() -> list[Tensor]:
    return [torch.zeros(SIZE) for _ in range(NUM_RANKS)]


KINDS: dict[str, Callable[[int], Collective]] = {
    "all-reduce": lambda rank: AllReduce(lambda: given(rank)),
    "reduce": lambda rank: Reduce(lambda: given(rank), root=1),
    "broadcast": lambda rank: Broadcast(given(rank), root=1),
    "all-gather": lambda rank: AllGather(given(rank)[:SIZE], torch.zeros(NUM_RANKS, SIZE)),
    "reduce-scatter": lambda rank: ReduceScatter(given(rank).chunk(NUM_RANKS), torch.zeros(SIZE)),
}


def result(op: Any) -> list[Tensor]:
    return [op.tensor]


def begun(ops: Sequence[Collective], made: Sequence[Any]) -> list[Any]:
    return [op.start(group) for op, group in zip(ops, made, strict=True)]


def wait(works: Sequence[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait(LONG)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_for_an_op_that_others_have_not_begun_ends_at_its_limit(
    kind: str, two_groups: tuple[list[Any], list[Any]]
) -> None:
    ops, made = [KINDS[kind](rank) for rank in range(NUM_RANKS)], two_groups[0]
    waits = ops[1].start(made[1])  # rank 1 is the one that gets what one rank gets
    if kind != "broadcast":  # the root of a broadcast waits for nobody
        with pytest.raises(RuntimeError) as ended:
            waits.wait(SHORT)
        assert is_late(ended.value)
    wait([ops[0].start(made[0]), waits, ops[2].start(made[2])])


@pytest.mark.parametrize("done", [{0}, {0, 2}, {2}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_has_its_result_keeps_it_where_others_need_the_op_once_more(
    kind: str, done: set[int], two_groups: tuple[list[Any], list[Any]]
) -> None:
    ops = [KINDS[kind](rank) for rank in range(NUM_RANKS)]
    wait(begun(ops, two_groups[0]))
    getting = [1] if kind == "reduce" else list(range(NUM_RANKS))
    before = {rank: result(ops[rank]) for rank in getting}
    values = {rank: torch.cat(before[rank]).clone() for rank in getting}
    works = [op.again(group, done) for op, group in zip(ops, two_groups[1], strict=True)]
    for rank in done.intersection(getting):  # it may be reading them just now
        assert all(one is other for one, other in zip(result(ops[rank]), before[rank], strict=True))
    wait(works)
    for rank in getting:
        assert torch.equal(torch.cat(result(ops[rank])), values[rank]), rank


def test_a_sum_of_which_every_rank_gets_a_part_is_bitwise_gloo_s_own(
    two_groups: tuple[list[Any], list[Any]],
) -> None:
    ops = [ReduceScatter(given(rank).chunk(NUM_RANKS), torch.zeros(SIZE)) for rank in range(NUM_RANKS)]
    own = parts()
    wait(begun(ops, two_groups[0]))
    wait(
        [
            dist.reduce_scatter(own[rank], list(given(rank).chunk(NUM_RANKS)), group=made, async_op=True)
            for rank, made in enumerate(two_groups[1])
        ]
    )
    assert all(torch.equal(op.tensor, part) for op, part in zip(ops, own, strict=True))
