"""Steps of torch's own runtime beside what `ps.simulate` and `penstock.analyze.predict` said before. See README.md.

python benchmarks/arrive/predict.py cases --seed S --out benchmarks/arrive/cases.json --numbers 0-9
python benchmarks/arrive/predict.py record --seed S --folder TRACES
python benchmarks/arrive/predict.py write --seed S --folder TRACES --out benchmarks/arrive/predictions.json
python benchmarks/arrive/predict.py judge --out benchmarks/arrive/predictions.json --numbers 0-24
python benchmarks/arrive/predict.py readme
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import penstock as ps
from benchmarks.arrive.ranks import NUM_RANKS, Job, run_jobs, run_rank
from experiments.common.readme import markdown, write_between
from experiments.common.record import record
from penstock.analyze import RunAnalysis, analyze_trace, predict
from penstock.analyze.what_if import WhatIf
from penstock.formats.traces import read_trace
from penstock.integrations.torch import costs_in_torch

FOLDER = Path(__file__).resolve().parent
NAMES = ("1f1b", "zb", "interleaved-1f1b", "zb-v", "planned")
NUM_TRACES, NUM_TARGETS = 10, 5
NARROW, WIDE = 256, 65_536
"""Numbers of a message: 1 KB, and 256 KB where a link has a bandwidth."""
MEDIAN, WORST = 0.02, 0.06
"""The aims."""


def stages_of(name: str) -> int:
    return 2 * NUM_RANKS if name in ("interleaved-1f1b", "zb-v") else NUM_RANKS


def some_links(random: Random, num_late: int, num_narrow: int) -> list[str]:
    """Links in the lab's language; no two of them join the same hosts."""
    pairs = random.sample([(0, 1), (1, 2), (2, 3)], num_late + num_narrow)
    late = [f"{a}:{b}=latency:{random.randint(10, 120)}ms" for a, b in pairs[:num_late]]
    return late + [f"{a}:{b}=bandwidth:{random.randint(10, 40)}MB/s" for a, b in pairs[num_late:]]


# ---- 20 cases: ps.simulate against the runtime


