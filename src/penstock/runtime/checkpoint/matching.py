"""Whether a checkpoint is of the model that wants to read it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.runtime.checkpoint.errors import CheckpointError
from penstock.runtime.checkpoint.reader import Reader

__all__ = ["Kind", "match"]

SHOWN = 3

Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


def match(reader: Reader, expected: Mapping[str, Kind], *, prefix: str = "") -> None:
    """Compares a checkpoint's names, shapes and types with those expected, where they begin with `prefix`.

    Raises `CheckpointError` that lists the first few missing, unexpected and different names.
    """
    wanted = {name: kind for name, kind in expected.items() if name.startswith(prefix)}
    held = {name: (reader.shape(name), reader.dtype(name)) for name in reader.names() if name.startswith(prefix)}
    differences = [
        _list("missing", [name for name in wanted if name not in held]),
        _list("unexpected", [name for name in held if name not in wanted]),
        _list(
            "of another shape",
            [
                f"{name} {held[name][0]} here, {shape} wanted"
                for name, (shape, _) in wanted.items()
                if name in held and held[name][0] != shape
            ],
        ),
        _list(
            "of another type",
            [
                f"{name} {held[name][1]} here, {dtype} wanted"
                for name, (_, dtype) in wanted.items()
                if name in held and held[name][1] != dtype
            ],
        ),
    ]
    if any(differences):
        raise CheckpointError(
            f"checkpoint {reader.path} is of another model ({len(held)} tensors, {len(wanted)} wanted): build the "
            f"model it was written with, or choose another checkpoint\n{'; '.join(filter(None, differences))}"
        )


def _list(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:SHOWN])}{more}"
