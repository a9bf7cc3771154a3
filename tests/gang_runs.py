"""What ranks run together, trained: shared stages, gathers of two towers, losses that ops make.

Every case is run in one process and, from the same functions, in several.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as f
from torch import Tensor, nn

import penstock as ps
from packed import packed
from penstock.models import CrossEntropy, GPTConfig, gpt_stage, parallelize, tied_parameters
from penstock.runtime.tensors.dtensor import whole
from waiting import PATIENCE

ADAM = partial(torch.optim.AdamW, lr=0.01)
NUM_RANKS, NUM = 4, 8
CONFIG = GPTConfig(vocab_size=37, context=6, depth=4, width=16, num_heads=4, dropout=0.1)
EVERY = 2
"""Microbatches of a gather."""

Steps = list[tuple[Tensor, dict[str, Tensor]]]
"""Of each step the loss and the gradients by name."""


# A GPT with embedding and head on all ranks.


def gpt_stages(config: GPTConfig) -> list[Any]:
    """The embedding, a block for each rank, the head."""
    return [partial(gpt_stage, config, range(layer, layer + 1)) for layer in range(config.num_layers)]


def tokens() -> tuple[Tensor, Tensor]:
    text = torch.randint(CONFIG.vocab_size, (2 * NUM, CONFIG.context + 1), generator=torch.Generator().manual_seed(2))
    return text[:, :-1], text[:, 1:]


def train_gpt(
    schedule: ps.Schedule, tied: bool, cut: bool, dropout: float = 0.1, **options: Any
) -> tuple[Steps, list[float]]:
    """Two steps, and the loss of an evaluation."""
    config = replace(CONFIG, tied=tied, dropout=dropout, depth=schedule.num_stages - 2)
    pipe = ps.Pipeline(
        gpt_stages(config),
        schedule,
        loss_fn=CrossEntropy(),
        optimizer=ADAM,
        timeout=PATIENCE,
        **packed(clip_norm=0.5, tied=tied_parameters(config), parallelize=parallelize if cut else None, **options),
    )
    steps: Steps = []
    for _ in range(2):
        loss = pipe.step(*tokens(), update=False).loss
        gradients = {name: whole(p.grad).clone() for name, p in pipe.named_parameters() if p.grad is not None}
        norm = pipe.update()
        assert norm is not None
        steps.append((torch.stack([loss, norm]), gradients))
    told = [float(pipe.evaluate(*tokens()).loss)]
    pipe.close()
    return steps, told


# Two towers that end in no common stage; a loss compares what both say.


def contrast(image: Tensor, text: Tensor) -> Tensor:
    """CLIP's loss at a fixed temperature."""
    logits = f.normalize(image, dim=1) @ f.normalize(text, dim=1).T * 5
    same = torch.arange(len(logits))
    return (f.cross_entropy(logits, same) + f.cross_entropy(logits.T, same)) / 2


def of_towers(values: dict[tuple[int, int], Tensor]) -> tuple[Tensor, Tensor]:
    image, text = (torch.cat([v for (s, _), v in sorted(values.items()) if s == stage]) for stage in (1, 3))
    return image, text


