"""Checkpoints sharded by parameter name, that any number of ranks may read again.

A checkpoint is a folder `step-00000100` with one safetensors shard a writing rank and an `index.json` that says
which shard holds which tensor. Nothing in it can execute code. It is written beside under a hidden name and
renamed when complete, so a kill at any moment keeps the last good one; checksums find what a disk did to it later.
"""

from penstock.runtime.checkpoint.errors import CheckpointError
from penstock.runtime.checkpoint.export import export
from penstock.runtime.checkpoint.folder import latest
from penstock.runtime.checkpoint.index import JSON
from penstock.runtime.checkpoint.match import match
from penstock.runtime.checkpoint.optimizer import load_optimizer, optimizer_tensors
from penstock.runtime.checkpoint.reader import Reader, Source
from penstock.runtime.checkpoint.write import write

__all__ = [
    "JSON",
    "CheckpointError",
    "Reader",
    "Source",
    "export",
    "latest",
    "load_optimizer",
    "match",
    "optimizer_tensors",
    "write",
]
