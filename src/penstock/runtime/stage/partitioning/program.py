"""A traced forward as a list of steps, and the part of it that each stage runs.

    step       0 stem   1 relu   2 block.0   3 add(1, 2)   4 block.1   5 cat(4, 1)   6 head
    stages     `------- 0 -----------------------------'   `------ 1 ------------'   ` 2 '
    passed on                                         1, 3                        5

Steps keep the order of the user's forward. A stage begins with a layer. What the forward does between two layers
belongs to the first of them. A value that a later stage uses passes through all stages in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx, nn

from penstock.cost.cut import PartitionError
from penstock.runtime.stage.partitioning.place import SourceLine
from penstock.runtime.stage.partitioning.recorder import MODEL, attribute_of


class ValueRef(NamedTuple):
    """In arguments: the value of a step."""

    slot: int


class LayerCall(NamedTuple):
    """The so-manieth call of a layer, by its path in the model."""

    path: str
    occurrence: int


@dataclass(frozen=True)
class TracedStep:
    """Attributes:
    slot: where the value goes. target: a layer's path, a method's name, or a function.
    layer: the call, where it is one. number: of the call among all, from 1; 0 for what is none.
    no_grad: whether it runs without gradients.
    kind: of a layer's output, which must stay as it was for the example; None: any.
    lists: whether a layer is given lists or dicts, which it must leave as they are.
    """

    slot: int
    op: str
    target: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    uses: frozenset[int]
    line: SourceLine | None
    layer: LayerCall | None = None
    number: int = 0
    no_grad: bool = False
    kind: Any = None
    lists: bool = False


@dataclass(frozen=True)
class StageProgram:
    """What a stage runs. `frees`: by step, the values that are not needed after it."""

    steps: tuple[TracedStep, ...]
    frees: tuple[tuple[int, ...], ...]
    comes: tuple[int, ...]
    goes: tuple[int, ...]
    tensors: Mapping[int, str]


class TracedProgram:
    """Attributes:
    steps: in order. tensors: slot -> path of a parameter or buffer of the model, or the tensor itself, a constant.
    used_at: by path of a tensor, a line of the forward that uses it.
    output: what the forward returns, made of `ValueRef`s. calls: of layers, in order.
    """

    def __init__(self, graph: fx.Graph, entry: nn.Module, kinds: bool) -> None:
        own = {id(tensor): name for name, tensor in _tensors(entry).items()}
        slots = {node: slot for slot, node in enumerate(graph.nodes)}
        self.tensors: dict[int, str] = {}
        self.constants: dict[int, Any] = {}
        self.used_at: dict[str, SourceLine | None] = {}
        self.steps: list[TracedStep] = []
        self.output: Any = None
        self.calls: list[LayerCall] = []
        counts: Counter[str] = Counter()

        def reference(value: Any) -> Any:
            return fx.node.map_arg(value, lambda node: ValueRef(slots[node]))

        for node in graph.nodes:
            slot = slots[node]
            if node.op == "output":
                self.output = _plain(reference(node.args[0]))
                self._output_uses = frozenset(slots[each] for each in node.all_input_nodes)
                continue
            if node.op == "placeholder":
                self.inputs = slot
                continue
            if node.op == "get_attr":
                value = attribute_of(entry, str(node.target))
                if id(value) in own:
                    self.tensors[slot] = own[id(value)]
                    self.used_at[own[id(value)]] = node.meta.get("line")
                else:
                    self.constants[slot] = value
                continue
            args, kwargs = _plain(reference(node.args)), _plain(reference(node.kwargs))
            uses = frozenset(slots[each] for each in node.all_input_nodes)
            target: Any = node.target
            layer, number = None, 0
            if node.op == "call_module":
                target = str(node.target).removeprefix(f"{MODEL}.")
                layer = LayerCall(target, counts[target])
                counts[target] += 1
                self.calls.append(layer)
                number = len(self.calls)
            self.steps.append(
                TracedStep(
                    slot, node.op, target, args, kwargs, uses, node.meta.get("line"), layer, number,
                    node.meta.get("no_grad", False),
                    kind_of(node.meta["value"]) if kinds and layer is not None and "value" in node.meta else None,
                    layer is not None and _has_lists((args, kwargs)),
                )
            )  # fmt: skip

    def parts(self, begins: Sequence[LayerCall]) -> list[StageProgram]:
        """Of each stage its part.

        Args:
            begins: the call with which each stage but the first begins.

        Raises:
            PartitionError: the forward does not make such a call.
        """
        places = {step.layer: place for place, step in enumerate(self.steps) if step.layer is not None}
        for call in begins:
            if call not in places:
                raise PartitionError(
                    f"a stage begins with layer {call.path}, which the forward does not call with these inputs or in "
                    "this mode; give ps.split(..., example=) inputs like those of the run"
                )
        starts = [0, *(places[call] for call in begins), len(self.steps)]
        if sorted(starts) != starts:
            raise PartitionError(
                f"with these inputs or in this mode the forward calls {', '.join(c.path for c in begins)} in another "
                "order; give ps.split(..., example=) inputs like those of the run"
            )
        made_at = {self.inputs: 0} | {
            step.slot: stage
            for stage in range(len(starts) - 1)
            for step in self.steps[starts[stage] : starts[stage + 1]]
        }
        last_stage = dict.fromkeys(self._output_uses, len(starts) - 2)
        for stage in range(len(starts) - 1):
            for step in self.steps[starts[stage] : starts[stage + 1]]:
                for slot in step.uses:
                    last_stage[slot] = max(stage, last_stage.get(slot, 0))
        given = {**self.tensors, **self.constants}
        found = []
        for stage in range(len(starts) - 1):
            steps = tuple(self.steps[starts[stage] : starts[stage + 1]])
            comes = sorted(s for s, at in made_at.items() if at < stage <= last_stage.get(s, 0) and s not in given)
            goes = sorted(s for s, at in made_at.items() if at <= stage < last_stage.get(s, 0) and s not in given)
            used = {slot for step in steps for slot in step.uses}
            if stage == len(starts) - 2:
                used |= self._output_uses
            kept = set(goes) | (set(self._output_uses) if stage == len(starts) - 2 else set())
            last_use: dict[int, int] = {}
            for place, step in enumerate(steps):
                for slot in (*step.uses, step.slot):
                    last_use[slot] = place
            frees: list[list[int]] = [[] for _ in steps]
            for slot, place in last_use.items():
                if slot not in kept and slot not in given:
                    frees[place].append(slot)
            tensors = {slot: self.tensors[slot] for slot in sorted(used) if slot in self.tensors}
            found.append(StageProgram(steps, tuple(map(tuple, frees)), tuple(comes), tuple(goes), tensors))
        return found


def fill(template: Any, values: Mapping[int, Any]) -> Any:
    """A template with values in the places of its references."""
    kind = type(template)
    if kind is ValueRef:
        return values[template.slot]
    if kind is tuple:
        return tuple([fill(each, values) for each in template])
    if kind is list:
        return [fill(each, values) for each in template]
    if kind is dict:
        return {key: fill(each, values) for key, each in template.items()}
    if kind is slice:
        return slice(fill(template.start, values), fill(template.stop, values), fill(template.step, values))
    return template


def kind_of(value: Any) -> Any:
    """A value's type, and of tuples, lists and dicts those of what they hold."""
    if isinstance(value, tuple | list):
        return (type(value), *map(kind_of, value))
    if isinstance(value, dict):
        return (type(value), *((key, kind_of(each)) for key, each in value.items()))
    return type(value)


def _plain(value: Any) -> Any:
    """fx's immutable lists and dicts as plain ones."""
    if isinstance(value, ValueRef):
        return value
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_plain(each) for each in value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    return value


def _has_lists(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_lists, value))
    if isinstance(value, dict):
        return any(isinstance(each, list | dict) or _has_lists(each) for each in value.values())
    return isinstance(value, list)


def _tensors(entry: nn.Module) -> dict[str, Any]:
    model = entry.get_submodule(MODEL)
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}
