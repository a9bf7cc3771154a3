"""Collective ops of gloo: a wait for one ends after its limit, so that a rank whose link was lost hears of that."""

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

from penstock.runtime.mesh.collective import all_gather, all_reduce, broadcast, is_late, reduce, reduce_scatter
from penstock.runtime.transport.failover import gloo_group

NUM_RANKS = 3
SIZE = 5
SHORT, LONG = timedelta(seconds=0.05), timedelta(seconds=60)


def groups() -> list[Any]:
    """A group of gloo for each of some ranks of this process."""
    store = dist.HashStore()
    made: list[Any] = [None] * NUM_RANKS

    def make(rank: int) -> None:
        made[rank] = gloo_group("127.0.0.1", store, rank, NUM_RANKS, timeout=60.0)

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


KINDS: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
    "all-reduce": (all_reduce, lambda rank: (given(rank),)),
    "reduce": (reduce, lambda rank: (given(rank), 1)),
    "broadcast": (broadcast, lambda rank: (given(rank), 1)),
    "all-gather": (all_gather, lambda rank: (given(rank)[:SIZE], torch.zeros(NUM_RANKS, SIZE))),
    "reduce-scatter": (reduce_scatter, lambda rank: (given(rank).chunk(NUM_RANKS), torch.zeros(SIZE))),
}
"""Ops, and what each rank gives them."""


def wait(works: Sequence[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait(LONG)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_for_an_op_that_others_have_not_begun_ends_at_its_limit(
    kind: str, two_groups: tuple[list[Any], list[Any]]
) -> None:
    op, values = KINDS[kind]
    made = two_groups[0]
    waits = op(made[1], *values(1))  # rank 1 is the one that gets what one rank gets
    if kind != "broadcast":  # the root of a broadcast waits for nobody
        with pytest.raises(RuntimeError) as ended:
            waits.wait(SHORT)
        assert is_late(ended.value)
    wait([op(made[0], *values(0)), waits, op(made[2], *values(2))])


def test_a_sum_of_which_every_rank_gets_a_part_is_bitwise_gloo_s_own(
    two_groups: tuple[list[Any], list[Any]],
) -> None:
    found, own = parts(), parts()
    rows = [given(rank).chunk(NUM_RANKS) for rank in range(NUM_RANKS)]
    wait([reduce_scatter(made, rows[rank], found[rank]) for rank, made in enumerate(two_groups[0])])
    wait(
        [
            dist.reduce_scatter(own[rank], list(given(rank).chunk(NUM_RANKS)), group=made, async_op=True)
            for rank, made in enumerate(two_groups[1])
        ]
    )
    assert all(map(torch.equal, found, own))
