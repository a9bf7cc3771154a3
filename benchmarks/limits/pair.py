"""Are proofs, dispatch, plans for a late link, large schedules and deciders as good as at an earlier commit?

    python benchmarks/limits/pair.py --before CHECKOUT --after CHECKOUT --core 0 --part plain
    python benchmarks/limits/pair.py --readme                        writes the table of README.md from pair.json

The protocol, written before its runs. Each checkout answers from its own sources and environment
(`.venv/bin/python`), in one process on one core (answers.py). One checkout answers a question, then at once the
other; they take turns in being first. Answers go to runs/limits_pair/ as they come, and the same command continues
from there. pair.json is the summary. These are the parts, their questions and aims:

plain, uneven, free, offload, graphs
    The problems of benchmarks/proofs, seeds 0 to 1999 of each kind, with .3 s for a plain plan and .2 s for others.
    Each is judged as in that benchmark: the planner's bounds, its value and what ranks hold, beside an exact
    solver. The solver's answers are those that the earlier checkout keeps. Where it keeps none, the solver has 20 s
    now. Aims: nothing is wrong, and at least .9 of what was proved before is proved.
caps
    The 2,000 plain problems under caps of which some are less than a rank needs for one microbatch. Aim: `ps.plan`
    refuses those for which the exact solver proves that there is no order, and no others.
dispatch
    The 240 schedules of benchmarks/dispatch. Aims: over the earlier checkout's schedules all makespans and what
    `auto` chooses are the same. Over a checkout's own plans no mean over the frozen run is more than .003 above the
    earlier.
late plan
    The six cases of benchmarks/late_link: warm-ups; 12, 10 and 8 in flight; host memory. Aims: no plan is longer
    and no bound lower by more than .003. The same orders take the same simulated time under every dispatch.
late measured
    The cases with warm-ups and 12, 10 and 8 in flight on emulated devices; medians of five steps over the undelayed
    time. Aim: no way to run is slower by more than .02 of that time.
large
    `zb-h1` of 1,024 x 4,096 by benchmarks/engine, one round in each of six processes a side. Aim: the least processor
    time of check, lower and simulate together is at most 1.05 of the earlier. (Changed after three rounds by the
    clock, whose times differed twofold within a side: other work ran on the machine.)
deciders
    10,000 problems, seeds 0 to 9999: the simulator under four policies, in C and in Python, the runtime's
    dispatchers over the same clock, and list scheduling by rules and by values, in C and in Python. (The earlier
    commit has numba in place of C.) Aim: all forms make the same orders with the same start times, to the last bit,
    and as before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.readme import markdown, write_between
from experiments.common.record import commit, record
from experiments.common.summary import save_summary

HERE = Path(__file__).resolve().parent
ROWS = HERE.parents[1] / "runs/limits_pair"
SIDES = ("before", "after")
KINDS = {"plain": "proofs", "uneven": "uneven", "free": "free", "offload": "offload", "graphs": "graphs"}
"""By kind of proof, the file of the exact solver's answers in the earlier checkout."""
SECONDS = {"plain": 0.3}
OTHER_SECONDS = 0.2
LATE = ("warm-ups", "12", "10", "8", "8 and host memory", "8 halved and host memory")
BLOCK = 100
"""Problems of deciders that one question asks for."""
Row = dict[str, Any]


class Checkout:
    """A process that answers from one checkout."""

    def __init__(self, root: Path, core: int | None) -> None:
        self.root = root
        words = [] if core is None else ["taskset", "-c", str(core)]
        words += [str(root / ".venv/bin/python"), str(HERE / "answers.py")]
        paths = os.pathsep.join(map(str, (root / "src", root, root / "tests")))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env=environment
        )

    def ask(self, *question: Any) -> Any:
        _pipe(self._process.stdin).write(json.dumps(question) + "\n")
        _pipe(self._process.stdin).flush()
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise SystemExit(f"{self.root} ended at {question}; its error is above")
        return json.loads(line)


def _pipe(found: IO[str] | None) -> IO[str]:
    assert found is not None
    return found


class Pair:
    """Both checkouts, which take turns in being asked first."""

    def __init__(self, before: Path, after: Path, core: int | None) -> None:
        self.before, self.after = Checkout(before, core), Checkout(after, core)
        self._turn = 0

    def ask(self, *question: Any) -> Row:
        self._turn += 1
        sides = SIDES if self._turn % 2 else SIDES[::-1]
        return {side: getattr(self, side).ask(*question) for side in sides}

    def known(self, kind: str) -> dict[int, list[Any]]:
        """By seed, the exact solver's answers that the earlier checkout keeps."""
        _, *lines = (self.before.root / f"benchmarks/proofs/{KINDS[kind]}.jsonl").read_text().splitlines()
        return {row["case"]: row["solved"] for row in map(json.loads, lines)}


