"""A schedule or timelines as a standalone SVG: rows are ranks, colour is the op kind, the number the microbatch.

Several timelines stand one above the other on one time axis, so that lengths compare. The figure brings
its own light and dark background and needs no font, script or file besides itself. The same input gives
the same text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from xml.sax.saxutils import escape

from penstock.draw.panel import Drawable, Panel, colors_used, panels
from penstock.draw.style import ink, kind_label, kind_order, num, shade, short, text_width, ticks, wrapped
from penstock.schedule.op import OF_UPDATES
from penstock.simulation import TimedOp

MARGIN, LABEL, BUSY = 22.0, 52.0, 46.0
PHONE, PHONE_MARGIN = 480, 8.0
"""Pictures narrower than this (pixels) have smaller margins."""
CROWDED = 6.0
"""Bars narrower than this touch: gaps between them would show as stripes that are not in the schedule."""
LEAST, LEAST_OF_UPDATES = 0.2, 1.5
"""Narrowest bars, in pixels; updates may take no time at all, and are to be seen."""
ROW, ROW_GAP, MESSAGE_GAP, TALLEST = 26.0, 4.0, 17.0, 1400.0
BESIDE = 3.0
"""Height of an asynchronous op's bar, below the row of its rank."""
HEAD, FACTS, PANEL_GAP, AXIS, LEGEND = 30.0, 16.0, 20.0, 26.0, 26.0
DIGIT, SMALL_DIGIT, RADIUS = 6.4, 5.0, 2
MESSAGE_LINES = {"sent": "message waits to leave", "left": "travels", "taken": "waits to be taken"}
RECEIVE_POSTED = "receive posted"

STYLE = """
svg{font-family:-apple-system,BlinkMacSystemFont,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-size:12px}
.page{fill:#fff;stroke:#dfe4ea}.lane{fill:#eef1f5}.grid{stroke:#dbe1e8}
.title{font-size:16px;font-weight:650;fill:#16202c}.fact{font-size:12px;font-weight:400;fill:#4c5866}
.text{fill:#4c5866}.soft{fill:#7a8594}.right{text-anchor:end}
.n{text-anchor:middle;font-size:11px;font-variant-numeric:tabular-nums;pointer-events:none}
.n .s{font-size:9.5px}.mid{text-anchor:middle}
.blocked{fill:none;stroke:#8b95a3;stroke-width:2;stroke-dasharray:2 2}
@media(prefers-color-scheme:dark){.page{fill:#0f151d;stroke:#28313c}.lane{fill:#1c242e}.grid{stroke:#2b3541}
.title{fill:#eef2f7}.fact,.text{fill:#b6c0cc}.soft{fill:#8793a2}}
"""
MESSAGE_STYLE = ".left{stroke-width:1.8}.taken{stroke-width:3;stroke-opacity:.38}"


@dataclass(frozen=True)
class _Frame:
    """Where things lie: the x of a time, and the height of rows."""

    margin: float
    left: float
    right: float
    length: float
    row: float
    gap: float

    def x(self, time: float) -> float:
        return self.left + (self.right - self.left) * time / self.length

    @property
    def pitch(self) -> float:
        return self.row + (self.gap if self.row > 12 else self.gap / 4)


