"""Runs a schedule with torch: stages, split backward, transports, updates."""

from penstock.cost.cut import PartitionError, partition
from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.arguments import ParallelOptions, PrecisionOptions
from penstock.runtime.emulation.emulated_run import Emulation, emulate
from penstock.runtime.emulation.mesh import EmulatedMesh
from penstock.runtime.emulation.pipeline import EmulatedPipeline
from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.execute.step_result import StepResult
from penstock.runtime.mesh.nodes import device_mesh
from penstock.runtime.migrate import Placed
from penstock.runtime.parameters.muon import MuonAdamW, leave_to_adamw
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.stage.partitioning import Split, split
from penstock.runtime.stage.registered_ops import OpCall
from penstock.runtime.stage.stage import Stage
from penstock.runtime.transport.choose import DelegateOptions, TransportOptions

__all__ = [
    "DeadlineExceeded",
    "DelegateOptions",
    "EmulatedMesh",
    "EmulatedPipeline",
    "MuonAdamW",
    "leave_to_adamw",
    "Emulation",
    "OpCall",
    "PartitionError",
    "PeerLost",
    "ParallelOptions",
    "Pipeline",
    "PrecisionOptions",
    "Placed",
    "RuntimeFailure",
    "Split",
    "Stage",
    "AdaptOptions",
    "StepResult",
    "TransportOptions",
    "device_mesh",
    "emulate",
    "partition",
    "split",
]
