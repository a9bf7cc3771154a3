"""Drives the decision core over a cost model: timeline, bubbles, memory, slow links."""

from penstock.simulate.footprint import Footprint, RankFootprint, footprint
from penstock.simulate.simulate import Blocking, Decoupled, simulate
from penstock.simulate.timeline import Message, TimedOp, Timeline

__all__ = [
    "Blocking",
    "Decoupled",
    "Footprint",
    "Message",
    "RankFootprint",
    "TimedOp",
    "Timeline",
    "footprint",
    "simulate",
]