def to_svg(
    drawn: Drawable | Sequence[Drawable],
    *,
    titles: Sequence[str] | None = None,
    width: int = 1200,
    inline: bool = False,
    comment: str | None = None,
) -> str:
    """Draws one or several schedules or timelines.

    Args:
        drawn: a schedule (drawn as it runs where each rank's share of the model takes F = I = W = 1), a timeline,
            or several.
        titles: one for each timeline; by default the schedules' names.
        width: of the picture, in pixels; its height follows.
        inline: whether the picture becomes a part of a page. Its styles then hold within it alone, so that it changes
            neither the page nor other pictures there.
        comment: put into the file's first line, like the command that made it.

    Raises:
        ScheduleError: nothing to draw, or a schedule that cannot run.

    Examples:
        >>> import penstock as ps
        >>> "<svg" in ps.draw.to_svg(ps.build("1f1b", 2, 4), width=600)
        True
    """
    shown = panels(drawn, titles)
    num_rows = sum(p.timeline.num_ranks for p in shown)
    has_posts = any(p.timeline.channels for p in shown)
    gap = MESSAGE_GAP if has_posts else ROW_GAP
    row = max(3.0, min(ROW, TALLEST / num_rows - gap))
    length = max(p.timeline.makespan for p in shown) or 1.0
    margin = MARGIN if width >= PHONE else PHONE_MARGIN
    frame = _Frame(margin, margin + LABEL, width - margin - BUSY, length, row, gap)
    kinds = kind_order(k for p in shown for k in p.kinds)
    body: list[str] = []
    y = MARGIN - 4
    tops = []
    for panel in shown:
        tops.append(y + HEAD + FACTS * len(_facts(panel, width - 2 * margin)[1]))
        y = tops[-1] + panel.timeline.num_ranks * frame.pitch + PANEL_GAP
    bottom = y - PANEL_GAP
    body += _axis(frame, bottom, shown[0].unit)
    for panel, top in zip(shown, tops, strict=True):
        body += _grid(frame, top, panel.timeline.num_ranks)
        body += _panel(panel, frame, kinds, top, width - 2 * margin)
    legend, end = _legend(shown, frame, width, bottom + AXIS + 14)
    body += legend
    height = round(end + 4)
    first = f"<!-- {comment.replace('--', '- -')} -->\n" if comment else ""
    styles = STYLE + (MESSAGE_STYLE if has_posts else "") + "".join(_kind_styles(kinds, shown))
    scope = ""
    if inline:
        name = "penstock-" + sha256("".join(body).encode()).hexdigest()[:10]
        scope, styles = f' class="{name}"', _scoped(styles, name)
    described = "; ".join(f"{p.title}: {', '.join(p.facts())}" for p in shown)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg"{scope} width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(described, {chr(34): "&quot;"})}">'
        f"\n<style>{styles}</style>\n"
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    )
    return first + head + "\n" + "\n".join(body) + "\n</svg>\n"


def _scoped(styles: str, name: str) -> str:
    """The styles so that they hold within the element of that class alone."""

    def scoped(rule: re.Match[str]) -> str:
        selectors = [each.strip() for each in rule[1].split(",")]
        return ",".join(f".{name}" if each == "svg" else f".{name} {each}" for each in selectors) + f"{{{rule[2]}}}"

    return re.sub(r"([^{}@]+)\{([^{}]*)\}", scoped, styles)


def _kind_styles(kinds: Sequence[str], shown: Sequence[Panel]) -> list[str]:
    rules = []
    for count in sorted({p.num_chunks for p in shown}):
        for chunk in range(count):
            for index, kind in enumerate(kinds):
                color = shade(kind, chunk, count)
                name = f"{index}-{chunk}-{count}"
                rules.append(f".k{name}{{fill:{color}}}.t{name}{{fill:{ink(color)}}}\n")
    return rules


def _marks(frame: _Frame) -> list[float]:
    return ticks(frame.length, max(2, int((frame.right - frame.left) / 75)))


def _grid(frame: _Frame, top: float, num_ranks: int) -> list[str]:
    """Faint lines at the axis's ticks behind one panel's rows."""
    y1, y2 = num(top - 3), num(top + num_ranks * frame.pitch)
    xs = [num(frame.x(time)) for time in _marks(frame)]
    return ['<path class="grid" d="' + "".join(f"M{x} {y1}V{y2}" for x in xs) + '"/>']


def _axis(frame: _Frame, bottom: float, unit: str) -> list[str]:
    """The times below the last panel."""
    base = num(bottom + 16)
    label = "time, ms" if unit else "time"
    end = frame.left - (16 if frame.margin == MARGIN else 8)
    out = [f'<text class="soft right" x="{num(end)}" y="{base}">{label}</text>']
    for time in _marks(frame):
        out.append(f'<text class="soft mid" x="{num(frame.x(time))}" y="{base}">{short(time)}</text>')
    return out


def _facts(panel: Panel, room: float) -> tuple[str, list[str]]:
    """What is said of a panel: beside its title, and below it where that is too wide."""
    beside = "  ·  ".join(panel.facts())
    if 1.1 * text_width(panel.title, 16) + 12 + text_width(beside) <= room:
        return beside, []
    lines = [""]
    for fact in panel.facts():
        more = f"{lines[-1]}  ·  {fact}" if lines[-1] else fact
        if text_width(more) <= room:
            lines[-1] = more
        else:
            lines.append(fact)
    return "", [line for line in lines if line]


