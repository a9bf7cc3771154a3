"""Runs the playground's scripts in node, and what they are compared with in Python."""

from __future__ import annotations

import json
import random
import re
import subprocess
from functools import cache
from typing import Any

import penstock as ps
from penstock.formats import to_torch_csv
from penstock.play import scripts
from penstock.schedule.text_parser import parse

NAMES = (
    "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "zb", "zb-v", "v-half", "v-min", "chimera",
    "hanayo", "bitpipe", "vchimera", "dualpipe", "dualpipe-v",
)  # fmt: skip
TWO_PIPELINES = ("chimera", "bitpipe", "vchimera", "dualpipe")
DISPATCHES = ("frozen", "hinted", "hinted:0.5", "dynamic", "auto")
WRONG_CELLS = (
    "f0", "F", "-1", "0F", "'x'", 'F0"', "12", "0AB1", "A1.0", "0GATHER2.0", "0R0", "0Q1", "F0B0", "0F1,", "OFO",
    "...", ".5", "0F77", "77F0", "a\\b'c",
)  # fmt: skip
WRONG_LINES = (
    "edges 0>1",
    "hello 'you'",
    "",
    "# said aside",
    "pipeline 9: stages on ranks 0 1",
    "rank 0 | F0",
    "order of B",
    "hello\tyou",
    "F0 B0",
)

_HEAD = "schedule g: 2 ranks, 2 stages, 2 microbatches\npipeline 0: stages on ranks 0 1\n"
GRID_OF_RULE = {
    None: "rank 0 | F0 F1 B0 B1\nrank 1 | F0 B0 F1 B1",
    "text": "rank 0 | F0 F1 BO B1\nrank 1 | F0 B0 F1 B1",
    "name": f"{_HEAD.replace('g:', '(g):')}rank 0 | F0 F1 B0 B1\nrank 1 | F0 B0 F1 B1",
    "kind": "rank 0 | F0F1 B0 B1\nrank 1 | F0 B0 F1 B1",
    "range": f"{_HEAD}rank 0 | F0 F1 B0 B2\nrank 1 | F0 B0 F1 B1",
    "placement": f"{_HEAD}rank 0 | 0F0 0F1 1B0 0B1\nrank 1 | F0 B0 F1 B1",
    "coverage": f"{_HEAD}rank 0 | F0 B0\nrank 1 | F0 B0",
    "order": "rank 0 | F0 F1 B0 B1\nrank 1 | B0 F0 F1 B1",
    "microbatches": "rank 0 | F0 F1 B0 B1\nrank 1 | F1 F0 B0 B1",
    "deadlock": "rank 0 | F0 B0 F1 B1\nrank 1 | F0 F1 B0 B1",
    "memory": f"{_HEAD.replace('batches', 'batches, at most 1 in flight')}rank 0 | F0 F1 B0 B1\nrank 1 | F0 B0 F1 B1",
}
"""A grid that breaks each rule, and one that breaks none."""


@cache
def _source() -> str:
    return scripts()