def compare(call: ps.runtime.OpCall) -> None:
    """A gather whose ranks all work out the loss."""
    assert call.ranks == (1, 3)
    assert {m // EVERY for m in call.microbatches} == {call.index}
    call.add_loss(contrast(*of_towers(call.gather())))


class AsyncGather:
    """A gather beside the computation, and the loss when it has ended."""

    def __init__(self) -> None:
        self.found: dict[int, Any] = {}

    def gather(self, call: ps.runtime.OpCall) -> Any:
        self.found[call.index] = gathering = call.gathering()
        return gathering

    def lose(self, call: ps.runtime.OpCall) -> None:
        assert call.ranks == (call.rank,)
        assert len(call.outputs) == EVERY
        call.add_loss(contrast(*of_towers(self.found[call.index].result)))


def towers(asynchronous: bool, split: bool = False) -> ps.Program:
    ahead = EVERY if asynchronous else 0
    tower = ps.Branch(
        ps.placements.one_to_one(2), NUM, ps.Rules("interleaved", warmup=[EVERY - r + ahead for r in range(2)])
    )
    last = (("image", -1), ("text", -1))
    forwards, backwards = {("F", at): EVERY for at in last}, {("B", at): EVERY for at in last}
    if asynchronous:
        gathers = AsyncGather()
        ops = [ps.NewOp("GATHER", last[0], forwards, on=last, time=2.0, asynchronous=True, run=gathers.gather)]
        ops += [ps.NewOp("LOSS", at, {("GATHER", last[0]): 1}, {("B", at): EVERY}, run=gathers.lose) for at in last]
    else:
        ops = [ps.NewOp("GATHER", last[0], forwards, backwards, on=last, time=2.0, run=compare)]
    return ps.Program.of_branches({"image": tower, "text": tower}, ops=ops, name="towers", split=split)


def tower_stages() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]


def pairs() -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {0: torch.randn(3 * NUM, 6, generator=generator), 2: torch.randn(3 * NUM, 6, generator=generator)}


def train_towers(
    program: ps.Program, schedule: ps.Schedule | None = None, **options: Any
) -> tuple[Steps, ps.Timeline]:
    made = program.build() if schedule is None else schedule
    pipe = ps.Pipeline(
        tower_stages(), made, optimizer=ADAM, ops=program.callables, timeout=PATIENCE, **packed(**options)
    )
    steps: Steps = []
    for _ in range(2):
        loss = pipe.step(pairs(), update=False).loss
        steps.append((loss, {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}))
        pipe.update()
    timeline = pipe.timeline()
    pipe.close()
    return steps, timeline


def plain_towers() -> Steps:
    """The same by a loop over the gathers' groups of samples."""
    stages = tower_stages()
    adam = ADAM([p for stage in stages for p in stage.parameters()])
    steps: Steps = []
    groups = NUM // EVERY
    for _ in range(2):
        batch, total = pairs(), torch.zeros(())
        for image, text in zip(*(batch[stage].tensor_split(groups) for stage in (0, 2)), strict=True):
            loss = contrast(stages[1](stages[0](image)), stages[3](stages[2](text))) / groups
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        named = {f"{index}.{n}": p for index, stage in enumerate(stages) for n, p in stage.named_parameters()}
        steps.append((total, {name: p.grad.clone() for name, p in named.items() if p.grad is not None}))
        adam.step()
        adam.zero_grad()
    return steps


def differences(want: Steps, got: Steps, exact: bool = False) -> list[str]:
    """Where losses or gradients differ, in words; only of the gradients that are there."""
    found = []
    for step, ((loss, gradients), (wanted, names)) in enumerate(zip(got, want, strict=True)):
        for name, value, other in [("loss", loss, wanted), *((n, g, names[n]) for n, g in gradients.items())]:
            close = torch.equal(value, other) if exact else torch.allclose(value, other, rtol=1e-4, atol=1e-6)
            if not close:
                found.append(f"step {step}: {name} differs by {float((value - other).abs().max()):g}")
        if not gradients:
            found.append(f"step {step}: no gradients")
    return found


# By the clock alone.


def emulations() -> list[tuple[ps.Schedule, ps.Costs]]:
    """Shared stages, a gather, and an asynchronous one, with what their ops take."""
    made = [(ps.build("mllm", NUM_RANKS, 4), ps.Costs.uniform(NUM_RANKS + 2, f=4, i=4, w=4))]
    for asynchronous in (False, True):
        schedule = towers(asynchronous).build()
        registered = {(r.kind, r.stage): 6.0 for r in schedule.graph.registered}
        made.append((schedule, ps.Costs.uniform(4, f=4, i=4, w=4).with_other(registered)))
    return made
