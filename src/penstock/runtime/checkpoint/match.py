"""Whether a checkpoint is of the model that wants to read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.runtime.checkpoint.errors import CheckpointError
from penstock.runtime.checkpoint.reader import Reader

__all__ = ["match"]

SHOWN = 3


def match(reader: Reader, expected: Mapping[str, Sequence[int]], *, prefix: str = "") -> None:
    """Compares a checkpoint's names and shapes with those expected, both only where they begin with `prefix`.

    Raises `CheckpointError` that lists the first few missing, unexpected and differently shaped names.
    """
    wanted = {name: tuple(shape) for name, shape in expected.items() if name.startswith(prefix)}
    held = {name: reader.shape(name) for name in reader.names() if name.startswith(prefix)}
    differences = [
        _list("missing", [name for name in wanted if name not in held]),
        _list("unexpected", [name for name in held if name not in wanted]),
        _list(
            "of another shape",
            [
                f"{name} {held[name]} here, {shape} wanted"
                for name, shape in wanted.items()
                if held.get(name, shape) != shape
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
