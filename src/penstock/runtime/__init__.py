"""Runs a schedule with torch: stages, split backward, transports, updates."""

from penstock.cost.cut import PartitionError, partition
from penstock.runtime.emulate import Emulation, emulate
from penstock.runtime.emulated_pipeline import EmulatedPipeline
from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.registered import OpCall
from penstock.runtime.stage import Stage
from penstock.runtime.steering import Steering
from penstock.runtime.step_result import StepResult
from penstock.runtime.transport_choice import DelegateOptions

__all__ = [
    "DeadlineExceeded",
    "DelegateOptions",
    "EmulatedPipeline",
    "Emulation",
    "OpCall",
    "PartitionError",
    "PeerLost",
    "Pipeline",
    "RuntimeFailure",
    "Stage",
    "Steering",
    "StepResult",
    "emulate",
    "partition",
]