def _panel(panel: Panel, frame: _Frame, kinds: Sequence[str], top: float, room: float) -> list[str]:
    end = frame.x(panel.timeline.makespan)
    beside, below = _facts(panel, room)
    title = escape(panel.title) + (f'<tspan class="fact" dx="12">{escape(beside)}</tspan>' if beside else "")
    out = [f'<text class="title" x="{num(frame.margin)}" y="{num(top - 11 - FACTS * len(below))}">{title}</text>']
    for number, line in enumerate(below):
        y = top - 9 - FACTS * (len(below) - 1 - number)
        out.append(f'<text class="fact text" x="{num(frame.margin)}" y="{num(y)}">{escape(line)}</text>')
    for rank, row in enumerate(panel.rows):
        y = top + rank * frame.pitch
        out.append(
            f'<rect class="lane" x="{num(frame.left)}" y="{num(y)}" width="{num(end - frame.left)}" '
            f'height="{num(frame.row)}" rx="{RADIUS}"/>'
        )
        if frame.row >= 9:
            middle = num(y + frame.row / 2 + 4)
            out.append(f'<text class="text right" x="{num(frame.left - 8)}" y="{middle}">rank {rank}</text>')
            share = f"{100 * panel.busy_shares[rank]:.0f}%"
            out.append(f'<text class="soft" x="{num(end + 7)}" y="{middle}">{share}</text>')
        out += _row(panel, frame, kinds, row, y)
        out += _beside(panel, frame, kinds, panel.streams[rank], y)
    return out + (_messages(panel, frame, top) if panel.timeline.channels else [])


def _messages(panel: Panel, frame: _Frame, top: float) -> list[str]:
    """Messages whose ends were posted: along the sender's row until they leave, across, and along the receiver's row
    until they are taken; a dot where the receive is posted.
    """
    out = []
    for message in panel.messages:
        down = message.target_rank > message.source_rank
        ys = [top + rank * frame.pitch for rank in (message.source_rank, message.target_rank)]
        y1, y2 = num(ys[0] + (frame.row + 1.5 if down else -1.5)), num(ys[1] + (-1.5 if down else frame.row + 1.5))
        x1, x2, x3, x4 = (num(frame.x(t)) for t in (message.sent, message.left, message.arrived, message.taken))
        color, posted = shade(message.source.kind), num(frame.x(message.posted or 0.0))
        out.append(
            f'<g stroke="{color}"><title>{escape(panel.message_sentence(message))}</title>'
            + (f'<path class="sent" d="M{x1} {y1}H{x2}"/>' if x1 != x2 else "")
            + f'<path class="left" d="M{x2} {y1}L{x3} {y2}"/>'
            + (f'<path class="taken" d="M{x3} {y2}H{x4}"/>' if x3 != x4 else "")
            + f'<circle fill="{color}" cx="{posted}" cy="{y2}" r="1.2"/></g>'
        )
    return out


def _beside(panel: Panel, frame: _Frame, kinds: Sequence[str], row: Sequence[TimedOp], y: float) -> list[str]:
    """Thin bars below a rank's row: its asynchronous ops."""
    top, height = num(y + frame.row), num(min(BESIDE, frame.pitch - frame.row))
    bars = []
    for timed in row:
        left, right = frame.x(timed.start - panel.origin), frame.x(timed.end - panel.origin)
        name = f"{kinds.index(timed.op.kind)}-{panel.chunk(timed.rank, timed.op)}-{panel.num_chunks}"
        bars.append(
            f'<rect class="k{name}" x="{num(left)}" y="{top}" width="{num(max(right - left, LEAST))}" '
            f'height="{height}"><title>{escape(panel.sentence(timed))}</title></rect>'
        )
    return ["<g>", *bars, "</g>"] if bars else []


