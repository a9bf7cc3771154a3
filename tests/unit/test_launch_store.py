"""Each start of the ranks has a part of the store of its own, since torchrun keeps one store for all its restarts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from penstock.runtime.errors import DeadlineExceeded
from penstock.runtime.launch.rank import store_of_this_start

TIMEOUT = 20.0


def start(store: dist.Store, num_ranks: int = 3) -> list[dist.Store]:
    """The stores of the ranks of one start, rank 0 first. Rank 0 looks before the others have written anything."""
    store.set_timeout(timedelta(seconds=TIMEOUT))
    with ThreadPoolExecutor(num_ranks) as threads:
        found = [threads.submit(store_of_this_start, store, rank, num_ranks, TIMEOUT) for rank in range(num_ranks)]
        return [each.result() for each in found]


def test_the_ranks_of_one_start_share_a_store() -> None:
    first, *others = start(dist.HashStore())
    first.set("address", "here")
    assert [each.get("address") for each in others] == [b"here"] * 2


def test_a_start_does_not_see_what_an_earlier_start_wrote() -> None:
    store = dist.HashStore()
    before = start(store)
    before[1].set("1", "the address of a process that ended")
    again = start(store)
    assert not any(each.check(["1"]) for each in again)
    again[2].set("2", "here")
    assert again[0].get("2") == b"here"


def test_rank_0_answers_the_living_process_after_the_one_that_ended() -> None:
    store = dist.HashStore()
    store.set("process/1", "ended")  # a process that ended before it joined
    first, second = start(store, num_ranks=2)
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_rank_0_names_the_rank_that_did_not_start() -> None:
    store = dist.HashStore()
    store.set("process/1", "ended")
    with pytest.raises(DeadlineExceeded, match=r"rank 0 waited 0\.05 s for rank 1 of 2 to start"):
        store_of_this_start(store, 0, 2, 0.05)
