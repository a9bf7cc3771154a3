"""Emulated ranks, a process each, over a transport that the test makes: what it does to a run."""

from __future__ import annotations

import zlib

import torch.distributed as dist

import penstock as ps
from emulated_ranks import Ran, ran, start_worker
from penstock.runtime.execute.executors import run_rank
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.transport.base import StepMessages, Transport
from penstock.runtime.transport.channel import Tags, expected_by_channel
from penstock.runtime.transport.wiring import Wiring, num_indices
from waiting import PATIENCE

DIGEST = zlib.crc32(b"test")


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def step(
    transport: Transport,
    wiring: Wiring,
    rank: int,
    costs: ps.Costs,
    dispatch: str,
    threaded: bool,
) -> Ran:
    """One emulated step, the same on every rank; all ranks get what all of them saw."""
    schedule = wiring.schedule
    edges = ((edge, wiring.rank_of(edge.producer)) for edge in wiring.expected(rank))
    signatures = ["emulated"] * num_indices(schedule)
    expected = expected_by_channel(edges, Tags(schedule))
    transport.begin(StepMessages(expected, signatures, DIGEST, threaded))
    worker = start_worker(wiring, rank, costs, dispatch, transport)
    run_rank(worker)
    transport.end()
    mine = worker.times, worker.peak_held, transport.crossings()
    everyone = GroupPeers(world(), PATIENCE).gather(mine)
    return ran(wiring, everyone, dispatch)
