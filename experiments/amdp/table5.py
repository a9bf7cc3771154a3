"""Table 5 and Figure 9: vNAG against the synchronous pipeline and AMDP, 8 ranks, updates of 8 samples.

    python -m experiments.amdp.table5           an hour and ten minutes of one core; what was done before is kept
    python -m experiments.amdp.table5 --again   all of it
    python -m experiments.amdp.table5 --show    what was found last

Throughput is simulated for the paper's two models on its device, a block a stage, the embedding on top of the first
and the head on top of the last. Losses are of both models made small, trained for 1,000 updates instead of 50,000 on
the standard library's text, as bytes instead of 50,304 words:

                 width         tokens        heads        rate
    Model-1    64 for 768    16 for 512     4 for 12    that of figure 7
    Model-2   224 for 2688   32 for 1024    8 for 24    a third of it

Both have 8 blocks on 8 stages, as there. Model-2 is 3.5 times as wide as Model-1 and sees twice as many tokens.
Its rate is a third, as in the paper (1e-4 for 3e-4). Model-2 was fixed so before any run of it.

vNAG's microbatch is the whole minibatch of 8 samples, after which it updates; the others gather 8 microbatches of
one sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from experiments.amdp import RESULTS
from experiments.amdp.figure7 import ADAM, NADAM, Stroke, chart_of
from experiments.amdp.learning import Method, Task, shown, train
from experiments.amdp.timing import OtherSetup, ktokens
from experiments.common.command import options
from experiments.common.results import Row, facts, find, known, runs, save, table
from penstock.cost.model_shapes import GPTShape
from penstock.cost.presets import A800, CostPreset
from penstock.draw.chart import Axis, Figure, Hue, save_chart
from penstock.models import GPTConfig
from penstock.schedule import TENTATIVE

RANKS = BATCH = 8
TASKS: Mapping[str, Task] = {
    "Model-1": Task(batch=BATCH),
    "Model-2": Task(GPTConfig(vocab_size=256, context=32, depth=8, width=224, num_heads=8), batch=BATCH),
}
RATES: Mapping[str, float] = {"Model-1": 1.0, "Model-2": 1 / 3}
"""Of each model's learning rates over those of figure 7."""

SYNC, LATE = "Sync. PP", "AMDP, tentative"
METHODS = (
    Method(SYNC, "1f1b", peak=ADAM),
    Method("vNAG", "vnag", window=1, samples=BATCH, optimizer="NAdam", peak=NADAM),
    Method("AMDP", "amdp", peak=ADAM),
    Method(LATE, "amdp", peak=ADAM, rule=TENTATIVE),
    Method("Sync. PP, NAdam", "1f1b", optimizer="NAdam", peak=NADAM),
)
"""The last two are not the paper's: AMDP under our rule `tentative`, and the synchronous pipeline with vNAG's
optimizer, which tells what of vNAG's loss is its optimizer's, and what its delays'."""

SHOWN: Mapping[str, tuple[Hue, Stroke]] = {
    SYNC: ("grey", "solid"),
    "vNAG": ("purple", "solid"),
    "AMDP": ("navy", "solid"),
    LATE: ("navy", "dashed"),
    "Sync. PP, NAdam": ("grey", "dashed"),
}
"""How Figure 9 draws each."""

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
BY_THE_PAPER = tuple(dict.fromkeys(method for _, method in PAPER))


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
        if method.name in (*BY_THE_PAPER, LATE)
    ]


def lines(rows: Sequence[Row], times: Sequence[Row]) -> Iterator[str]:
    """Args: rows of `train`, and of `throughputs`."""
    yield "throughput, ktokens/s (times Sync. PP's); ours by simulation"
    body = []
    for row in times:
        base = find(times, model=row["model"], method=SYNC)["ktokens"]
        ours = f"{row['ktokens']:.1f} ({row['ktokens'] / base:.2f})"
        body.append([f"{row['model']}, {row['method']}", ours, _paper_throughput(row["model"], row["method"])])
    yield from table(["", "ours", "paper"], body)
    yield "\nloss (over Sync. PP's); ours of both models made small"
    body = []
    for row in rows:
        base = find(rows, model=row["model"], method=SYNC)["final"]
        over = "" if row["final"] is None else f" ({row['final'] / base - 1:+.1%})"
        ours = shown(row["final"]) + over
        body.append([f"{row['model']}, {row['method']}", ours, _paper_loss(row["model"], row["method"])])
    yield from table(["", "ours", "paper"], body)


def curve_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Figure 9 in numbers: validation loss after a tenth, half and all of the updates."""
    parts = (0.1, 0.5, 1.0)
    body = []
    for row in rows:
        by_update = dict(map(tuple, row["curve"]))
        asked = [round(part * row["updates"]) for part in parts]
        body.append([f"{row['model']}, {row['method']}", *(shown(by_update.get(at)) for at in asked)])
    yield from table(["", *(f"after {part:.0%}" for part in parts)], body)


def _paper_throughput(model: str, method: str) -> str:
    if (model, method) not in PAPER:
        return "-"
    ktokens = PAPER[model, method][0]
    return f"{ktokens:.1f} ({ktokens / PAPER[model, SYNC][0]:.2f})"


def _paper_loss(model: str, method: str) -> str:
    if (model, method) not in PAPER:
        return "-"
    loss = PAPER[model, method][1]
    return f"{loss:.2f} ({loss / PAPER[model, SYNC][1] - 1:+.1%})"


def by_update(rows: Sequence[Row], model: str) -> Figure:
    """Figure 9 of a model: its validation loss by update."""
    config = TASKS[model].config
    sizes = f"a GPT of {config.depth} blocks, {config.width} wide, {config.context} tokens"
    return chart_of(
        [row for row in rows if row["model"] == model],
        SHOWN,
        title=f"Figure 9: loss of a small {model}",
        note=f"{sizes}; an update gathers {BATCH} samples",
        x=Axis("updates"),
    )


def main() -> None:
    parser = options(__doc__, RESULTS, show=True)
    parser.add_argument("--again", action="store_true", help="those too that were done before")
    given = parser.parse_args()
    rows, earlier = (each(given.out, "table5", not given.again) for each in (known, runs))
    done = {(row["model"], row["method"]): row for row in rows}
    if given.show:
        print("\n".join(lines(list(done.values()), facts(given.out, "table5")["throughput"])))
        return
    times = throughputs()
    for model, task in TASKS.items():
        for method in METHODS:
            if (model, method.name) not in done:
                done[model, method.name] = {
                    "model": model,
                    **train(replace(method, peak=method.peak * RATES[model]), task, print),
                }
                found = [
                    done[key] for key in itertools.product(TASKS, (each.name for each in METHODS)) if key in done
                ]
                save(
                    given.out,
                    "table5",
                    found,
                    seeds=[task.seed],
                    raw={"losses": None},
                    earlier=earlier,
                    throughput=times,
                )
    rows = list(done.values())
    print("\n".join(lines(rows, times)))
    for model in TASKS:
        save_chart(by_update(rows, model), given.out / f"figure9-{model.lower()}.svg")


if __name__ == "__main__":
    main()
