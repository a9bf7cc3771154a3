"""Runs a schedule with torch: stages, split backward, transports, updates.

    Pipeline(model, schedule, ...) --> LocalPipeline, in each process: what is built there, and removed at the end
                                          |
        stage --F, B, I, W, R--> execute <--messages--> transport --> other ranks
                                    |
        parameters: gradients added up, weights updated      adapt: what is measured decides what runs next

pipeline         what a user calls, step by step           local_pipeline   a pipeline in one process
arguments        what a user gives, checked first          compatibility    which features exclude one another
partitioning/    any module, or a list, cut into stages    stage/           the ops of one stage
transport/       messages between ranks                    tensors/         what such messages hold
parameters/      gradients, optimizer, weight versions     tensor_parallel  layers sharded over ranks
mesh/            processes, and what each is for           launch/          rank processes of this machine
adapt/           plans that change while it runs           emulation/       the same, with ops that only take time
checkpoint/      files, and state sent between ranks       errors           what can go wrong, and checks of values
verify           a step computed in ways that must agree   node_moves       nodes that change places
plain_loop       the reference loop                        lifetime         open, broken or closed
execute/         what each rank does next, in a step       split_backward/ weight gradients that wait for W
"""

from penstock.cost.cut import PartitionError, partition
from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.arguments import ParallelOptions, PrecisionOptions
from penstock.runtime.emulation.pipeline import EmulatedPipeline, Emulation, emulate
from penstock.runtime.errors import DeadlineExceeded, PeerFailed, PeerLost, RuntimeFailure, VerifyError
from penstock.runtime.execute.step_end import StepResult
from penstock.runtime.mesh.process_mesh import device_mesh
from penstock.runtime.parameters.muon import MuonAdamW, leave_to_adamw
from penstock.runtime.partitioning import Split, split
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.plain_loop import plain_step
from penstock.runtime.stage.batch_rules import WHOLE, BatchRules
from penstock.runtime.stage.registered_ops import OpCall
from penstock.runtime.stage.stage import Stage
from penstock.runtime.transport.choose import DelegateOptions, TransportOptions
from penstock.runtime.verify import ComparedWays, Verification

__all__ = [
    "ComparedWays",
    "DeadlineExceeded",
    "DelegateOptions",
    "EmulatedPipeline",
    "MuonAdamW",
    "leave_to_adamw",
    "Emulation",
    "OpCall",
    "PartitionError",
    "PeerFailed",
    "PeerLost",
    "ParallelOptions",
    "Pipeline",
    "PrecisionOptions",
    "RuntimeFailure",
    "Split",
    "Stage",
    "AdaptOptions",
    "BatchRules",
    "StepResult",
    "TransportOptions",
    "WHOLE",
    "Verification",
    "VerifyError",
    "device_mesh",
    "emulate",
    "partition",
    "plain_step",
    "split",
]
