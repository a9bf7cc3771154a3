"""Judges the three runs of a seed by their own records, and a cell by its seeds, as the README's protocol says.

    oracle, without, with   -->  judge_seed  -->  a row of numbers  -->  judge_cell  -->  what must hold, and does it

Pure: records in, numbers out. Times of emulated steps are those of the devices that they stand for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

BEFORE = 20
"""Steps before a false decision that it is held against, at most."""
RECOVERED = {0: 0.8, 1: 0.6}
"""The share of what the oracle recovers that must be recovered in the median, by busy loops beside the run."""
HARM = 0.05
"""Share of a run's time that a fault may cost more with `--adapt` than without."""
LOST = 0.01
"""Share of a run's time that false decisions may cost."""
PAGE = 0.2
"""How far from the truth the page's "saved" may be, relative to it."""
NOISE = 0.02
"""Share of a run's time by which two equal runs may differ: what is smaller is neither saved nor lost."""
RETURNS = ("take back", "stop delegating")
"""Actions that go back, and so answer nothing and are not false."""
LINKS = re.compile(r"(\d+)[:>–](\d+)")
Link = tuple[int, int]


@dataclass(frozen=True)
class Seed:
    """The records of one seed.

    Attributes:
        oracle, without, adapting: ms of each run's steps. warmup: how many of the first do not count.
        fault: the late link, the fault's first step, and the first after it; None for none.
        control, iterations: lines of the adapting run's control.jsonl and iterations.jsonl.
        saved: ms that the page of that run says were saved, by measured steps; None where it cannot tell.
        about: the middle of the range that it says if steps vary too much to tell; None where it says nothing.
    """

    oracle: Sequence[float]
    without: Sequence[float]
    adapting: Sequence[float]
    fault: tuple[Link, int, int] | None
    control: Sequence[str]
    iterations: Sequence[str]
    saved: float | None
    about: float | None = None
    warmup: int = 0


def parsed(lines: Iterable[str]) -> list[dict[str, Any]]:
    """JSON lines; the last one may be cut off."""
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def names_link(reason: str, link: Link) -> bool:
    """Whether a reason names a link in either direction."""
    named = {tuple(sorted(map(int, pair))) for pair in LINKS.findall(reason)}
    return tuple(sorted(link)) in named


def is_for(decision: Mapping[str, Any], link: Link) -> bool:
    """Whether a change is for a link: its reason names it, it delegates it, or it moves nodes."""
    configuration = decision["configuration"]
    nodes = list(configuration.get("nodes", ()))
    return names_link(decision["reason"], link) or list(link) in configuration["delegated"] or nodes != sorted(nodes)


def judge_seed(seed: Seed) -> dict[str, Any]:
    """What the runs of a seed came to.

    Returns:
        run_ms: of the run without, from the first step that counts. recoverable, recovered: by how much the oracle's
            and the adapting run were shorter.
        claimed: ms that the page says were saved. is_range: whether it says a range, of which that is the
            middle.
        onset: the fault's first step. made: the step after which a change for it was decided. ran_from: the first
            step with that change. answered: whether there is one, and the fault's last step ran something else than
            the first step of the run did.
        decisions: changes that ran. taken_back: changes back to what ran before, or at the start.
        false: changes that were made without a fault, or for other links. false_steps, false_ms: the steps that ran
            them, and what these lost.
    """
    oracle_ms, run_ms, ms = (sum(steps[seed.warmup :]) for steps in (seed.oracle, seed.without, seed.adapting))
    decisions = [value["decision"] for value in parsed(seed.control) if "decision" in value]
    rows = parsed(seed.iterations)
    start = rows[0]["digest"] if rows else ""
    changes = [each for each in decisions if each["action"] not in RETURNS and each["digest"] != start]
    onset = None if seed.fault is None else seed.fault[1]
    in_fault = [row for row in rows if seed.fault is not None and seed.fault[1] <= row["iteration"] < seed.fault[2]]
    numbers = {each["number"] for each in changes if _is_false(each, seed.fault)}
    answers = [
        each
        for each in changes
        if each["number"] not in numbers and seed.fault is not None and is_for(each, seed.fault[0])
    ]
    ran = [row for row in rows if answers and row["number"] == answers[0]["number"]]
    lost = [_lost(number, rows, onset) for number in sorted(numbers)]
    claimed = seed.about if seed.saved is None else seed.saved
    return {
        "run_ms": round(run_ms, 1),
        "recoverable": round(run_ms - oracle_ms, 1),
        "recovered": round(run_ms - ms, 1),
        "claimed": None if claimed is None else round(claimed, 1),
        "is_range": seed.saved is None and claimed is not None,
        "onset": onset,
        "answered": bool(answers and in_fault) and in_fault[-1]["digest"] != start,
        "made": answers[0]["iteration"] if answers else None,
        "ran_from": ran[0]["iteration"] if ran else None,
        "decisions": sum(any(row["number"] == each["number"] for row in rows) for each in changes),
        "taken_back": len(decisions) - len(changes),
        "false": len(numbers),
        "false_steps": sum(steps for steps, _ in lost),
        "false_ms": round(sum(ms for _, ms in lost), 1),
    }


def _is_false(decision: Mapping[str, Any], fault: tuple[Link, int, int] | None) -> bool:
    """Whether a change was made while no fault lasted, and not in the step after one, or for other links."""
    if fault is None or not fault[1] <= decision["iteration"] <= fault[2]:
        return True
    return bool(LINKS.search(decision["reason"])) and not is_for(decision, fault[0])


