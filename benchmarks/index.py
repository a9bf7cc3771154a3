"""Writes the tables of README.md here: of each folder its question, its headline, and the command that repeats it.

    python benchmarks/index.py

Every number comes out of the folder's results; the one folder that has none as JSON has its README quoted.
`experiments/tests/test_benchmark_results.py` makes the tables again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.common.readme import markdown, write_between

FOLDER = Path(__file__).resolve().parent


class Benchmark(NamedTuple):
    """A line of the index; the README of the folder has the command, word for word."""

    folder: str
    question: str
    headline: Callable[[], str]
    command: str


def read(file: str) -> Any:
    return json.loads((FOLDER / file).read_text(encoding="utf-8"))


def adapt() -> str:
    found = read("adapt/results.json")
    cells = found["cells"].values()
    if not cells:
        return "the protocol stands, its runs are still to be made"
    met = sum(not cell["missed"] for cell in cells)
    false, seeds = (sum(cell[name] for cell in cells) for name in ("false", "num_seeds"))
    tutorial = [f"{each['answered']} of {each['num_runs']}" for each in found["tutorial"].values()]
    said = f"{met} of {len(cells)} cells meet their aims; {false} false decisions in {seeds} runs"
    return said + (f"; the tutorial's command is answered in {' and '.join(tutorial)} runs" if tutorial else "")


def analyze() -> str:
    traces = read("analyze/results.json")["traces"]
    most = max(each["slowdown_off"] for each in traces)
    return f"the slowdowns of {len(traces)} public traces are at most {most:.0e} from the study's (relative)"


def arrive() -> str:
    late, healthy = (read("arrive/results.json")["cases"][name]["ways"] for name in ("late", "healthy"))

    def ms(ways: dict[str, Any], way: str) -> float:
        return median(ways[way]["ms"])

    runs = read("arrive/adaptive.json")["runs"]
    most = max(step - detected for run in runs for detected, step in run["changes"])
    cases = [case["nccl"] for case in read("arrive/channels.json")["cases"]]
    plan, placed = (median(case[way] / case[0] for case in cases) for way in (2, 3))
    over, gain = ms(late, "placed") / late["placed"]["simulated"], ms(late, "zb") / ms(late, "placed")
    said = read("arrive/predictions.json")
    return (
        f"with one link 120 ms late a step takes {over:.2f} of its simulated time with our plan and placement, "
        f"{gain:.1f} times as fast as `zb` by torch's lowering; without delay "
        f"{ms(healthy, 'placed') / ms(healthy, 'planned'):.3f} of torch's lowering of the plan (sleeps on gloo). "
        f"A link that turns late and heals gets plans in {sum(run['holds'] for run in runs)} of {len(runs)} runs, "
        f"at most {most} steps after the change was detected. {said['num']} predictions from profiles are "
        f"{said['median']:.1%} off in the median, {said['worst']:.1%} at most. A plan for one NCCL communicator "
        f"takes {plan:.3f} of what no order can beat, one only placed for it {placed:.3f} (simulated, medians)"
    )


def compatibility() -> str:
    found, rules = read("compatibility/results.json"), read("compatibility/rules_results.json")
    trained, refused, wrong = found["trained"], found["refused"], len(found["wrong"])
    said = f"of {found['cells']} combinations {trained} train right; refused by name: {refused}, wrong: {wrong}"
    return f"{said}; of {rules['cells']} with rules that predict weights {rules['trained']} train right"


def delegate() -> str:
    share = read("delegate/results.json")["delegates_share"]
    return (
        f"delegates reach {share['16 MB']:.0%} of the GB/s of a rank that sends by itself at 16 MB, "
        f"{share['64 KB']:.0%} at 64 KB"
    )


def dispatch() -> str:
    rows = read("dispatch/results.json")["rows"]
    late, quiet = rows["one link late"], rows["no delay"]
    return (
        f"`auto` takes {late['auto']['mean']:.2f} of the frozen time with one link late and "
        f"{quiet['auto']['mean']:.3f} with none, over {late['cases']} schedules (simulated)"
    )


def emulated() -> str:
    found = []
    for ranks in ("threads", "processes"):
        errors = read(f"emulated/{ranks}-stretch-2.json")["errors"]["all"]
        found.append(f"{errors['median']:.1%} as {ranks}")
    return f"the median error of a step is {' and '.join(found)}, with times stretched twofold"


def engine() -> str:
    row = max(read("engine/results.json")["rows"], key=lambda each: each["num_ops"])
    return (
        f"`{row['schedule']}` of {row['num_ops'] / 1e6:.1f} million ops: {row['seconds']['all']:.0f} s and "
        f"{row['peak_mib'] / 1024:.1f} GiB from `build` to a timeline"
    )


def faults() -> str:
    found = read("faults/results.json")["runs"].values()
    runs, wrong = (sum(each[name] for each in found) for name in ("runs", "wrong"))
    cells = [cell for file in ("links", "bounded") for cell in read(f"faults/{file}.json")["cells"]]
    cut, right = (sum(each[name] for each in cells) for name in ("runs", "equal"))
    return f"{runs} runs killed or out of disk, {wrong} wrong; {right} of {cut} runs with a network cut are right"


def fuzz() -> str:
    parts = read("fuzz/one-process.json")["in one process"], read("fuzz/between.json")["between processes"]
    cases, same, wrong, raw = (sum(each[name] for each in parts) for name in ("cases", "same", "different", "raw"))
    return f"of {cases:,} random runs {same:,} are the same, {wrong} silently different, {raw} ended in a raw error"


def gaps() -> str:
    rows = [row for row in read("gaps/results.json")["rows"] if row["ortools"]]
    means = {row["family"]: row["mean"] for row in rows}
    least, most = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    return f"mean proven gaps after 10 s are {means[least]:.2%} ({least}) to {means[most]:.2%} ({most})"


def head_of_line() -> str:
    rows = [each for each in read("head_of_line/threads.json")["rows"] if each["pipeline"] == "gpt2-7b"]

    def times(links: str, transport: str) -> Any:
        (row,) = [
            each
            for each in rows
            if (each["schedule"], each["links"], each["transport"]) == ("zb", links, transport)
            and each["depth"] in (None, 2)
        ]
        return row

    occupied, late = times("0:1=occupancy:30ms", "direct"), times("0:1=latency:30ms", "delegate")
    return (
        f"a first link that is occupied for 30 ms makes `zb` {occupied['measured']:.2f} times as long (the paper: "
        f"{occupied['paper']:.2f}); one that is late by as much, with delegates, {late['measured']:.2f} (emulated)"
    )


def hf_families() -> str:
    """Its file is the list of families. Which of them train is a test, and the README says it."""
    return quoted("hf_families", r"\d+ of \d+ families train, equal to the bit")


def lab() -> str:
    found = read("lab/interface.json")["summary"]["interface"]
    equal = "every loss the same to the bit" if found["all_equal"] else "not all losses the same"
    return (
        f"{found['num_runs']} interfaces went down amid a message, which waited {found['median_wait_s']:.2f} s in "
        f"the median and {found['longest_wait_s']:.2f} s at most; {equal}"
    )


def late_link() -> str:
    rows = read("late_link/results.json")["cases"]["warm-ups"]
    ms = {name: median(rows[name]["measured"]) for name in ("undelayed", "frozen", "hinted")}
    return (
        f"a last link 60 ms late makes a step of `zb` {ms['hinted'] / ms['undelayed']:.2f} times as long under "
        f"hinted dispatch, {ms['frozen'] / ms['undelayed']:.2f} times frozen (Penstock's own runtime, emulated)"
    )


def limits() -> str:
    rows = read("limits/results.json")["rows"]
    over = {
        cache: max(most / row["time_limit"] for row in rows if row["cache"] == cache for most in row["elapsed"])
        for cache in ("warm", "cold")
    }
    return f"at most {over['warm']:.2f} times the limit with machine code on disk, {over['cold']:.2f} times without"


def mesh() -> str:
    found = read("mesh/matrix.json")
    rows, jobs = found["largest"], sum(row["jobs"] for row in found["largest"])
    most = max(row[name] for row in rows for name in ("loss", "gradient", "norm", "parameter", "evaluated"))
    equal, alone = (sum(row[name] for row in rows if row["mesh"] == "pipelines alone") for name in ("equal", "jobs"))
    return (
        f"{jobs - len(found['problems'])} of {jobs} jobs are right, within {most:.0e} of "
        f"the largest entry; of the jobs with pipelines alone, {equal} of {alone} are equal to the bit"
    )


def peers() -> str:
    (row,) = [row for row in read("peers/results.json")["rows"] if row["peer"] == "all"]
    return (
        f"of {row['settings']} plans {row['longer']} are longer than theirs; the mean is {row['mean']:.3f} of "
        "theirs (simulated)"
    )


def plan() -> str:
    families = read("plan/free.json")["families"]
    num_plans, most = sum(each["num_problems"] for each in families), max(each["gap"]["most"] for each in families)
    return f"the proven gap of {num_plans} plans without a memory cap is {most:.3%} at most after a second"


def play() -> str:
    row = read("play/results.json")["rows"][0]
    first, frame = median(row["first_ms"]), median(row["frames_ms"])
    return f"the first schedule is there after {first:.0f} ms, a frame takes {frame:.0f} ms in the median"


def profiling() -> str:
    shares = []
    for row in read("profiling/results.json")["rows"]:
        plain, steered = (median(row["cpu_ms"][kind]) for kind in ("plain", "steered"))
        shares.append((steered - plain) / median(row["makespan_ms"]["plain"]))
    return f"{min(shares):.2%} to {max(shares):.2%} of a step in processor time, by rank"


def proofs() -> str:
    kinds = ("proofs", "free", "offload", "graphs", "uneven")
    found = [read(f"proofs/{kind}.json")["all"] for kind in kinds]
    cases, wrong = (sum(each[name] for each in found) for name in ("cases", "wrong"))
    return f"{wrong} of {cases:,} bounds are wrong beside an exact solver"


def rank_memory() -> str:
    families = read("hf_families/families.json")
    loaded = {row["case"]: max(row["peak"]) for row in read("rank_memory/loading.json")["rows"]}
    shares = [loaded[name] for name in loaded if name in families]
    return f"to load a quarter of a model takes {max(shares):.2f} of its bytes at most, in {len(shares)} families"


def runtime() -> str:
    rows = [row for row in read("runtime/in_turns.json")["rows"] if row["transport"] == "host"]

    def ratio(size: str) -> str:
        (row,) = [each for each in rows if (each["size"], each["schedule"]) == (size, "zb-v")]
        return f"{row['ratios']['main_thread_cpu_ms']:.2f}"

    return f"`zb-v` takes {ratio('tiny')} (tiny) and {ratio('small')} (small) of torch's main-thread CPU"


def space() -> str:
    rows = [row for row in read("space/results.json")["searches"] if row["memory_limit"] is None]
    row = max((each for each in rows if each["paper_seconds"]), key=lambda each: each["num_ranks"])
    return (
        f"{row['num_tried']} programs for {row['num_ranks']} ranks and {row['num_microbatches']} microbatches in "
        f"{row['seconds']:.1f} s; FlexPipe's authors report {row['paper_seconds']:.0f} s on their machine"
    )


def split() -> str:
    rows = read("split/results.json")["rows"]
    ours, theirs = ([row[f"{side}_ratio"] for row in rows] for side in ("ours", "torch"))
    return f"(I + W) / B is {min(ours):.2f} to {max(ours):.2f}; torch's is {min(theirs):.2f} to {max(theirs):.2f}"


def tune() -> str:
    off = [row["off"] for row in read("tune/results.json")["rows"]]
    return f"predictions of {len(off)} settings are {min(off):.0%} to {max(off):.0%} off in the median"


def uneven() -> str:
    rows = read("uneven/results.json")["rows"]
    ((arrival, _, rules, *_),) = [row[3:] for row in rows if row[:3] == ["zb-h1", 8, 0.6]]
    return (
        f"a step of `zb-h1` over the mean work of a rank: {arrival:.2f} in order of arrival, {rules:.2f} in a "
        "planned order (simulated)"
    )


def quoted(folder: str, pattern: str) -> str:
    """The sentence of a folder's README that the pattern finds; there must be one."""
    text = " ".join((FOLDER / folder / "README.md").read_text(encoding="utf-8").split())
    (found,) = set(re.findall(pattern, text))
    return str(found)


