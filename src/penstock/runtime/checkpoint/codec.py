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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.errors import CheckpointError
from penstock.runtime.tensors.digest import bytes_of
from penstock.runtime.tensors.pytree import DTYPES

AS_JSON = "#json"

_PAIRS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_ITEMS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "torch.Size"}
_LEAVES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    complex: ("complex", lambda v: [v.real, v.imag], lambda v: complex(*v)),
    bytes: ("bytes", lambda v: base64.b64encode(v).decode(), base64.b64decode),
    bytearray: ("bytearray", lambda v: base64.b64encode(v).decode(), lambda v: bytearray(base64.b64decode(v))),
    torch.dtype: ("torch.dtype", str, lambda v: DTYPES[v.removeprefix("torch.")]),
    torch.device: ("torch.device", str, torch.device),
}
"""By type its name, what JSON has of a value, and the value of that."""
_BENEATH: dict[type, Any] = {int: int.__int__, float: float.__float__, str: str.__str__, tuple: tuple, list: list}
"""What an option of a subclass becomes."""
_FROM_PAIRS: dict[str, Callable[[Any], Any]] = {name: kind for kind, name in _PAIRS.items()}
_FROM_ITEMS: dict[str, Callable[[Any], Any]] = {name: kind for kind, name in _ITEMS.items()}
_FROM_LEAVES = {name: value_of for name, _, value_of in _LEAVES.values()}


class UnstorableValue(ValueError):
    """A value holds something that is neither plain data nor a dense tensor. The message says where, and what."""


def pack(base: str, value: Any, what: str) -> dict[str, Tensor]:
    """Takes a value apart. The first tensor is its JSON text as bytes, named `BASE#json`.

    Raises `CheckpointError` that begins with `what` and says where in the value the thing lies that can't be stored.
    """
    tensors: list[Tensor] = []
    try:
        text = json.dumps(_encode(value, "", tensors))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(
            f"{what} cannot be stored: {reason}. It must be tensors, numbers, text, and dicts, lists, tuples or sets "
            "of them; turn the rest into these"
        ) from None
    named = {base + AS_JSON: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}
    return named | {f"{base}#{number}": tensor for number, tensor in enumerate(tensors)}


def unpack(base: str, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """The value that `pack` took apart. Tensors that were not in host memory go to `device`."""
    found = json.loads(bytes(tensors[base + AS_JSON].numpy()))
    return _decode(found, lambda number: tensors[f"{base}#{number}"], device)


def to_json(value: Any) -> Any:
    """Options as JSON, in which numbers of torch and numpy are Python's. Raises UnstorableValue for all else."""
    return json.loads(json.dumps(_encode(value, "", None)))


def from_json(value: Any) -> Any:
    """The data that `to_json` took."""
    return _decode(value)


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


def is_storable(tensor: Tensor) -> bool:
    """Whether a tensor is dense and has data."""
    return tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_quantized


def names_by_base(names: Iterable[str], prefix: str) -> dict[str, list[str]]:
    """By base the names of each packed value, of those names that begin with a prefix."""
    found: dict[str, list[str]] = {}
    for name in names:
        if name.startswith(prefix):
            found.setdefault(name.rpartition("#")[0], []).append(name)
    return found


def _encode(value: Any, where: str, tensors: list[Tensor] | None) -> Any:
    """A value as JSON. Its tensors are added to `tensors`. That is None for options: there only single numbers may be
    tensors, subclasses of plain types become these, and a device is refused, as each process has another.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list or kind in _ITEMS:
        items = [_encode(each, f"{where}[{place}]", tensors) for place, each in enumerate(value)]
        if kind in (set, frozenset):  # equal sets give their items in different orders
            items.sort(key=json.dumps)
        return items if kind is list else {_ITEMS[kind]: items}
    if kind in _PAIRS:
        pairs = [
            [_encode(key, f"{where} key", tensors), _encode(each, f"{where}[{key!r}]", tensors)]
            for key, each in value.items()
        ]
        return {_PAIRS[kind]: pairs}
    if kind is deque:
        return {"deque": [_encode(list(value), where, tensors), value.maxlen]}
    if kind in _LEAVES and not (tensors is None and kind is torch.device):
        name, plain, _ = _LEAVES[kind]
        return {name: plain(value)}
    if kind in (Tensor, Parameter) or isinstance(value, np.generic) or kind in (np.ndarray, np.memmap):
        return _encode_numbers(value, where, tensors)
    if tensors is None and (base := next((each for each in _BENEATH if isinstance(value, each)), None)):
        return _encode(_BENEATH[base](value), where, None)
    raise UnstorableValue(f"{where} is a {kind.__module__}.{kind.__qualname__}".lstrip())


def _encode_numbers(value: Any, where: str, tensors: list[Tensor] | None) -> Any:
    """A tensor, or an array or a number of numpy."""
    if tensors is None and value.ndim == 0:
        return _encode(value.item(), where, None)
    if isinstance(value, Tensor):
        name, tensor = ("tensor" if value.device.type == "cpu" else "device tensor"), value.detach()
    else:
        name = "array" if isinstance(value, np.ndarray) else "scalar"
        try:
            tensor = torch.from_numpy(np.array(value))
        except TypeError:
            raise UnstorableValue(f"{where} is a numpy array of {value.dtype}".lstrip()) from None
    if tensors is None or not is_storable(tensor):
        raise UnstorableValue(f"{where} is {tensor.layout} on {tensor.device}, shape {tuple(tensor.shape)}".lstrip())
    tensors.append(tensor)
    return {name: len(tensors) - 1}


def _decode(value: Any, tensor_of: Callable[[int], Tensor] | None = None, device: torch.device | None = None) -> Any:
    if isinstance(value, list):
        return [_decode(each, tensor_of, device) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind in _FROM_LEAVES:
        return _FROM_LEAVES[kind](inside)
    if kind in _FROM_ITEMS:
        return _FROM_ITEMS[kind](_decode(inside, tensor_of, device))
    if kind in _FROM_PAIRS:
        pairs = {_decode(key, tensor_of, device): _decode(each, tensor_of, device) for key, each in inside}
        return _FROM_PAIRS[kind](pairs)
    if kind == "deque":
        items, most = inside
        return deque(_decode(items, tensor_of, device), most)
    assert tensor_of is not None, "options hold no tensors"
    tensor = tensor_of(inside)
    if kind == "device tensor" and device is not None:
        return tensor.to(device)
    return tensor if kind.endswith("tensor") else tensor.numpy() if kind == "array" else tensor.numpy()[()]
