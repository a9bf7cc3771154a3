"""Checkpoints sharded by parameter name, that any number of ranks may read again.

    step-00000100/  shard-...   a safetensors file per writing rank      every rank: write --> rename by rank 0
                    index.json  which shard holds which tensor           any rank:   reader --> the names it wants

Nothing in a checkpoint can execute code. It is written beside under a hidden name and renamed when complete, so a
kill at any moment keeps the last good one; checksums find what a disk did to it later.

saving           a pipeline's, all ranks or none      training_state   a pipeline's state as plain named tensors
state_transfer   from pipeline to pipeline, no disk   user_state       what else has a `state_dict`
format           the files: shards and their index    writer, reader    of such files
folder           names of checkpoints, and renames    codec, optimizer  values as named tensors
"""

from penstock.runtime.checkpoint.codec import AS_JSON, digests_of, names_by_base, pack
from penstock.runtime.checkpoint.folder import candidates, complete, latest, set_aside
from penstock.runtime.checkpoint.format import JSON, VERSION
from penstock.runtime.checkpoint.optimizer import (
    ATTRIBUTES,
    members_of,
    merged_meta,
    optimizer_tensors,
    stage_optimizer,
)
from penstock.runtime.checkpoint.reader import Kind, Reader, TensorSource, load_packed, match, rename_members, renamed
from penstock.runtime.checkpoint.writer import UNWRITTEN, export, write
from penstock.runtime.errors import CheckpointError, DamagedCheckpointError

__all__ = [
    "AS_JSON",
    "ATTRIBUTES",
    "JSON",
    "UNWRITTEN",
    "VERSION",
    "CheckpointError",
    "DamagedCheckpointError",
    "Kind",
    "Reader",
    "TensorSource",
    "candidates",
    "complete",
    "digests_of",
    "export",
    "latest",
    "load_packed",
    "match",
    "members_of",
    "merged_meta",
    "names_by_base",
    "optimizer_tensors",
    "pack",
    "rename_members",
    "renamed",
    "set_aside",
    "stage_optimizer",
    "write",
]
