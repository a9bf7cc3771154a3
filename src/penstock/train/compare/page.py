"""A comparison as a page: the table, and the loss by update and by time. It loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import accumulate
from pathlib import Path

from penstock.draw.chart import STYLE, Axis, Figure, Line, line_chart, save_chart
from penstock.train.compare.result import Compared, Comparison
from penstock.train.folder import write_whole

MOST_POINTS = 80
"""Points of a line; where there are more steps, neighbours are averaged."""

CSS = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#16202c;background:#fff}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:14px;margin:1rem 0}
td,th{padding:.3rem .6rem;text-align:right;border-bottom:1px solid #dfe4ea}
td:first-child,th:first-child{text-align:left;white-space:nowrap}
p{color:#5f6a78;margin:.2rem 0}
@media(prefers-color-scheme:dark){body{color:#eef2f7;background:#0f151d}td,th{border-color:#28313c}p{color:#9aa6b4}}
"""


def charts(found: Comparison) -> list[tuple[str, Figure]]:
    """(name, chart) of the loss by update and by simulated time; none where nothing was trained."""
    trained = [row for row in found.rows if row.trained is not None]
    if not trained:
        return []
    by_update, by_time = [], []
    for row in trained:
        assert row.trained is not None
        seconds = list(accumulate([row.simulated.milliseconds / 1e3] * len(row.trained.losses)))
        by_update.append(_line(row, [float(count) for count in row.trained.updates]))
        by_time.append(_line(row, seconds))
    low = 0.95 * min(min(value for value in line.y if value is not None) for line in by_time)
    y = Axis("training loss, nats a token", low=low)
    return [
        ("loss-by-update", line_chart(by_update, title="Loss by update", x=Axis("updates"), y=y)),
        ("loss-by-time", line_chart(by_time, title="Loss by time", x=Axis("seconds, simulated"), y=y)),
    ]


def _line(row: Compared, x: Sequence[float]) -> Line:
    assert row.trained is not None
    losses = row.trained.losses
    size = -(-len(losses) // MOST_POINTS)
    parts = [losses[start : start + size] for start in range(0, len(losses), size)]
    ends = [x[min(start + size, len(x)) - 1] for start in range(0, len(x), size)]
    return Line(row.name, ends, [sum(part) / len(part) for part in parts])


def write_page(found: Comparison, folder: Path) -> dict[str, str]:
    """Writes compare.html, and each chart as SVG; returns where they lie."""
    drawn = charts(found)
    for name, chart in drawn:
        save_chart(chart, folder / f"{name}.svg")
    head = "".join(f"<th>{escape(name)}</th>" for name in found.head())
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in found.cells(row)) + "</tr>" for row in found.rows
    )
    told = "".join(f"<p>{escape(line)}</p>" for line in [*found.words(), *found.notices])
    title = ", ".join(row.name for row in found.rows)
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{told}"
        + "".join(f"<figure>{chart.inline()}</figure>" for _, chart in drawn)
        + "</body></html>\n"
    )
    write_whole(folder / "compare.html", page)
    return {"page": str(folder / "compare.html")} | {name: str(folder / f"{name}.svg") for name, _ in drawn}
