"""Whatever another thread tells a rank before it waits ends that wait, over every transport. No test asserts a time:
a wait that nothing ends fails at its deadline.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

import penstock as ps
from emulated_processes import world
from penstock.cost import Links
from penstock.runtime import RuntimeFailure
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.transport.base import StepMessages, Transport
from penstock.runtime.transport.channel import Tags
from penstock.runtime.transport.delegate import DelegateTransport
from penstock.runtime.transport.gloo import GlooTransport
from penstock.runtime.transport.link_conditions import ConditionedTransport, Conditions
from penstock.runtime.transport.loopback import LoopbackTransport, Mailbox
from penstock.runtime.transport.rank_memory import OwnMemory
from penstock.runtime.transport.routed import RoutedTransport
from penstock.runtime.transport.shared_memory import SharedMemoryTransport
from processes import run_ranks_to_end
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc

LIMIT = PATIENCE
"""Seconds that a wait may last: only one that is never woken does."""


def transports(rank: int) -> dict[str, Transport]:
    """Of each kind one, between two ranks."""
    tags, gather = Tags(ps.build("1f1b", 2, 2)), GroupPeers(world(), PATIENCE).gather
    own = OwnMemory(2)
    made: dict[str, Transport] = {
        "loopback": LoopbackTransport([Mailbox(), Mailbox()], rank, LIMIT),
        "shared memory": SharedMemoryTransport(rank, tags, LIMIT, own, gather(own.address)),
        "gloo": GlooTransport(dist.new_group(), tags, LIMIT),
        "delegates": DelegateTransport(rank, gather, tags, LIMIT),
    }
    for name, delegated in (("routed", []), ("routed, delegated", [(0, 1)])):
        base = GlooTransport(dist.new_group(), tags, LIMIT)
        routed = RoutedTransport(base, DelegateTransport(rank, gather, tags, LIMIT))
        routed.route(delegated)
        made[name] = routed
    late = Conditions(Links.parse("0:1=latency:1ms"))
    made |= {f"{name}, late and bounded": ConditionedTransport(t, late, depth=1) for name, t in made.items()}
    return made


def woken(rank: int) -> dict[str, str]:
    """By transport, what went wrong with a rank that was woken after it looked, and before it waited."""
    made, wrong = transports(rank), {}
    for name, transport in made.items():
        transport.begin(StepMessages())
        try:
            for _ in range(2):
                assert transport.arrivals() == []
                transport.wake()
                assert transport.wait((), lambda: "woken") == []
        except RuntimeFailure as error:
            wrong[name] = str(error)
        finally:
            transport.end()
    dist.barrier()
    for transport in made.values():
        transport.close()
    return wrong


def test_what_another_thread_tells_before_a_wait_ends_it() -> None:
    """That an asynchronous op has ended, or that a decision has come."""
    outcomes = run_ranks_to_end(2, woken)
    assert not any(o.value for o in outcomes), [o.value for o in outcomes]
