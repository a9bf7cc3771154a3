"""The best (pp, dp, mbs) of a method, over powers of two, each with every way to compute activations again.

As section 7.1 says: "We search the space of the parameters (pp, dp, mbs) (for power-of-two) to find the best
performance for each baseline." Points go by what their work alone would take, the shortest first, and those whose
work takes longer than the best iteration found are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from experiments.flexpipe.methods import METHODS, OURS, SEARCHED, Run, separated
from experiments.flexpipe.setups import BATCH, RECOMPUTE, Model, Setup

LEAST_PIPELINE = 2
MARGIN = 1.2
"""How much longer than the best an iteration may take before its gradients are separated."""
MOST_SEPARATED = 24


@dataclass(frozen=True)
class Best:
    """What a search found.

    Attributes:
        run: the fastest that fits in memory; None where none does.
        nearest: the one that needs least memory, where none fits.
        num_tried: points whose schedules were made.
    """

    run: Run | None
    nearest: Run | None
    num_tried: int


def setups(method: str, model: Model, vocabulary: int, num_gpus: int, batch: int = BATCH) -> Iterator[Setup]:
    """All points."""
    updates = "zero1" if method == OURS else "all-reduce"
    pp = LEAST_PIPELINE
    while pp <= num_gpus:
        microbatch = 1
        while (
            setup := Setup(model, vocabulary, pp, num_gpus // pp, microbatch, batch=batch, updates=updates)
        ).num_microbatches:
            yield from (setup.with_recompute(recompute) for recompute in RECOMPUTE)
            microbatch *= 2
        pp *= 2


def work_ms(setup: Setup) -> float:
    """No schedule of the setup takes less: the work, spread evenly over the ranks, and what comes after it.

    (All-reduces of shared ends are in it; schedules without them take far longer, as their ends are uneven.)
    """
    layers = [setup.embedding(setup.pp), setup.head(setup.pp)]
    alone = setup.block
    shared = sum(layer.f + layer.i + layer.w for layer in layers)
    blocks = setup.model.num_blocks * (alone.f + alone.i + alone.w) / setup.pp
    state = sum(layer.parameters for layer in layers) + setup.model.num_blocks * alone.parameters / setup.pp
    reduced = setup.tail_ms(state) if setup.updates == "all-reduce" else 0.0
    return setup.num_microbatches * (shared + blocks) + reduced + setup.step_ms(state)


def search(method: str, model: Model, vocabulary: int, num_gpus: int, batch: int = BATCH) -> Best:
    """The fastest of all points and placements that fits in memory.

    Of methods that search, the best have their gradients separated at the end, so those a little slower are kept.
    """
    best: Run | None = None
    nearest: Run | None = None
    kept: list[tuple[float, Run]] = []
    margin = MARGIN if method in SEARCHED else 1.0
    tried = 0
    for setup in sorted(setups(method, model, vocabulary, num_gpus, batch), key=work_ms):
        below = margin * best.iteration_ms() if best else inf
        if work_ms(setup) >= below / margin:
            break
        tried += 1
        for run in METHODS[method](setup, below):
            if run.fits:
                kept.append((run.iteration_ms(), run))
                best = run if best is None or run.iteration_ms() < best.iteration_ms() else best
            elif nearest is None or max(run.peaks()) < max(nearest.peaks()):
                nearest = run
    if method in SEARCHED:
        kept.sort(key=lambda pair: pair[0])
        whole = [run for _, run in kept if run.is_whole]
        shorter = [separated(run) for run in whole[:MOST_SEPARATED] if run.setup.recompute != "full"]
        best = min([run for run in (best, *shorter) if run], key=Run.iteration_ms, default=None)
    return Best(best, None if best else nearest, tried)


def alternatives(method: str, setup: Setup) -> Iterator[Run]:
    """All that a method finds for one setup, with the gradients of whole backwards separated where it searches."""
    for run in METHODS[method](setup, inf):
        yield run
        if method in SEARCHED and setup.recompute != "full" and run.is_whole:
            yield separated(run)
