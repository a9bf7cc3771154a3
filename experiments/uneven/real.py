"""Real compute on whole documents of the default corpus: python -m experiments.uneven.real

Two processes, two minutes, nothing beside them. The same weights are trained by three ways of making microbatches in
turn, an update each: documents packed and planned one step ahead, documents padded to the longest, and windows of the
same text under plain causal attention. Writes results/real.json.
"""

from __future__ import annotations

import sys
import time
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import penstock as ps
from experiments.uneven import protocol
from experiments.uneven.record import add_cell
from penstock.data import Batches, Sequences, document_lengths, open_corpus
from penstock.models import CrossEntropy, GPTConfig, build_layers, gpt_costs, gpt_costs_by_length, gpt_stage
from penstock.runtime import partition
from penstock.runtime.launch import init_process, launch
from penstock.train.tasks.documents import as_gpt_takes_it, packed_example
from penstock.train.tasks.task import Example

SETTING = protocol.REAL
WAYS = ("planned", "padded", "fixed")


class Documents:
    """The documents that fit whole, as the three ways take them."""

    def __init__(self) -> None:
        corpus, context = open_corpus(), SETTING.context
        lengths = document_lengths(corpus.train.size, corpus.train_starts)
        chosen = np.flatnonzero((lengths > 1) & (lengths <= context + 1))
        parts = [corpus.train[s : s + n] for s, n in zip(corpus.train_starts[chosen], lengths[chosen], strict=True)]
        starts = np.cumsum(lengths[chosen]) - lengths[chosen]
        tokens = np.concatenate(parts)
        self.sequences = Sequences(tokens, starts, context, SETTING.windows * context)
        self._windows = Batches(tokens, SETTING.windows, context)

    def lengths(self, step: int) -> list[int]:
        return self.sequences.lengths[self.sequences.of_step(step)].tolist()

    def planned(self, step: int, microbatches: tuple[tuple[int, ...], ...]) -> Example:
        own = self.sequences.of_step(step)
        return packed_example(self.sequences, [own[list(each)] for each in microbatches], as_gpt_takes_it)

    def padded(self, step: int) -> Example:
        """A row for each document, all as long as the longest of the step."""
        rows = [self.sequences.row([k]) for k in self.sequences.of_step(step)]
        longest = max(row.inputs.shape[1] for row in rows)
        inputs = torch.zeros(len(rows), longest, dtype=torch.int64)
        targets = torch.full((len(rows), longest), -100)
        for k, row in enumerate(rows):
            size = row.inputs.shape[1]
            inputs[k, :size], targets[k, :size] = torch.from_numpy(row.inputs[0]), torch.from_numpy(row.targets[0])
        return Example(inputs, targets)

    def fixed(self, step: int) -> Example:
        inputs, targets = self._windows[step]
        return Example(torch.from_numpy(inputs), torch.from_numpy(targets))


def num_tokens(example: Example) -> int:
    parts = example.targets if isinstance(example.targets, list) else [example.targets]
    return sum(int((part != -100).sum()) for part in parts)


def plain_loss(config: GPTConfig, example: Example) -> torch.Tensor:
    """Of the first weights, one microbatch after another."""
    layers, loss_fn, total = build_layers(config), CrossEntropy(), None
    tokens = num_tokens(example)
    with torch.no_grad():
        for value, wanted in zip(example.inputs, example.targets, strict=True):
            for layer in layers:
                value = layer(value)
            loss = loss_fn(value, wanted) * (wanted.numel() / tokens)
            total = loss if total is None else total + loss
    assert total is not None
    return total


def rank() -> None:
    """What each process does; the first writes the result."""
    torch.set_num_threads(1)
    number, _ = init_process(120.0)
    first = number == 0
    documents = Documents()
    config = GPTConfig(256, SETTING.context, SETTING.depth, SETTING.width, SETTING.num_heads)
    schedule = ps.build(SETTING.schedule, SETTING.num_ranks, SETTING.num_microbatches)
    parts = partition(gpt_costs(config), schedule.num_stages)
    costs = gpt_costs_by_length(config, parts)
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    bitwise, planning, gains = True, [], []
    with ps.Pipeline(
        [lambda part=part: gpt_stage(config, list(part)) for part in parts],
        schedule,
        loss_fn=CrossEntropy(),
        optimizer=torch.optim.AdamW,
    ) as pipe:
        for block in range(-1, SETTING.blocks):  # the first warms up
            step = block + 1
            for turn in range(len(WAYS)):
                way = WAYS[(block + turn) % len(WAYS)]
                dist.barrier()
                began = time.perf_counter()
                if way == "planned":
                    plan = None
                    if first:
                        plan = ps.planning.plan_batch(documents.lengths(step), schedule, costs, dispatches=["frozen"])
                    (chosen,) = pipe.gather(None if plan is None else plan.microbatches)[0]
                    example = documents.planned(step, chosen)
                    if plan is not None:
                        planning.append(plan.seconds)
                        gains.append(plan.gain)
                else:
                    example = documents.padded(step) if way == "padded" else documents.fixed(step)
                if block < 0:
                    loss = pipe.step(*example, update=False).loss
                    pipe.zero_grad()
                    if way == "planned" and first:
                        bitwise = torch.equal(loss, plain_loss(config, example))
                    continue
                pipe.step(*example)
                speeds[way].append(num_tokens(example) / (time.perf_counter() - began))
    if not first:
        return
    found: dict[str, Any] = {
        "cell": SETTING._asdict(),
        "num_documents": len(documents.sequences),
        "tokens_per_second": {way: [round(each, 1) for each in speeds[way]] for way in WAYS},
        "over_padding": round(fmean(speeds["planned"]) / fmean(speeds["padded"]), 4),
        "over_fixed": round(median(a / b for a, b in zip(speeds["planned"], speeds["fixed"], strict=True)), 4),
        "bitwise": bitwise,
        "planning_ms": round(1e3 * median(planning), 2),
        "predicted_gain": round(fmean(gains), 4),
    }
    sys.argv[1:] = []
    add_cell("real", 0, [0], found)
    print(found, file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        rank()
    else:
        sys.exit(launch(["-m", "experiments.uneven.real", "--rank"], SETTING.num_ranks))
