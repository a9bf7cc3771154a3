"""Puts an agent into a process of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.control import Configuration
from penstock.cost import Costs
from penstock.runtime.adapt.agent import Agent
from penstock.runtime.adapt.coordinator import RunSetting
from penstock.runtime.adapt.options import AdaptOptions
from penstock.runtime.adapt.rendezvous import meet
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import Peers
from penstock.runtime.transport.choose import TransportChoice


def steer(
    steering: AdaptOptions,
    peers: Peers,
    start: Configuration,
    costs: Costs | None,
    choice: TransportChoice,
    ready: Callable[[Configuration], Any],
    stretch: float = 1.0,
) -> Agent:
    """The agent of this process. Every process must call it.

    Args:
        start: what runs first.
        costs: None where they are to be measured.
        choice: what carries the messages.
        ready: works out what a configuration needs to run; called in a thread.
        stretch: milliseconds of the clock to one of the costs' time.

    Raises:
        ControlError: options that make no sense, or caps below what the start needs.
        RuntimeFailure: the store cannot be reached, or the folder not be written to.
    """
    depth = choice.depth or 0
    # On every rank, so that all raise alike; what an op takes has no part in it.
    steering.job(
        costs or Costs.assumed(start.schedule.num_ranks, start.schedule.placement), start, depth, choice.has_delegates
    )
    meeting = meet(steering.store, peers)
    setting = RunSetting(start, costs, depth, choice.has_delegates, stretch, meeting.processes)
    agent, error = None, ""
    try:
        agent = Agent(steering, setting, meeting, ready)
    except RuntimeFailure as failure:  # rank 0 alone writes files and starts the controller
        error = str(failure)
    failed = next((text for text in peers.gather(error) if text), "")
    if failed or agent is None:
        if agent is not None:
            agent.close()
        else:
            meeting.close()
        raise RuntimeFailure(failed)
    return agent
