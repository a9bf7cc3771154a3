"""What names of annotations say: regular expressions with groups, and those of the frameworks.

    PP:(?P<stage>\\d+)(?P<op>F|B|I|W)(?P<microbatch>\\d+)         TorchTitan: PP:2F7
    Forward (?P<microbatch>\\d+)                                   the op is the pattern's own, F

A group may be named op, stage, microbatch, rank, replica or step. What no group says is read from the event's
arguments of that name; a microbatch that is said nowhere is counted, in the order of starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.formats.traces.op_names import LETTERS, kind_named
from penstock.formats.traces.run_trace import Scope, TraceError

GROUPS = ("op", "stage", "microbatch", "rank", "replica", "step")
NUMBERS = GROUPS[1:]


class NamePattern(NamedTuple):
    """One form of name.

    Attributes:
        text: a regular expression that must match the whole name, or its end after a blank, a dot or a slash.
        op: what it is, where no group says it.
    """

    text: str
    op: str = ""

    def compiled(self) -> re.Pattern[str]:
        """Raises TraceError for what is no regular expression, has unknown groups or does not say which op it is."""
        try:
            found = re.compile(rf"(?:.*[\s./:])?(?:{self.text})")
        except re.error as error:
            raise TraceError(f"pattern {self.text!r} is no regular expression: {error}") from None
        if unknown := sorted(found.groupindex.keys() - set(GROUPS)):
            raise TraceError(f"pattern {self.text!r} has a group {unknown[0]!r}; it may have {', '.join(GROUPS)}")
        if not self.op and "op" not in found.groupindex:
            raise TraceError(
                f"pattern {self.text!r} does not say which op it is: give a group named op, like "
                r"(?P<op>F|B)(?P<microbatch>\d+), or write OP=PATTERN, like F=forward (?P<microbatch>\d+)"
            )
        return found

    @classmethod
    def parse(cls, text: str) -> NamePattern:
        """Reads PATTERN, or OP=PATTERN."""
        op, equals, rest = text.partition("=")
        return cls(rest, op) if equals and re.fullmatch(r"[A-Za-z_-]+", op) else cls(text)


_ALONE = r"(?<![\s./:])"
"""Nothing stands before it: such short names would otherwise be the ends of many."""
_SEPARATED = r"[ _.:,;=#/|@()\[\]-]*"
_STAGE = rf"(?i:s|stage){_SEPARATED}(?P<stage>\d+)"
_OP = rf"(?i:(?P<op>{'|'.join(LETTERS)}))"
_WORD = rf"(?i:mb|microbatch|micro_batch){_SEPARATED}"
_MICROBATCH = rf"(?:{_WORD})?(?P<microbatch>\d+){_SEPARATED}"
_OPTIMIZER = NamePattern(r"Optimizer\.step#\w+\.step", "optimizer")
_TORCH = (
    NamePattern(r"PP:(?P<stage>\d+)(?P<op>F|B|I|W)(?P<microbatch>\d+)"),
    NamePattern(r"PP:(?P<stage>\d+)(?P<op>REDUCE_GRAD)"),
    NamePattern(r"Forward (?P<microbatch>\d+)", "F"),
    NamePattern(r"Backward (?P<microbatch>\d+)", "B"),
    _OPTIMIZER,
)

PRESETS: Mapping[str, tuple[NamePattern, ...]] = {
    "penstock": (NamePattern(r"(?P<op>F|B|I|W|R|U) (?P<microbatch>\d+)"),),
    "torch": _TORCH,
    "torchtitan": _TORCH,
    "megatron": (
        NamePattern(r"(?P<op>(?:forward|backward)-(?:compute|send|recv))"),
        NamePattern(r"(?P<op>forward_step|backward_step)"),
        NamePattern(r"(?P<op>params-all-gather|grads-reduce-scatter|all-grads-sync|optimizer|optimizer-clip-main-grad"
                    r"|layernorm-grads-all-reduce|embedding-grads-all-reduce)"),
    ),
    "ranges": (
        NamePattern(rf"{_ALONE}(?:{_STAGE}{_SEPARATED})?{_OP}{_SEPARATED}{_MICROBATCH}"),
        NamePattern(rf"{_ALONE}{_OP}{_SEPARATED}{_MICROBATCH}{_SEPARATED}{_STAGE}"),
        NamePattern(rf"{_ALONE}(?:{_STAGE}{_SEPARATED})?{_WORD}(?P<microbatch>\d+){_SEPARATED}{_OP}{_SEPARATED}"),
        NamePattern(rf"{_ALONE}(?P<stage>\d+){_OP}(?P<microbatch>\d+)"),
        _OPTIMIZER,
    ),
    "stacks": (
        NamePattern(r"forward_one_chunk", "F"),
        NamePattern(r"backward_one_chunk", "B"),
        NamePattern(r"backward_weight_one_chunk", "W"),
        _OPTIMIZER,
    ),
    "deepspeed": (
        NamePattern(r"_exec_(?P<op>forward_pass|backward_pass)"),
        NamePattern(r"_exec_reduce_grads", "grads-all-reduce"),
        NamePattern(r"_exec_optimizer_step", "optimizer"),
    ),
}  # fmt: skip
"""Names that the frameworks give. TorchTitan's are torch's; Megatron's are its timers and functions (a profile
with stacks names those), DeepSpeed's the functions of its pipeline engine. `ranges` are for people who name ops
themselves: F3, stage 1 bwd mb 2. `stacks` are functions of torch's stages, as `Schedule1F1B` names no op."""


