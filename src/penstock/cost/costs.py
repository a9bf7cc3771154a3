"""Costs of ops: milliseconds of F, I, W and B per stage, activations that a forward keeps, and memory of weights."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, cast

from penstock.cost.errors import CostError
from penstock.cost.overlap import Overlap
from penstock.cost.uneven import ALL, EVEN, Array, Factors, Uneven
from penstock.schedule.op import BACKWARD, FORWARD, GIVE, INPUT, KINDS, OF_UPDATES, PREDICT, UPDATE, WEIGHT
from penstock.schedule.short_repr import short_repr
from penstock.schedule.updates import OWNER
from penstock.schedule.weight_versions import moment, predictions_of
from penstock.unknown_names import refuse_unknown

if TYPE_CHECKING:
    from penstock.schedule import Placement, Schedule

FREED_BY_INPUT = 0.5
"""Default share of a stage's activation that I frees; W frees the rest."""

# In a chain of norms and linears on one core of an Intel Xeon, a linear whose W waits takes 80 us more in F, I and W
# together, with what W has to read again. Its W takes 80 us for 2**21 multiply-adds of float32, and 140 us for 2**22.
MERGE_WORK = 1 << 22
"""Multiply-adds of a weight gradient that may wait for W. One of fewer is computed in I, as to wait would cost about
what it moves.
"""

BY_MICROBATCH = {"f": "F", "i": "I", "w": "W", "b": "B", "activation": "activation", "message_bytes": "message"}
"""Rows that may say more than one number per stage, and the factors they then come to."""
_OPTIONAL_ROWS = (
    *("b", "activation", "message_bytes", "update_bytes", "take_over"),
    *("weight_bytes", "gradient_bytes", "optimizer_bytes"),
)
"""What need not be given."""


def _validated(name: str, values: Sequence[float], length: int | None, optional: bool = False) -> tuple[float, ...]:
    try:
        result = tuple(float(v) for v in values)
    except (TypeError, ValueError, OverflowError):
        raise CostError(f"{name} is {reprlib.repr(values)}: give one number per stage") from None
    if length is not None and len(result) != length and (result or not optional):
        raise CostError(f"{name} has {len(result)} entries; give one per stage, {length} in all")
    for stage, value in enumerate(result):
        if not math.isfinite(value) or value < 0:
            raise CostError(f"{name} of stage {stage} is {value}: give a number of at least 0")
    return result


OtherCosts = (
    Mapping[str | tuple[str, int], float | tuple[float, float]] | tuple[tuple[str, int | None, float, float], ...]
)


def _other(given: OtherCosts, num_stages: int) -> tuple[tuple[str, int | None, float, float], ...]:
    """Registered ops' costs as (kind, stage or None, ms, memory)."""
    if isinstance(given, tuple):
        return given
    entries: list[tuple[str, int | None, float, float]] = []
    for key, value in given.items():
        kind, stage = (key, None) if isinstance(key, str) else key
        if kind in KINDS:
            raise CostError(f"other costs name {kind}; ms of F, I, W and B are given as f, i, w and b")
        ms, memory = value if isinstance(value, tuple) else (value, 0.0)
        if stage is not None and not 0 <= stage < num_stages:
            raise CostError(f"the cost of {kind} names stage {stage}: stages go from 0 to {num_stages - 1}")
        if not (isinstance(ms, Real) and 0 <= ms < math.inf and isinstance(memory, Real) and math.isfinite(memory)):
            raise CostError(f"the cost of {key} is {value!r}: give ms of at least 0, or (ms, memory)")
        entries.append((kind, stage, float(ms), float(memory)))
    return tuple(sorted(entries, key=lambda entry: (entry[0], -1 if entry[1] is None else entry[1])))


