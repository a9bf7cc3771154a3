"""Writes the tables of README.md from results/: python -m experiments.uneven.tables (a second)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from textwrap import fill

from experiments.common.readme import write_between
from experiments.common.results import filled
from experiments.uneven import protocol
from experiments.uneven.record import read_cells

README = Path(__file__).resolve().parent / "README.md"
NOT_RUN = "not run"


def verdict(found: float, aim: float | None) -> str:
    if aim is None:
        return ""
    return "yes" if round(found, 2) >= aim else f"no, {found / aim - 1:.1%}"


def row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def head(*names: str) -> list[str]:
    return [row(*names), "|" + "---|" * len(names)]


def speeds(part: str, cells: tuple[protocol.Cell, ...]) -> list[str]:
    """A part with draws of a gain by rules and, where they were tried, by moves: the last is judged."""
    found = read_cells(part)
    lines = head("", "sigma", "by rules", "after moves", "least of any draw", "aim", "met")
    for number, cell in enumerate(cells):
        label = f"{cell.name}, {cell.num_ranks} ranks"
        if str(number) not in found:
            lines.append(row(label, cell.sigma, NOT_RUN, "", "", f"{cell.aim:.2f}", ""))
            continue
        draws = found[str(number)]["draws"]
        means = [fmean(column) for column in zip(*draws, strict=True)]
        moved = f"{means[1]:.2f}" if len(means) > 1 else ""
        least = min(draw[-1] for draw in draws)
        met = verdict(means[-1], cell.aim)
        lines.append(row(label, cell.sigma, f"{means[0]:.2f}", moved, f"{least:.2f}", f"{cell.aim:.2f}", met))
    return lines


def errors() -> list[str]:
    found = read_cells("errors")
    lines = head("", "sigma", "mean", "worst draw", "met")
    for number, cell in enumerate(protocol.ORDER):
        if str(number) in found:
            taken = [draw[0] for draw in found[str(number)]["draws"]]
            met = "yes" if fmean(taken) <= 1 and max(taken) <= protocol.WORST else "no"
            lines.append(
                row(
                    f"{cell.name}, {cell.num_ranks} ranks",
                    cell.sigma,
                    f"{fmean(taken):.3f}",
                    f"{max(taken):.3f}",
                    met,
                )
            )
    return lines


def towers() -> list[str]:
    found = read_cells("towers")
    lines = head("", "ranks", "sigma", "at most", "by rules", "after moves", "least", "aim", "met")
    for number, cell in enumerate(protocol.TOWERS):
        if str(number) in found:
            rules, moved, over = zip(*found[str(number)]["draws"], strict=True)
            aim = "" if cell.aim is None else f"{cell.aim:.2f}"
            lines.append(
                row(
                    cell.how, cell.num_ranks, cell.sigma, f"{fmean(over):.2f}", f"{fmean(rules):.2f}",
                    f"{fmean(moved):.2f}", f"{min(moved):.2f}", aim, verdict(fmean(moved), cell.aim),
                )
            )  # fmt: skip
    return lines


def late_towers() -> list[str]:
    found = read_cells("late_towers")
    if not found:
        return [f"Late links: {NOT_RUN}."]
    lines = head("ranks", "sigma", "links late by, ms", "memory", "at most", "faster", "least", "most", "aim", "met")
    for number, cell in enumerate(protocol.LATE_TOWERS):
        memory = "1f1b's" if cell.memory == 1 else f"{cell.memory} times 1f1b's"
        setting = cell.num_ranks, cell.sigma, f"{cell.latency:g}", memory
        if str(number) not in found:
            lines.append(row(*setting, NOT_RUN, "", "", "", f"{protocol.MULTI_MODAL:.2f}", ""))
            continue
        faster, over = zip(*found[str(number)]["draws"], strict=True)
        values = fmean(over), fmean(faster), min(faster), max(faster), protocol.MULTI_MODAL
        met = verdict(fmean(faster), protocol.MULTI_MODAL)
        lines.append(row(*setting, *(f"{value:.2f}" for value in values), met))
    return lines


def captioned() -> list[str]:
    found, emulated = read_cells("captioned"), read_cells("captioned_emulated")
    if not found:
        return [f"A captioner's steps: {NOT_RUN}."]
    lines = head("", "microbatches", "faster, mean", "least", "most")
    for number, (name, ranks, num) in enumerate(protocol.CAPTIONED):
        if str(number) not in found:
            lines.append(row(f"{name}, {ranks} ranks", num, NOT_RUN, "", ""))
            continue
        faster, _ = zip(*found[str(number)]["draws"], strict=True)
        cells = f"{fmean(faster):.2f}", f"{min(faster):.2f}", f"{max(faster):.2f}"
        lines.append(row(f"{name}, {ranks} ranks", num, *cells))
    if emulated:
        names = ("arrival, ms", "simulated", "planned, ms", "simulated", "faster", "simulated")
        lines += ["", "Step 0 on emulated devices:", "", *head("", *names)]
        for number in sorted(emulated, key=int):
            cell = emulated[number]
            (name, ranks, _), arrival, planned = (cell[key] for key in ("cell", "arrival", "planned"))
            ms = [f"{each:.0f}" for each in (*arrival, *planned)]
            gains = [f"{before / after:.2f}" for before, after in zip(arrival, planned, strict=True)]
            lines.append(row(f"{name}, {ranks} ranks", *ms, *gains))
    return lines


def assigned() -> list[str]:
    found, limits = read_cells("assigned"), read_cells("assigned_limits")
    lines = head(
        "", "longest", "busiest, arrival", "busiest", "in any step", "at least", "in any", "faster", "at most", "aim",
        "met",
    )  # fmt: skip
    for number, cell in enumerate(protocol.ASSIGNED):
        if str(number) in found:
            before, after, faster = zip(*found[str(number)]["draws"], strict=True)
            least, most = zip(*limits[str(number)]["draws"], strict=True)
            aim = "" if cell.aim is None else f"{cell.aim:.2f}"
            lines.append(
                row(
                    cell.name, cell.longest, f"{fmean(before):.3f}", f"{fmean(after):.4f}", f"{max(after):.4f}",
                    f"{fmean(least):.4f}", f"{max(least):.4f}", f"{fmean(faster):.3f}", f"{fmean(most):.3f}", aim,
                    verdict(fmean(faster), cell.aim),
                )
            )  # fmt: skip
    return lines


def documents() -> list[str]:
    found = read_cells("documents")
    lines = head("", "busiest", "faster", "least", "aim", "met", "planned in, s")
    for number, cell in enumerate(protocol.DOCUMENTS):
        if str(number) in found:
            busiest, faster, seconds = zip(*found[str(number)]["draws"], strict=True)
            mean = fmean(faster)
            lines.append(
                row(
                    cell.name, f"{fmean(busiest):.4f}", f"{mean:.3f}", f"{min(faster):.3f}", cell.aim,
                    verdict(mean, cell.aim), f"{fmean(seconds):.2f}",
                )
            )  # fmt: skip
    return lines


def emulated() -> list[str]:
    found = read_cells("emulated")
    if not found:
        return [f"Emulated cells: {NOT_RUN}."]
    lines = head("", "sigma", "arrival, ms", "simulated", "planned, ms", "simulated", "faster")
    for number in sorted(found, key=int):
        (name, ranks, sigma), arrival, planned = (found[number][key] for key in ("cell", "arrival", "planned"))
        ms = [f"{each:.0f}" for each in (*arrival, *planned)]
        lines.append(row(f"{name}, {ranks} ranks", sigma, *ms, f"{arrival[0] / planned[0]:.2f}"))
    return lines


def real() -> list[str]:
    found = read_cells("real").get("0")
    if found is None:
        return [f"Real compute: {NOT_RUN}."]
    setting = protocol.REAL
    lines = head("tokens a second", "mean of the blocks")
    lines += [row(way, f"{fmean(each):,.0f}") for way, each in found["tokens_per_second"].items()]
    over = [
        ("padding to the longest, mean", found["over_padding"], setting.padding),
        ("windows of fixed length, median", found["over_fixed"], setting.fixed),
    ]
    lines += ["", *head("planned over", "", "aim", "met")]
    lines += [row(what, f"{value:.2f}", f"{aim:.2f}", verdict(value, aim)) for what, value, aim in over]
    same = "are" if found["bitwise"] else "are not"
    lines += [
        "",
        f"{setting.schedule} over {setting.num_ranks} ranks with {setting.num_microbatches} microbatches, a GPT of "
        f"{setting.depth} layers of width {setting.width}, {setting.blocks} blocks of each way in turn. "
        f"{found['num_documents']:,} documents. The first loss and the plain loop's {same} equal to the last bit. A "
        f"plan took {found['planning_ms']:.0f} ms beside training.",
    ]
    return lines


def text() -> str:
    parts = {
        "Order and dispatch planned, memory by count": speeds("order", protocol.ORDER),
        "Memory in bytes, by length": speeds("bytes", protocol.BYTES),
        "Factors predicted 5% wrong: time over arrival's": errors(),
        "Another schedule in the same memory, over frozen 1f1b (RRFP's language setting)": speeds(
            "changed", protocol.CHANGED
        ),
        "An encoder before the decoder, over frozen 1f1b (RRFP's multi-modal setting)": towers(),
        "The same over late links": late_towers(),
        "A captioner on images of different sizes": captioned(),
        "32 replicas of 4 ranks, 8 microbatches each": assigned(),
        "Whole documents over 32 replicas": documents(),
        "On emulated devices": emulated(),
        "Real compute": real(),
    }
    return "\n".join(line for title, lines in parts.items() for line in (f"## {title}", "", *lines, ""))


MISSED = """\
- **1f1b over 32 replicas, {assigned, faster} of {assigned, aim}; busiest {assigned, busiest} of {busiest, aim}, in
  any step {assigned, in any step} of {in any step, aim}.** These aims are out of reach on the draws of the protocol.
  Replicas with the longest microbatches, {assigned, longest} of the mean, are busier than the others even where the
  other seven are the shortest of all: no assignment has a busiest replica below {assigned, at least} in the mean and
  {assigned, at least in any step} in any step (*at least* in the table). And where such a replica is the slowest, a
  step is {assigned, at most} times as fast (*at most*: its best order as rules and moves find it). The limits were
  worked out after the runs.
