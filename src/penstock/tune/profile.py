"""What one model's layers cost on one device: milliseconds and bytes, measured, estimated or read from a file.

Times are for one microbatch of `microbatch_size` samples, while `num_parallel` ranks work at the same time on the
machine. Two ranks that share memory and clock are slower than one alone.

    one stage's op  =  its layers' times  +  what an op costs without any layer (`op_overhead`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

from penstock.tune.errors import TuneError

KINDS = ("f", "b", "f_split", "i", "w")
"""First the forward and backward of a stage that runs B, then those of a stage that runs I and W."""

TIMES = (*KINDS, "update")
BYTES = ("activation", "held", "output", "weight", "state")
ROWS = (*TIMES, *BYTES, "tensors")


@dataclass(frozen=True)
class Profile:
    """The layers of a model, one entry per layer.

    Attributes:
        model: its name. layers: the layers' names, first to last.
        microbatch_size: samples. num_parallel: ranks that worked side by side when this was measured.
        recompute: whether blocks keep only their input and run again in the backward.
        f, b, f_split, i, w: milliseconds. A forward that will be split records a tape, so it has a time of its own.
        activation: bytes kept from F to B or I. held: bytes of them kept from I to W.
        output: bytes of the message the layer would send, were it the last of its stage.
        weight, state: bytes of parameters, and of what the optimizer keeps for them.
        update: milliseconds of clipping, optimizer and clearing gradients.
        op_overhead: milliseconds by kind of an op of a stage without layers.
        step: milliseconds a step besides, for the norm of the whole gradient and for what any update costs.
        transient: most bytes that a backward holds besides; what a recomputed block holds while it runs again.
        tied: bytes of a weight that the first and the last layer share; 0 if they do not.
        tensors: how many parameters a layer has; none where that is not known.
        num_sharing: ranks that hold the first and the last layer together and run each of their ops at once; what the
            rows say of these two is then of one rank's part. 1 where one rank has the whole of each.
        source: "measured", "estimated" or the file it was read from.

    Raises:
        TuneError: a negative number, one that is not finite, or lists of different lengths.
    """

    model: str
    layers: Sequence[str]
    microbatch_size: int
    num_parallel: int
    f: Sequence[float]
    b: Sequence[float]
    f_split: Sequence[float]
    i: Sequence[float]
    w: Sequence[float]
    activation: Sequence[float]
    held: Sequence[float]
    output: Sequence[float]
    weight: Sequence[float]
    state: Sequence[float]
    update: Sequence[float]
    op_overhead: Mapping[str, float] = field(default_factory=dict)
    recompute: bool = False
    transient: float = 0.0
    step: float = 0.0
    tied: float = 0.0
    num_sharing: int = 1
    source: str = "measured"
    tensors: Sequence[float] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.layers, list | tuple) or not self.layers or not isinstance(self.model, str):
            raise TuneError(f"{self.source}: a model needs a name and the names of its layers, at least one")
        for name in ("microbatch_size", "num_parallel", "num_sharing"):
            _whole(self.source, name, getattr(self, name))
        if not self.tensors:
            object.__setattr__(self, "tensors", [0.0] * len(self.layers))
        for name in ROWS:
            object.__setattr__(self, name, _row(self.source, name, getattr(self, name), len(self.layers)))
        for name in ("transient", "tied", "step"):
            _number(self.source, name, getattr(self, name))
        for kind, value in self.op_overhead.items():
            if kind not in KINDS:
                raise TuneError(f"{self.source}: op_overhead has no kind {kind!r}; it has {', '.join(KINDS)}")
            _number(self.source, f"op_overhead of {kind}", value)
        object.__setattr__(self, "layers", tuple(self.layers))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def time(self, kind: str, layers: range) -> float:
        """Milliseconds of one op of a stage that holds `layers`; `kind` is one of `KINDS`."""
        row: Sequence[float] = getattr(self, kind)
        return sum(row[layer] for layer in layers) + self.op_overhead.get(kind, 0.0)

    def total(self, what: str, layers: range) -> float:
        """The sum of any row over `layers`."""
        row: Sequence[float] = getattr(self, what)
        return sum(row[layer] for layer in layers)

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        if self.num_sharing == 1:
            del found["num_sharing"]  # so that versions without it read most files
        return found

    @classmethod
    def from_json(cls, value: Mapping[str, Any], source: str | None = None) -> Profile:
        """Reads `to_json`'s form. Raises TuneError that names the field."""
        source = source or "a profile"
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(value) - known):
            raise TuneError(f"{source}: unknown field {unknown[0]!r}; a profile has {', '.join(sorted(known))}")
        needed = [f.name for f in fields(cls) if f.name not in _OPTIONAL]
        if missing := [name for name in needed if name not in value]:
            raise TuneError(f"{source}: field {missing[0]!r} is missing")
        return cls(**{**value, "source": value.get("source", source)})


