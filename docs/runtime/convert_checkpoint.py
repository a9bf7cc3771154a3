"""Converts checkpoints of earlier versions of Penstock (a folder with `index.json`) into today's.

    python convert_checkpoint.py runs/mine/checkpoints/step-00000300 converted

writes `converted/step-00000300`, which `pipe.load` and `penstock train --resume` read. The old folder stays as it is.
Checksums are compared on the way.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from penstock.runtime.checkpoint.codec import checksum
from penstock.runtime.checkpoint.dcp import write


def read_tensors(folder: Path, index: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of an old checkpoint. Those of complex128 are stored as pairs of numbers."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in index["shards"]:
        with safe_open(folder / shard, framework="pt") as file:
            for name, entry in index["tensors"].items():
                if entry["shard"] == shard:
                    found = file.get_tensor(name)
                    tensors[name] = torch.view_as_complex(found) if entry["dtype"] == "C128" else found
                    if checksum(tensors[name]) != entry["crc32"]:
                        raise SystemExit(f"{name} in {folder / shard} is damaged: its checksum differs")
    return tensors


def with_groups(meta: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The meta, where the first versions did not store which parameters the optimizer's group had."""
    optimizer = meta.get("optimizer")
    if optimizer is not None and "members" not in optimizer:
        if len(optimizer["groups"]) > 1:
            raise SystemExit("the checkpoint does not say which parameters its optimizer's groups had")
        optimizer["members"] = [sorted(name.removeprefix("model/") for name in names if name.startswith("model/"))]
    if optimizer is not None:
        meta["optimizer"] = {"inside": {}, "attributes": {}, "unchanged": [], **optimizer}
    return meta


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    whole = json.loads((source / "index.json").read_text())
    index = whole["index"]
    if zlib.crc32(json.dumps(index, separators=(",", ":")).encode()) != whole["crc32"]:
        raise SystemExit(f"{source / 'index.json'} is damaged: its checksum differs")
    tensors = read_tensors(source, index)
    meta = with_groups(index["meta"], list(tensors))
    path = write(target, index["step"], tensors, meta, keep=2**31)
    num_bytes = sum(math.prod(each.shape) * each.itemsize for each in tensors.values())
    print(f"{path}: {len(tensors)} tensors, {num_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
