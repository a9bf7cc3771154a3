"""What was recorded of a run, every op with its step, replica, rank, stage and microbatch as columns; and what the
names of ops say.

    step  replica  rank  op                    stage  microbatch   start     end
      16        0     1  backward-compute          1           3   2301.2  2684.7
      16        0     1  forward-recv             -1          -1   2684.7  2688.4
      16        0     1  grads-reduce-scatter     -1          -1  46056.7 46270.8

All readers make this, and all of the analysis begins with it.

Names are Megatron's timers, which ByteDance's study took over, Penstock's letters, and annotations. An annotation is
read by regular expressions with groups, given or of a framework:

    PP:(?P<stage>\\d+)(?P<op>F|B|I|W)(?P<microbatch>\\d+)         TorchTitan: PP:2F7
    Forward (?P<microbatch>\\d+)                                   the op is the pattern's own, F

A group may be named op, stage, microbatch, rank, replica or step. What no group says is read from the event's
arguments of that name; a microbatch that is said nowhere is counted, in the order of starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

Array = Any
"""A numpy array."""
NONE = -1
"""What stands where an op has no stage, no microbatch."""


class TraceError(Exception):
    """A trace that cannot be read, or not be analysed; the message says what is missing and what would help."""

    exit_code = 1
    rule = "trace"


class Scope(Enum):
    """Who takes part in an op.

    COMPUTE: its rank alone, for a stage and a microbatch. LOCAL: its rank alone, besides the microbatches.
    SEND, RECEIVE: one end of a message between two ranks of a pipeline.
    REPLICAS: the same rank of all replicas. PIPELINE: those ranks of one pipeline that have it. ALL: all ranks.
    """

    COMPUTE = "compute"
    LOCAL = "local"
    SEND = "send"
    RECEIVE = "receive"
    REPLICAS = "replicas"
    PIPELINE = "pipeline"
    ALL = "all"

    @property
    def is_collective(self) -> bool:
        return self in (Scope.REPLICAS, Scope.PIPELINE, Scope.ALL)

    @property
    def is_message(self) -> bool:
        return self in (Scope.SEND, Scope.RECEIVE)


class TracedKind(NamedTuple):
    """A kind of op as its trace names it.

    Attributes:
        name: in the trace.
        scope: who takes part.
        kind: of compute, Penstock's letter: F, B, I, W, R. Of messages F for activations, B for gradients.
        is_communication: whether its time is that of a network, and compared by its median.
    """

    name: str
    scope: Scope
    kind: str = ""
    is_communication: bool = False


@dataclass(frozen=True, eq=False)
class RunTrace:
    """Ops of one run, one entry a column for each, in no particular order. Times are milliseconds.

    Attributes:
        name: of the trace, for people.
        kinds: what `kind` counts.
        kind, step, replica, rank, stage, microbatch: ints. `stage` counts over the whole model; of an op besides the
            microbatches it is the stage whose gradients or parameters it is about, where that is known.
        start, end: floats. Those of one step share a clock, or are aligned later.
        notes: what a reader did that a person should know.
    """

    name: str
    kinds: tuple[TracedKind, ...]
    kind: Array
    step: Array
    replica: Array
    rank: Array
    stage: Array
    microbatch: Array
    start: Array
    end: Array
    notes: tuple[str, ...] = ()

    COLUMNS = ("kind", "step", "replica", "rank", "stage", "microbatch", "start", "end")

    def __len__(self) -> int:
        return len(self.kind)

    def __repr__(self) -> str:
        return (
            f"<RunTrace {self.name}: {len(self)} ops, {len(self.steps)} steps, {self.num_replicas} replicas of "
            f"{self.num_ranks} ranks>"
        )

    @cached_property
    def steps(self) -> Array:
        return np.unique(self.step)

    @cached_property
    def num_ranks(self) -> int:
        """Ranks of one pipeline."""
        return int(self.rank.max()) + 1 if len(self) else 0

    @cached_property
    def num_replicas(self) -> int:
        return int(self.replica.max()) + 1 if len(self) else 0

    @cached_property
    def num_stages(self) -> int:
        return int(self.stage.max()) + 1 if len(self) else 0

    def has(self, test: Callable[[TracedKind], bool]) -> Array:
        """Whether each op's kind passes a test."""
        if not self.kinds:
            return np.zeros(len(self), bool)
        return np.array([test(kind) for kind in self.kinds])[self.kind]

    def take(self, chosen: Array) -> RunTrace:
        """Some of the ops."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in self.COLUMNS})

    def with_note(self, note: str) -> RunTrace:
        return replace(self, notes=(*self.notes, note))


class TracedOp(NamedTuple):
    """One op, as readers that go event by event collect them. `start` and `end` in milliseconds."""

    name: str
    step: int
    replica: int
    rank: int
    stage: int
    microbatch: int
    start: float
    end: float


MOST = 1 << 62
"""Above this a number in a file names nothing."""


def whole_numbers(what: str, values: Array) -> Array:
    """A column of floats as whole numbers; where there is none, `NONE`.

    Args:
        what: the column, for errors.

    Raises:
        TraceError: numbers that are not whole, or beyond what a file can mean.
    """
    filled = np.where(np.isnan(values), NONE, values)
    if (wrong := ~np.isfinite(filled) | (np.abs(filled) > MOST)).any():
        raise TraceError(f"{what} holds {filled[wrong][0]:g}: give whole numbers, counted from 0")
    if (filled != np.round(filled)).any():
        raise TraceError(f"{what} holds numbers that are not whole")
    return filled.astype(np.int64)


def trace_of(name: str, ops: Iterable[TracedOp], notes: Sequence[str] = ()) -> RunTrace:
    """The columns of ops that were read one by one."""
    found = list(ops)
    columns = list(zip(*found, strict=True)) if found else [()] * len(TracedOp._fields)
    names, kind = np.unique(np.array(columns[0], dtype=object).astype(str), return_inverse=True)
    for what, column in zip(TracedOp._fields[1:6], columns[1:6], strict=True):
        if column and max(map(abs, column)) > MOST:
            raise TraceError(f"{name}: {what} {max(column, key=abs)} of an op: numbers count from 0")
    ints = [np.array(column, np.int64) for column in columns[1:6]]
    floats = [np.array(column, np.float64) for column in columns[6:]]
    numbers: dict[str, Any] = dict(zip(TracedOp._fields[1:], [*ints, *floats], strict=True))
    kinds = tuple(kind_named(str(each)) for each in names)
    return RunTrace(name, kinds, kind.astype(np.int64), **numbers, notes=tuple(notes))


_COMPUTE = {"forward-compute": "F", "backward-compute": "B", "input-grad-compute": "I", "weight-grad-compute": "W"}
_WORDS = {
    "F": ("f", "forward", "fwd", "fw", "forward_step", "forward_pass", "forward_compute"),
    "B": ("b", "backward", "bwd", "bw", "backward_step", "backward_pass", "backward_compute", "full_backward"),
    "I": ("i", "backward_input", "input_grad", "dgrad"),
    "W": ("w", "backward_weight", "weight_grad", "wgrad"),
    "R": ("r", "recompute"),
}
LETTERS = {word: letter for letter, words in _WORDS.items() for word in words}
_MESSAGES = {
    "forward-send": (Scope.SEND, "F"),
    "forward-recv": (Scope.RECEIVE, "F"),
    "backward-send": (Scope.SEND, "B"),
    "backward-recv": (Scope.RECEIVE, "B"),
    "SEND_F": (Scope.SEND, "F"),
    "RECV_F": (Scope.RECEIVE, "F"),
    "SEND_B": (Scope.SEND, "B"),
    "RECV_B": (Scope.RECEIVE, "B"),
}
_OTHERS = {
    "params-all-gather": Scope.REPLICAS,
    "grads-reduce-scatter": Scope.REPLICAS,
    "grads-all-reduce": Scope.REPLICAS,
    "separate-grads-all-reduce": Scope.REPLICAS,
    "all-grads-sync": Scope.REPLICAS,
    "REDUCE": Scope.REPLICAS,
    "REDUCE_GRAD": Scope.REPLICAS,
    "embedding-grads-all-reduce": Scope.PIPELINE,
    "optimizer-clip-main-grad": Scope.ALL,
}
_LOCAL_COMMUNICATION = ("layernorm-grads-all-reduce",)
"""Within a worker's tensor-parallel group: nobody else waits for it, but its time is that of a network."""