def with_shared_ends(profile: Profile, ends: Profile) -> Profile:
    """The profile of a model whose first and last layer are shared by several ranks.

    Args:
        ends: the profile of these two layers alone, for the part that one of these ranks has.
    """
    rows = {name: (getattr(ends, name)[0], *getattr(profile, name)[1:-1], getattr(ends, name)[-1]) for name in ROWS}
    return replace(profile, tied=ends.tied, num_sharing=ends.num_sharing, **rows)  # type: ignore[arg-type]


def joined_profile(model: str, parts: Sequence[Profile]) -> Profile:
    """One profile of the layers of several parts of a model, part by part.

    Each part may have been measured with microbatches of its own size. What an op costs besides its layers
    is their mean.
    """
    first = parts[0]
    rows = {name: [value for part in parts for value in getattr(part, name)] for name in ROWS}
    kinds = {kind for part in parts for kind in part.op_overhead}
    return Profile(
        model=model,
        layers=[layer for part in parts for layer in part.layers],
        microbatch_size=max(part.microbatch_size for part in parts),
        num_parallel=first.num_parallel,
        op_overhead={k: sum(part.op_overhead.get(k, 0.0) for part in parts) / len(parts) for k in sorted(kinds)},
        recompute=first.recompute,
        transient=max(part.transient for part in parts),
        step=sum(part.step for part in parts),
        source=first.source,
        **rows,  # type: ignore[arg-type]
    )


_BY_SIZE = ("sizes", "send", "receive", "delay", "reduce", "threads")
_OF_COPIES = ("sums", "values")
OF_HOLDERS = ("reduce", *_OF_COPIES)
"""What ranks that hold the same stage exchange at the end of a step."""

_OPTIONAL = ("op_overhead", "recompute", "transient", "step", "tied", "num_sharing", "source", "tensors")


