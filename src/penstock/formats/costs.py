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
from typing import Any

from penstock.cost import CostError, Costs, Overlap, Uneven
from penstock.cost.costs import BY_MICROBATCH
from penstock.cost.presets import PRESETS, is_preset, parse_preset
from penstock.cost.uneven import ALL
from penstock.formats.profile import costs_of_profile, is_profile

FORMAT, VERSION = "penstock-costs", 1

_STATE_ROWS = ("weight_bytes", "gradient_bytes", "optimizer_bytes")
_ROWS = ("f", "i", "w", "b", "activation", "message_bytes", "update_bytes", "take_over", *_STATE_ROWS)
UNEVEN = ("time", "activation", "message")
_SHARES = ("freed_by_input", "kept_by_recompute")


def costs_from_json(text: str, num_stages: int) -> Costs:
    """Reads costs, or a profile, for `num_stages` stages; raises CostError that names what is wrong in it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CostError(f"not JSON: {error}") from None
    if is_profile(value):
        return costs_of_profile(value, num_stages)
    if not isinstance(value, dict) or value.get("format", FORMAT) != FORMAT:
        raise CostError('costs are a JSON object, like {"f": 10, "i": 10, "w": [10, 12]}')
    version = value.get("version", VERSION)
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= VERSION:
        raise CostError(f"version is {version!r}: this Penstock reads up to {VERSION}")
    if unknown := sorted(set(value) - {*_ROWS, *_SHARES, "other", "uneven", "overlap", "format", "version"}):
        raise CostError(
            f"unknown field {unknown[0]!r}; costs have {', '.join((*_ROWS, *_SHARES))}, other, uneven and overlap"
        )
    if missing := [name for name in ("f", "i", "w") if name not in value]:
        raise CostError(f"field {missing[0]!r} is missing: f, i and w are needed")
    rows: dict[str, Any] = {name: _row(name, value[name], num_stages) for name in _ROWS if name in value}
    uneven = _uneven_costs(value.get("uneven", []))
    for name in _SHARES:
        if isinstance(value.get(name), bool):
            raise CostError(f"{name} is a yes or no: give a share from 0 to 1")
    shares = {name: value[name] for name in _SHARES if name in value}
    other = _other_costs(value.get("other", {}), num_stages)
    overlap = _overlap(value["overlap"], num_stages) if "overlap" in value else None
    if any(isinstance(each, list) for name in BY_MICROBATCH if name in rows for each in rows[name]):
        return Costs.by_microbatch(**rows, **shares, other=other, uneven=uneven, overlap=overlap)
    return Costs(**rows, **shares, other=other, uneven=uneven, overlap=overlap)


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


def _uneven_costs(value: Any) -> Uneven:
    if not isinstance(value, list | dict):
        raise CostError(
            "field 'uneven': expected one factor per microbatch, like [1, 2.5], or {\"time\": [1, 2.5], "
            '"activation": ..., "message": ...}'
        )
    return Uneven.of(value)


def _overlap(value: Any, num_stages: int) -> Overlap:
    known = {"f", "b", "hidden", "measured"}
    if not isinstance(value, dict) or not {"f", "b"} <= set(value) <= known:
        raise CostError(
            "field 'overlap': expected the communication of f and b in ms, the share that is hidden and, where there "
            'are some, measured pairs, like {"f": 4, "b": 8, "hidden": 0.9, "measured": [[0, 3, 25.5]]}'
        )
    measured = value.get("measured", [])
    rows = measured if isinstance(measured, list) else [measured]
    if not all(isinstance(row, list) and [isinstance(x, int | float) for x in row] == [True] * 3 for row in rows):
        raise CostError(
            f"field 'overlap.measured': give [stage of F, stage of B, ms] each: {json.dumps(measured)[:60]}"
        )
    hidden = value.get("hidden", 1.0)
    if isinstance(hidden, bool):
        raise CostError("overlap.hidden is a yes or no: give a share from 0 to 1")
    f, b = (_row(f"overlap.{name}", value[name], num_stages) for name in ("f", "b"))
    return Overlap(f, b, hidden, {(forward, backward): ms for forward, backward, ms in measured})


def _other_costs(value: Any, num_stages: int) -> dict[str | tuple[str, int], float]:
    if not isinstance(value, dict):
        raise CostError("field 'other': expected the milliseconds of each registered kind, like {\"GATHER\": 2.5}")
    found: dict[str | tuple[str, int], float] = {}
    for kind, ms in value.items():
        if isinstance(ms, list):
            row = _row(f"other.{kind}", ms, num_stages)
            found |= {(kind, stage): each for stage, each in enumerate(row)}
        elif isinstance(ms, int | float) and ms is not True and ms is not False:
            found[kind] = ms
        else:
            raise CostError(
                "field 'other': expected the milliseconds of each registered kind, or one number per stage, like "
                '{"GATHER": 2.5}'
            )
    return found


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
    each = [v for row in values for v in (row if isinstance(row, list) and name in BY_MICROBATCH else [row])]
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in each):
        raise CostError(f"field {name!r}: expected a number or one number per stage, got {json.dumps(value)[:60]}")
    if len(values) != num_stages:
        raise CostError(f"field {name!r} has {len(values)} entries; give one per stage, {num_stages} in all")
    return values