@refuse_unknown(CostError)
@dataclass(frozen=True)
class Costs:
    """How long each stage's ops take, and how much memory they need.

    Every list has one entry per stage. Times are in milliseconds, memory is in bytes or in activation units.

    Attributes:
        f, i, w: milliseconds of a forward, and of the input-gradient and weight-gradient halves of a backward.
        b: milliseconds of a full backward. Default: i + w.
        activation: what a forward keeps for its backward, in bytes or activation units. Default: 1 per stage.
        freed_by_input: share of the activation, 0 to 1, that I frees. W (or B) frees the rest.
        kept_by_recompute: share of the activation, 0 to 1, that a forward keeps (its input) if an R runs it again.
            If it is not given, `ps.plan` does not recompute forwards.
        other: costs of other kinds of ops, by kind or by (kind, stage): ms, or (ms, memory). Positive memory is held
            from the op's start. Negative memory is freed at its end. A kind that is not listed costs nothing, except
            R, which takes as long as F.
        message_bytes: bytes that a stage's forward sends to the next stage; the gradient that comes back has the same
            size. It matters on links with a bandwidth, and where messages are really sent. Default: 0 per stage.
        update_bytes: if updates are ops of the schedule, bytes of a stage's gradients on their way to the owner of
            its optimizer state, and of its parameters on their way back. Default: 0 per stage. `with_predictions`
            adds the bytes of predicted weights.
        take_over: milliseconds of an update on a copy that does not own the stage and only receives the new
            parameters. Default: 0 per stage.
        weight_bytes: bytes of a stage's parameters as ops read them. `ps.footprint` needs them.
        gradient_bytes: bytes of one buffer of gradients. Default: `weight_bytes`.
        optimizer_bytes: bytes that only the optimizer keeps: moments, and full-precision parameters if ops read
            shorter ones. Default: 0 per stage.
        uneven: how the costs of single microbatches differ from these: an `Uneven`, or what one is made from. A list
            with one number per microbatch multiplies the times of that microbatch's ops on every stage.
            {"time": ..., "activation": ..., "message": ...} sets factors of time, memory and message size apart.
            Simulated and emulated runs use it, and so do `ps.plan` and `ps.planning.order_microbatches`. The library
            builds its schedules as if all microbatches cost the same.
        overlap: how much time a rank saves when it runs a forward and a full backward as one (`Schedule.pairs`).
            None: it saves nothing, and a pair takes as long as one op after the other.

    To give the time of an update on its owner, use the kind "U" in `other`. Ops that are messages (SEND_F and the
    like) take no time; `Links` says how late messages arrive.

    Raises:
        CostError: a negative or non-finite number, lists of different lengths, or no stage.

    Examples:
        >>> import penstock as ps
        >>> costs = ps.Costs(f=[10, 12], i=[10, 12], w=[8, 8], activation=[2e9, 2e9])
        >>> costs.num_stages, costs.b
        (2, (18.0, 20.0))
        >>> ps.simulate(ps.build("1f1b", 2, 4), costs).makespan
        156.0
    """

    f: Sequence[float]
    i: Sequence[float]
    w: Sequence[float]
    b: Sequence[float] = ()
    activation: Sequence[float] = ()
    freed_by_input: float = field(default=FREED_BY_INPUT)
    kept_by_recompute: float | None = None
    other: OtherCosts = field(default=())
    message_bytes: Sequence[float] = ()
    uneven: Uneven | Mapping[str, Factors] | Sequence[float] = EVEN
    update_bytes: Sequence[float] = ()
    take_over: Sequence[float] = ()
    weight_bytes: Sequence[float] = ()
    gradient_bytes: Sequence[float] = ()
    optimizer_bytes: Sequence[float] = ()
    overlap: Overlap | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        f = _validated("f", self.f, None)
        if not f:
            raise CostError("costs need at least one stage")
        i, w = (_validated(name, getattr(self, name), len(f)) for name in "iw")
        rows = {"f": f, "i": i, "w": w}
        rows |= {name: _validated(name, getattr(self, name), len(f), optional=True) for name in _OPTIONAL_ROWS}
        rows["b"] = b = rows["b"] or tuple(x + y for x, y in zip(i, w, strict=True))
        rows["activation"] = rows["activation"] or (1.0,) * len(f)
        rows["message_bytes"] = rows["message_bytes"] or (0.0,) * len(f)
        for name in ("freed_by_input", "kept_by_recompute"):
            share = getattr(self, name)
            if share is None and name == "kept_by_recompute":
                continue
            if not isinstance(share, Real) or not 0 <= float(share) <= 1:
                raise CostError(f"{name} is {share!r}: give a share from 0 to 1")
        object.__setattr__(self, "other", _other(self.other, len(f)))
        uneven = Uneven.of(self.uneven)
        uneven.check_stages(len(f))
        object.__setattr__(self, "uneven", uneven)
        for name, value in rows.items():
            object.__setattr__(self, name, value)
        if self.overlap is not None:
            if not isinstance(self.overlap, Overlap):
                raise CostError(
                    f"overlap is {reprlib.repr(self.overlap)}: give ps.cost.Overlap(f=[...], b=[...], hidden=0.9)"
                )
            self.overlap.check(f, b)

    @classmethod
    @refuse_unknown(CostError)
    def uniform(
        cls,
        num_stages: int,
        f: float = 1.0,
        i: float = 1.0,
        w: float = 1.0,
        b: float | None = None,
        activation: float = 1.0,
        freed_by_input: float = FREED_BY_INPUT,
    ) -> Costs:
        """The same costs for every stage."""
        if not isinstance(num_stages, Integral) or num_stages < 1:
            raise CostError(f"costs need at least one stage, a whole number, got {num_stages!r}")
        n = num_stages
        return cls([f] * n, [i] * n, [w] * n, [] if b is None else [b] * n, [activation] * n, freed_by_input)

    @classmethod
    def by_microbatch(cls, **rows: Any) -> Costs:
        """Costs of single ops, as they were measured: per stage one number, or one number per microbatch.

        It takes the same arguments as `Costs`. In `f`, `i`, `w`, `b`, `activation` and `message_bytes` an entry may
        be a list with one number per microbatch. The stage then costs their mean, and `uneven` says how each
        microbatch differs from it.

            Costs.by_microbatch(f=[[10, 20], 15], i=[10, 10], w=[10, 10])     f=[15, 15], F0 of stage 0 takes 10

        Raises:
            CostError: what `Costs` refuses, `uneven` given in addition, or rows of different lengths.
        """
        if rows.get("uneven"):
            raise CostError("costs by microbatch say already how microbatches differ; leave `uneven` out")
        means, factors = {}, {}
        for name, what in BY_MICROBATCH.items():
            given = rows.get(name, ())
            try:
                nested = [isinstance(each, Sequence) and not isinstance(each, str) for each in given]
            except TypeError:
                raise CostError(f"{name} is {reprlib.repr(given)}: give one entry per stage") from None
            if not any(nested):
                continue
            num = max(len(each) for each, is_row in zip(given, nested, strict=True) if is_row)
            per_stage = [
                _validated(f"{name} of stage {stage}", each if is_row else [each] * num, None)
                for stage, (each, is_row) in enumerate(zip(given, nested, strict=True))
            ]
            if short := [stage for stage, row in enumerate(per_stage) if len(row) != num]:
                raise CostError(
                    f"{name} of stage {short[0]} has {len(per_stage[short[0]])} entries; give one per microbatch, "
                    f"{num} in all"
                )
            means[name] = [sum(row) / num for row in per_stage]
            factors[what] = [
                [each / mean for each in row] if mean else [1.0] * num
                for row, mean in zip(per_stage, means[name], strict=True)
            ]
        uneven = Uneven(
            {kind: each for kind, each in factors.items() if kind in "FIWB"},
            factors.get("activation", ()),
            factors.get("message", ()),
        )
        return cls(**{**rows, **means, "uneven": uneven})

    @classmethod
    def assumed(cls, num_ranks: int, placement: Placement) -> Costs:
        """The costs that are assumed if none are given: F, I and W of each rank's share of the model take 1 ms each.

        The forwards of one microbatch through the whole model take `num_ranks` ms in all, and so do its I and its W,
        however finely the model is cut. So makespans of different schedules can be compared. All stages take equally
        long. A stage that several ranks run together occupies each of them. An activation is 1 per stage, as in
        `uniform`.
        """
        num_stages = placement.num_stages
        occupied = sum(len(placement.hosts(0, stage)) for stage in range(num_stages))
        # A multiple of 2**-36, so that sums are exact: with thirds as they are, rounding would decide which of two
        # ops that are ready at the same moment comes first.
        each = round(2**36 * num_ranks / occupied) / 2**36
        return cls.uniform(num_stages, each, each, each)

    @property
    def num_stages(self) -> int:
        return len(self.f)

    @property
    def kept(self) -> float:
        """`kept_by_recompute`, or 0 if it is not given."""
        return 0.0 if self.kept_by_recompute is None else float(self.kept_by_recompute)

    @property
    def factors(self) -> Uneven:
        """`uneven` as a value; it is empty if all microbatches cost the same."""
        return cast("Uneven", self.uneven)

    def require_stages(self, num_stages: int, of: str = "the schedule has") -> None:
        """Raises CostError unless these are costs of so many stages; `of` says in words where the number is from."""
        if self.num_stages != num_stages:
            raise CostError(
                f"the costs are for {self.num_stages} stages, {of} {num_stages}; give costs for as many stages"
            )

    def duration(self, kind: str, stage: int, microbatch: int | None = None, *, owns: bool = True) -> float:
        """Milliseconds of one op.

        Args:
            microbatch: whose factor counts. None: the time of the kind and stage, before any factor.
            owns: for an update, whether its copy owns the stage.
        """
        ms = self._even_duration(kind, stage, owns)
        return ms if microbatch is None or not self.factors.time else ms * self._time_factor(kind, stage, microbatch)

    def pair_duration(self, forward: Sequence[Any], backward: Sequence[Any]) -> float:
        """Milliseconds of a forward and a backward that a rank runs as one.

        Each is (kind, stage, microbatch), or (kind, stage) for the time before any factor.
        """
        f, b = self.duration(*forward), self.duration(*backward)
        if self.overlap is None:
            return f + b
        scales = [1.0, 1.0]
        if self.factors.time:
            scales = [self._time_factor(*op) if len(op) > 2 else 1.0 for op in (forward, backward)]
        return self.overlap.time(forward[1], backward[1], f, b, *scales)

    def memory_change(self, kind: str, stage: int, microbatch: int | None = None) -> float:
        """How one op changes the activations that its rank holds: F and R add to them, I, W and B free them.

        F adds the whole activation, or only what is kept if an R adds the rest later. If no microbatch is given, the
        result is that of the kind and stage, before any factor.
        """
        held = self._even_memory(kind, stage)
        if microbatch is None or not self.factors.activation:
            return held
        return held * self.factors.factor("activation", kind, stage, microbatch)

    def message_size(
        self, producer: tuple[str, int] | tuple[str, int, int], consumer: tuple[str, int] | tuple[str, int, int]
    ) -> float:
        """Bytes of the message from one op to another. A gradient has the size of the activation it belongs to.

        Each op is (kind, stage, microbatch), or (kind, stage) for the size before any factor. Messages that are
        neither activations nor gradients only say that an op has run, and have 0 bytes.
        """
        if producer[0] == consumer[0] == FORWARD:
            return self._sent(FORWARD, producer)
        if producer[0] in (BACKWARD, INPUT) and consumer[0] in (BACKWARD, INPUT):
            return self._sent(BACKWARD, consumer)
        if consumer[0] in OF_UPDATES and self.update_bytes:
            size = self.update_bytes[consumer[1]]
            if producer[0] != UPDATE or len(consumer) == 2 or not self.factors.message:
                return size
            return size * self.factors.factor("message", UPDATE, consumer[1], consumer[2])
        return 0.0

    def time_factors(self, kind: str, num_microbatches: int) -> Array:
        """How many times as long each op of a kind takes: an array (num_stages, num_microbatches)."""
        uneven, size = self.factors, (self.num_stages, num_microbatches)
        if not self._has_halves_only(kind):
            return uneven.table("time", kind, *size)
        i, w = (uneven.table("time", half, *size) for half in (INPUT, WEIGHT))
        found = uneven.table("time", ALL, *size)
        for stage in range(self.num_stages):
            if (whole := self.i[stage] + self.w[stage]) > 0:
                found[stage] = (self.i[stage] * i[stage] + self.w[stage] * w[stage]) / whole
        return found

    def activation_factors(self, kind: str, num_microbatches: int) -> Array:
        """How many times as much memory each op of a kind adds or frees: an array (num_stages, num_microbatches)."""
        return self.factors.table("activation", kind, self.num_stages, num_microbatches)

    def _even_duration(self, kind: str, stage: int, owns: bool) -> float:
        if kind == GIVE:
            return 0.0
        if kind in (UPDATE, PREDICT) and not owns:
            return self.take_over[stage] if self.take_over else 0.0
        by_kind = {"F": self.f, "I": self.i, "W": self.w, "B": self.b}
        if kind in by_kind:
            return by_kind[kind][stage]
        if not {(kind, stage), (kind, None)} & self._other_by_key.keys():
            if kind == "R":
                return self.f[stage]
            kind = UPDATE if kind == PREDICT else kind
        return self._other_cost(kind, stage)[0]

    def _time_factor(self, kind: str, stage: int, microbatch: int) -> float:
        uneven = self.factors
        if self._has_halves_only(kind) and (whole := self.i[stage] + self.w[stage]) > 0:
            i, w = (uneven.factor("time", half, stage, microbatch) for half in (INPUT, WEIGHT))
            return (self.i[stage] * i + self.w[stage] * w) / whole
        return uneven.factor("time", kind, stage, microbatch)

    def _has_halves_only(self, kind: str) -> bool:
        """Whether a full backward takes as long as its halves together: the halves have factors, and B has none."""
        given = self.factors.rows_of("time")
        return kind == BACKWARD and BACKWARD not in given and (INPUT in given or WEIGHT in given)

    def _even_memory(self, kind: str, stage: int) -> float:
        share = {
            "F": 1.0,
            "I": -self.freed_by_input,
            "W": self.freed_by_input - 1.0,
            "B": -1.0,
            "R": 1.0 - self.kept,
        }
        if kind in share:
            return share[kind] * self.activation[stage]
        return self._other_cost(kind, stage)[1]

    def _sent(self, kind: str, op: tuple[str, int] | tuple[str, int, int]) -> float:
        size = self.message_bytes[op[1]]
        if len(op) == 2 or not self.factors.message:
            return size
        return size * self.factors.factor("message", kind, op[1], op[2])

    def with_other(self, other: Mapping[tuple[str, int], float | tuple[float, float]]) -> Costs:
        """The same costs, with those of more registered ops by (kind, stage)."""
        added = _other(dict(other), self.num_stages)
        kept = tuple(entry for entry in self.other_entries if entry[:2] not in dict(other))
        return replace(self, other=kept + added)

    def with_predictions(self, schedule: Schedule, sharding: str = "copies", most: float = math.inf) -> Costs:
        """The same costs, with the predicted weights that messages take to other copies of a stage.

        After an update the owner of a stage sends the new parameters. It sends predicted parameters with them: as
        many bytes again for each distance, in updates, by which ops of the other copy look ahead. If nothing of the
        kind is sent, the costs stay the same.

        Args:
            schedule: what runs.
            sharding: who has the optimizer's state. With "none" each copy has it, and predicts for itself.
            most: upper limit of a message's bytes.

        Examples:
            >>> import penstock as ps
            >>> from dataclasses import replace
            >>> amdp = ps.build("amdp", 4, 16, window=4)
            >>> amdp = replace(amdp, updates=replace(amdp.updates, rule="xpipe"))
            >>> costs = replace(ps.Costs.uniform(4), update_bytes=[1e6] * 4).with_predictions(amdp)
            >>> [costs.message_size(("U", 0, 0), ("U", 0, 1)), costs.message_size(("B", 0, 1), ("U", 0, 0))]
            [2000000.0, 1000000.0]
        """
        windows, found = schedule.windows, {} if sharding == "none" else predictions_of(schedule)
        copies = {copy: needs for copy, needs in found.items() if copy[0] != OWNER}
        if windows is None or not self.update_bytes or not copies:
            return self
        rows = [[1.0] * windows.num_ops for _ in range(self.num_stages)]
        for (pipeline, stage), needs in copies.items():
            size = self.update_bytes[stage]
            for update in range(windows.num_updates):
                factor = 1.0 + len(needs.get(moment(update + 1), ()))
                if size:
                    rows[stage][windows.number(update, pipeline)] = max(1.0, min(factor, most / size))
        uneven = self.factors
        return replace(self, uneven=replace(uneven, message={**uneven.rows_of("message"), UPDATE: rows}))

    @property
    def other_entries(self) -> tuple[tuple[str, int | None, float, float], ...]:
        """`other` as (kind, stage or None for all, ms, memory), sorted."""
        return _other(self.other, self.num_stages)

    def _other_cost(self, kind: str, stage: int) -> tuple[float, float]:
        found = self._other_by_key
        return found.get((kind, stage)) or found.get((kind, None), (0.0, 0.0))

    @cached_property
    def _other_by_key(self) -> dict[tuple[str, int | None], tuple[float, float]]:
        return {(kind, stage): (ms, memory) for kind, stage, ms, memory in self.other_entries}


def require_costs(value: object) -> None:
    """Raises CostError for a value that is not `Costs`."""
    if not isinstance(value, Costs):
        raise CostError(
            f"costs are {type(value).__name__}: give ps.Costs, like ps.Costs.uniform(num_stages=4, f=10, i=10, w=10)"
        )
