"""Runs a schedule with torch: stages, split backward, transports, updates."""

from penstock.cost.cut import PartitionError, partition
from penstock.runtime.device_mesh import device_mesh
from penstock.runtime.emulate import Emulation, emulate
from penstock.runtime.emulated_mesh import EmulatedMesh
from penstock.runtime.emulated_pipeline import EmulatedPipeline
from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.registered import OpCall
from penstock.runtime.rerank import Placed
from penstock.runtime.stage import Stage
from penstock.runtime.steering import Steering
from penstock.runtime.step_result import StepResult
from penstock.runtime.transport_choice import DelegateOptions

__all__ = [
    "DeadlineExceeded",
    "DelegateOptions",
    "EmulatedMesh",
    "EmulatedPipeline",
    "Emulation",
    "OpCall",
    "PartitionError",
    "PeerLost",
    "Pipeline",
    "Placed",
    "RuntimeFailure",
    "Stage",
    "Steering",
    "StepResult",
    "device_mesh",
    "emulate",
    "partition",
]