def kind_named(name: str) -> TracedKind:
    """What an op of this name is; one that is not known takes its rank's time and nobody else's."""
    letter = _COMPUTE.get(name) or LETTERS.get(name.lower())
    if letter is not None:
        return TracedKind(name, Scope.COMPUTE, letter)
    if name in _MESSAGES:
        scope, letter = _MESSAGES[name]
        return TracedKind(name, scope, letter, True)
    scope = _OTHERS.get(name, Scope.LOCAL)
    return TracedKind(name, scope, "", scope.is_collective or name in _LOCAL_COMMUNICATION)


PARAMETERS = "params-all-gather"
"""What brings a stage's parameters before its first forward."""


GROUPS = ("op", "stage", "microbatch", "rank", "replica", "step")
NUMBERS = GROUPS[1:]


Pattern = tuple[str, str]
"""A regular expression that must match the whole name, or its end after a blank, a dot or a slash; and the op that
the name means, where no group says it."""


def parse_pattern(text: str) -> Pattern:
    """Reads PATTERN, or OP=PATTERN."""
    op, equals, rest = text.partition("=")
    return (rest, op) if equals and re.fullmatch(r"[A-Za-z_-]+", op) else (text, "")


_ALONE = r"(?<![\s./:])"
"""Nothing stands before it: such short names would otherwise be the ends of many."""
_SEPARATED = r"[ _.:,;=#/|@()\[\]-]*"
_STAGE = rf"(?i:s|stage){_SEPARATED}(?P<stage>\d+)"
_OP = rf"(?i:(?P<op>{'|'.join(LETTERS)}))"
_WORD = rf"(?i:mb|microbatch|micro_batch){_SEPARATED}"
_MICROBATCH = rf"(?:{_WORD})?(?P<microbatch>\d+){_SEPARATED}"
_OPTIMIZER = (r"Optimizer\.step#\w+\.step", "optimizer")
_TORCH = (
    (r"PP:(?P<stage>\d+)(?P<op>F|B|I|W)(?P<microbatch>\d+)", ""),
    (r"PP:(?P<stage>\d+)(?P<op>REDUCE_GRAD)", ""),
    (r"Forward (?P<microbatch>\d+)", "F"),
    (r"Backward (?P<microbatch>\d+)", "B"),
    _OPTIMIZER,
)

