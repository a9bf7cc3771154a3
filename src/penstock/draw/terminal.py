"""Schedules and timelines in a terminal: rows are ranks, colour is the op kind, the number is the microbatch.

A schedule is its unit-time grid; a timeline is drawn to scale. Without colour a letter says the kind, so
that nothing is lost in a log file:

    rank 0 |F0-F1-......B0----F2-B1----...B2----|  75%
    rank 1 |...F0-B0----F1-B1----F2-B2----......|  75%
"""

from __future__ import annotations

import shutil
import sys
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby

from penstock.draw.panel import Panel, panels
from penstock.draw.style import kind_label, kind_order, short, ticks
from penstock.schedule import Op, Schedule
from penstock.schedule.text import grid_cells
from penstock.simulation import TimedOp, Timeline

DEFAULT_WIDTH, NARROWEST = 120, 20
MOST_COLUMNS_AN_OP = 6
RESET = "\x1b[0m"

# The palette in the 256 colours that terminals share, dark to light: a rank's later stages are lighter.
SHADES = {
    "F": (25, 68, 110, 153),
    "R": (24, 67, 109, 152),
    "B": (166, 173, 180, 223),
    "I": (214, 215, 222, 230),
    "W": (36, 79, 115, 158),
    "U": (97, 140, 183, 225),
}
OTHER_SHADES = (243, 247, 251, 254)
DARK_SHADES = {24, 25, 166, 97, 243}
DARK, LIGHT, EDGE = 16, 231, 236


def to_terminal(drawn: Schedule | Timeline, color: bool = True, width: int | None = None) -> str:
    """The picture as lines of text.

    Args:
        drawn: a schedule or a timeline.
        color: whether to use colours (256-colour escapes); the caller knows about NO_COLOR and terminals.
        width: columns to stay within. By default the terminal's; where there is none, a timeline gets 120
            columns and a schedule all it needs. A schedule that is too long is cropped, and a line says so;
            a timeline is scaled, and a line says how.

    Examples:
        >>> import penstock as ps
        >>> print(ps.draw.to_terminal(ps.build("1f1b", 2, 2), color=False))
        schedule 1f1b: 2 ranks, 2 stages, 2 microbatches
        rank 0 |F0 F1 .  B0 .  B1
        rank 1 |.  F0 B0 F1 B1
    """
    if width is None and sys.stdout is not None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    if isinstance(drawn, Schedule):
        lines = _grid(drawn, color, width)
    else:
        lines = _bars(panels(drawn)[0], color, width or DEFAULT_WIDTH)
    return "\n".join(line.rstrip() for line in lines)