- **{multi-modal, aim} with the encoder's work on all ranks** is reached at 16 ranks and sigma 1.0 alone. Elsewhere
  order of arrival takes {towers, least} to {towers, most} times the mean work per rank, so that not even a step
  without a bubble would be {multi-modal, aim} times as fast. What spreading takes, running most encoders again, is
  more than it gives there: zb-v in its best order is faster. No schedule takes less than the mean work per rank, so
  *at most* in the table is a bound: {towers, 8 and 0.6} and {towers, 8 and 1.0} at 8 ranks, {towers, 16 and 0.6} at
  16 and sigma 0.6.
- **{multi-modal, aim} over late links** is reached in no cell. The nearest is {late, nearest}, at 16 ranks and sigma
  1.0 with links 5 ms late, in twice 1f1b's memory. At 8 ranks and sigma 0.6 with 5 or 10 ms, and at 16 ranks and
  sigma 0.6 with 5 ms, no schedule can reach it: the bound is {late, 8 by 5}, {late, 8 by 10} and {late, 16 by 5} in
  the mean. In the other cells the bound is above {multi-modal, aim}, and what lies between is not known. These are
  orders by rules, without moves, and all links are late by the same.
"""
"""What README.md says of aims that are missed; a name in braces is one of `NUMBERS`."""


def _of_replicas(part: str, column: int, how: Callable[..., float], digits: int) -> str:
    """Of the draws of 1f1b over replicas, whose aim is missed."""
    return f"{how(draw[column] for draw in read_cells(part)['0']['draws']):.{digits}f}"


def _at_most(num_ranks: int, sigma: float) -> float:
    """How many times as fast a step of both towers could be, in the mean, without a bubble."""
    number = protocol.TOWERS.index(protocol.Towers("spread", num_ranks, sigma, protocol.MULTI_MODAL))
    return fmean(draw[2] for draw in read_cells("towers")[str(number)]["draws"])


def _late_at_most(num_ranks: int, latency: float) -> str:
    """The same over late links, at sigma 0.6."""
    number = protocol.LATE_TOWERS.index(protocol.LateTowers(num_ranks, 0.6, latency, 1))
    return f"{fmean(draw[1] for draw in read_cells('late_towers')[str(number)]['draws']):.2f}"


def _nearest() -> str:
    late = read_cells("late_towers").values()
    return f"{max(fmean(draw[0] for draw in cell['draws']) for cell in late):.2f}"


MISSING = ((8, 0.6), (8, 1.0), (16, 0.6))
"""Ranks and sigmas where a spread encoder misses its aim."""
NUMBERS: Mapping[str, Callable[[], str]] = {
    "assigned, aim": lambda: f"{protocol.ASSIGNED[0].aim:.2f}",
    "assigned, longest": lambda: f"{protocol.ASSIGNED[0].longest:g}",
    "assigned, faster": partial(_of_replicas, "assigned", 2, fmean, 3),
    "assigned, busiest": partial(_of_replicas, "assigned", 1, fmean, 4),
    "assigned, in any step": partial(_of_replicas, "assigned", 1, max, 3),
    "assigned, at least": partial(_of_replicas, "assigned_limits", 0, fmean, 4),
    "assigned, at least in any step": partial(_of_replicas, "assigned_limits", 0, max, 4),
    "assigned, at most": partial(_of_replicas, "assigned_limits", 1, fmean, 3),
    "busiest, aim": lambda: f"{protocol.BUSIEST:g}",
    "in any step, aim": lambda: f"{protocol.BUSIEST_IN_ANY:g}",
    "multi-modal, aim": lambda: f"{protocol.MULTI_MODAL:g}",
    "towers, least": lambda: f"{min(_at_most(*each) for each in MISSING):.1f}",
    "towers, most": lambda: f"{max(_at_most(*each) for each in MISSING):.1f}",
    **{
        f"towers, {ranks} and {sigma}": (lambda r=ranks, s=sigma: f"{_at_most(r, s):.2f}") for ranks, sigma in MISSING
    },
    "late, nearest": _nearest,
    **{f"late, {ranks} by {ms}": partial(_late_at_most, ranks, ms) for ranks, ms in ((8, 5), (8, 10), (16, 5))},
}
"""What stands for the names in braces in `MISSED`."""


def missed() -> str:
    """What is missed, with its numbers, in lines of a page."""
    items = filled(MISSED, NUMBERS).replace("\n  ", " ").splitlines()
    return "\n".join(fill(item, 118, subsequent_indent="  ", break_on_hyphens=False) for item in items)


def main() -> None:
    write_between(README, "results", f"\n{text()}")
    write_between(README, "missed", missed())


if __name__ == "__main__":
    main()