def questions(part: str, pair: Pair) -> dict[str, Callable[[], Row]]:
    """By name, what is asked in a part."""
    if part in KINDS:
        known, seconds = pair.known(part), SECONDS.get(part, OTHER_SECONDS)
        return {str(seed): lambda s=seed: proof(pair, part, s, seconds, known.get(s)) for seed in range(2000)}
    if part == "caps":
        return {str(seed): lambda s=seed: caps(pair, s) for seed in range(2000)}
    if part == "dispatch":
        from benchmarks.dispatch.run import COSTS, SCHEDULES, SIZES

        given = [(name, *size, kind) for name in SCHEDULES for size in SIZES for kind in COSTS]
        return {" ".join(map(str, each)): lambda each=each: dispatched(pair, each) for each in given}
    if part == "late plan":
        return {case: lambda c=case: late_plan(pair, c) for case in LATE}
    if part == "late measured":
        return {case: lambda c=case: late_measured(pair, c) for case in LATE[:4]}
    if part == "large":
        return {str(turn): lambda: pair.ask("large", 1024, 4096) for turn in range(6)}
    return {str(first): lambda f=first: decided(pair, f) for first in range(0, 10_000, BLOCK)}


def proof(pair: Pair, kind: str, seed: int, seconds: float, known: list[Any] | None) -> Row:
    if known:
        found = pair.ask("proof", kind, seed, seconds, known)
    else:
        after = pair.after.ask("proof", kind, seed, seconds, None)
        found = {"before": pair.before.ask("proof", kind, seed, seconds, after["solved"]), "after": after}
    assert found["before"]["case"] == found["after"]["case"], f"{kind} {seed} is another problem in each checkout"
    return found


def caps(pair: Pair, seed: int) -> Row:
    after = pair.after.ask("refused", seed, None)
    return {"before": pair.before.ask("refused", seed, after["impossible"]), "after": after}


def dispatched(pair: Pair, given: tuple[Any, ...]) -> Row:
    found = pair.ask("dispatched", *given, "")
    texts = [found[side].pop("schedule") for side in SIDES]
    same = found["after"] if texts[0] == texts[1] else pair.after.ask("dispatched", *given, texts[0])
    return {**found, "same": same["rows"] == found["before"]["rows"]}


def late_plan(pair: Pair, case: str) -> Row:
    found = pair.ask("late_plan", case)
    before = found["before"]
    again = pair.after.ask("late_ways", case, before["memory_limit"], before["schedules"])
    return {**found, "same": again == before["ways"]}


def late_measured(pair: Pair, case: str) -> Row:
    plans = {row["name"]: row for row in rows_of("late plan")}
    return pair.ask("late_measured", case, plans[case]["before"]["memory_limit"])


def decided(pair: Pair, first: int) -> Row:
    """By decider: problems whose forms differ within a side, or between the sides, and those that all refuse."""
    found = pair.ask("decided", first, first + BLOCK)
    counts: Row = {}
    for seed, (was, now) in enumerate(zip(found["before"], found["after"], strict=True), first):
        for decider in now:
            row = counts.setdefault(decider, {"cases": 0, "refused": 0, "before": [], "after": [], "between": []})
            row["cases"] += 1
            row["refused"] += now[decider]["C"].startswith("refused")
            for side, forms in (("before", was[decider]), ("after", now[decider])):
                row[side] += [seed] if len(set(forms.values())) > 1 else []
            row["between"] += [seed] if was[decider] != now[decider] else []
    return counts


def rows_of(part: str) -> list[Row]:
    path = ROWS / f"{part}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(part: str, pair: Pair, most: int | None) -> None:
    ROWS.mkdir(parents=True, exist_ok=True)
    known = {row["name"] for row in rows_of(part)}
    left = [each for each in questions(part, pair).items() if each[0] not in known][:most]
    after = commit(pair.after.root, ["src"])[:8]
    for name, ask in left:
        line = json.dumps({"name": name, "commit": after, **ask()})
        with (ROWS / f"{part}.jsonl").open("a") as file:
            file.write(line + "\n")