GROUPS = {
    "Are the numbers right?": (
        Benchmark(
            "fuzz",
            "Do random models train as a plain loop does?",
            fuzz,
            "python benchmarks/fuzz/run.py --cases 2000 --out benchmarks/fuzz/one-process.json",
        ),
        Benchmark(
            "compatibility",
            "Does every feature work with every other?",
            compatibility,
            "python benchmarks/compatibility/run.py --out benchmarks/compatibility/results.json",
        ),
        Benchmark(
            "mesh",
            "Does every split into pipelines, replicas and shards train as one process does?",
            mesh,
            "python benchmarks/mesh/matrix.py --rounds 3 --out benchmarks/mesh/matrix.json",
        ),
        Benchmark(
            "hf_families",
            "Which families of Hugging Face models train at the prompt?",
            hf_families,
            ".venv/bin/python -m pytest tests/unit/test_hf_families.py",
        ),
        Benchmark(
            "proofs",
            "Are the planner's lower bounds true?",
            proofs,
            "python benchmarks/proofs/run.py --cases 2000 --out benchmarks/proofs/proofs.json",
        ),
    ),
    "What does the runtime cost?": (
        Benchmark(
            "runtime",
            "What does running a schedule cost, beside torch's own pipelines?",
            runtime,
            "python benchmarks/runtime/run.py --rounds 6 --no-memory",
        ),
        Benchmark(
            "split",
            "How much longer does a backward take when it is split in two?",
            split,
            "python benchmarks/split/run.py --out benchmarks/split/results.json",
        ),
        Benchmark(
            "rank_memory",
            "How much memory does a rank need to load its part of a model?",
            rank_memory,
            "python benchmarks/rank_memory/run.py loading",
        ),
        Benchmark(
            "delegate",
            "What does it cost to send through delegates, the processes that send for a rank?",
            delegate,
            "python benchmarks/delegate/measure.py --out benchmarks/delegate/results.json",
        ),
        Benchmark(
            "profiling",
            "What does it cost to time every message and op?",
            profiling,
            "python benchmarks/profiling/run.py --out results.json",
        ),
    ),
    "What do slow and failing links cost?": (
        Benchmark(
            "late_link",
            "What does one late link cost, by dispatch and memory?",
            late_link,
            "python benchmarks/late_link/run.py --emulate",
        ),
        Benchmark(
            "arrive",
            "Does a plan take in torch's own runtime what we say?",
            arrive,
            "python benchmarks/arrive/run.py --out benchmarks/arrive/results.json",
        ),
        Benchmark(
            "dispatch",
            "Which order of ready ops is the fastest?",
            dispatch,
            "python benchmarks/dispatch/run.py --out benchmarks/dispatch/results.json",
        ),
        Benchmark(
            "adapt",
            "How much of what a late link costs does `--adapt` win back, and is its page right?",
            adapt,
            "python benchmarks/adapt/run.py --out runs/adapt",
        ),
        Benchmark(
            "head_of_line",
            "How much time is lost when messages queue up behind a slow one?",
            head_of_line,
            "python benchmarks/head_of_line/run.py --out threads.json",
        ),
        Benchmark(
            "faults",
            "Does a run continue after a rank is killed, a disk is full or a network is cut?",
            faults,
            "python benchmarks/faults/kill.py --out kill.json",
        ),
        Benchmark(
            "lab",
            "How long does training stand still after a fault?",
            lab,
            "python benchmarks/lab/faults.py --count 20 --faults interface --out benchmarks/lab/interface.json",
        ),
    ),
    "How good and how fast are plans?": (
        Benchmark(
            "gaps",
            "How far are plans from the best under tight memory?",
            gaps,
            "python benchmarks/gaps/run.py --numbers 0-19",
        ),
        Benchmark(
            "peers",
            "Are plans shorter than the schedules of other projects?",
            peers,
            "python benchmarks/peers/run.py --plan",
        ),
        Benchmark(
            "plan",
            "How good is a plan after a second, and how fast are the steps of the planner?",
            plan,
            "python benchmarks/plan/run.py --only free --instances 200 --out benchmarks/plan/free.json",
        ),
        Benchmark(
            "limits",
            "Does the planner keep to its time limit?",
            limits,
            "python benchmarks/limits/run.py 8x32 warm",
        ),
        Benchmark(
            "space",
            "How long does the search over every placement and rule take?",
            space,
            "python benchmarks/space/run.py --repeats 1 --out benchmarks/space/results.json",
        ),
        Benchmark(
            "engine",
            "How long does it take to build and simulate a schedule of millions of ops?",
            engine,
            "python benchmarks/engine/run.py 1024x4096",
        ),
        Benchmark(
            "uneven",
            "How much faster is a step if microbatches of different lengths are ordered by a plan?",
            uneven,
            "python benchmarks/uneven/run.py --out benchmarks/uneven/results.json",
        ),
    ),
    "Are predictions true?": (
        Benchmark(
            "emulated",
            "How close do emulated runs come to simulated ones?",
            emulated,
            "python benchmarks/emulated/run.py --stretch 2 --out threads-stretch-2.json",
        ),
        Benchmark(
            "tune",
            "Does a step take as long as the tuner says?",
            tune,
            "python benchmarks/tune/run.py --rounds 3 --steps 20 --patience 5 --out FILE.json",
        ),
        Benchmark(
            "analyze",
            "Does `penstock analyze` find what a study's own tool found?",
            analyze,
            "python benchmarks/analyze/run.py data/trace-AR.parquet data/trace-ST.parquet data/trace-SE.parquet",
        ),
        Benchmark(
            "play",
            "How quick is the playground?",
            play,
            "python benchmarks/play/measure.py",
        ),
    ),
}


