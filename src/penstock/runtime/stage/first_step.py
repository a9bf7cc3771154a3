"""What a stage's first training step shows: state that its forward changes, which no order of ops could make right.

    plain loop    forward 0, backward 0; forward 1, backward 1
    pipeline      forward 0, forward 1, forward 2; backward 0 ...

Between a forward and its backward other forwards run. Autograd sees that one of them has changed a tensor that the
backward needs, unless it was changed through `.data`. And a forward that is run again (R) must find everything as it
was. Buffers are kept for it. Parameters, a random generator or a number of the module's own are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.stage.stage import GATHERS
from penstock.runtime.tensors.digest import hash_of
from penstock.runtime.tensors.dtensor import is_sharded
from penstock.runtime.tensors.pytree import flatten


class WatchedTensor(NamedTuple):
    """A parameter or buffer as it was, with a hash of its elements."""

    module: nn.Module
    name: str
    tensor: Tensor
    version: int
    hash: int

    @property
    def kind(self) -> str:
        return "parameter" if isinstance(self.tensor, nn.Parameter) else "buffer"

    @property
    def now(self) -> Tensor | None:
        known = self.module._parameters if self.kind == "parameter" else self.module._buffers
        return known.get(self.name)


class FirstStep:
    """Watches a stage in its first training step, and in its first one with R.

    Args:
        stage, index: the stage and its number.
        watches: False for stages of which nothing is to be refused.
    """

    def __init__(self, stage: nn.Module, index: int, watches: bool = True) -> None:
        self._stage, self._index, self._watches = stage, index, watches
        self._ended = {False: False, True: False}
        self._repeats = False
        self._before: list[WatchedTensor] = []
        self._outputs: dict[int, tuple[float, float]] = {}
        self._changed: list[tuple[WatchedTensor, int]] = []

    def begin(self, training: bool, repeats: bool) -> None:
        """A step begins; `repeats`: some forwards of the stage are run again."""
        self._outputs.clear()
        self._repeats = repeats
        begins = self._watches and training and not self._ended[repeats]
        self._before = list(self._watched()) if begins else []

    def require_none(self) -> None:
        """At the end of a training step. Raises RuntimeFailure where a forward changed something through `.data`."""
        if not self._before:
            return
        for known in self._before:
            is_same = known.now is known.tensor and known.tensor._version == known.version
            if is_same and hash_of(known.tensor) != known.hash:
                raise RuntimeFailure(
                    f"stage {self._index}: a forward changed {known.kind} {known.name!r} of "
                    f"{type(known.module).__name__} through .data, which autograd does not see, so that backwards of "
                    "earlier microbatches may compute with the changed values; change it in place under "
                    "torch.no_grad(), which autograd sees, or assign a new tensor to a buffer "
                    f"(self.{known.name} = ...), or change it between steps"
                )
        self._before, self._changed = [], []
        self._ended[self._repeats] = True

    def ran(self, m: int, result: Any) -> None:
        """Takes note of what the first run of a microbatch computed that runs again."""
        if self._before:
            self._outputs[m] = _measured(result)

    def begin_again(self, m: int) -> None:
        """Before the second run: takes note of the parameters that the first one has changed."""
        changed = self._changed_parameters() if m in self._outputs else []
        self._changed = [(known, hash_of(known.now)) for known in changed if known.now is not None]

    def ran_again(self, m: int, result: Any) -> None:
        """Raises RuntimeFailure where the second run changed a parameter once more, or computed something else."""
        if m not in self._outputs:
            return
        for known, before in self._changed:
            if known.now is None or hash_of(known.now) != before:
                raise RuntimeFailure(
                    f"stage {self._index}: the forward of {type(known.module).__name__} changes its parameter "
                    f"{known.name!r}, so that it can't be run again (R) as it was; make it a buffer, or use a "
                    "schedule without R for this model"
                )
        (size, weighed), (again, weighed_again) = self._outputs.pop(m), _measured(result)
        if abs(again - size) > _SHARE * size or abs(weighed_again - weighed) > _SHARE * size:
            raise RuntimeFailure(
                f"stage {self._index}: the forward of microbatch {m} was run again (R) and computed something else: "
                "it draws from a random generator of its own or changes a number that it computes with; draw from "
                "torch's generator and keep numbers in buffers, or use a schedule without R for this model"
            )

    def _changed_parameters(self) -> list[WatchedTensor]:
        """The parameters that forwards of this step have changed in place or replaced."""
        found = [known for known in self._before if known.kind == "parameter" and known.now is not None]
        return [known for known in found if known.now is not known.tensor or known.tensor._version != known.version]

    def _watched(self) -> Iterator[WatchedTensor]:
        seen: set[int] = set()
        for module in self._stage.modules():
            # Kernels of these change statistics unseen, and no backward of a training step needs those.
            buffers = {} if isinstance(module, GATHERS) or self._repeats else module._buffers
            for name, tensor in (*module._parameters.items(), *buffers.items()):
                if tensor is None or id(tensor) in seen or not _is_plain(tensor):
                    continue
                seen.add(id(tensor))
                yield WatchedTensor(module, name, tensor, tensor._version, hash_of(tensor))


_SHARE = 1e-2
"""The share by which sums of a forward's results may differ when it runs again: rounding, and not other numbers."""

_PIECE = 7 << 17
"""Numbers that are summed at a time: a multiple of the weights' period."""


def _is_plain(tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided and not is_sharded(tensor) and not tensor.is_meta
    return strided and not tensor.is_quantized and tensor.dtype.itemsize <= 16


def _measured(result: Any) -> tuple[float, float]:
    """The size of all numbers that a forward computed, and their sum, each weighed by its place."""
    size = weighed = 0.0
    for leaf in flatten(result)[0]:
        if not _is_plain(leaf) or not leaf.numel():
            continue
        weights = 1 + torch.arange(min(2 * leaf.numel(), _PIECE), device=leaf.device) % 7
        for piece in _numbers_of(leaf).reshape(-1).split(_PIECE):  # so that little memory is needed
            values = piece.double()
            values = torch.where(values.isfinite(), values, 0.0)
            sums = torch.stack([values.abs().sum(), (values * weights[: values.numel()]).sum()]).tolist()
            size, weighed = size + sums[0], weighed + sums[1]
    return size, weighed


def _numbers_of(tensor: Tensor) -> Tensor:
    """The tensor, or the real and imaginary parts of a complex one."""
    plain = tensor.detach()
    return torch.view_as_real(plain.resolve_conj().resolve_neg()) if plain.is_complex() else plain
