"""Raw results as JSON, a row a line, with the record of the run; their charts, lines of a table, numbers in a text.

results/figure12.json     what a command found: its rows, and `record`, of the run that found them
                          `measured`: the record of a later run that put times by the clock into the rows
                          `earlier`: the records of the runs before `record`, where rows come from several runs;
                          a row's `run` counts through them, and `record` is the last
results/figure12.svg      its chart
results/raw/              long columns that no table or chart needs, which git does not keep: a run writes them
                          again, and their checksums lie in the results
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.record import record
from penstock.draw.chart import Figure, save_chart

Row = dict[str, Any]
"""Of one case: its keys and what was found."""


def save(
    folder: Path,
    name: str,
    rows: Sequence[Row],
    *,
    seeds: Sequence[int] = (),
    raw: Mapping[str, Callable[[Any], Any] | None] | None = None,
    earlier: Sequence[Mapping[str, Any]] = (),
    measured: bool = False,
    **more: Any,
) -> Path:
    """Writes the results of a run, its record and what else is known of it; whole or not at all.

    Args:
        seeds: of all that was drawn; none where nothing was.
        raw: columns that go to `raw/` beside the results, each with what makes its summary there; None for none.
        earlier: the records of the runs that rows with a `run` come from, as `runs` gives them; the other rows are
            of this run.
        measured: whether this run only measured rows of the file that is there; the file's record stays.
        more: what else is known.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if raw:
        rows, more = _without_raw(folder, name, rows, raw), {**more, "raw": _checksum(folder, name)}
    path, this = folder / f"{name}.json", record() | {"seeds": list(seeds)}
    if measured:
        more = {**facts(folder, name), **more, "measured": this}
    else:
        more = {"name": name, **more, "record": this, **({"earlier": list(earlier)} if earlier else {})}
    if earlier:
        rows = [{**row, "run": row.get("run", len(earlier))} for row in rows]
    head = json.dumps(rounded(more))[:-1]
    body = ",\n ".join(json.dumps(rounded(row)) for row in rows)
    beside = path.with_suffix(".part")
    beside.write_text(f'{head}, "rows": [\n {body}\n]}}\n', encoding="utf-8")
    beside.replace(path)
    return path


def _without_raw(
    folder: Path, name: str, rows: Sequence[Row], raw: Mapping[str, Callable[[Any], Any] | None]
) -> list[Row]:
    """The rows with summaries for what goes to `raw/`, which is written."""
    place = folder / "raw" / f"{name}.json"
    place.parent.mkdir(exist_ok=True)
    columns = [{key: row[key] for key in raw if key in row} for row in rows]
    place.write_text("\n".join(json.dumps(rounded(each)) for each in columns) + "\n", encoding="utf-8")
    kept = []
    for row in rows:
        made = {key: how(row[key]) for key, how in raw.items() if how is not None and key in row}
        kept.append({key: made.get(key, value) for key, value in row.items() if key not in raw or key in made})
    return kept


def _checksum(folder: Path, name: str) -> dict[str, Any]:
    """Of what was written to `raw/`."""
    data = (folder / "raw" / f"{name}.json").read_bytes()
    return {"file": f"raw/{name}.json", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def facts(folder: Path, name: str) -> dict[str, Any]:
    """What a file says besides its rows; nothing where there is no such file."""
    path = folder / f"{name}.json"
    if not path.exists():
        return {}
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    del value["rows"]
    return value


def load(folder: Path, name: str) -> list[Row]:
    """The rows that `save` wrote. Exits with what to run first where there are none."""
    path = folder / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{folder} has no {path.name}: run {name.partition('-')[0]} first")
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def known(folder: Path, name: str, resume: bool = True) -> list[Row]:
    """What earlier runs have found, each row with its `run` among `runs`; nothing where it is not gone on with."""
    if not resume or not (folder / f"{name}.json").exists():
        return []
    last = len(runs(folder, name)) - 1
    return [{**row, "run": row.get("run", last)} for row in load(folder, name)]


def runs(folder: Path, name: str, resume: bool = True) -> list[dict[str, Any]]:
    """The records of the runs that found the rows of `known`, in their order."""
    found = facts(folder, name) if resume else {}
    return [*found.get("earlier", ()), found["record"]] if found else []


def find(rows: Sequence[Row], **keys: Any) -> Row:
    """The one row with these keys."""
    (found,) = [row for row in rows if all(row.get(name) == value for name, value in keys.items())]
    return found


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of columns, the first left-aligned, the others right."""
    cells = [list(head), *map(list, body)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        first, *others = zip(row, widths, strict=True)
        yield "  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]).rstrip()


def filled(text: str, numbers: Mapping[str, Callable[[], str]]) -> str:
    """A text with numbers in place of the names in braces, so that nobody types what a result holds.

    Args:
        numbers: by name, what makes each out of the results.

    Raises:
        ValueError: there is no number of such a name.
    """
    names = named_in(text)
    if unknown := sorted(names - numbers.keys()):
        raise ValueError(f"a text names {', '.join(unknown)} in braces, and NUMBERS beside it does not; add it there")
    return _NAMED.sub(lambda found: numbers[found[1]](), text)


def named_in(text: str) -> set[str]:
    """The names in braces."""
    return set(_NAMED.findall(text))


_NAMED = re.compile(r"\{([^{}]+)\}")


def draw(folder: Path, name: str, figure: Figure) -> None:
    """Saves a chart beside the results and says where."""
    path = folder / f"{name}.svg"
    save_chart(figure, path)
    print(f"chart: {path}")


def rounded(value: Any) -> Any:
    """The same with fewer digits, as those further on say nothing; None for what is no number."""
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value
