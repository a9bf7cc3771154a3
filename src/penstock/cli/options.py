"""Options that several verbs share, and the words in them read into values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import typer
from typer.models import OptionInfo

from penstock.cli.failure import Misuse
from penstock.schedule.messages import CHANNELS
from penstock.train.options import options_of, read_given

T = TypeVar("T")


def result_option(text: str, words: str = "", *endings: str, option: str = "--out") -> OptionInfo:
    """An option that names the file of a result: that it can be written is found out before the work.

    Args:
        words: what is wrong with another ending than `endings`; any may be given where there are none.
    """

    def check(given: str | None) -> str | None:
        if given is None:
            return None
        if endings and not given.lower().endswith(endings):
            raise Misuse(f"{option} {given}: {words}")
        from penstock.formats.files import path_of, require_place  # here, as only a result needs a place

        require_place(path_of(given))
        return given

    found: OptionInfo = typer.Option(option, metavar="FILE", callback=check, help=text)
    return found


def page_option(text: str, what: str) -> OptionInfo:
    """The same of a page."""
    return result_option(text, f"{what} is a page; give a name that ends with .html", ".html", ".htm")


def taken(kind: type[T], given: Mapping[str, Any]) -> T:
    """The settings of a class among the options given, which `with_options` made of it. Raises what reading does."""
    names = options_of(kind)  # type: ignore[arg-type]
    return kind(**read_given({name: given[name] for name in names if name in given}, kind))


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Channels = Annotated[
    str | None,
    typer.Option("--channels", help="What carries messages: buffered, gloo, nccl, nccl-pair or nccl-edge."),
]
Out = Annotated[
    str | None,
    result_option(
        "Where the result goes: the schedule as .json, .txt or .csv (torch's), or its picture as .svg or .html.",
        "schedules are written as .json, .txt or .csv, and their pictures as .svg or .html",
        ".json",
        ".txt",
        ".csv",
        ".svg",
        ".html",
    ),
]

_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?"
_BYTES = re.compile(rf"(?P<number>{_NUMBER})\s*(?P<unit>B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def _number(option: str, text: str, part: str) -> float:
    """Reads `part` of an option's `text`."""
    try:
        return float(part)
    except ValueError:
        raise Misuse(f"{option} {text}: {part!r} is not a number") from None


def numbers(option: str, text: str) -> list[float]:
    """Reads `10` or `10,12,10,10`."""
    return [_number(option, text, part) for part in text.split(",")]


def limits_of(option: str, text: str | None, num_ranks: int | None = None) -> tuple[float | list[float] | None, bool]:
    """Reads `7`, `7,5` or `35GiB`: a limit or one per rank, and whether it is in bytes, of all that a rank holds.

    Raises:
        Misuse: what is no number and no size, or not above 0, some entries with a unit and some without, or several
            that are not one per rank, where it is given how many ranks there are.
    """
    if text is None:
        return None, False
    parts = [part.strip() for part in text.split(",")]
    in_bytes = [part[-1:].isalpha() and part.lower() not in ("inf", "nan") for part in parts]
    if any(in_bytes) and not all(in_bytes):
        raise Misuse(
            f"{option} {text}: {parts[in_bytes.index(False)]} has no unit and {parts[in_bytes.index(True)]} has one; "
            "give all with a unit, as in 35GiB,40GiB, or none"
        )
    values = [number_of_bytes(option, part) for part in parts] if in_bytes[0] else numbers(option, text)
    if wrong := [part for part, value in zip(parts, values, strict=True) if not value > 0]:
        raise Misuse(f"{option} {text}: {wrong[0]} is no limit; give what is above 0")
    if num_ranks is not None and len(values) not in (1, num_ranks):
        raise Misuse(f"{option} {text} has {len(values)} entries; give one, or one per rank: {num_ranks}")
    return (values[0] if len(values) == 1 else values), in_bytes[0]


def bytes_of(option: str, text: str | None) -> float | None:
    """Reads `35GiB` for a verb that counts all that a rank holds, by one limit for all of them.

    Raises:
        Misuse: as `limits_of`; a number without a unit, or one limit per rank.
    """
    limit, in_bytes = limits_of(option, text)
    if limit is None:
        return None
    if not in_bytes:
        raise Misuse(
            f"{option} {text} has no unit, and so counts activations alone; all that a rank holds is counted here; "
            "give a unit, as in 35GiB"
        )
    if isinstance(limit, list):
        raise Misuse(f"{option} {text}: one limit for all ranks is needed here, as in {str(text).split(',')[0]}")
    return limit


def number_of_bytes(option: str, text: str) -> float:
    """Reads `2GiB`, `500MB` or `1e6B`."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise Misuse(f"{option} {text}: give a number with a unit of bytes, like 2GiB, 500MB or 1000000B")
    return float(match["number"]) * _UNITS[match["unit"].lower()]


def transport_of(text: str) -> dict[str, Any]:
    """Reads `decoupled`, `blocking`, `blocking:4` or a channel like `gloo`, as arguments of `ps.simulate`."""
    if text in CHANNELS:
        return {"channels": text}
    if text != "decoupled" and not text.startswith("blocking"):
        raise Misuse(f"--messages {text}: write decoupled, blocking, blocking:DEPTH, or {', '.join(CHANNELS)}")
    return {"transport": text}
