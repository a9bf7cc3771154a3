"""How much more or less than others the microbatches cost: factors on times, on what is kept and on what is sent.

Uneven([1, 2.5])                         the ops of microbatch 1 take 2.5 times as long, on every stage
Uneven(time={"F": [1, 2], "W": [1, 4]})  by kind of op; other kinds are even
Uneven(activation=[[1, 2], [1, 3]])      one row of factors per stage
Uneven.lengths([512, 2048])              all three, in proportion to the length
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np

from penstock.cost.errors import CostError
from penstock.schedule.op import BACKWARD, COMMUNICATION, FORWARD, INPUT, RECOMPUTE, UPDATE, WEIGHT
from penstock.schedule.short_repr import short_repr

Array = Any
"""A numpy array of floats."""
Rows = tuple[tuple[float, ...], ...]
"""Factors by stage and microbatch; a single row is for all stages."""
Given = Sequence[float] | Sequence[Sequence[float]]
"""One factor per microbatch for all stages, or one row of them per stage."""
Factors = Given | Mapping[str, Given] | tuple[tuple[str, Rows], ...]

ALL = ""
"""The kind under which factors for all plain kinds stand."""
_PLAIN = (FORWARD, BACKWARD, INPUT, WEIGHT, RECOMPUTE)
_KINDS = {
    "time": "F, B, I, W, R or a registered kind",
    "activation": "F, of what it keeps and I, W and B free, or a registered kind",
    "message": "F, of activations, B, of their gradients, or U, of the parameters that copies are sent",
}


@dataclass(frozen=True)
class Uneven:
    """Factors by which single ops cost more or less than `Costs` says of their kind and stage.

    Each field takes one factor per microbatch for all stages, or one row of them per stage; or a mapping from kinds
    of op to such factors. Microbatches that are not given have the factor 1. Factors of a registered kind are counted
    by the number of its op, and are given by its name alone: what is said of all kinds is said of F, B, I, W and R.

    Attributes:
        time: of durations. R takes F's factor unless it has its own; B that of its halves where only these are given.
        activation: of what a forward keeps and its backward frees. Of a registered kind it is what `Costs.other` says
            that it holds.
        message: of the bytes sent on by a forward (F), of their gradients coming back (B), and of the parameters that
            an update sends to another copy of a stage (U, counted by the number of the op that takes them over).

    Raises:
        CostError: a negative or infinite factor, no number at all, or a kind that has no factors.

    Examples:
        >>> import penstock as ps
        >>> long_one = ps.cost.Uneven(time=[1, 2, 1, 1])
        >>> costs = ps.Costs(f=[10] * 2, i=[10] * 2, w=[10] * 2, uneven=long_one)
        >>> costs.duration("F", 0, 0), costs.duration("F", 0, 1)
        (10.0, 20.0)
    """

    time: Factors = ()
    activation: Factors = ()
    message: Factors = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _normal(field.name, getattr(self, field.name)))

    @classmethod
    def of(cls, value: Uneven | Mapping[str, Factors] | Sequence[float]) -> Uneven:
        """Reads factors as `Costs` takes them: for times alone, or a mapping from the fields' names."""
        if isinstance(value, Uneven):
            return value
        if not isinstance(value, Mapping):
            return cls(time=value)
        if unknown := sorted(set(value) - _KINDS.keys(), key=str):
            raise CostError(f"uneven has a field {unknown[0]!r}; it may have {', '.join(_KINDS)}")
        return cls(**value)

    @classmethod
    def lengths(cls, lengths: Sequence[float]) -> Uneven:
        """Times, activations and messages in proportion to the length of each microbatch, which is 1 in the mean.

        Attention takes more than that for long sequences: give `time` its own factors where this matters.

        Raises:
            CostError: no lengths, or some below 0 or infinite.
        """
        given = _row("length", lengths)
        mean = sum(given) / max(1, len(given))
        if not mean > 0:
            raise CostError(f"lengths are {reprlib.repr(lengths)}: give one above 0 at least")
        factors = tuple(each / mean for each in given)
        return cls(factors, factors, factors)

    def __bool__(self) -> bool:
        return bool(self.time or self.activation or self.message)

    def check_stages(self, num_stages: int) -> None:
        """Raises CostError for rows of another number of stages."""
        for name in _KINDS:
            for kind, rows in self.rows_of(name).items():
                if len(rows) not in (1, num_stages):
                    raise CostError(
                        f"uneven {name}{f' of {kind}' if kind else ''} has {len(rows)} rows; give one for "
                        f"all stages, or one per stage, {num_stages} in all"
                    )

    def rows_of(self, what: str) -> Mapping[str, Rows]:
        """The factors of "time", "activation" or "message" by kind; those of all plain kinds are under ALL."""
        found = self.__dict__.get(f"_{what}")
        if found is None:
            found = dict(cast("tuple[tuple[str, Rows], ...]", getattr(self, what)))
            object.__setattr__(self, f"_{what}", found)
        return cast("Mapping[str, Rows]", found)

    def find(self, what: str, kind: str) -> Rows | None:
        """The factors of a kind; None where it is even."""
        rows = self.rows_of(what)
        if kind in rows:
            return rows[kind]
        if what == "time" and kind == RECOMPUTE and FORWARD in rows:
            return rows[FORWARD]
        return rows.get(ALL) if kind in _PLAIN else None

    def factor(self, what: str, kind: str, stage: int, microbatch: int) -> float:
        """One factor; 1 where none is given."""
        rows = self.find(what, kind)
        if rows is None:
            return 1.0
        row = rows[0] if len(rows) == 1 else rows[stage]
        return row[microbatch] if 0 <= microbatch < len(row) else 1.0

    def table(self, what: str, kind: str, num_stages: int, num_microbatches: int) -> Array:
        """`factor` of all ops of a kind, (num_stages, num_microbatches)."""
        found = np.ones((num_stages, num_microbatches))
        rows = self.find(what, kind)
        if rows is not None:
            for stage in range(num_stages):
                row = rows[0] if len(rows) == 1 else rows[stage]
                found[stage, : len(row)] = row[:num_microbatches]
        return found


