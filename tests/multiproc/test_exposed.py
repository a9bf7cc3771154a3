"""What a job shows to others on its machine and its network: no key, and no socket that more than its peers reach."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from delegate_ranks import Chain, exchange, run_delegate_ranks
from listening import Listener, family, listeners, shown
from packed import packed
from penstock.runtime.transport.delegate import DelegateTransport
from processes import run_ranks_to_end
from waiting import PATIENCE

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc/net"),
]


def delegated(rank: int, gather: Any) -> dict[str, Any]:
    chain = Chain(2, 2)
    transport = DelegateTransport(rank, gather, chain.tags, PATIENCE)
    try:
        exchange(transport, chain, rank, 0, lambda m: (10,))
        pids = list(transport.pids.values())
        found = {"key": str(transport._delegate.key), "shown": [shown(pid) for pid in pids]}
        gather(None)
        return found
    finally:
        transport.close()


@pytest.mark.slow
def test_the_delegates_key_is_neither_on_a_command_line_nor_in_an_environment() -> None:
    outcomes = run_delegate_ranks(2, delegated)
    assert not any(one.error for one in outcomes), outcomes[0].text
    for one in outcomes:
        assert len(one.value["key"]) > 10
        assert len(one.value["shown"]) == 1
        assert not any(one.value["key"] in text for text in one.value["shown"])


def steered(rank: int, transport: str) -> list[Listener]:
    """A job without MASTER_ADDR: steering starts a store of its own."""
    assert "MASTER_ADDR" not in os.environ
    torch.manual_seed(0)
    model = [nn.Linear(8, 8) for _ in range(2)]
    options: dict[str, Any] = {} if transport == "delegate" else {"steering": ps.AdaptOptions()}
    if transport == "routed":
        options["delegates"] = ps.runtime.DelegateOptions()
    pipe = ps.Pipeline(
        model,
        ps.build("1f1b", 2, 4),
        loss_fn=nn.MSELoss(),
        timeout=PATIENCE,
        **packed(transport="delegate" if transport == "delegate" else "host", **options),
    )
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    pipe.step(x, x)
    found = listeners(family(os.getpid()))
    pipe.step(x, x)
    pipe.close()
    return found


@pytest.mark.parametrize("transport", ["host", "routed", "delegate"])
def test_a_job_on_one_host_listens_on_loopback_alone(transport: str) -> None:
    outcomes = run_ranks_to_end(2, steered, transport)
    found = [each for o in outcomes for each in o.value]
    assert found, "gloo listens at least"
    assert {each.address for each in found} == {"127.0.0.1"}
