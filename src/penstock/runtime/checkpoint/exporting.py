"""A model as one safetensors file under its plain parameter names, for every other program."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from penstock.runtime.checkpoint.errors import CheckpointError
from penstock.runtime.checkpoint.folder import sync
from penstock.runtime.checkpoint.reader import Reader
from penstock.runtime.checkpoint.shard import TensorSpec, by_alignment, check_tensor, dtype_code, write_file

__all__ = ["export"]

MODEL = "model/"


def export(path: str | Path, source: Mapping[str, Tensor] | Reader) -> Path:
    """Writes one `.safetensors` file, beside and renamed, and returns its path.

    From a mapping its names are taken as they are; from a checkpoint's reader its `model/` tensors without that
    prefix, one at a time. Raises `CheckpointError` when there is nothing to write, a tensor cannot be stored or
    the disk refuses; a file of that name is then as it was.
    """
    path = Path(path)
    specs, tensors = _from_reader(source) if isinstance(source, Reader) else _from_mapping(source)
    if not specs:
        raise CheckpointError(f"{path} would be empty: there are no tensors named {MODEL}... to export")
    temporary = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(temporary, specs, lambda spec: next(tensors))
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CheckpointError(f"{path} could not be written: {error.strerror or error}. It is as it was") from error
    return path


def _from_mapping(tensors: Mapping[str, Tensor]) -> tuple[list[TensorSpec], Iterator[Tensor]]:
    specs = by_alignment(check_tensor(name, tensor) for name, tensor in tensors.items())
    return specs, (tensors[spec.name] for spec in specs)


def _from_reader(reader: Reader) -> tuple[list[TensorSpec], Iterator[Tensor]]:
    names = reader.in_order(name for name in reader.names() if name.startswith(MODEL))
    names.sort(key=lambda name: -reader.dtype(name).itemsize)
    specs = [
        TensorSpec(name[len(MODEL) :], reader.shape(name), dtype_code(name, reader.dtype(name))) for name in names
    ]
    return specs, (tensor for _, tensor in reader.iterate(names))
