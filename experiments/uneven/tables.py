"""Writes the tables of README.md from results/: python -m experiments.uneven.tables (a second)."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from experiments.uneven import protocol
from experiments.uneven.record import read_cells
from penstock.bench.readme import write_between

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


def main() -> None:
    write_between(README, "results", f"\n{text()}")


if __name__ == "__main__":
    main()