PRESETS: Mapping[str, tuple[Pattern, ...]] = {
    "penstock": ((r"(?P<op>F|B|I|W|R|U) (?P<microbatch>\d+)", ""),),
    "torch": _TORCH,
    "torchtitan": _TORCH,
    "megatron": (
        (r"(?P<op>(?:forward|backward)-(?:compute|send|recv))", ""),
        (r"(?P<op>forward_step|backward_step)", ""),
        (r"(?P<op>params-all-gather|grads-reduce-scatter|all-grads-sync|optimizer|optimizer-clip-main-grad"
         r"|layernorm-grads-all-reduce|embedding-grads-all-reduce)", ""),
    ),
    "ranges": (
        (rf"{_ALONE}(?:{_STAGE}{_SEPARATED})?{_OP}{_SEPARATED}{_MICROBATCH}", ""),
        (rf"{_ALONE}{_OP}{_SEPARATED}{_MICROBATCH}{_SEPARATED}{_STAGE}", ""),
        (rf"{_ALONE}(?:{_STAGE}{_SEPARATED})?{_WORD}(?P<microbatch>\d+){_SEPARATED}{_OP}{_SEPARATED}", ""),
        (rf"{_ALONE}(?P<stage>\d+){_OP}(?P<microbatch>\d+)", ""),
        _OPTIMIZER,
    ),
    "stacks": (
        (r"forward_one_chunk", "F"),
        (r"backward_one_chunk", "B"),
        (r"backward_weight_one_chunk", "W"),
        _OPTIMIZER,
    ),
    "deepspeed": (
        (r"_exec_(?P<op>forward_pass|backward_pass)", ""),
        (r"_exec_reduce_grads", "grads-all-reduce"),
        (r"_exec_optimizer_step", "optimizer"),
    ),
}  # fmt: skip
"""Names that the frameworks give. TorchTitan's are torch's; Megatron's are its timers and functions (a profile
with stacks names those), DeepSpeed's the functions of its pipeline engine. `ranges` are for people who name ops
themselves: F3, stage 1 bwd mb 2. `stacks` are functions of torch's stages, as `Schedule1F1B` names no op."""


