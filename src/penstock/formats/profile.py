"""Profiles: what `penstock tune --profile-only --out` measured of a model's layers and of messages.

    {"format": "penstock-profile", "version": 2, "profiles": [...], "transfers": {"1": {...}, "2": {...}}}

Layers are cut into stages so that the costliest stage costs least:

    layers      embedding  block  block  block  head          f, i, w ... one entry per layer
    stages     [          stage 0       ][   stage 1   ]
    one op of a stage  =  its layers' times  +  what an op costs without any layer (`op_overhead`)

In version 1, profiles have no `tensors` and transfers have no `per_tensor`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.cost import CostError, Costs
from penstock.cost.cut import PartitionError, partition
from penstock.formats.files import converted

FORMAT, VERSION = "penstock-profile", 2

KINDS = ("f", "b", "f_split", "i", "w")
"""First the forward and backward of a stage that runs B, then those of a stage that runs I and W."""

TIMES = (*KINDS, "update")
BYTES = ("activation", "held", "output", "weight", "state")
ROWS = (*TIMES, *BYTES, "tensors")

Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Row = Annotated[tuple[Amount, ...], Meta(min_length=1, description="a list with one number of at least 0 per layer")]
BySize = Annotated[
    tuple[Amount, ...], Meta(min_length=1, description="a list with one number of at least 0 per size")
]
Count = Annotated[int, Meta(ge=1, description="a whole number of at least 1")]
EXCHANGES = ("reduce", "sums", "values")
"""What ranks that hold the same stage exchange at the end of a step."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the layers of a model cost on one device, one entry per layer.

    Times are of one microbatch, while `num_parallel` ranks work at the same time on the machine. Two ranks that
    share memory and clock are slower than one alone.

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
        tensors: how many parameters a layer has; empty if that is not known.
        num_sharing: ranks that hold the first and the last layer together and run each of their ops at once. The
            rows of these two layers are then of one rank's part. 1 where one rank has the whole of each.
        source: "measured", or what the costs were made from.
    """

    model: str
    layers: Annotated[tuple[str, ...], Meta(min_length=1, description="a list with the name of each layer")]
    microbatch_size: Count
    num_parallel: Count
    f: Row
    b: Row
    f_split: Row
    i: Row
    w: Row
    activation: Row
    held: Row
    output: Row
    weight: Row
    state: Row
    update: Row
    op_overhead: dict[str, Amount] = {}
    recompute: bool = False
    transient: Amount = 0.0
    step: Amount = 0.0
    tied: Amount = 0.0
    num_sharing: Count = 1
    source: str = "measured"
    tensors: tuple[Amount, ...] = ()

    def check(self) -> None:
        """Raises CostError for rows of different lengths, or the overhead of an unknown kind."""
        _require_known("op_overhead", self.op_overhead, KINDS)
        for name in ROWS:
            row, num = getattr(self, name), self.num_layers
            if len(row) != num and (row or name != "tensors"):
                raise CostError(f"profile: {name} has {len(row)} entries; give one per layer, {num} in all")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def time(self, kind: str, layers: range) -> float:
        """Milliseconds of one op of a stage that holds `layers`; `kind` is one of `KINDS`."""
        return self.total(kind, layers) + self.op_overhead.get(kind, 0.0)

    def total(self, name: str, layers: range) -> float:
        """The sum of a row over `layers`; 0 if the profile does not have the row."""
        row: Sequence[float] = getattr(self, name)
        return sum(row[layer] for layer in layers) if row else 0.0

    def layer_costs(self, is_split: bool) -> list[float]:
        """Milliseconds of a microbatch in each layer, by which layers are cut into stages.

        Args:
            is_split: whether backwards run in halves, I and W.
        """
        rows = [getattr(self, name) for name in (("f_split", "i", "w") if is_split else ("f", "b"))]
        return [sum(times) for times in zip(*rows, strict=True)]


class MessageCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the runtime and its messages cost around the ops, by the message's size.

    Attributes:
        sizes: bytes, rising.
        send, receive: milliseconds that a message of each size keeps its sender and its receiver from their ops.
        delay: milliseconds from the end of an op to the start of one on another rank that waited for its result.
        reduce: milliseconds of summing a stage's gradients of so many bytes over two replicas.
        threads: milliseconds of processor time that a message takes from other threads at each end; where every
            core has a rank, they take it from the ranks.
        gap: milliseconds between two ops of a rank when nothing is sent or received.
        step: milliseconds of a step in which no op runs, with several ranks; step_alone: with one.
        source: "measured" or "assumed".
        sums: milliseconds of adding up a stage's gradients of so many bytes where another pipeline has a copy of it:
            they go to the owner, and the sum comes back. If it is empty, it is twice the delay.
        values: milliseconds of giving the copy the owner's weights after an update. If it is empty, it is the delay.
        per_tensor: for `reduce`, `sums` and `values`, additional milliseconds for each tensor of the stage.
    """

    sizes: BySize
    send: BySize
    receive: BySize
    delay: BySize
    reduce: BySize
    threads: BySize
    gap: Amount = 0.0
    step: Amount = 0.0
    step_alone: Amount = 0.0
    source: str = "measured"
    sums: tuple[Amount, ...] = ()
    values: tuple[Amount, ...] = ()
    per_tensor: dict[str, Amount] = {}

    def check(self) -> None:
        """Raises CostError for rows of different lengths, sizes that do not rise, or an unknown exchange."""
        _require_known("per_tensor", self.per_tensor, EXCHANGES)
        for name in ("send", "receive", "delay", "reduce", "threads", "sums", "values"):
            row, num = getattr(self, name), len(self.sizes)
            if len(row) != num and (row or name not in ("sums", "values")):
                raise CostError(f"transfers: {name} has {len(row)} entries; give one per size, {num} in all")
        if any(b <= a for a, b in pairwise(self.sizes)):
            raise CostError(f"transfers: sizes are {list(self.sizes)}; give each above the one before")

    def at(self, name: str, size: float) -> float:
        """Milliseconds for a message of `size` bytes, interpolated between the two nearest sizes that are known.

        Below the smallest size it is the value of the smallest. Above the largest it grows as between the last two.
        """
        row: Sequence[float] = getattr(self, name)
        if not row:
            return (2 if name == "sums" else 1) * self.at("delay", size)
        sizes = self.sizes
        if size <= sizes[0] or len(sizes) == 1:
            return row[0]
        last = next((k for k in range(1, len(sizes)) if size <= sizes[k]), len(sizes) - 1)
        share = (size - sizes[last - 1]) / (sizes[last] - sizes[last - 1])
        return max(0.0, row[last - 1] + share * (row[last] - row[last - 1]))

    def of_stage(self, name: str, size: float, num_tensors: float) -> float:
        """Milliseconds of one exchange between holders, for a stage of so many bytes and tensors."""
        return self.at(name, size) + self.per_tensor.get(name, 0.0) * num_tensors

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

    @classmethod
    def assumed(cls, bandwidth: float = math.inf) -> MessageCosts:
        """Links of `bandwidth` bytes per ms and no latency, whose messages take no time of the ranks themselves."""
        delay, nothing = (0.0, 1e6 / bandwidth), (0.0, 0.0)
        return cls((0.0, 1e6), nothing, nothing, delay, delay, nothing, source="assumed")


class ProfileFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file.

    Attributes:
        profiles: of one model; for several microbatch sizes or numbers of ranks side by side, or with recompute.
        transfers: what messages cost, by number of ranks.
    """

    profiles: Annotated[tuple[Profile, ...], Meta(min_length=1, description="a list with at least one profile")]
    transfers: dict[str, MessageCosts] = {}
    format: Literal["penstock-profile"] = "penstock-profile"
    version: Annotated[
        int, Meta(ge=1, le=VERSION, description=f"a version that this Penstock reads, up to {VERSION}")
    ] = VERSION


def is_profile(value: Any) -> bool:
    """Whether JSON is a profile's, judged by what it is headed with."""
    return isinstance(value, dict) and (value.get("format") == FORMAT or "profiles" in value)


def profile_to_json(profiles: Sequence[Profile], transfers: Mapping[int, MessageCosts]) -> str:
    """The text of a file."""
    file = ProfileFile(tuple(profiles), {str(num_ranks): each for num_ranks, each in transfers.items()})
    return json.dumps(msgspec.to_builtins(file), indent=1, allow_nan=False) + "\n"


def read_profile(value: Any) -> ProfileFile:
    """Reads the content of a file from JSON.

    Raises:
        CostError: another version, profiles of several models, a field that is missing or damaged.
    """
    try:
        file = converted(value, ProfileFile)
    except ValueError as error:
        raise CostError(f"profile: {error}") from None
    if wrong := [number for number in file.transfers if not number.isdigit()]:
        raise CostError(f"profile: transfers of {wrong[0]!r}: give them by number of ranks, like 2")
    for profile in file.profiles:
        profile.check()
    for transfer in file.transfers.values():
        transfer.check()
    if len({(profile.model, profile.layers) for profile in file.profiles}) > 1:
        raise CostError("its profiles are of several models; make one file per model")
    return file


def costs_of_profile(value: Any, num_stages: int) -> Costs:
    """Costs of `num_stages` stages of the profiled model, with weights, optimizer state and updates.

    F is that of a stage whose backward is split. Of several profiles the one without recompute is taken, with as many
    ranks side by side as there are stages, or the next fewer.

    Raises:
        CostError: as `read_profile`; also profiles of several microbatch sizes, and more stages than layers.
    """
    profile = _chosen(read_profile(value).profiles, num_stages)
    try:
        parts = partition(profile.layer_costs(is_split=True), num_stages)
    except PartitionError as error:
        raise CostError(str(error)) from None

    def total(name: str) -> list[float]:
        return [profile.total(name, part) for part in parts]

    def time(kind: str) -> list[float]:
        return [profile.time(kind, part) for part in parts]

    kept, held, weights = sum(profile.activation), sum(profile.held), total("weight")
    return Costs(
        f=time("f_split"),
        i=time("i"),
        w=time("w"),
        b=time("b"),
        activation=total("activation"),
        freed_by_input=max(0.0, 1 - held / kept) if kept else 0.0,
        message_bytes=[profile.output[part[-1]] for part in parts[:-1]] + [0.0],
        other={("U", stage): ms for stage, ms in enumerate(total("update"))},
        update_bytes=weights,
        weight_bytes=weights,
        optimizer_bytes=total("state"),
    )


def _require_known(field: str, given: Mapping[str, float], known: Sequence[str]) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise CostError(f"profile: {field} has no kind {unknown[0]!r}; it has {', '.join(known)}")


def _chosen(profiles: Sequence[Profile], num_stages: int) -> Profile:
    plain = [each for each in profiles if not each.recompute]
    if not plain:
        raise CostError("all profiles in it recompute; profile without --recompute")
    if len(sizes := sorted({str(each.microbatch_size) for each in plain})) > 1:
        raise CostError(f"it has profiles of microbatches of {', '.join(sizes)} samples; profile just one size")
    fitting = [each for each in plain if each.num_parallel <= num_stages]
    return (max if fitting else min)(fitting or plain, key=lambda each: each.num_parallel)