def benchmarks() -> Iterator[Benchmark]:
    for each in GROUPS.values():
        yield from each


def tables() -> str:
    """A table for each group, under its heading."""
    lines: list[str] = []
    for name, members in GROUPS.items():
        lines += [f"## {name}", "", "| folder | question | headline | command |", "|---|---|---|---|"]
        for each in members:
            link = f"[{each.folder}]({each.folder}/README.md)"
            headline = each.headline()
            lines.append(f"| {link} | {each.question} | {headline[:1].upper()}{headline[1:]} | `{each.command}` |")
        lines.append("")
    return "\n".join(lines)


SAID: dict[str, tuple[str, ...]] = {
    "commit": ("commit", "commits", "now"),
    "command": ("command", "commands"),
    "machine": ("machine",),
    "load": ("load", "load_before_and_after"),
}
"""What a result says of its run, and the names that it has in the files."""
NO_RESULTS = (
    "compatibility/cells.json",
    "compatibility/rules.json",
    "hf_families/families.json",
)
"""What was drawn, listed or planned for a benchmark to run."""


def not_recorded() -> dict[str, list[str]]:
    """What each file of results does not say of its run, by the file; without those that say all."""
    found = {}
    for path in sorted(FOLDER.rglob("*.json")):
        name = path.relative_to(FOLDER)
        if not any(name.match(each) for each in NO_RESULTS):
            found[str(name)] = [what for what in SAID if not says(read(str(name)), what)]
    return {name: missing for name, missing in found.items() if missing}


