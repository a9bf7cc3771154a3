"""The pages of the site on the papers, made out of committed results when the site is built.

python -m experiments.claims.pages [FOLDER]     a second; writes the pages to build/papers, or to another folder
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.claims import amdp, flexpipe, pipemorph
from experiments.claims.claim import ROOT, Claim, Item, Paper, facts_of, rows_of

FOLDER = ROOT / "build" / "papers"
PAPERS = (pipemorph.PAPER, flexpipe.PAPER, amdp.PAPER)
AUDIT = ROOT / "experiments" / "claims" / "audit.json"
SITE = "docs/papers/"
"""Where the site has these pages. The repository has no such folder."""
NAMES = {"PM": "PipeMorph", "FP": "FlexPipe", "AM": "AMDP"}
PAPER_OF = dict(zip(NAMES, PAPERS, strict=True))
"""By what the audit calls it."""
REAL = ROOT / "benchmarks" / "tune" / "results.json"
MADE = "<!-- made by: python -m experiments.claims.pages -->"


HOW = """\
Every number of ours on this page is read from the committed results.

- *Simulated* is what the simulator gives for the schedule and the costs.
- *By the clock* is the same schedule in Penstock's own runtime, on emulated devices, where an op sleeps for as long
  as the costs say. Such a run shows that dispatch and transport keep the simulated times. It does not show how long
  a real op takes.
{trained}- A number comes from a GPU only if its section says *on one GPU*.

[One table](audit.md#real-computation) is of real computation. [The audit](audit.md) says what was done for
each figure."""

TRAINED = "- *Trained* is the loss of a small model that was really trained, on a CPU.\n"

STATES = """\
An audit once listed {} capabilities, figures and tables of the three papers. Each row says what the audit found then,
what holds now, and what shows it: a test, a file of results, or a page. A row that is not simply done has its
reason."""

MEANINGS = {
    "emulated": "simulated, and run by the clock on devices that sleep through their ops",
    "simulated": "run by the simulator alone",
    "on one GPU": "measured with all ranks on a single GPU, which is less than the paper's one for each rank",
    "differently": "done in another way than in the paper",
    "host half": "all but the copies from and to a device",
    "open": "this machine could do it, and it has not been done",
}
"""Of the states of rows, those that the page explains where a row has them."""

COMPUTED = """\
In this table, ops really compute: a small GPT with one thread per rank, and no more ranks than cores. On emulated
devices an op takes the time that the costs say. So a run by the clock tests dispatch and transport, not the costs.

The tuner measures layers and messages by themselves, and predicts a step from them. Then steps are timed. *Off* is
`|predicted / measured - 1|`. Only rounds in which the machine was quiet count
([how](../../benchmarks/tune/README.md)). Predicted, measured and off are each the median over these rounds. So off
can differ from the quotient of the other two medians."""


def pages() -> dict[str, str]:
    """The text of each page, by its file's name."""
    return {f"{each.key}.md": page(each) for each in PAPERS} | {"audit.md": audit()}


def page(paper: Paper) -> str:
    """A paper's page: its numbers beside ours, then figure by figure."""
    again = sum(claim.again is not None for claim in paper.claims)
    lines = [
        MADE,
        "",
        f"# {paper.title}",
        "",
        paper.filled(paper.intro.strip()),
        "",
        HOW.format(trained=TRAINED if any(claim.trained for claim in paper.claims) else ""),
        "",
        f"`make papers-quick` simulates {again} of the {len(paper.claims)} rows of this table anew, and compares the",
        "results digit by digit. It takes a quarter of an hour at most.",
        "",
        *_claims(paper.claims),
    ]
    for item in paper.items:
        lines += ["", f"## {item.name}: {item.about}", "", *_item(paper, item)]
    return "\n".join(lines) + "\n"


def _claims(claims: Sequence[Claim]) -> Iterator[str]:
    """A column for trained losses stands only where a paper has some."""
    columns = {"simulated": "simulated", "measured": "by the clock"}
    if any(claim.trained for claim in claims):
        columns["trained"] = "trained"
    yield f"| figure | of what | the paper | {' | '.join(columns.values())} |"
    yield f"|---|---|---:|{'---:|' * len(columns)}"
    for claim in claims:
        paper = "" if claim.paper is None else claim.show.format(claim.paper)
        yield f"| {claim.item} | {claim.what} | {paper} | {' | '.join(map(claim.shown, columns))} |"


def _item(paper: Paper, item: Item) -> Iterator[str]:
    if item.reason and not item.has_results:
        yield item.reason.strip()
        return
    if item.finding:
        yield paper.filled(item.finding.strip())
        yield ""
    if item.chart:
        yield f"![{item.about}](../../experiments/{item.chart})"
        yield ""
    yield f"`python -m experiments.{item.command}`"
    yield ""
    for name in item.files:
        yield from [
            "```text",
            *(line.rstrip() for line in paper.table(item, rows_of(name))),
            "```",
            "",
            recorded(name),
            "",
        ]
    for name in item.also:
        yield from [recorded(name), ""]
    label, text = (
        "**About these runs.**" if item.own else "**What differs, and why.**",
        paper.filled(item.differs.strip()),
    )
    yield from [label, "", text] if text.startswith(("-", "*")) else [f"{label} {text}"]


def recorded(name: str) -> str:
    """A line on how a file of results came about."""
    found = facts_of(name)
    paper, _, file = name.partition("/")
    link = f"[{file}.json](../../experiments/{paper}/results/{file}.json)"
    if "record" not in found:
        return f"{link}."
    device = found.get("device", "cpu")
    said = _run(found["record"], "" if device == "cpu" else f"one {device}, ")
    if earlier := found.get("earlier"):
        commits = ", ".join(dict.fromkeys(_commit(each) for each in earlier))
        which = "put down afterwards, from the history" if earlier[0].get("rows_from_history") else "its number"
        said += f"; before it {len(earlier)} more, at {commits}; each row says its run ({which})"
    if "measured" in found:
        said += f"; by the clock {_run(found['measured'])}"
    return f"{link}: {said}."


def _run(of: Mapping[str, Any], gpu: str = "") -> str:
    """A run, in words."""
    machine = of["machine"]
    drawn = f", seeds {', '.join(map(str, of['seeds']))}" if of["seeds"] else ""
    load = f", load {of['load'][0]:.1f}" if of["load"] else ", load not recorded"
    later = "; put down afterwards, from the history" if of.get("from_history") else ""
    return (
        f"`{of['command']}` at commit {_commit(of)}, {gpu}{machine['processor']}, {machine['num_processors']} cores"
        f"{drawn}{load}{later}"
    )


def _commit(of: Mapping[str, Any]) -> str:
    """Nine digits, and `+` where sources differed from it."""
    commit: str = of["commit"]
    return commit[:9] + commit[40:]


def audited() -> list[dict[str, Any]]:
    """The rows of the audit. One may say in `once` what it becomes when the results in its evidence are there.

    A name in braces in a reason stands for the number of that name of the row's paper.
    """
    rows = audit_as_written()
    for row in rows:
        then = row.pop("once", None)
        if then and all((ROOT / path).exists() for path in then["evidence"] if path.endswith(".json")):
            row.update(then)
        row["why"] = PAPER_OF[row["paper"]].filled(row["why"])
    return rows


def audit_as_written() -> list[dict[str, Any]]:
    """The rows of the audit's file."""
    rows: list[dict[str, Any]] = json.loads(AUDIT.read_text(encoding="utf-8"))
    return rows


def audit() -> str:
    """The audit's table, row by row."""
    rows = audited()
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["state"]] = counts.get(row["state"], 0) + 1
    lines = [
        MADE,
        "",
        "# The papers, row by row",
        "",
        STATES.format(len(rows)),
        "",
        *(f"- *{state[0].upper()}{state[1:]}*: {text}." for state, text in MEANINGS.items() if state in counts),
        "",
        "| state | rows |",
        "|---|---:|",
        *(f"| {state} | {count} |" for state, count in sorted(counts.items(), key=lambda each: -each[1])),
    ]
    for key, name in NAMES.items():
        lines += ["", f"## {name}", "", "| item | then | now | what shows it | reason |", "|---|---|---|---|---|"]
        for row in rows:
            if row["paper"] == key:
                shown = "<br>".join(map(_evidence, row["evidence"]))
                lines.append(f"| {row['item']} | {row['was']} | {row['state']} | {shown} | {row['why']} |")
    return "\n".join([*lines, "", *_real()]) + "\n"


