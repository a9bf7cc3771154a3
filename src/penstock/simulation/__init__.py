"""Drives the decision core over a cost model: timeline, bubbles, memory, slow links."""

from penstock.simulation.memory_footprint import Footprint, RankFootprint, footprint, room_for_activations
from penstock.simulation.mesh import MeshTimeline, TimedReduction, simulate_mesh
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Message, TimedOp, Timeline
from penstock.simulation.transport import Blocking, Decoupled

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
    "room_for_activations",
    "simulate",
    "simulate_mesh",
]