def _row(panel: Panel, frame: _Frame, kinds: Sequence[str], row: Sequence[TimedOp], y: float) -> list[str]:
    """Bars, then numbers: bars of a row share their height, so it stands once, on their group."""
    bars, numbers = [], []
    top, height, base = num(y), num(frame.row), num(y + frame.row / 2 + 4)
    for timed, after in zip_longest(row, row[1:]):
        left, right = frame.x(timed.start - panel.origin), frame.x(timed.end - panel.origin)
        gap = 1.0 if right - left > CROWDED else 0.0
        if gap == 0 and after is not None and after.start <= timed.end:
            # Reaches below the next bar, which is painted over it, so that nothing shines through between the two.
            gap = -min(1.0, frame.x(after.end - panel.origin) - right)
        name = f"{kinds.index(timed.op.kind)}-{panel.chunk(timed.rank, timed.op)}-{panel.num_chunks}"
        rounded = f' rx="{RADIUS}"' if right - left > CROWDED else ""
        least = LEAST_OF_UPDATES if timed.op.kind in OF_UPDATES else LEAST
        bars.append(
            f'<rect class="k{name}" x="{num(left)}" y="{top}" width="{num(max(right - left - gap, least))}" '
            f'height="{height}"{rounded}><title>{escape(panel.sentence(timed))}</title></rect>'
        )
        text = panel.number(timed.op)
        room = right - left - max(gap, 0.0)
        if frame.row >= 13 and room >= SMALL_DIGIT * len(text) + 1:
            small = "" if room >= DIGIT * len(text) + 3 else " s"
            numbers.append(
                f'<text class="t{name}{small}" x="{num((left + right - max(gap, 0.0)) / 2)}" y="{base}">{text}</text>'
            )
        if timed.blocked > 0:
            middle = num(y + frame.row / 2)
            until = frame.x(timed.end - panel.origin + timed.blocked)
            bars.append(f'<line class="blocked" x1="{num(right)}" y1="{middle}" x2="{num(until)}" y2="{middle}"/>')
    return ["<g>", *bars, "</g>", '<g class="n">', *numbers, "</g>"] if numbers else ["<g>", *bars, "</g>"]


def _legend(shown: Sequence[Panel], frame: _Frame, width: int, y: float) -> tuple[list[str], float]:
    """The key to colours and numbers, in as many rows as it needs, and the y of its end."""
    used = colors_used(shown)
    first, end = frame.margin + (LABEL if width >= PHONE else 0), width - frame.margin
    out: list[str] = []
    x = first

    def entry(swatches: Sequence[str], label: str, room: float) -> None:
        nonlocal x, y
        if x > first and x + room > end:
            x, y = first, y + 22
        for swatch in swatches:
            out.append(swatch.format(x=num(x), y=num(y), middle=num(y + 7), right=num(x + 14)))
            x += 15
        out.append(f'<text class="text" x="{num(x + 5)}" y="{num(y + 12)}">{escape(label)}</text>')
        x += room - 15 * len(swatches)

    box = '<rect {look} x="{{x}}" y="{{y}}" width="14" height="14" rx="2"/>'
    for kind in kind_order(used):
        label, colors = kind_label(kind), [box.format(look=f'fill="{color}"') for color in used[kind]]
        entry(colors, label, 15 * len(colors) + 5 + (7.8 if label.isupper() else 5.9) * len(label) + 20)
    entry([box.format(look='class="lane"')], "idle", 60)
    if any(t.blocked > 0 for panel in shown for t in panel.timeline.ops):
        entry(['<line class="blocked" x1="{x}" y1="{middle}" x2="{right}" y2="{middle}"/>'], "link full", 88)
    if any(panel.timeline.channels for panel in shown):
        line = '<path class="{look}" stroke="#7a8594" d="M{{x}} {{middle}}H{{right}}"/>'
        for look, label in MESSAGE_LINES.items():
            entry([line.format(look=look)], label, 15 + 5 + 5.7 * len(label) + 14)
        dot = '<circle fill="#7a8594" cx="{right}" cy="{middle}" r="1.8"/>'
        entry([dot], RECEIVE_POSTED, 118)
    notes = ["number: microbatch", "right: busy"]
    if any(panel.schedule.updates is not None for panel in shown):
        notes[0] += " (of U the update, ' on a copy)"
    if any(panel.schedule.asynchronous for panel in shown):
        notes.append("thin bars: asynchronous")
    if any(len(colors) > 1 for colors in used.values()):
        notes.insert(1, "lighter: later stage of the rank")
    note = ", ".join(notes)
    if x + 5.8 * len(note) > end:
        x, y = first, y + 22
    lines = wrapped(note, end - x)
    for number, line in enumerate(lines):
        out.append(f'<text class="soft" x="{num(x)}" y="{num(y + 12 + 16 * number)}">{line}</text>')
    return out, y + LEGEND + 16 * (len(lines) - 1)
