"""Table 5: vNAG against the synchronous pipeline and AMDP, 8 ranks, updates of 8 samples.

    python -m experiments.amdp.table5           ten minutes of one core; what was done before is kept
    python -m experiments.amdp.table5 --again   all of it

Throughput is simulated for the paper's two models on its device, a block a stage, the embedding on top of the first
and the head on top of the last. The loss is of Model-1 made small: 8 blocks on 8 stages as there, but of width 64
instead of 768, 16 tokens instead of 512, bytes instead of 50,304 words, and 1,000 updates instead of 50,000 on the
standard library's text. Rates are those of figure 7.

vNAG's microbatch is the whole minibatch of 8 samples, after which it updates; the others gather 8 microbatches of
one sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from experiments.amdp import RESULTS
from experiments.amdp.figure7 import ADAM, NADAM
from experiments.amdp.learning import Method, Task, shown, train
from experiments.amdp.timing import OtherSetup, ktokens
from experiments.common.command import options
from experiments.common.results import Row, find, known, save, table
from penstock.cost.presets import A800, CostPreset
from penstock.cost.presets.gpt import GPTShape

RANKS = BATCH = 8
TASK = Task(batch=BATCH)

SYNC = "Sync. PP"
METHODS = (
    Method(SYNC, "1f1b", peak=ADAM),
    Method("vNAG", "vnag", window=1, samples=BATCH, optimizer="NAdam", peak=NADAM),
    Method("AMDP", "amdp", peak=ADAM),
    Method("Sync. PP, NAdam", "1f1b", optimizer="NAdam", peak=NADAM),
)
"""The last is not the paper's: it tells what of vNAG's loss is its optimizer's, and what its delays'."""

_SHAPE = GPTShape(8, 768, num_heads=12, vocab_size=50304, num_positions=512, sequence=512)
MODELS: Mapping[str, GPTShape] = {
    "Model-1": _SHAPE,
    "Model-2": replace(_SHAPE, width=2688, num_heads=24, num_positions=1024, sequence=1024),
}
PAPER: Mapping[tuple[str, str], tuple[float, float]] = {
    ("Model-1", "Sync. PP"): (31.0, 4.05),
    ("Model-1", "vNAG"): (47.1, 5.12),
    ("Model-1", "AMDP"): (58.5, 4.09),
    ("Model-2", "Sync. PP"): (8.9, 3.67),
    ("Model-2", "vNAG"): (11.1, 4.93),
    ("Model-2", "AMDP"): (18.2, 3.69),
}
"""ktokens/s, and the loss after 50,000 updates."""


def throughput(model: str, method: Method) -> float:
    """ktokens/s by simulation."""
    shape = replace(MODELS[model], microbatch_size=method.samples or 1)
    preset = CostPreset(model, shape, RANKS, device=A800, split="even")
    return ktokens(method, OtherSetup(model, RANKS, BATCH, other=preset), synchronous=("1f1b",))


def throughputs(models: Iterable[str] = MODELS) -> list[Row]:
    return [
        {"model": model, "method": method.name, "ktokens": throughput(model, method)}
        for model in models
        for method in METHODS
        if (model, method.name) in PAPER
    ]


def lines(rows: Sequence[Row], times: Sequence[Row]) -> Iterator[str]:
    """Args: rows of `train`, and of `throughputs`."""
    yield "throughput, ktokens/s (times Sync. PP's); ours by simulation"
    body = []
    for model in dict.fromkeys(row["model"] for row in times):
        base = find(times, model=model, method=SYNC)["ktokens"]
        for method in METHODS[:3]:
            ours, (paper, _) = find(times, model=model, method=method.name)["ktokens"], PAPER[model, method.name]
            cells = f"{ours:.1f} ({ours / base:.2f})", f"{paper:.1f} ({paper / PAPER[model, SYNC][0]:.2f})"
            body.append([f"{model}, {method.name}", *cells])
    yield from table(["", "ours", "paper"], body)
    yield "\nloss (over Sync. PP's); ours of a small Model-1, the paper's of both"
    base = find(rows, method=SYNC)["final"]
    body = []
    for row in rows:
        over = "" if row["final"] is None else f" ({row['final'] / base - 1:+.1%})"
        body.append(
            [row["method"], shown(row["final"]) + over, *(_paper_loss(model, row["method"]) for model in MODELS)]
        )
    yield from table(["", "ours", *MODELS], body)


def _paper_loss(model: str, method: str) -> str:
    if (model, method) not in PAPER:
        return "-"
    loss = PAPER[model, method][1]
    return f"{loss:.2f} ({loss / PAPER[model, SYNC][1] - 1:+.1%})"


def main() -> None:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--again", action="store_true", help="those too that were done before")
    given = parser.parse_args()
    done = {} if given.again else {row["method"]: row for row in known(given.out, "table5")}
    times = throughputs()
    for method in METHODS:
        if method.name not in done:
            done[method.name] = train(method, TASK, print)
            found = [done[each.name] for each in METHODS if each.name in done]
            save(given.out, "table5", found, seeds=[TASK.seed], throughput=times)
    print("\n".join(lines([done[method.name] for method in METHODS], times)))


if __name__ == "__main__":
    main()
