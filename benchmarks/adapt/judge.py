"""Judges one run of `run.py` by its own records, as the README's protocol says. Pure: lines in, a verdict out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

BEFORE = 20
"""Steps before a change that it is held against, at most."""
SLOWER, WITHIN = 1.02, 10
"""A false decision with steps longer than this many times those before must not run more steps than that."""
LASTS = 5
"""Steps of which most must have the fault for the first of them to be its onset."""
ANSWER = 3
"""Steps with the fault in which it must be answered."""
NAMES = ("memory", "noise", "absorbed", "taken back")
"""Obstacles that name the caps, or the noise of steps, as what stood in the way."""
Link = tuple[int, int]


def parsed(lines: Iterable[str]) -> list[dict[str, Any]]:
    """JSON lines; the last one may be cut off."""
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def onset(rows: Sequence[Mapping[str, Any]], link: Link, ms: float) -> int | None:
    """The first step in which the link's messages, in either direction, took half of the injected delay or more, and
    in most of the `LASTS` steps from it on: a busy machine makes single messages as late."""
    ways = (f"{link[0]}:{link[1]}", f"{link[1]}:{link[0]}")
    late = [max(row["links"].get(way, 0.0) for way in ways) >= ms / 2 for row in rows]
    for at, row in enumerate(rows):
        if late[at] and sum(late[at : at + LASTS]) > len(late[at : at + LASTS]) / 2:
            return int(row["iteration"])
    return None


def names_link(reason: str, link: Link) -> bool:
    """Whether a decision's reason, or a finding, names the link in either direction."""
    named = {tuple(sorted(map(int, pair))) for pair in re.findall(r"(\d+):(\d+)", reason)}
    return tuple(sorted(link)) in named


def judge(
    control: Iterable[str], iterations: Iterable[str], link: Link | None = None, fault_ms: float = 0.0
) -> dict[str, Any]:
    """What a run came to.

    Args:
        control, iterations: lines of control.jsonl and of iterations.jsonl.
        link: whose messages were made late by `fault_ms`; None where no fault was injected.

    Returns:
        `onset`: step of the fault; `false`: each false decision with its steps before and with it, `ok` where it
        was harmless; `answered`: whether a decision that names the link was made in time and ran; `reasons`: what the
        run says stood in the way; `explained`: whether one of them is of `NAMES`.
    """
    lines, rows = parsed(control), parsed(iterations)
    start = None if link is None else onset(rows, link, fault_ms)
    decisions = [value["decision"] for value in lines if "decision" in value]
    changes = [each for each in decisions if each["action"] != "take back"]
    ran = {each["number"]: [row for row in rows if row["number"] == each["number"]] for each in decisions}
    false = [
        _false(each, ran[each["number"]], rows, start)
        for each in changes
        if start is None or each["iteration"] < start or link is None or not names_link(each["reason"], link)
    ]
    found: dict[str, Any] = {
        "steps": len(rows),
        "median_ms": round(median(row["ms"] for row in rows), 3) if rows else None,
        "decisions": len(changes),
        "taken_back": len(decisions) - len(changes),
        "false": false,
        "false_ok": all(each["ok"] for each in false),
        "verdicts": [value["verdict"] for value in lines if "verdict" in value],
    }
    if link is None:
        return found
    answers = [
        each
        for each in changes
        if start is not None
        and each["iteration"] >= start
        and names_link(each["reason"], link)
        and ran[each["number"]]
    ]
    said = [value["unanswered"] for value in lines if "unanswered" in value]
    about = [each for each in said if names_link(" ".join(each["cause"]), link)]
    back = [value["verdict"] for value in lines if "verdict" in value and not value["verdict"]["kept"]]
    reasons = [f"{each['obstacle']}: {each['why']}" for each in about]
    reasons += [f"taken back: {each['why']}" for each in back if start is not None and each["iteration"] >= start]
    in_time = [each for each in answers if start is not None and each["iteration"] < start + ANSWER]
    found |= {
        "onset": start,
        "made": answers[0]["iteration"] if answers else None,
        "ran_from": ran[answers[0]["number"]][0]["iteration"] if answers else None,
        "answered": bool(in_time),
        "answered_late": bool(answers) and not in_time,
        "reasons": reasons,
        "explained": any(reason.startswith(NAMES) for reason in reasons),
    }
    return found


def _false(
    decision: Mapping[str, Any],
    mine: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    start: int | None,
) -> dict[str, Any]:
    """A false decision: its steps are held against those right before it, the fault's steps against none without."""
    found = {"number": decision["number"], "made": decision["iteration"], "action": decision["action"]}
    if not mine:
        return found | {"ran": 0, "before": None, "with": None, "ok": True}
    first = mine[0]["iteration"]
    late = start is not None and first >= start
    same = [row for row in mine if late or start is None or row["iteration"] < start]
    before = [
        row["ms"]
        for row in rows
        if row["iteration"] < first and (not late or start is None or row["iteration"] >= start)
    ][-BEFORE:]
    if not before or not same:
        return found | {"ran": len(mine), "before": None, "with": None, "ok": len(mine) <= WITHIN}
    level, now = median(before), median(row["ms"] for row in same)
    ok = now <= SLOWER * level or len(same) <= WITHIN
    return found | {"ran": len(same), "before": round(level, 3), "with": round(now, 3), "ok": ok}