def summary_of(part: str, rows: list[Row]) -> list[Row]:
    """The rows of a part in pair.json: figures [before, after], and the names of what is not as it should be."""
    if part in KINDS:
        return [of_proofs(rows)]
    if part == "caps":
        wrong = [[row["name"] for row in rows if row[s]["refused"] != row[s]["impossible"]] for s in SIDES]
        impossible = sum(row["after"]["impossible"] is True for row in rows)
        return [{"name": "cases", "cases": len(rows), "impossible": impossible, "wrong": wrong}]
    if part == "dispatch":
        return of_dispatch(rows)
    if part == "late plan":
        sides = {name: [[row[side][name] for side in SIDES] for row in rows] for name in ("makespan", "lower_bound")}
        ways = [{way: [row[side]["ways"][way] for side in SIDES] for way in row["after"]["ways"]} for row in rows]
        each = zip(rows, sides["makespan"], sides["lower_bound"], ways, strict=True)
        return [{"name": row["name"], "same": row["same"], "plan": p, "bound": b, **w} for row, p, b, w in each]
    if part == "late measured":
        found = []
        for row in rows:
            middle = {s: {w: statistics.median(x["measured"]) for w, x in row[s].items()} for s in SIDES}
            over = {w: [round(middle[s][w] / middle[s]["undelayed"], 4) for s in SIDES] for w in row["after"]}
            found.append({"name": row["name"], **over})
        return found
    if part == "large":
        least = {p: [min(row[s][p] for row in rows) for s in SIDES] for p in rows[0]["after"]}
        three = [min(sum(row[s][p] for p in ("check", "lower", "simulate")) for row in rows) for s in SIDES]
        return [{"name": "least of all rounds", "rounds": len(rows), "check, lower, simulate": three, **least}]
    found = {}
    for row in rows:
        for decider, counts in row.items():
            if decider not in ("name", "commit"):
                kept = found.setdefault(decider, {name: type(value)() for name, value in counts.items()})
                for name, value in counts.items():
                    kept[name] += value
    return [{"name": decider, **counts} for decider, counts in found.items()]


def of_proofs(rows: list[Row]) -> Row:
    def both(value: Callable[[Row], Any]) -> list[int]:
        return [sum(bool(value(row[side])) for row in rows) for side in SIDES]

    ratios = [row["after"]["value"] / row["before"]["value"] for row in rows if all(row[s]["value"] for s in SIDES)]
    wrong = [row for row in rows if row["before"]["wrong"] or row["after"]["wrong"]]
    return {
        "name": "cases", "cases": len(rows), "optimum known": sum(row["after"]["solved"][2] for row in rows),
        "proved": both(lambda found: found["proved"]),
        "optimal": both(lambda found: found["value"] is not None and found["value"] == found["solved"][0]),
        "wrong": both(lambda found: found["wrong"]),
        "wrong cases": [{row["name"]: {s: row[s]["wrong"] for s in SIDES}} for row in wrong],
        "plan after / before": statistics.fmean(ratios),
    }  # fmt: skip


def of_dispatch(rows: list[Row]) -> list[Row]:
    found: dict[str, Row] = {}
    for row in rows:
        for side in SIDES:
            for name, makespans, chosen in row[side]["rows"]:
                kept = found.setdefault(name, {})
                for policy, ms in {**makespans, "auto": makespans[chosen]}.items():
                    kept.setdefault(policy, {s: [] for s in SIDES})[side].append(ms / makespans["frozen"])
    means = {name: {p: [round(statistics.fmean(x[s]), 4) for s in SIDES] for p, x in of.items() if p != "frozen"}
             for name, of in found.items()}  # fmt: skip
    same = {"name": "same schedules", "schedules": len(rows), "differ": [r["name"] for r in rows if not r["same"]]}
    return [same, *({"name": name, **of} for name, of in means.items())]


def table(parts: dict[str, list[Row]]) -> list[str]:
    """The table of README.md: figures before and after."""
    lines = []
    for part, rows in parts.items():
        for row in rows:
            told = [f"{name} {_shown(value)}" for name, value in row.items() if name != "name"]
            lines.append([part, row["name"], "; ".join(told)])
    return markdown(["part", "", "figures: before → after"], lines)


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) == len(SIDES) and all(isinstance(each, int | float) for each in value):
        return " → ".join(map(_shown, value))
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def main() -> None:
    parts = (*KINDS, "caps", "dispatch", "late plan", "late measured", "large", "deciders")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the earlier commit, with its .venv")
    parser.add_argument("--after", type=Path, help="a checkout of the later commit, with its .venv")
    parser.add_argument("--part", choices=parts, action="append", default=[])
    parser.add_argument("--core", type=int, help="the one core on which both answer (default: any)")
    parser.add_argument("--most", type=int, help="no more questions of a part than this")
    parser.add_argument("--readme", action="store_true")
    given = parser.parse_args()
    path = HERE / "pair.json"
    if given.readme:
        write_between(HERE / "README.md", "pair", table(json.loads(path.read_text())["parts"]))
        return
    pair = Pair(given.before.resolve(), given.after.resolve(), given.core)
    for part in given.part:
        run(part, pair, given.most)
    summaries = {part: summary_of(part, rows) for part in parts if (rows := rows_of(part))}
    words = "python benchmarks/limits/pair.py --before CHECKOUT --after CHECKOUT --core 0 --part PART"
    commits = {part: rows_of(part)[-1]["commit"] for part in summaries}
    commits = {"before": commit(pair.before.root, ["src"])[:8], **commits}
    save_summary(path, {**record(), "command": words, "commits": commits, "parts": summaries})


if __name__ == "__main__":
    main()