def _lost(number: int, rows: Sequence[Mapping[str, Any]], onset: int | None) -> tuple[int, float]:
    """The steps that a false decision ran, and the ms that these took longer than as many of those before it.

    Steps with the fault are held against steps with the fault alone, and those without against those without.
    """
    mine = [row for row in rows if row["number"] == number]
    if not mine:
        return 0, 0.0
    first = mine[0]["iteration"]
    if onset is None or first < onset:
        alike = [row for row in rows if onset is None or row["iteration"] < onset]
    else:
        alike = [row for row in rows if row["iteration"] >= onset]
    before = [row["ms"] for row in alike if row["iteration"] < first][-BEFORE:]
    took = [row["ms"] for row in alike if row["number"] == number]
    level = median(before or took)
    return len(mine), max(0.0, sum(took) - level * len(took))


def share(row: Mapping[str, Any]) -> float | None:
    """The share of what the oracle recovered; None where that was no more than two equal runs may differ."""
    if row["recoverable"] <= NOISE * row["run_ms"]:
        return None
    return float(row["recovered"] / row["recoverable"])


def page_error(row: Mapping[str, Any]) -> float:
    """How far the page's "saved" is from the truth, relative to it, or to what two equal runs may differ if that is
    more."""
    claimed = row["claimed"] or 0.0
    return float(abs(claimed - row["recovered"]) / max(abs(row["recovered"]), NOISE * row["run_ms"]))


def has_wrong_sign(row: Mapping[str, Any]) -> bool:
    """Whether the page says saved where the run was longer, or the other way, by more than two equal runs differ."""
    least = NOISE * row["run_ms"]
    claimed, truth = row["claimed"] or 0.0, row["recovered"]
    return (claimed > least and truth < -least) or (claimed < -least and truth > least)


def judge_cell(load: int, fault: bool, lasts: int | None, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A cell: its numbers over all seeds, and each aim that it misses, in words.

    Args:
        load: busy loops beside the runs.
        fault: whether there was one. lasts: its steps; None: to the end.
        rows: of `judge_seed`.
    """
    shares = [each for row in rows if (each := share(row)) is not None]
    worst = min((row["recovered"] / row["run_ms"] for row in rows), default=0.0)
    errors = [page_error(row) for row in rows if row["claimed"] is not None]
    lost = [row["false_ms"] / row["run_ms"] for row in rows]
    found: dict[str, Any] = {
        "num_seeds": len(rows),
        "recoverable": _middle([row["recoverable"] / row["run_ms"] for row in rows]),
        "share": _middle(shares),
        "longer": None if fault else _middle([-row["recovered"] / row["run_ms"] for row in rows]),
        "worst": round(worst, 3),
        "answered": sum(row["answered"] for row in rows),
        "steps_to_decision": _middle([row["made"] - row["onset"] for row in rows if row["made"] is not None]),
        "steps_to_switch": _middle([row["ran_from"] - row["onset"] for row in rows if row["ran_from"] is not None]),
        "decisions": sum(row["decisions"] for row in rows),
        "false": sum(row["false"] for row in rows),
        "false_steps": sum(row["false_steps"] for row in rows),
        "false_ms": round(sum(row["false_ms"] for row in rows), 1),
        "page_error": _middle(errors),
        "page_silent": sum(row["claimed"] is None for row in rows),
        "page_right": sum(each <= PAGE for each in errors),
        "page_wrong_sign": sum(has_wrong_sign(row) for row in rows),
    }
    missed = []
    if fault and lasts is None and load in RECOVERED and (not shares or median(shares) < RECOVERED[load]):
        missed.append(f"recovered less than {RECOVERED[load]:.0%} of what the oracle does in the median")
    if fault and worst < -HARM:
        missed.append(f"a run lost more than {HARM:.0%}")
    if lasts is not None and lasts <= 3 and found["decisions"]:
        missed.append("a burst was answered")
    if not fault and (
        max(lost, default=0.0) > LOST or median(-row["recovered"] / row["run_ms"] for row in rows) > LOST
    ):
        missed.append(f"more than {LOST:.0%} of a run lost without a fault")
    if fault and lasts is None and 2 * len(errors) <= len(rows):
        missed.append("the page cannot tell what was saved in half of the runs or more")
    if fault and lasts is None and errors and median(errors) > PAGE:
        missed.append(f'the page\'s "saved" is more than {PAGE:.0%} off in the median')
    if found["page_wrong_sign"]:
        missed.append('the page says "saved" of a loss, or the other way')
    return found | {"missed": missed}


def _middle(values: Sequence[float]) -> list[float] | None:
    """Median, least and most."""
    return [round(each, 3) for each in (median(values), min(values), max(values))] if values else None


ANSWERED = {0: 18, 1: 15}
"""Of 20 runs of the tutorial's command, how many must be answered, by busy loops beside them."""


def is_answered(control: Iterable[str], iterations: Iterable[str], link: Link) -> bool:
    """Whether a run changed for a late link, and kept the change to its end."""
    rows = parsed(iterations)
    decisions = [value["decision"] for value in parsed(control) if "decision" in value]
    answers = [each for each in decisions if each["action"] not in RETURNS and is_for(each, link)]
    return bool(answers and rows) and rows[-1]["digest"] != rows[0]["digest"]
