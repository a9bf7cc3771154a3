"""Megatron's layout strings (`--pipeline-model-parallel-layout`): which layers each stage has.

    Et*3|(tt|)*29,m|L          E embedding   t transformer block   m multi-token prediction   L loss

    stage 0  Ettt  |  stages 1 to 29  tt  |  stage 30  m  |  stage 31  L

`|` begins the next stage, `*n` repeats a letter, a bar or a group in brackets, commas mean nothing. Stage s is on
rank s mod P. The rules are Megatron-Core's (`PipelineParallelLayerLayout`, read at commit 00caa53); a group in a
group, which it misreads, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NoReturn

from penstock.schedule import ScheduleError

__all__ = ["LETTERS", "MegatronLayout"]

LETTERS = "EtmL"
MOST_LAYERS = 100_000
"""Letters that a string may stand for: a slip of the finger must not fill the memory."""

_PART = re.compile(r"(?:\((?P<group>[^()]*)\)|(?P<letter>[EtmL|]))(?:[\s,]*\*(?P<times>[0-9]+))?|[\s,]+")
"""A letter, a bar or a group, and how often it is there; or what means nothing."""


@dataclass(frozen=True)
class MegatronLayout:
    """The layers of each stage, as letters, in the order in which the model runs them.

    Attributes:
        stages: one string of E, t, m and L per stage; an empty stage is allowed.

    Raises:
        ScheduleError: letters out of order, or an embedding or a loss that is missing or there twice.
    """

    stages: tuple[str, ...]

    def __post_init__(self) -> None:
        letters = "".join(self.stages)
        for letter, what in (("E", "embedding"), ("L", "loss")):
            if letters.count(letter) != 1:
                of_m = letter == "L" and letters.count("L") > 1
                more = "; a layer that predicts further tokens has its loss in it: write m for it, Ett|ttmL" * of_m
                raise _refused(f"{letter} is there {letters.count(letter)} times: a model has one {what}{more}")
        if "".join(sorted(letters, key=LETTERS.index)) != letters:
            raise _refused("layers go E, then every t, then every m, then L")
        if "E" not in self.stages[0] or "L" not in self.stages[-1]:
            raise _refused("the first stage has the embedding (E), the last one the loss (L)")
        if sum("m" in stage for stage in self.stages) > 1:
            raise _refused("every m is in one stage, the last or one before it: Ett|tt|mmL, not Ett|ttm|mL")

    @classmethod
    def parse(cls, text: str) -> MegatronLayout:
        """Reads a layout string.

        Raises:
            ScheduleError: what is not one, with a caret below the place.
        """
        return cls(tuple(_unrolled(text, 0, len(text)).split("|")))

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ScheduleError where Megatron would not spread the stages over so many ranks."""
        if num_ranks < 1 or len(self.stages) % num_ranks:
            raise _refused(
                f"{len(self.stages)} stages do not spread evenly over {num_ranks} ranks: give as many stages to each"
            )
        chunks = len(self.stages) // num_ranks
        for stage, letters in enumerate(self.stages):
            if "m" in letters and stage // num_ranks < chunks - 1:
                raise _refused(f"m is in stage {stage}: Megatron has it in the last stage of its rank only")

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks (t) per stage."""
        return tuple(stage.count("t") for stage in self.stages)

    def with_counts(self, counts: Sequence[int]) -> MegatronLayout:
        """The layout with so many blocks in the stages, and the rest where it is."""
        return MegatronLayout(
            tuple(
                "E" * stage.count("E") + "t" * count + "m" * stage.count("m") + "L" * stage.count("L")
                for stage, count in zip(self.stages, counts, strict=True)
            )
        )

    def __str__(self) -> str:
        """A short string that reads back as this: equal stages in a row as a group."""
        parts = []
        *before, last = self.stages
        for stage, same in groupby(before):
            count = len(list(same))
            parts.append(f"({_short(stage)}|)*{count}" if count > 1 and stage else f"{_short(stage)}|" * count)
        return "".join([*parts, _short(last)])


def _short(stage: str) -> str:
    return "".join(
        f"{letter}*{count}" if count > 2 else letter * count
        for letter, count in ((letter, len(list(same))) for letter, same in groupby(stage))
    )


def _unrolled(text: str, start: int, end: int) -> str:
    """The letters and bars that a part of a string stands for."""
    letters = ""
    at = start
    while at < end:
        found = _PART.match(text, at, end)
        if found is None:
            _refuse_character(text, at)
        at = found.end()
        if found["group"] is not None and found["times"] is None:
            _at(text, at - 1, "a group says how often it is repeated: (tt|)*4")
        times = found["times"] or "1"
        if int(times[:9]) == 0:
            _at(text, found.start("times") - 1, "repeat at least once")
        more = _unrolled(text, *found.span("group")) if found["group"] is not None else found["letter"] or ""
        if found["times"] and not more:
            _at(text, found.start("times") - 1, "there is nothing before it to repeat")
        if len(times) > 9 or len(letters) + len(more) * int(times) > MOST_LAYERS:
            _at(text, found.start("times") - 1 if found["times"] else at - 1, f"more than {MOST_LAYERS:,} layers")
        letters += more * int(times)
    return letters


def _refuse_character(text: str, at: int) -> NoReturn:
    """Says why a character cannot be where it is."""
    if text[at] == "(":
        bracket = re.compile(r"[()]").search(text, at + 1)
        if bracket is None:
            _at(text, at, "this group is not closed")
        _at(text, bracket.start(), "a group in a group, which Megatron misreads: write it out")
    why = {")": "no group is open here", "*": "there is nothing before it to repeat"}.get(text[at])
    _at(text, at, why or f"{text[at]!r} is not part of a layout; known are E, t, m, L, |, ( ), *n and commas")


def _at(text: str, at: int, why: str) -> NoReturn:
    start, end = max(0, at - 40), at + 40
    raise ScheduleError(
        f"layout: {why}\n  {text[start:end]}\n  {' ' * (at - start)}^", rule="layout", line=1, column=at + 1
    )


def _refused(why: str) -> ScheduleError:
    return ScheduleError(f"layout: {why}", rule="layout")
