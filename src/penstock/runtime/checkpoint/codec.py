"""Plain data as named tensors and back, without anything that could execute code.

    {"step": 3, "window": (tensor, 0.5)}
    BASE#json  {"dict": [["step", 3], ["window", {"tuple": [{"tensor": 0}, 0.5]}]]}
    BASE#0     the tensor

Types are kept apart that JSON merges: tuples and lists, the kinds of dict, numpy's numbers and Python's. What is
neither plain data nor a tensor is refused by its place, like `["window"][1]`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.errors import CheckpointError
from penstock.runtime.tensors.digest import bytes_of
from penstock.runtime.tensors.pytree import DTYPES

AS_JSON = "#json"

PAIRS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
ITEMS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "torch.Size"}
FROM_PAIRS: dict[str, Callable[[Any], Any]] = {name: kind for kind, name in PAIRS.items()}
FROM_ITEMS: dict[str, Callable[[Any], Any]] = {name: kind for kind, name in ITEMS.items()}


def pack(base: str, value: Any, what: str) -> dict[str, Tensor]:
    """A value's tensors by name, the first of them its JSON text as bytes.

    Raises `CheckpointError` that begins with `what` and says where in the value what cannot be stored lies.
    """
    tensors: list[Tensor] = []
    try:
        text = json.dumps(_encode(value, "", tensors))
    except _UnstorableValue as error:
        raise CheckpointError(
            f"{what} cannot be stored: {error}. It must be tensors, numbers, text, and dicts, lists, tuples or sets "
            "of them; turn the rest into these"
        ) from None
    except (RecursionError, ValueError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{what} cannot be stored: {reason}") from None
    named = {base + AS_JSON: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}
    return named | {f"{base}#{number}": tensor for number, tensor in enumerate(tensors)}


def unpack(base: str, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """The value that `pack` took apart; tensors that were not in host memory go to `device`.

    Raises `ValueError` for what `pack` did not write.
    """
    text = tensors[base + AS_JSON]
    if text.dtype != torch.uint8 or text.dim() != 1:
        raise ValueError(f"{base}{AS_JSON} is no text")
    parts: dict[int, Tensor] = {}
    while (name := f"{base}#{len(parts)}") in tensors:
        parts[len(parts)] = tensors[name]
    try:
        return _decode(json.loads(bytes(text.numpy())), parts, device)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError, OverflowError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{base} holds no plain data: {reason}") from None


def digests_of(packed: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """By base the digest of each packed value, which is the same under any base."""
    digests = {}
    for base, tensors in packed.items():
        found = hashlib.sha256()
        for name, tensor in sorted(tensors.items()):
            found.update(f"{name.removeprefix(base)} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            found.update(bytes_of(on_host(tensor)))
        digests[base] = found.hexdigest()
    return digests


def on_host(tensor: Tensor) -> Tensor:
    """A tensor's elements in order, in host memory."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's elements in order."""
    return zlib.crc32(bytes_of(on_host(tensor)))


def require_storable(name: str, tensor: Tensor) -> None:
    """Raises `CheckpointError` for what is no dense tensor with data."""
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"tensor name {name!r}: a name is a non-empty text")
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{name} is a {type(tensor).__name__}: only tensors are stored, put the rest into meta")
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        raise CheckpointError(f"{name} is {tensor.layout} on {tensor.device}: only dense tensors with data can be")


def names_by_base(names: Iterable[str], prefix: str) -> dict[str, list[str]]:
    """By base the names of each packed value, of those names that begin with a prefix."""
    found: dict[str, list[str]] = {}
    for name in names:
        if name.startswith(prefix):
            found.setdefault(name.rpartition("#")[0], []).append(name)
    return found


class _UnstorableValue(Exception):
    """What cannot be stored, and where it lies."""


def _encode(value: Any, where: str, tensors: list[Tensor]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encode(each, f"{where}[{place}]", tensors) for place, each in enumerate(value)]
    if kind in (set, frozenset):  # equal sets give their items in different orders
        items = [_encode(each, f"{where} item", tensors) for each in value]
        return {ITEMS[kind]: sorted(items, key=json.dumps)}
    if kind in ITEMS:
        return {ITEMS[kind]: [_encode(each, f"{where}[{place}]", tensors) for place, each in enumerate(value)]}
    if kind in PAIRS:
        return {
            PAIRS[kind]: [
                [_encode(key, f"{where} key", tensors), _encode(each, f"{where}[{key!r}]", tensors)]
                for key, each in value.items()
            ]
        }
    if kind is deque:
        return {"deque": [[_encode(e, f"{where}[{i}]", tensors) for i, e in enumerate(value)], value.maxlen]}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind in (bytes, bytearray):
        return {kind.__name__: base64.b64encode(value).decode()}
    if kind is torch.dtype:
        return {"torch.dtype": str(value)}
    if kind is torch.device:
        return {"torch.device": str(value)}
    if kind in (Tensor, Parameter):
        return {"tensor" if value.device.type == "cpu" else "device tensor": _add(value.detach(), where, tensors)}
    if isinstance(value, np.generic) or kind in (np.ndarray, np.memmap):
        try:
            held = torch.from_numpy(np.array(value))
        except TypeError:
            raise _UnstorableValue(f"{where} is a numpy array of {value.dtype}".lstrip()) from None
        return {"array" if isinstance(value, np.ndarray) else "scalar": _add(held, where, tensors)}
    raise _UnstorableValue(f"{where} is a {kind.__module__}.{kind.__qualname__}".lstrip())


def _add(tensor: Tensor, where: str, tensors: list[Tensor]) -> int:
    try:
        require_storable(where or "it", tensor)
    except CheckpointError as error:
        raise _UnstorableValue(str(error)) from None
    tensors.append(tensor)
    return len(tensors) - 1


def _decode(value: Any, tensors: Mapping[int, Tensor], device: torch.device | None) -> Any:
    if isinstance(value, list):
        return [_decode(each, tensors, device) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind in FROM_ITEMS:
        return FROM_ITEMS[kind](_decode(_list(inside), tensors, device))
    if kind in FROM_PAIRS:
        pairs = [(_decode(key, tensors, device), _decode(each, tensors, device)) for key, each in _list(inside)]
        return FROM_PAIRS[kind](dict(pairs))
    if kind == "deque":
        items, most = inside
        return deque(_decode(_list(items), tensors, device), most)
    if kind == "complex":
        return complex(*inside)
    if kind in ("bytes", "bytearray"):
        held = base64.b64decode(inside, validate=True)
        return held if kind == "bytes" else bytearray(held)
    if kind == "torch.dtype":
        return DTYPES[inside.removeprefix("torch.")]
    if kind == "torch.device":
        return torch.device(inside)
    if kind in ("tensor", "device tensor", "array", "scalar"):
        if type(inside) is not int or inside not in tensors:
            raise ValueError(f"there is no tensor {inside!r}")
        tensor = tensors[inside]
        if kind == "tensor":
            return tensor
        if kind == "device tensor":
            return tensor if device is None else tensor.to(device)
        array = tensor.numpy()
        return array if kind == "array" else array[()]
    raise ValueError(f"there is no kind {kind!r}")


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.40} is no list")
    return value