def _grid(schedule: Schedule, color: bool, width: int | None) -> list[str]:
    rows = grid_cells(schedule)
    length = max((row[-1].column + 1 for row in rows if row), default=0)
    label = len(f"rank {schedule.num_ranks - 1}") + 2
    most = max((len(cell.ops) for row in rows for cell in row), default=1)
    if color:
        digits = max((len(str(op.microbatch)) for row in schedule.order for op in row), default=1)
        room = width is None or label + length * most * (digits + 2) <= width
        each = digits + (2 if room else 1)  # columns of an op
        wide = each * most
    else:
        wide = 1 + max((len(cell.text) for row in rows for cell in row), default=1)
    shown = length if width is None else min(length, max(1, (max(width, NARROWEST) - label) // wide))
    chunks = [{stage: k for k, stage in enumerate(schedule.stages_of(r))} for r in range(schedule.num_ranks)]
    num_chunks = max(len(mine) for mine in chunks) if chunks else 1
    lines = [str(schedule).splitlines()[0]]
    for rank, row in enumerate(rows):
        cells = ["".ljust(wide) if color else ".".ljust(wide)] * min(shown, row[-1].column + 1 if row else 0)
        for cell in row:
            if cell.column >= shown:
                continue
            if not color:
                cells[cell.column] = cell.text.ljust(wide)
                continue
            part = wide // len(cell.ops)  # the two of a pair share their cell
            painted = ""
            for op in cell.ops:
                number = (
                    f"{op.microbatch} ".rjust(part) if part > len(str(op.microbatch)) + 1 else f" {op.microbatch}"
                )
                painted += _paint(number.rjust(part), op, chunks[rank].get(op.stage, 0), num_chunks)
            cells[cell.column] = painted
        lines.append(f"rank {rank}".ljust(label - 2) + " |" + "".join(cells))
    if shown < length:
        lines.append(f"(steps 0 to {shown - 1} of {length}; SVG and HTML show them all)")
    if color:
        lines += _legend([op.kind for row in schedule.order for op in row], label, num_chunks, color, width)
    return lines


def _bars(panel: Panel, color: bool, width: int) -> list[str]:
    timeline = panel.timeline
    label = len(f"rank {timeline.num_ranks - 1}") + 2
    room = max(width, NARROWEST + label) - label - 6
    scale = _columns_per_ms(panel, room)
    length = max(1, min(room, round(timeline.makespan * scale)))
    lines = [f"{panel.title}: {', '.join(panel.facts())}"]
    bodies = []
    for rank, row in enumerate(panel.rows):
        body = _bar_row(panel, row, length, scale, color)
        bodies.append(body)
        lines.append(f"rank {rank}".ljust(label - 2) + " |" + body + f"|{100 * panel.busy_shares[rank]:4.0f}%")
        if panel.streams[rank]:
            body = _bar_row(panel, panel.streams[rank], length, scale, color)
            bodies.append(body)
            lines.append("beside".ljust(label - 2)[: label - 2] + " |" + body + "|")
    lines += _axis(panel, label, length, scale)
    if not color and any(letter.islower() for body in bodies for letter in body):
        lines.append("(small letters begin the name of a kind that has no room)")
    drawn = [timed for row in (*panel.rows, *panel.streams) for timed in row]
    narrow = sum(1 for t in drawn if (t.end - t.start) * scale < 1)
    if narrow:
        lines.append(
            f"(a column is {panel.time(1 / scale)}; {narrow} of {len(drawn)} ops are shorter; "
            "SVG and HTML show them all)"
        )
    lines += _legend(panel.kinds, label, panel.num_chunks, color, width)
    if any(timeline.peak_activations):
        peaks = ", ".join(short(p) for p in timeline.peak_activations[:16])
        more = ", ..." if timeline.num_ranks > 16 else ""
        lines.append(" " * label + f"peak activations per rank: {peaks}{more}")
    return lines


def _columns_per_ms(panel: Panel, room: int) -> float:
    """Columns a millisecond: a whole number for the shortest op where that fits, so that equal ops look equal."""
    makespan = panel.timeline.makespan
    if makespan <= 0:
        return 1.0
    shortest = min((t.end - t.start for t in panel.timeline.ops if t.end > t.start), default=makespan)
    whole = min(int(room * shortest / makespan + 1e-9), MOST_COLUMNS_AN_OP)
    return whole / shortest if whole >= 2 else room / makespan


def _bar_row(panel: Panel, row: Sequence[TimedOp], length: int, scale: float, color: bool) -> str:
    """One rank's columns. An op too short for a column of its own shows where a column's middle falls in it."""
    starts = [t.start - panel.origin for t in row]
    owner: list[int] = []
    for column in range(length):
        middle = (column + 0.5) / scale
        index = bisect_right(starts, middle) - 1
        owner.append(index if index >= 0 and row[index].end - panel.origin > middle else -1)
    out = []
    for index, columns in groupby(owner):
        size = len(list(columns))
        if index < 0:
            out.append((" " if color else ".") * size)
            continue
        op = row[index].op
        number = panel.number(op)
        if color:
            text = number if len(number) < size or (size == len(number) and size > 1) else ""
            out.append(_paint(_placed(text, size), op, panel.chunk(row[index].rank, op), panel.num_chunks, size > 1))
        else:
            text = str(op) if panel.num_chunks > 1 and len(str(op)) < size else op.short()
            if len(text) > size:
                text = op.kind if len(op.kind) <= size else op.kind[:size].lower()
            out.append(text.ljust(size, "-"))
    return "".join(out)


def _placed(text: str, size: int) -> str:
    """`text` in the middle of a bar, with the first column free for its edge where there is room."""
    left = max((size - len(text)) // 2, min(1, size - len(text)))
    return (" " * left + text).ljust(size)


def _axis(panel: Panel, label: int, length: int, scale: float) -> list[str]:
    end = length / scale
    marks, texts = [" "] * (length + 1), [" "] * (length + 12)
    for time in ticks(end, max(1, length // 12)):
        column = min(round(time * scale), length)
        marks[column] = "|"
        text = short(time)
        texts[column : column + len(text)] = text
    unit = (panel.unit or "time").rjust(label - 1) + " "
    return [" " * label + "".join(marks), unit + "".join(texts)]


def _legend(kinds: Sequence[str], label: int, num_chunks: int, color: bool, width: int | None) -> list[str]:
    """The key, broken into lines where the width asks for it."""
    notes = ["number: microbatch"] if color else [". idle"]
    if color and num_chunks > 1:
        notes.append("lighter: later stage of the rank")
    lines, used = [""], 0
    for kind in [*kind_order(kinds), *notes]:
        text = kind_label(kind)
        swatches = num_chunks if color and kind not in notes else 0
        size = 3 * bool(lines[-1]) + 2 * swatches + bool(swatches) + len(text)
        if lines[-1] and width is not None and label + used + size > width:
            lines.append("")
            used = 0
        painted = "".join(_paint("  ", Op(kind, 0, 0), chunk, num_chunks, False) for chunk in range(swatches))
        lines[-1] += "   " * bool(lines[-1]) + painted + " " * bool(swatches) + text
        used += size
    return [" " * label + line for line in lines]


def _paint(text: str, op: Op, chunk: int, num_chunks: int, edge: bool = True) -> str:
    """`text` on the op's colour; an edge in its first, blank column tells it from a neighbour of its kind."""
    shades = SHADES.get(op.kind, OTHER_SHADES)
    lightest = 2 if num_chunks <= 3 else 3
    back = shades[round(lightest * chunk / max(num_chunks - 1, 1))]
    front = LIGHT if back in DARK_SHADES else DARK
    if edge and len(text) > 1 and text[0] == " ":
        return f"\x1b[48;5;{back};38;5;{EDGE}m▏\x1b[38;5;{front}m{text[1:]}{RESET}"
    return f"\x1b[48;5;{back};38;5;{front}m{text}{RESET}"
