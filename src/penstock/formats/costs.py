"""Costs as JSON: numbers for all stages alike, or lists with one entry per stage.

{"format": "penstock-costs", "version": 1, "f": 10, "i": [10, 10, 12, 12], "w": 10}

`b`, `activation`, `message_bytes`, what is about updates and the model's state, `freed_by_input` and
`kept_by_recompute` may be there too, and what `other` kinds of op take; `format` and `version` may be left out.
What pairs of a forward and a backward hide: "overlap" has the communication of `f` and `b`, the share that is
`hidden`, and what was `measured`, as [stage of the forward, stage of the backward, ms].
Microbatches that differ: "uneven" has their factors; or a stage's entry is a list with one number per microbatch.
A profile's file, and the name of a preset, stand for costs too (`read_costs`).
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.cost import CostError, Costs, Overlap, Uneven
from penstock.cost.costs import BY_MICROBATCH
from penstock.cost.presets import PRESETS, is_preset, parse_preset
from penstock.cost.uneven import ALL
from penstock.formats.files import converted, read_json
from penstock.formats.profile import costs_of_profile, is_profile

FORMAT, VERSION = "penstock-costs", 1

UNEVEN = ("time", "activation", "message")

Share = Annotated[float | None, Meta(description="a share from 0 to 1")]
Row = Annotated[float | list[float | list[float]], Meta(description="a number or one number per stage")]

_OTHER = 'the milliseconds of each registered kind, or one number per stage, like {"GATHER": 2.5}'
_UNEVEN = 'one factor per microbatch, like [1, 2.5], or {"time": [1, 2.5], "activation": ..., "message": ...}'
_VERSION = f"a version that this Penstock reads, {VERSION}"


class OverlapFields(msgspec.Struct, forbid_unknown_fields=True):
    f: Row
    b: Row
    hidden: Annotated[float, Meta(description="a share from 0 to 1")] = 1.0
    measured: Annotated[list[tuple[int, int, float]], Meta(description="[stage of F, stage of B, ms] each")] = []


class CostsFields(msgspec.Struct, forbid_unknown_fields=True):
    f: Row
    i: Row
    w: Row
    b: Row | None = None
    activation: Row | None = None
    message_bytes: Row | None = None
    update_bytes: Row | None = None
    take_over: Row | None = None
    weight_bytes: Row | None = None
    gradient_bytes: Row | None = None
    optimizer_bytes: Row | None = None
    freed_by_input: Share = None
    kept_by_recompute: Share = None
    other: Annotated[dict[str, float | list[float]], Meta(description=_OTHER)] = {}
    uneven: Annotated[list[Any] | dict[str, Any], Meta(description=_UNEVEN)] = []
    overlap: OverlapFields | None = None
    format: str = FORMAT
    version: Annotated[int, Meta(ge=1, le=VERSION, description=_VERSION)] = VERSION


_SHARES = ("freed_by_input", "kept_by_recompute")
_ROWS = CostsFields.__struct_fields__[: CostsFields.__struct_fields__.index(_SHARES[0])]


def costs_from_json(text: str, num_stages: int) -> Costs:
    """Reads costs, or a profile, for `num_stages` stages; raises CostError that names what is wrong in it."""
    try:
        value = read_json(text)
        if is_profile(value):
            return costs_of_profile(value, num_stages)
        if not isinstance(value, dict) or value.get("format", FORMAT) != FORMAT:
            raise CostError('costs are a JSON object, like {"f": 10, "i": 10, "w": [10, 12]}')
        file = converted(value, CostsFields)
    except ValueError as error:
        raise CostError(str(error)) from None
    given = {name: getattr(file, name) for name in (*_ROWS, *_SHARES)}
    given = {name: each for name, each in given.items() if each is not None}
    rows = {name: _row(name, each, num_stages) for name, each in given.items() if name in _ROWS}
    others: dict[str | tuple[str, int], float] = {}
    for kind, ms in file.other.items():
        if isinstance(ms, list):
            others |= {(kind, stage): each for stage, each in enumerate(_row(f"other.{kind}", ms, num_stages))}
        else:
            others[kind] = ms
    overlap = None
    if (said := file.overlap) is not None:
        f, b = (_row(f"overlap.{name}", row, num_stages) for name, row in (("f", said.f), ("b", said.b)))
        overlap = Overlap(f, b, said.hidden, {(forward, backward): ms for forward, backward, ms in said.measured})
    by_microbatch = any(isinstance(each, list) for name in BY_MICROBATCH for each in rows.get(name, ()))
    made = Costs.by_microbatch if by_microbatch else Costs
    return made(**(given | rows), other=others, uneven=Uneven.of(file.uneven), overlap=overlap)


def costs_to_json(costs: Costs) -> str:
    """What `costs_from_json` reads back as equal costs.

    Raises:
        CostError: costs that a file cannot hold: other kinds of op that take memory.
    """
    value: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    value |= {name: list(row) for name in _ROWS if (row := getattr(costs, name))}
    value |= {name: getattr(costs, name) for name in _SHARES if getattr(costs, name) is not None}
    kinds: dict[str, dict[int | None, float]] = {}
    for kind, stage, ms, memory in costs.other_entries:
        if memory:
            raise CostError(f"kind {kind} takes memory, which a file of costs cannot say; give its time alone")
        kinds.setdefault(kind, {})[stage] = ms
    if uneven := uneven_json(costs):
        value["uneven"] = uneven
    if (overlap := costs.overlap) is not None:
        value["overlap"] = {"f": list(overlap.f), "b": list(overlap.b), "hidden": overlap.hidden}
        if overlap.measured:
            value["overlap"]["measured"] = [[*stages, ms] for stages, ms in overlap.times.items()]
    if kinds:
        stages = range(costs.num_stages)
        value["other"] = {
            kind: ms[None] if None in ms and len(ms) == 1 else [ms.get(stage, ms.get(None, 0.0)) for stage in stages]
            for kind, ms in kinds.items()
        }
    return json.dumps(value)


def uneven_json(costs: Costs) -> dict[str, Any]:
    """The factors as a file has them, of all kinds alike or by kind, one row for all stages or one per stage."""
    value: dict[str, Any] = {}
    for what in UNEVEN:
        found = {kind: rows[0] if len(rows) == 1 else rows for kind, rows in costs.factors.rows_of(what).items()}
        if found:
            value[what] = found[ALL] if found.keys() == {ALL} else found
    return value


def read_costs(source: str, num_stages: int) -> Costs:
    """Costs by a preset's name (`gpt2-14b`, `gpt2-14b:tp=2`), or from a file of costs or of a profile.

    Raises:
        CostError: neither; or what `costs_preset` and `load_costs` find wrong.
    """
    path = Path(source)
    if is_preset(source):
        return parse_preset(source).costs(num_stages)
    if not path.exists() and path.suffix != ".json" and "/" not in source:
        near = difflib.get_close_matches(source.partition(":")[0], PRESETS, n=2, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise CostError(f"costs {source!r}: neither a file nor a preset; {hint}presets are {', '.join(PRESETS)}")
    return load_costs(path, num_stages)


def are_of_a_model(source: str) -> bool:
    """Whether costs that `read_costs` reads are those of one model, however many stages it is cut into."""
    return is_preset(source) or is_profile(json.loads(Path(source).read_text(encoding="utf-8-sig")))


def load_costs(path: str | Path, num_stages: int) -> Costs:
    """Reads a costs file. Raises CostError that names the file and what is wrong in it."""
    try:
        return costs_from_json(Path(path).read_text(encoding="utf-8-sig"), num_stages)
    except FileNotFoundError as error:
        raise CostError(
            f"{path}: {error.strerror}; measure a model's layers into it with penstock tune --profile-only --out "
            f"{path}, or name a preset: {', '.join(PRESETS)}"
        ) from None
    except OSError as error:
        raise CostError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CostError(f"{path}: not text") from None
    except CostError as error:
        raise CostError(f"{path}: {error}") from None


def _row(name: str, value: Any, num_stages: int) -> list[Any]:
    values = value if isinstance(value, list) else [value] * num_stages
    if len(values) != num_stages:
        raise CostError(f"field {name!r} has {len(values)} entries; give one per stage, {num_stages} in all")
    return values