class ParsedName(NamedTuple):
    """What a name and the event's arguments say; None where they say nothing."""

    op: str
    numbers: dict[str, int | None]


class Names:
    """Reads names by patterns, the first that matches.

    Raises:
        TraceError: a pattern is wrong.
    """

    def __init__(self, patterns: tuple[NamePattern, ...]) -> None:
        self._patterns = [(each.compiled(), each.op) for each in patterns]
        self._known: dict[str, tuple[str, dict[str, str | None]] | None] = {}

    def read(self, name: str, args: Mapping[str, Any]) -> ParsedName | None:
        """What is said, or None for a name that no pattern matches."""
        if name not in self._known:
            self._known[name] = self._match(name)
        found = self._known[name]
        if found is None:
            return None
        op, groups = found
        numbers = {each: groups.get(each, args.get(each)) for each in NUMBERS}
        return ParsedName(op, {each: _number(value) for each, value in numbers.items()})

    def matches(self, name: str) -> bool:
        return self.read(name, {}) is not None

    def _match(self, name: str) -> tuple[str, dict[str, str | None]] | None:
        for pattern, op in self._patterns:
            match = pattern.fullmatch(name)
            if match is not None:
                groups = match.groupdict()
                return groups.pop("op", None) or op, {
                    key: value for key, value in groups.items() if value is not None
                }
        return None


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def preset_for(names: set[str]) -> str | None:
    """The preset that knows forwards and backwards among these names; the one that knows most."""
    best, most = None, 0
    for preset in PRESETS:
        known, letters = _known(preset, names)
        if "F" in letters and letters & {"B", "I"} and known > most:
            best, most = preset, known
    return best


def kinds_named(names: set[str]) -> set[str]:
    """Penstock's letters of the ops that any preset knows among these names."""
    return set().union(*(_known(preset, names)[1] for preset in PRESETS))


def _known(preset: str, names: set[str]) -> tuple[int, set[str]]:
    """How many of the names a preset knows, and the letters of the ops of microbatches among them."""
    reader = Names(PRESETS[preset])
    kinds = [kind_named(found.op) for name in names if (found := reader.read(name, {})) is not None]
    return len(kinds), {kind.kind for kind in kinds if kind.scope is Scope.COMPUTE}
