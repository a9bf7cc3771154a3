"""Timelines as one self-contained HTML page: zoom, ask an op what it waited for, follow a microbatch.

The page loads nothing: its style and script lie in page.css and page.js beside this file and are put into
the page, and a content security policy forbids it every request. It draws on a canvas and takes 100,000
ops and more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import accumulate
from typing import Any

from penstock.draw.panel import Drawable, Panel, colors_used, panels
from penstock.draw.style import ink, kind_label, kind_name, kind_order, shade
from penstock.draw.svg import MESSAGE_LINES, RECEIVE_POSTED
from penstock.formats.perfetto import held_over_time


def to_html(timelines: Drawable | Sequence[Drawable], titles: Sequence[str] | None = None) -> str:
    """The page.

    Args:
        timelines: one or several, on one time axis; a schedule is drawn as it runs where each
            rank's share of the model takes F = I = W = 1.
        titles: one for each timeline; by default the schedules' names. The page's own title has each of them once.

    Raises:
        ScheduleError: nothing to draw, or a schedule that cannot run.

    Examples:
        >>> import penstock as ps
        >>> "<canvas" in ps.draw.to_html([ps.build("1f1b", 2, 4), ps.build("zb-h1", 2, 4)])
        True
    """
    shown = panels(timelines, titles)
    heading = " · ".join(dict.fromkeys(p.title for p in shown))
    kinds = kind_order(k for p in shown for k in p.kinds)
    data = {
        "kinds": [{"kind": k, "name": kind_name(k)} for k in kinds],
        "timelines": [_timeline(panel, kinds) for panel in shown],
    }
    page = files("penstock.draw")
    slots = {
        "title": escape(heading),
        "css": page.joinpath("page.css").read_text(encoding="utf-8"),
        "js": page.joinpath("page.js").read_text(encoding="utf-8"),
        "facts": escape("; ".join(f"{p.title}: {', '.join(p.facts())}" for p in shown)),
        "legend": _legend(shown, kinds),
        "data": script_json(data),
    }
    return filled(page.joinpath("page.html").read_text(encoding="utf-8"), slots)


def filled(template: str, slots: Mapping[str, str]) -> str:
    """A page's template with a text in every slot, `{{title}}`. Slots in the texts themselves are not filled."""
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], template)


def script_json(value: Any) -> str:
    """JSON that cannot end the script element that contains it, whatever its strings hold."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _timeline(panel: Panel, kinds: Sequence[str]) -> dict[str, Any]:
    """A timeline in columns, ops by rank and start; references to ops are indices into these columns."""
    timeline, schedule = panel.timeline, panel.schedule
    ops = [timed for row in panel.rows for timed in row]
    number = {timed.op: index for index, timed in enumerate(ops)}
    messages = [m for m in panel.messages if m.source in number and m.target in number]
    return {
        "title": panel.title,
        "unit": panel.unit,
        "facts": " · ".join(panel.facts()),
        "source": timeline.source,
        "numRanks": timeline.num_ranks,
        "numStages": schedule.num_stages,
        "makespan": _ms(timeline.makespan),
        "busy": [round(share, 4) for share in panel.busy_shares],
        "peak": list(timeline.peak_activations),
        "pipelines": list(schedule.microbatch_pipeline) if schedule.placement.num_pipelines > 1 else None,
        "colors": [
            [[c := shade(k, chunk, panel.num_chunks), ink(c)] for chunk in range(panel.num_chunks)] for k in kinds
        ],
        "first": list(accumulate(map(len, panel.rows), initial=0)),
        "kind": [kinds.index(t.op.kind) for t in ops],
        "stage": [t.op.stage for t in ops],
        "microbatch": [t.op.microbatch for t in ops],
        "updates": None if schedule.updates is None else [panel.update(t.op) for t in ops],
        "chunk": [panel.chunk(t.rank, t.op) for t in ops],
        "start": [_ms(t.start - panel.origin) for t in ops],
        "end": [_ms(t.end - panel.origin) for t in ops],
        "waitedFor": [number.get(t.waited_for, -1) if t.waited_for else -1 for t in ops],
        "waitedForAsync": [str(t.waited_for) if t.waited_for and t.waited_for not in number else "" for t in ops],
        "waited": [_ms(t.waited) for t in ops],
        "blocked": [_ms(t.blocked) for t in ops],
        "recorded": bool(timeline.messages),
        "channels": timeline.channels is not None,
        "messages": {
            "source": [number[m.source] for m in messages],
            "target": [number[m.target] for m in messages],
            **{name: [_ms(getattr(m, name)) for m in messages] for name in ("sent", "left", "arrived", "taken")},
            "posted": [_ms(m.posted) for m in messages if m.posted is not None],
        },
        "streams": [
            {
                "rank": t.rank,
                "start": _ms(t.start - panel.origin),
                "end": _ms(t.end - panel.origin),
                "color": shade(t.op.kind, panel.chunk(t.rank, t.op), panel.num_chunks),
            }
            for row in panel.streams
            for t in row
        ],
        "held": [
            [[_ms(time - panel.origin), held] for time, held in held_over_time(row, panel.schedule.graph.holds)]
            for row in (list(own) + list(apart) for own, apart in zip(panel.rows, panel.streams, strict=True))
        ],
    }


def _ms(value: float) -> float:
    """Milliseconds to the tenth of a microsecond. Pages are smaller, and the difference cannot be seen."""
    rounded = round(value, 4)
    return int(rounded) if rounded == int(rounded) else rounded


def _legend(shown: Sequence[Panel], kinds: Sequence[str]) -> str:
    used = colors_used(shown)
    items = []
    for kind in kinds:
        swatches = "".join(f'<i style="background:{color}"></i>' for color in used.get(kind, ()))
        items.append(f"<span>{swatches}{escape(kind_label(kind))}</span>")
    if any(panel.timeline.channels for panel in shown):
        items += [f'<span><u class="{look}"></u>{label}</span>' for look, label in MESSAGE_LINES.items()]
        items.append(f"<span>• {RECEIVE_POSTED}</span>")
    note = "number: microbatch"
    if any(len(colors) > 1 for colors in used.values()):
        note += ", lighter: later stage of the rank"
    return "".join([*items, f'<span class="soft">{note}</span>'])