def says(value: Any, what: str) -> bool:
    """Whether a result says it: for all that it has, in a part of it, or in each row of a list."""
    if isinstance(value, dict):
        said = any(_is_good(value[name], what) for name in SAID[what] if name in value)
        return said or any(says(part, what) for part in value.values() if isinstance(part, dict | list))
    return bool(value) and all(isinstance(row, dict | list) and says(row, what) for row in value)


def _is_good(value: Any, what: str) -> bool:
    """Whether it is what its name promises. A commit is not where sources differed from it, which a `+` says."""
    if what == "machine":
        return isinstance(value, dict) and not {"processor", "cpu"}.isdisjoint(value)
    if what == "commit" and isinstance(value, dict):  # with the number of rows, or by what ran there
        value = list(value if all(isinstance(each, int) for each in value.values()) else value.values())
    parts = value if isinstance(value, list) else [value]
    if what == "load":
        return bool(parts) and all(isinstance(each, int | float) for each in parts)
    pattern = "[0-9a-f]{7,40}" if what == "commit" else "[^ ]+ .+"
    return bool(parts) and all(isinstance(each, str) and re.fullmatch(pattern, each) for each in parts)


def records() -> list[str]:
    """The table of results that do not say all of their run."""
    by_missing: dict[str, list[str]] = {}
    for name, missing in not_recorded().items():
        by_missing.setdefault(", ".join(missing), []).append(f"`{name}`")
    body = [[what, ", ".join(files)] for what, files in sorted(by_missing.items())]
    return markdown(["not recorded", "files"], body)


def main() -> None:
    write_between(FOLDER / "README.md", "results", tables())
    write_between(FOLDER / "README.md", "records", records())


if __name__ == "__main__":
    main()
