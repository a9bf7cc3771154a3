"""Converts checkpoints of version 0.1 of Penstock (a folder with `index.json`) into today's.

    python convert_checkpoint.py runs/mine/checkpoints/step-00000300 converted

writes `converted/step-00000300`, which `pipe.load` and `penstock train --resume` read. The old folder stays as it is.
Checksums are compared on the way.
"""

from __future__ import annotations

import base64
import json
import math
import sys
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from penstock.runtime.checkpoint.dcp import write
from penstock.runtime.checkpoint.object_state import ATTRIBUTE, DATA, pack
from penstock.runtime.tensors.digest import bytes_of

KINDS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "torch.Size": torch.Size,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "deque": lambda given: deque(*given),
    "complex": lambda parts: complex(*parts),
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "torch.dtype": lambda name: getattr(torch, name.removeprefix("torch.")),
    "torch.device": torch.device,
    "array": lambda tensor: tensor.numpy(),
    "scalar": lambda tensor: tensor.numpy()[()],
}
"""How version 0.1 told types apart that JSON merges. Tensors were stored beside the JSON, by number."""


def value_of(value: Any, base: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The value that version 0.1 stored as JSON under a name `BASE#json`."""
    if isinstance(value, list):
        return [value_of(each, base, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind in ("tensor", "device tensor"):
        return tensors[f"{base}#{inside}"]
    if kind in ("array", "scalar"):
        return KINDS[kind](tensors[f"{base}#{inside}"])
    return KINDS[kind](value_of(inside, base, tensors))


def read_tensors(folder: Path, index: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of an old checkpoint. Those of complex128 are stored as pairs of numbers."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in index["shards"]:
        with safe_open(folder / shard, framework="pt") as file:
            for name, entry in index["tensors"].items():
                if entry["shard"] == shard:
                    found = file.get_tensor(name)
                    tensors[name] = torch.view_as_complex(found) if entry["dtype"] == "C128" else found
                    if zlib.crc32(bytes_of(tensors[name])) != entry["crc32"]:
                        raise SystemExit(f"{name} in {folder / shard} is damaged: its checksum differs")
    return tensors


def with_data(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, and each value that was stored as JSON as today's data."""
    found = {name: tensor for name, tensor in tensors.items() if "#" not in name}
    for name in tensors:
        if name.endswith("#json"):
            base = name.removesuffix("#json")
            value = value_of(json.loads(bytes(tensors[name].tolist())), base, tensors)
            found[base.replace("optimizer/@/", ATTRIBUTE) + DATA] = pack(value, base)
    return found


def with_groups(meta: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The meta, with the groups of the optimizer as they are stored today."""
    optimizer = meta.get("optimizer")
    if optimizer is None:
        return meta
    if optimizer.get("inside"):
        raise SystemExit(f"{optimizer['class']} holds other optimizers, whose state is no longer stored")
    if "members" not in optimizer:
        if len(optimizer["groups"]) > 1:
            raise SystemExit("the checkpoint does not say which parameters its optimizer's groups had")
        optimizer["members"] = [sorted(name.removeprefix("model/") for name in names if name.startswith("model/"))]
    groups = []
    for options, members in zip(optimizer["groups"], optimizer["members"], strict=True):
        packed = pack({key: value_of(value, key, {}) for key, value in options.items()}, "a group of the optimizer")
        groups.append({"members": members, "options": base64.b64encode(bytes_of(packed)).decode()})
    return {**meta, "optimizer": {"class": optimizer["class"], "groups": groups}}


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
    path = write(target, index["step"], with_data(tensors), meta, keep=2**31)
    num_bytes = sum(math.prod(each.shape) * each.itemsize for each in tensors.values())
    print(f"{path}: {len(tensors)} tensors, {num_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