@dataclass(frozen=True)
class MessageCosts:
    """What the runtime and its messages cost around the ops, by the message's size.

    Attributes:
        sizes: bytes, rising.
        send, receive: milliseconds that a message of each size keeps its sender and its receiver from their ops.
        threads: milliseconds of processor time that a message takes from other threads at each end; where every
            core has a rank, they take it from the ranks.
        delay: milliseconds from the end of an op to the start of one on another rank that waited for its result.
        gap: milliseconds between two ops of a rank when nothing is sent or received.
        step: milliseconds of a step in which no op runs, with several ranks; step_alone: with one.
        reduce: milliseconds of summing a stage's gradients of so many bytes over two replicas.
        sums: milliseconds of adding up a stage's gradients of so many bytes where another pipeline has a copy of it:
            they go to the owner, and the sum comes back. values: of giving the copy the owner's weights after an
            update. Where a file has none, a message there and back, and one.
        per_tensor: by what of `reduce`, `sums` and `values`, milliseconds besides for each tensor of the stage.
        source: "measured", "assumed" or the file it was read from.
    """

    sizes: Sequence[float]
    send: Sequence[float]
    receive: Sequence[float]
    delay: Sequence[float]
    reduce: Sequence[float]
    threads: Sequence[float]
    gap: float = 0.0
    step: float = 0.0
    step_alone: float = 0.0
    source: str = "measured"
    sums: Sequence[float] | None = None
    values: Sequence[float] | None = None
    per_tensor: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind, value in self.per_tensor.items():
            if kind not in OF_HOLDERS:
                raise TuneError(f"{self.source}: per_tensor has no kind {kind!r}; it has {', '.join(OF_HOLDERS)}")
            _number(self.source, f"per_tensor of {kind}", value)
        for name in _OF_COPIES:
            if getattr(self, name) is None:
                times = 2 if name == "sums" else 1
                object.__setattr__(self, name, [times * delay for delay in self.delay])
        for name in (*_BY_SIZE, *_OF_COPIES):
            object.__setattr__(self, name, _row(self.source, name, getattr(self, name), len(self.sizes)))
        if not self.sizes or any(b <= a for a, b in pairwise(self.sizes)):
            raise TuneError(
                f"{self.source}: sizes are {list(self.sizes)}; give at least one, each above the one before"
            )
        for name in ("gap", "step", "step_alone"):
            _number(self.source, name, getattr(self, name))

    def at(self, what: str, size: float) -> float:
        """Milliseconds for a message of `size` bytes, interpolated between the two nearest sizes that are known.

        Below the smallest size it is the value of the smallest. Above the largest it grows as between the last two.
        """
        row: Sequence[float] = getattr(self, what)
        sizes = self.sizes
        if size <= sizes[0] or len(sizes) == 1:
            return row[0]
        last = next((k for k in range(1, len(sizes)) if size <= sizes[k]), len(sizes) - 1)
        share = (size - sizes[last - 1]) / (sizes[last] - sizes[last - 1])
        return max(0.0, row[last - 1] + share * (row[last] - row[last - 1]))

    def of_stage(self, what: str, size: float, num_tensors: float) -> float:
        """Milliseconds of one of `OF_HOLDERS`, for a stage of so many bytes and tensors."""
        return self.at(what, size) + self.per_tensor.get(what, 0.0) * num_tensors

    def over_replicas(self, size: float, num_tensors: float, num_replicas: int) -> float:
        """Milliseconds to sum a stage's gradients over k replicas. A ring moves 2 (k - 1) / k of the bytes through
        each of them. Each packs and unpacks its tensors, however many replicas there are.
        """
        ring = self.at("reduce", size) * 2 * (num_replicas - 1) / num_replicas
        return ring + self.per_tensor.get("reduce", 0.0) * num_tensors

    @property
    def latency(self) -> float:
        """Milliseconds of the smallest message, from op to op."""
        return self.delay[0]

    @property
    def bandwidth(self) -> float:
        """Bytes per millisecond, from the smallest to the largest message; infinite if the size makes no
        difference.
        """
        grown = self.delay[-1] - self.delay[0]
        return (self.sizes[-1] - self.sizes[0]) / grown if grown > 0 else math.inf

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any], source: str | None = None) -> MessageCosts:
        """Reads `to_json`'s form. Raises TuneError that names the field."""
        source = source or "a profile of messages"
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(value) - known):
            raise TuneError(f"{source}: unknown field {unknown[0]!r} of messages")
        if missing := sorted({*_BY_SIZE} - set(value)):
            raise TuneError(f"{source}: field {missing[0]!r} of messages is missing")
        return cls(**{**value, "source": value.get("source", source)})

    @classmethod
    def assumed(cls, latency: float = 0.0, bandwidth: float = math.inf) -> MessageCosts:
        """Links of `latency` ms and `bandwidth` bytes per ms, whose messages take no time of the ranks themselves."""
        _number("links", "latency", latency)
        if not bandwidth > 0:
            raise TuneError(f"the links' bandwidth is {bandwidth}: give a number above 0")
        sizes = (0.0, 1e6)
        delay = tuple(latency + size / bandwidth for size in sizes)
        nothing = (0.0, 0.0)
        return cls(sizes, nothing, nothing, delay, delay, nothing, source="assumed")


def _row(source: str, name: str, values: Any, length: int) -> tuple[float, ...]:
    if not isinstance(values, list | tuple):
        raise TuneError(f"{source}: {name} is {values!r}; give a list with one number per layer: {length}")
    if len(values) != length:
        raise TuneError(f"{source}: {name} has {len(values)} entries, {length} are needed")
    for place, value in enumerate(values):
        _number(source, f"{name}[{place}]", value)
    return tuple(float(value) for value in values)


def _number(source: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise TuneError(f"{source}: {name} is {value!r}; give a finite number of at least 0")


def _whole(source: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TuneError(f"{source}: {name} is {value!r}; give a whole number of at least 1")