def _normal(what: str, value: Factors) -> tuple[tuple[str, Rows], ...]:
    """Factors by kind, sorted; none where all are 1."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, Sequence) and len(value) and _are_pairs(value):
        pairs = [(kind, rows) for kind, rows in cast("Any", value)]
    else:
        pairs = [(ALL, cast("Given", value))]
    found = {}
    for kind, given in pairs:
        name = ALL if what == "activation" and kind == FORWARD else kind
        _check_kind(what, name)
        found[name] = _rows(what, given)
    uneven = {kind for kind, rows in found.items() if any(factor != 1 for row in rows for factor in row)}
    # A kind that is even is worth saying where others are not.
    return tuple(sorted((kind, found[kind]) for kind in found if kind in uneven or (uneven and kind != ALL)))


def _are_pairs(value: Sequence[Any]) -> bool:
    return not isinstance(value, str) and all(
        isinstance(each, Sequence) and not isinstance(each, str) and len(each) == 2 and isinstance(each[0], str)
        for each in value
    )


def _check_kind(what: str, kind: object) -> None:
    refused: tuple[str, ...] = (UPDATE, *COMMUNICATION)
    if what == "activation":
        refused += (BACKWARD, INPUT, WEIGHT, RECOMPUTE)
    fine = (
        kind in (ALL, FORWARD, BACKWARD, UPDATE)
        if what == "message"
        else isinstance(kind, str) and kind not in refused
    )
    if not fine:
        raise CostError(f"uneven {what} of {kind!r}: give factors of {_KINDS[what]}")


def _rows(what: str, given: object) -> Rows:
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str):
        raise CostError(
            f"uneven {what} is {reprlib.repr(given)}: give one number per microbatch, or such rows by stage"
        )
    if len(given) and all(isinstance(each, Sequence | np.ndarray) and not isinstance(each, str) for each in given):
        return tuple(_row(f"uneven {what}", row, f" of stage {stage}") for stage, row in enumerate(given))
    return (_row(f"uneven {what}", given),)


def _row(what: str, given: Any, where: str = "") -> tuple[float, ...]:
    try:
        row = tuple(float(each) for each in given)
    except (TypeError, ValueError, OverflowError):
        raise CostError(f"{what}{where} is {reprlib.repr(given)}: give one number per microbatch") from None
    for microbatch, value in enumerate(row):
        if not 0 <= value < math.inf:
            raise CostError(f"{what}{where}, microbatch {microbatch} is {value}: give a number of at least 0")
    return row


EVEN = Uneven()
"""All microbatches cost alike."""