def case(seed: int, number: int) -> Job:
    random = Random(f"case {seed} {number}")
    name = NAMES[number % len(NAMES)]
    way = ("placed", "lowered")[number // len(NAMES) % 2]
    num_narrow = number % 3 == 0
    links = some_links(random, random.randint(1, 2), num_narrow)
    num_stages = stages_of(name)
    each = [[random.uniform(20, 60) * NUM_RANKS / num_stages for _ in range(num_stages)] for _ in "FIW"]
    costs = costs_in_torch(ps.Costs(*each))
    num = random.choice((8, 12))
    if name == "planned":
        late = ps.Links.parse([each for each in links if "latency" in each])
        schedule = ps.plan(costs, NUM_RANKS, num, late, time_limit=0.5, seed=0).schedule
    else:
        schedule = ps.build(name, NUM_RANKS, num)
    return Job.of(way, schedule, costs, links=links, width=WIDE if num_narrow else NARROW)


def overheads(found: RunAnalysis, job: Job) -> tuple[dict[str, float], float]:
    """Of a run without late links: ms that an op of each kind takes besides its sleep, and ms of a message."""
    fit = found.fit
    assert fit is not None
    took = {
        kind: fmean(ms - job.costs.duration(kind, stage) for stage, ms in enumerate(row) if ms is not None)
        for kind, row in found.op_times.items()
    }
    between = fmean(fit.between.values())
    message = median(each.latency.at(0.0, "") for each in fit.links.conditions.values())
    return {kind: ms + fit.between[kind] for kind, ms in took.items()}, max(0.0, message - between)


def simulated(job: Job, rows: Sequence[str], more: dict[str, float], message: float, folder: Path) -> float:
    """Ms of a step by `ps.simulate`, of the rows that torch ran."""
    path = folder / "rows.csv"
    path.write_text("\n".join(rows) + "\n")
    costs = job.costs
    each = {kind: [ms + more[kind] for ms in getattr(costs, kind.lower())] for kind in "FIW"}
    links = ps.Links(ps.Links.parse(job.links).conditions, base=message)
    with_more = ps.Costs(each["F"], each["I"], each["W"], message_bytes=costs.message_bytes)
    # A whole backward has the time between ops once.
    with_more = replace(with_more, b=[ms + more["I"] for ms in costs.b])
    return ps.simulate(ps.load(path), with_more, links, channels="gloo").makespan


def measure_cases(seed: int, out: Path, numbers: Sequence[int]) -> None:
    given = json.loads(out.read_text()) if out.exists() else {"record": {}, "seed": seed, "overhead": {}, "rows": []}
    even = costs_in_torch(ps.Costs.uniform(NUM_RANKS, f=40, i=40, w=40))
    jobs = [case(seed, number) for number in numbers]
    rows = [row for row in given["rows"] if row[0] not in numbers]
    piece = f"{numbers[0]}-{numbers[-1]}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = Job.of("placed", ps.build("zb", NUM_RANKS, 8), even, profile=f"{name}/first")
        ran = run_jobs([first, *jobs], folder, __file__)
        next(ran)
        more, message = overheads(analyze_trace(read_trace([first.profile])), first)
        for number, job, found in zip(numbers, jobs, ran):
            said = simulated(job, found["rows"], more, message, folder)
            name_of = NAMES[number % len(NAMES)]
            rows.append([number, name_of, job.way, " ".join(job.links), *_against(said, found["ms"])])
    given["record"][piece] = record()
    given["overhead"][piece] = {kind: round(ms, 3) for kind, ms in {**more, "message": message}.items()}
    head = ["case", "schedule", "messages", "links", "simulated", "measured", "error"]
    write(out, {**given, **_summary(rows), "head": head}, sorted(rows))


# ---- 50 predictions from traces


@dataclass(frozen=True)
class Model:
    """A model of equal layers, an embedding in the first stage and a loss in the last. Times are ms of F, I, W."""

    layer: Sequence[float]
    first: Sequence[float]
    last: Sequence[float]

    def costs(self, cut: Sequence[int]) -> ps.Costs:
        rows = [[ms * num for num in cut] for ms in self.layer]
        for row, first, last in zip(rows, self.first, self.last, strict=True):
            row[0] += first
            row[-1] += last
        return costs_in_torch(ps.Costs(*rows))


@dataclass(frozen=True)
class Recorded:
    """What one trace is of."""

    model: Model
    name: str
    way: str
    num: int
    layers: Sequence[int]
    links: Sequence[str]
    width: int

    def job(self, folder: str = "") -> Job:
        schedule = ps.build(self.name, NUM_RANKS, self.num)
        return Job.of(
            self.way, schedule, self.model.costs(self.layers), links=self.links, width=self.width, profile=folder
        )


WAYS = (
    ("1f1b", "torch"),
    ("zb", "placed"),
    ("interleaved-1f1b", "lowered"),
    ("zb-v", "placed"),
    ("1f1b", "placed"),
    ("zb", "lowered"),
)


def some_cut(random: Random, total: int, num_stages: int) -> list[int]:
    """An even cut with up to two layers moved."""
    cut = [total // num_stages + (stage < total % num_stages) for stage in range(num_stages)]
    for _ in range(random.randint(0, 2)):
        source, target = random.sample(range(num_stages), 2)
        if cut[source] > 1:
            cut[source], cut[target] = cut[source] - 1, cut[target] + 1
    return cut


def recorded(seed: int, number: int) -> Recorded:
    random = Random(f"trace {seed} {number}")
    name, way = WAYS[number % len(WAYS)]
    total = random.choice((16, 20, 24))
    f = random.uniform(25, 50) * NUM_RANKS / total
    layer = f, f * random.uniform(0.9, 1.1), f * random.uniform(0.8, 1.0)
    embedding, loss = random.uniform(0, 6), random.uniform(0, 12)
    model = Model(layer, (embedding, embedding / 2, embedding), (loss, loss, loss / 2))
    links = some_links(random, 1, 0) if random.random() < 0.4 else []
    width = WIDE if number % 3 == 2 else NARROW
    layers = some_cut(random, total, stages_of(name))
    return Recorded(model, name, way, random.choice((8, 12)), layers, links, width)


@dataclass(frozen=True)
class Target:
    """What is predicted from a trace: a schedule, a cut and links. `given` are the links that differ."""

    recorded: Recorded
    name: str
    schedule: ps.Schedule
    cut: Sequence[int]
    given: Sequence[str]

    @property
    def links(self) -> list[str]:
        """The lab's: those given, and of the recorded ones the others."""
        said = {text.partition("=")[0] for text in self.given}
        return [*self.given, *(each for each in self.recorded.links if each.partition("=")[0] not in said)]

    def job(self) -> Job:
        model = self.recorded.model
        return Job.of("placed", self.schedule, model.costs(self.cut), links=self.links, width=self.recorded.width)

    def predict(self, found: RunAnalysis) -> WhatIf:
        links = ps.Links.parse(self.given) if self.given else None
        changed = list(self.cut) != list(self.recorded.layers)
        return predict(
            found,
            self.schedule,
            links=links,
            channels="gloo",
            layers=self.recorded.layers,
            cut=self.cut if changed else (),
            message_bytes=4.0 * self.recorded.width,
        )

    def __str__(self) -> str:
        return f"{self.name}, layers {' '.join(map(str, self.cut))}" + "".join(f", {each}" for each in self.given)


def target(seed: int, number: int, place: int) -> Target:
    """One change of a trace: another schedule, cut or link, or two of these."""
    random = Random(f"target {seed} {number} {place}")
    source = recorded(seed, number)
    changes = (("schedule",), ("cut",), ("link",), ("schedule", "link"), ("schedule", "cut"))[place]
    name = source.name
    if "schedule" in changes:
        name = random.choice([each for each in NAMES if each != source.name])
    if name == "planned":  # a file: zb with other warm-ups
        first = random.randint(4, source.num)
        warmup = sorted((random.randint(1, first) for _ in range(NUM_RANKS)), reverse=True)
        schedule = ps.build("zb", NUM_RANKS, source.num, warmup=warmup)
        name = f"zb warmup {' '.join(map(str, warmup))}"
    else:
        schedule = ps.build(name, NUM_RANKS, source.num)
    cut = list(source.layers)
    if "cut" in changes or len(cut) != schedule.num_stages:
        cut = some_cut(random, sum(cut), schedule.num_stages)
    wide = source.width == WIDE
    given = some_links(random, *((0, 1) if wide else (1, 0))) if "link" in changes else []
    return Target(source, name, schedule, cut, given)


def record_traces(seed: int, folder: Path) -> None:
    jobs = [recorded(seed, number).job(str(folder / str(number))) for number in range(NUM_TRACES)]
    with tempfile.TemporaryDirectory() as name:
        for number, found in enumerate(run_jobs(jobs, Path(name), __file__)):
            (folder / f"{number}.json").write_text(json.dumps(found["ms"]))


HEAD = ["number", "trace", "target", "predicted", "from", "to", "measured", "error"]


def write_predictions(seed: int, folder: Path, out: Path) -> None:
    rows: list[list[Any]] = []
    for number in range(NUM_TRACES):
        found = analyze_trace(read_trace([folder / str(number)]))
        of = recorded(seed, number)
        said = f"{of.name} {of.way}, layers {' '.join(map(str, of.layers))}" + "".join(f", {e}" for e in of.links)
        for place in range(NUM_TARGETS):
            each = target(seed, number, place)
            what_if = each.predict(found)
            low, high = what_if.bar or (0.0, 0.0)
            times = [round(ms, 1) for ms in (what_if.time, low, high)]
            rows.append([len(rows), said, str(each), *times, None, None])
    write(out, {"record": {"predicted": record()}, "seed": seed, "head": HEAD}, rows)


def judge(out: Path, numbers: Sequence[int]) -> None:
    given = json.loads(out.read_text())
    seed, rows = given["seed"], given["rows"]
    jobs = [target(seed, *divmod(number, NUM_TARGETS)).job() for number in numbers]
    with tempfile.TemporaryDirectory() as name:
        for number, found in zip(numbers, run_jobs(jobs, Path(name), __file__)):
            _, measured, error = _against(rows[number][3], found["ms"])
            rows[number][-2:] = measured, error
    given["record"][f"judged {numbers[0]}-{numbers[-1]}"] = record()
    done = [row for row in rows if row[-1] is not None]
    inside = sum(low <= ms <= high for *_, low, high, ms, _ in done)
    write(out, {**given, **_summary(done), "inside": inside}, rows)


# ---- results


def _against(said: float, ms: Sequence[float]) -> tuple[float, float, float]:
    """What was said, the median of what was measured, and the error as a share of that."""
    measured = median(ms)
    return round(said, 1), round(measured, 1), round(said / measured - 1, 4)


def _summary(rows: Sequence[Sequence[Any]]) -> dict[str, float]:
    errors = [abs(row[-1]) for row in rows]
    return {"num": len(rows), "median": round(median(errors), 4), "worst": max(errors)}


def write(out: Path, result: dict[str, Any], rows: Sequence[Sequence[Any]]) -> None:
    """One line a row."""
    body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    result.pop("rows", None)
    lines = [f' "{key}": {json.dumps(value)},' for key, value in result.items()]
    out.write_text("\n".join(["{", *lines, ' "rows": [', body, " ]", "}"]) + "\n")


def table(name: str) -> list[str]:
    found = json.loads((FOLDER / name).read_text())
    shown = [row for row in found["rows"] if row[-1] is not None]
    rows = [[*map(str, row[:-1]), f"{row[-1]:+.1%}"] for row in shown]
    said = f"Of {found['num']} the median error is {found['median']:.1%}, the worst {found['worst']:.1%}"
    inside = f"; {found['inside']} of them are within their error bar" if "inside" in found else ""
    return [f"{said}{inside}.", "", *markdown(found["head"], rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", nargs="?", choices=["cases", "record", "write", "judge", "readme"])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--folder", type=Path, help="where traces are")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--numbers", default="0-49", help="which cases are run, or predictions judged")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    first, last = map(int, given.numbers.split("-"))
    numbers = range(first, last + 1)
    if given.rank:
        run_rank(given.rank)
    elif given.verb == "cases":
        measure_cases(given.seed, given.out, numbers)
    elif given.verb == "record":
        given.folder.mkdir(parents=True, exist_ok=True)
        record_traces(given.seed, given.folder)
    elif given.verb == "write":
        write_predictions(given.seed, given.folder, given.out)
    elif given.verb == "judge":
        judge(given.out, numbers)
    else:
        for name in ("cases", "predictions"):
            write_between(FOLDER / "README.md", name, table(f"{name}.json"))


if __name__ == "__main__":
    main()
