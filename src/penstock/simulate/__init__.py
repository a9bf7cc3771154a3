"""Drives the decision core over a cost model: timeline, bubbles, memory, slow links."""

from penstock.simulate.footprint import Footprint, RankFootprint, footprint
from penstock.simulate.mesh import MeshTimeline, TimedReduction, simulate_mesh
from penstock.simulate.simulate import Blocking, Decoupled, simulate
from penstock.simulate.timeline import Message, TimedOp, Timeline

__all__ = [
    "Blocking",
    "Decoupled",
    "Footprint",
    "MeshTimeline",
    "Message",
    "RankFootprint",
    "TimedOp",
    "TimedReduction",
    "Timeline",
    "footprint",
    "simulate",
    "simulate_mesh",
]
