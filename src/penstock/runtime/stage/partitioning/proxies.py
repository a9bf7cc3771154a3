"""Proxies: they stand for values while a forward is traced, and record everything that is done to them.

In addition to what `torch.fx.Proxy` records, changes in place are recorded as such. `x += y` is not `x = x + y`,
because other references to `x` see the change.

A value that is None for the example of the inputs is None itself, and no proxy, as a forward may ask `x is None`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

if TYPE_CHECKING:
    from penstock.runtime.stage.partitioning.recorder import Recorder


class TracedProxy(fx.Proxy):
    """A value of a traced forward."""

    node: Any

    def __init__(self, node: fx.Node, tracer: Recorder) -> None:
        self.__dict__.update(node=node, recorder=tracer)

    @property
    def tracer(self) -> Recorder:  # type: ignore[override]
        """What records it. Raises KeptValue once that is done: some cache of the user's has kept the proxy."""
        recorder: Recorder = self.__dict__["recorder"]
        recorder.require_recording()
        return recorder

    def __getattr__(self, name: str) -> Any:
        if name == "grad":
            self.tracer.refuse("reads the gradient of a tensor, which a stage may not have yet")
        example = self.tracer.example(self)
        if example is not None:
            with self.tracer.suspended():
                found = getattr(example, name)  # as hasattr asks, too
            if found is None and not isinstance(example, Tensor):
                return None
        return TracedAttribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.tracer.refuse(f"sets {name!r} of a tensor")

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __len__(self) -> int:
        return int(self.tracer.fixed(self, len, "asks for the length of"))

    def __index__(self) -> int:
        return int(self.tracer.fixed(self, operator.index, "uses as a number"))

    def __int__(self) -> int:
        return int(self.tracer.fixed(self, int, "makes a number of"))

    def __float__(self) -> float:
        return float(self.tracer.fixed(self, float, "makes a number of"))

    def __contains__(self, item: Any) -> bool:
        self.tracer.refuse("looks for a value in")
        return False


class TracedAttribute(TracedProxy):
    """An attribute of a value, or its method, which is known once it is called."""

    def __init__(self, root: TracedProxy, attribute: str) -> None:
        self.__dict__.update(root=root, attribute=attribute, recorder=root.tracer, known=None)

    @property
    def node(self) -> Any:  # type: ignore[override]
        if self.__dict__["known"] is None:
            made = self.tracer.create_proxy("call_function", getattr, (self.root, self.attribute), {})
            self.__dict__["known"] = made.node
        return self.__dict__["known"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self.attribute, (self.root, *args), kwargs)


def _in_place(function: Callable[..., Any]) -> Callable[[TracedProxy, Any], Any]:
    def change(self: TracedProxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return change


IN_PLACE = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift,
    operator.irshift,
)  # fmt: skip
"""The operators that change their left side where it can be changed."""

for _each in IN_PLACE:
    setattr(TracedProxy, f"__{_each.__name__}__", _in_place(_each))


A_TENSOR = torch.empty(0)
"""Like any tensor, for tests of its kind."""