NamedOp = tuple[TracedKind, dict[str, int | None]]
"""What a name and the event's arguments say: the kind of op, and `NUMBERS`, None where they say nothing."""


class Names:
    """Reads names by patterns, the first that matches.

    Raises:
        TraceError: a pattern is wrong.
    """

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self._patterns = [(_compiled(*each), each[1]) for each in patterns]
        self._known: dict[str, tuple[TracedKind, dict[str, str]] | None] = {}

    def read(self, name: str, args: Mapping[str, Any]) -> NamedOp | None:
        """What is said, or None for a name that no pattern matches."""
        if name not in self._known:
            self._known[name] = self._match(name)
        found = self._known[name]
        if found is None:
            return None
        return found[0], {each: _number(found[1].get(each, args.get(each))) for each in NUMBERS}

    def matches(self, name: str) -> bool:
        return self.read(name, {}) is not None

    def _match(self, name: str) -> tuple[TracedKind, dict[str, str]] | None:
        for pattern, op in self._patterns:
            if (match := pattern.fullmatch(name)) is not None:
                groups = {key: value for key, value in match.groupdict().items() if value is not None}
                return kind_named(groups.get("op") or op), groups
        return None


def _compiled(text: str, op: str) -> re.Pattern[str]:
    """Raises TraceError for what is no regular expression, has unknown groups or does not say which op it is."""
    try:
        found = re.compile(rf"(?:.*[\s./:])?(?:{text})")
    except re.error as error:
        raise TraceError(f"pattern {text!r} is no regular expression: {error}") from None
    if unknown := sorted(found.groupindex.keys() - set(GROUPS)):
        raise TraceError(f"pattern {text!r} has a group {unknown[0]!r}; it may have {', '.join(GROUPS)}")
    if not op and "op" not in found.groupindex:
        raise TraceError(
            f"pattern {text!r} does not say which op it is: give a group named op, like "
            r"(?P<op>F|B)(?P<microbatch>\d+), or write OP=PATTERN, like F=forward (?P<microbatch>\d+)"
        )
    return found


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def preset_for(names: set[str]) -> str | None:
    """The preset that knows forwards and backwards among these names; the one that knows most."""
    known = {preset: kinds_named(names, preset) for preset in PRESETS}
    knows = [preset for preset, kinds in known.items() if "F" in kinds and {"B", "I"} & set(kinds)]
    return max(knows, key=lambda preset: len(known[preset]), default=None)


def kinds_named(names: set[str], preset: str) -> list[str]:
    """The kinds of the names that a preset knows: Penstock's letters of ops of microbatches, "" for others."""
    reader = Names(PRESETS[preset])
    kinds = [found[0] for name in names if (found := reader.read(name, {})) is not None]
    return [kind.kind if kind.scope is Scope.COMPUTE else "" for kind in kinds]
