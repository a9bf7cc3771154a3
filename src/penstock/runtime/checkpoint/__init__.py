"""Checkpoints by parameter name, that any number of ranks may read again, in the files of torch's own checkpoints.

    training_state --named tensors--> dcp: a file per process --rename--> step-00000100/ --Reader--> training_state

    step-00000100/  __0_0.distcp    a file per writing process, by torch.distributed.checkpoint (DCP)
                    .metadata       for DCP's tools
                    manifest.json   for us: where each tensor lies, its checksums, the step, and small data

Each process writes the tensors that it owns and the shards that it holds, so nothing is gathered. A load goes by the
manifest. It executes no code, and compares checksums, which DCP does not. DCP's tools go by `.metadata`, and find the
tensors under plain names: `model.layers.0.weight`, `optimizer.layers.0.weight.exp_avg`.

A checkpoint is written beside under a hidden name and renamed when it is complete, so a kill at any moment keeps the
last good one. Whatever can fail, fails in all processes (`together`) before anything is changed.

save_load        a pipeline's, all ranks or none      training_state    a pipeline's state as plain named tensors
dcp              writing the files                    optimizer         an optimizer's
folder           names, renames, and reading one      object_state      values that are no tensors, and their owners
together         all processes act, or all raise
state_transfer   from pipeline to pipeline, no disk
"""

from penstock.runtime.checkpoint.folder import Reader, candidates, complete, latest, set_aside
from penstock.runtime.checkpoint.together import UNWRITTEN
from penstock.runtime.errors import CheckpointError, DamagedCheckpointError

__all__ = [
    "UNWRITTEN",
    "CheckpointError",
    "DamagedCheckpointError",
    "Reader",
    "candidates",
    "complete",
    "latest",
    "set_aside",
]