def in_node(body: str, given: Any) -> Any:
    """What `(given) => { body }` returns, with the playground's scripts at hand."""
    program = (
        f"{_source()}\nconst run = (given) => {{ {body} }};\n"
        f"process.stdout.write(JSON.stringify(run({json.dumps(given)})));"
    )
    done = subprocess.run(["node", "-"], input=program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def draw_job(rng: random.Random) -> dict[str, Any]:
    """A library schedule, costs, late links and a dispatch."""
    num_ranks, num_microbatches = rng.randint(1, 7), rng.randint(1, 16)
    name = rng.choice(NAMES)
    options: dict[str, Any] = {}
    if name in ("chimera", "bitpipe", "vchimera", "hanayo", "interleaved-1f1b"):
        options["backward"] = rng.choice(["whole", "split"])
    if name == "zb" and rng.random() < 0.7:
        options["warmup"] = sorted((rng.randint(1, 9) for _ in range(num_ranks)), reverse=True)
        if rng.random() < 0.3:
            options["max_in_flight"] = rng.randint(1, 10)
    links = {}
    for _ in range(rng.randint(0, 3)):
        if num_ranks > 1:
            a = rng.randrange(num_ranks - 1)
            links[f"{a}>{a + 1}"], links[f"{a + 1}>{a}"] = rng.choice([0.5, 2, 7]), rng.choice([0, 0.5, 3])
    costs = [rng.choice([1, 2, 1.5, 0.7]) for _ in range(3)] + [rng.choice([1, 2, 3.3])]
    return {
        "name": name, "ranks": num_ranks, "microbatches": num_microbatches, "options": options, "costs": costs,
        "links": links, "dispatch": rng.choice(DISPATCHES),
        # Where two pipelines have a stage on two ranks, Python's costs, which are those of stages, know no slow rank.
        "slow": 1 if name in TWO_PIPELINES else rng.choice([1, 1, 1.7]),
    }  # fmt: skip


RUN_JOBS = """return given.map((job) => {
  let schedule;
  try { schedule = library.build(job.name, job.ranks, job.microbatches, job.options); }
  catch (error) { return error.rule ? { error: error.message } : { crash: error.stack }; }
  const [f, i, w, b] = job.costs, slow = range(job.ranks).map((rank) => (rank === 0 ? job.slow : 1));
  const links = new Map(Object.entries(job.links)), { dispatch } = job;
  const run = runs.simulate(schedule, { costs: { f, i, w, b, slow }, links, dispatch }), { ops } = run.graph;
  return { text: schedules.toText(schedule), makespan: run.makespan, dispatch: run.dispatch, bubble: run.bubble,
    peaks: run.peaks, json: schedules.toJson(schedule),
    times: Object.fromEntries(ops.map((op, at) => [schedules.opText(op), [run.start[at], run.end[at]]])) };
});"""


def costs_of(schedule: ps.Schedule, costs: list[float], slow: float) -> ps.Costs:
    """The page's costs, which are said per rank's share of the model, where rank 0 is `slow` times as slow."""
    per = schedule.num_stages / schedule.num_ranks
    hosts = schedule.placement.pipelines[0]
    rows = [[cost / per * (slow if rank == 0 else 1) for rank in hosts] for cost in costs]
    return ps.Costs(*rows)


def by_python(job: dict[str, Any]) -> dict[str, Any]:
    """What Python says of a job."""
    try:
        schedule = ps.build(job["name"], job["ranks"], job["microbatches"], **job["options"])
    except ps.ScheduleError as error:
        return {"error": str(error)}
    links = ps.Links({tuple(map(int, link.split(">"))): ms for link, ms in job["links"].items()})
    timeline = ps.simulate(
        schedule, costs_of(schedule, job["costs"], job["slow"]), links=links, dispatch=job["dispatch"]
    )
    return {
        "text": str(schedule),
        "makespan": timeline.makespan,
        "dispatch": timeline.dispatch,
        "bubble": timeline.bubble_ratio,
        "peaks": list(timeline.peak_activations),
        "times": {str(each.op): [each.start, each.end] for each in timeline.ops},
    }


TORCH_CSV = """return given.map((job) => {
  try {
    const schedule = library.build(job.name, job.ranks, job.microbatches, job.options), { channel } = job;
    const [f, i, w, b] = job.costs, slow = range(job.ranks).map((rank) => (rank === 0 ? job.slow : 1));
    return torch.toCsv(schedule, { costs: { f, i, w, b, slow }, links: new Map(Object.entries(job.links)), channel });
  } catch (error) { return error.rule ? error.message : error.stack; }
});"""


def torch_csv_by_python(job: dict[str, Any]) -> str:
    """The CSV of a job for its channel, or the error."""
    try:
        schedule = ps.build(job["name"], job["ranks"], job["microbatches"], **job["options"])
        if not job["channel"] or schedule.placement.num_pipelines > 1:
            return to_torch_csv(schedule)
        links = ps.Links({tuple(map(int, link.split(">"))): ms for link, ms in job["links"].items()})
        costs = costs_of(schedule, job["costs"], job["slow"])
        placed = ps.passes.add_communication(schedule, costs, links, channels=job["channel"])
        return to_torch_csv(placed, "compute_comms", job["channel"])
    except ps.ScheduleError as error:
        return str(error)


def draw_grid(rng: random.Random) -> str:
    """A grid of the library, mostly with some mistakes. Some mix the rows of two schedules, which may deadlock."""
    num_ranks, num_microbatches = rng.choice([2, 3, 4]), rng.choice([2, 4, 6, 8])
    made, other = (_drawn_schedule(rng, num_ranks, num_microbatches) for _ in range(2))
    lines = str(made).split("\n")
    if rng.random() < 0.5 and other.placement == made.placement:
        first = len(lines) - rng.randint(1, num_ranks)
        lines[first:] = str(other).split("\n")[first:]
    if rng.random() < 0.3:
        lines = [line for line in lines if line.startswith("rank")]
        if rng.random() < 0.3:
            lines = [line.partition("| ")[2] for line in lines]
    if rng.random() < 0.2:
        lines[0] += f", at most {rng.choice(['1', '2', '3', '4', '2.5'])} in flight"
    for _ in range(rng.randint(0, 3)):
        at = rng.randrange(len(lines))
        if "|" in lines[at]:
            head, _, cells = lines[at].partition("|")
            lines[at] = f"{head}| {' '.join(_broken(rng, cells.split()))}"
        elif rng.random() < 0.3:
            del lines[at]
        elif rng.random() < 0.3:
            lines.insert(at, rng.choice(WRONG_LINES))
        else:
            lines[at] = re.sub(
                r"\d+", lambda number: str(max(0, int(number[0]) + rng.choice([0, 0, 0, 1, -1]))), lines[at]
            )
        lines = lines or [""]
    return "\n".join(lines)


def _drawn_schedule(rng: random.Random, num_ranks: int, num_microbatches: int) -> ps.Schedule:
    while True:
        try:
            return ps.build(rng.choice(NAMES), num_ranks, num_microbatches)
        except ps.ScheduleError:
            continue


def _broken(rng: random.Random, cells: list[str]) -> list[str]:
    if not cells:
        return cells
    a, b = rng.randrange(len(cells)), rng.randrange(len(cells))
    how = rng.randrange(8)
    if how in (0, 7):
        b = b if how == 0 else min(a + 1, len(cells) - 1)
        cells[a], cells[b] = cells[b], cells[a]
    elif how == 1:
        del cells[a]
    elif how == 2:
        cells.insert(a, cells[b])
    elif how == 3:
        cells[a] = re.sub(r"\d+$", lambda number: str(abs(int(number[0]) + rng.choice([-1, 1, 9]))), cells[a])
    elif how == 4:
        cells[a] = re.sub("[FBIW]", lambda _: rng.choice("FBIWRX"), cells[a])
    elif how == 5:
        cells[a] = rng.choice(WRONG_CELLS)
    else:
        cells = [cell for cell in cells if rng.random() < 0.9]
    return cells


CHECK_GRIDS = """return given.map((text) => {
  try {
    const schedule = schedules.parse(text);
    schedules.check(schedule);
    return schedules.toText(schedule);
  } catch (error) {
    const { message, rule, rank, step, line, column } = error;
    return rule ? [message, rule, rank, step, line, column] : error.stack;
  }
});"""


def proved(text: str) -> Any:
    """What Python says of a grid: its text, or its error."""
    try:
        schedule = parse(text)
        ps.check(schedule)
    except ps.ScheduleError as error:
        return [str(error), error.rule, error.rank, error.step, error.line, error.column]
    return str(schedule)