def _evidence(each: str) -> str:
    path, _, test = each.partition("::")
    if path.startswith("docs/"):
        target = path.removeprefix(SITE) if path.startswith(SITE) else f"../{path.removeprefix('docs/')}"
    else:
        target = f"../../{path}"
    return f"[{test.replace('_', ' ') if test else _name(path)}]({target})"


def _name(path: str) -> str:
    """What a link to a file says: a page's title, the folder of a README, else the file's name."""
    if path.startswith(SITE):
        return next(each.title for each in PAPERS if path == f"{SITE}{each.key}.md")
    folder, _, file = path.rpartition("/")
    if file == "README.md":
        return folder
    if folder.startswith("docs"):
        title = (ROOT / path).read_text(encoding="utf-8").splitlines()
        return next(line for line in title if line.startswith("# ")).removeprefix("# ").rpartition("/: ")[2]
    return file


def _real() -> Iterator[str]:
    """The tuner's prediction against the clock, with at most as many ranks as cores."""
    value = json.loads(REAL.read_text(encoding="utf-8"))
    yield "## Real computation"
    yield ""
    yield COMPUTED
    yield ""
    yield "| schedule | ranks | microbatches | predicted, ms | measured, ms | off, median | off, worst | rounds |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    yield from real_rows(value)


def real_rows(value: dict[str, Any]) -> Iterator[str]:
    for case in value["rows"]:
        quiet = f"{case['num_quiet']} of {case['num_rounds']}"
        yield (
            f"| {case['schedule']} | {case['pp']} | {case['num_microbatches']} | {case['predicted_ms']:.1f} | "
            f"{case['measured_ms']:.1f} | {case['off']:.1%} | {case['worst']:.1%} | {quiet} |"
        )


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
