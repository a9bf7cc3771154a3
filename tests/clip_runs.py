"""A CLIP of three towers through one pipeline, beside the model in one module."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

import penstock as ps
from penstock.data import PairedSamples, TokenForm, VectorForm
from penstock.models import CLIP, CLIPStages, ContrastiveLoss, clip_presets, clip_program
from waiting import PATIENCE

NANO = clip_presets["nano"]
DATA = PairedSamples({"audio": VectorForm(8, 6), "text": TokenForm(6, 32), "video": VectorForm(12, 10)})
SIZES = {
    "as many microbatches everywhere": {"audio": 4, "text": 4, "video": 4, "contrast": 4},
    "gathered over microbatches": {"audio": 4, "text": 8, "video": 2, "contrast": 2},
}


def batch(numbers: range | list[int]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in DATA.samples(numbers).items()}


def program(sizes: Mapping[str, int], split: bool = False) -> ps.Program:
    """Audio by 1F1B over ranks 0 and 1, text interleaved over 2 and 3 in four stages, video and the contrast on 4."""
    groups = {name: max(1, num // sizes["contrast"]) for name, num in sizes.items()}
    one_f_one_b = ps.Rules(max_in_flight=[1 + groups["audio"], groups["audio"]])
    warmup = [4 + 2 * groups["text"], 2 + 2 * groups["text"]]
    interleaved = ps.Rules("interleaved", forward=ps.breadth_first(2), backward=ps.depth_first(2), warmup=warmup)
    late = ps.Rules(max_in_flight=groups["video"] + 2)
    towers = {
        "audio": ps.Branch(ps.placements.one_to_one(2), sizes["audio"], one_f_one_b),
        "text": ps.Branch(ps.placements.circular(2, 4), sizes["text"], interleaved),
        "video": ps.Branch(ps.placements.one_to_one(1), sizes["video"], late),
    }
    contrast = ps.Branch(ps.placements.one_to_one(1), sizes["contrast"], late, ranks=(4,))
    return clip_program(NANO, towers, contrast, split=split)


def whole(given: Mapping[str, Tensor], num: int, seed: int = 1) -> tuple[CLIP, Tensor]:
    """The model in one module with the gradients of a batch, cut for the contrast alone, and the loss."""
    model, loss_fn, total = CLIP(NANO, seed), ContrastiveLoss(), torch.zeros(())
    parts = {name: value.tensor_split(num) for name, value in given.items()}
    for m in range(num):
        loss = loss_fn(model({name: part[m] for name, part in parts.items()})) / num
        loss.backward()
        total = total + loss.detach()
    return model, total


def wrong(sizes: Mapping[str, int], built: ps.Schedule, cut: CLIPStages, dispatch: str = "frozen") -> list[str]:
    """What a step through the pipeline does other than the model in one module, in words."""
    exact = len(set(sizes.values())) == 1
    given = batch(range(32))
    model, loss = whole(given, sizes["contrast"])
    optimizer = partial(torch.optim.SGD, lr=0.1)
    pipe = ps.Pipeline(
        cut.sources(seed=1),
        built,
        loss_fn=ContrastiveLoss(),
        optimizer=optimizer,
        dispatch=dispatch,
        timeout=PATIENCE,
    )
    found = pipe.step(cut.inputs(given), update=False).loss
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    own = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    same = torch.equal if exact else partial(torch.allclose, rtol=1e-5, atol=1e-6)
    problems = [f"the gradient of {name}" for name in own if not same(own[name], wanted[name])]  # type: ignore[arg-type]
    problems += [] if same(found, loss) else [f"loss {found}, not {loss}"]
    names = {name for part in pipe.gather(sorted(own)) for name in part}
    problems += [] if names == set(wanted) else [f"parameters {sorted(names ^ set(wanted))}"]
    if dispatch == "frozen":
        problems += out_of_order(pipe.timeline(), built)
    pipe.update()
    optimizer(model.parameters()).step()
    fresh = batch(range(32, 64))
    with torch.no_grad():
        parts = {name: value.tensor_split(sizes["contrast"]) for name, value in fresh.items()}
        logits = [model({name: part[m] for name, part in parts.items()}) for m in range(sizes["contrast"])]
    said = pipe.predict(cut.inputs(fresh))
    close = [torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(said, logits, strict=True)]
    problems += [] if all(close) else ["what is predicted after the update"]
    pipe.close()
    return problems


def out_of_order(measured: ps.Timeline, built: ps.Schedule) -> list[str]:
    """Where a measured timeline ran other than the simulated one: the rows of ranks, and what waits for what."""
    simulated = ps.simulate(built)
    problems = [
        f"rank {rank} ran {ran}, not {wanted}"
        for rank, (ran, wanted) in enumerate(zip(rows(measured), rows(simulated), strict=True))
        if ran != wanted
    ]
    ended = {timed.op: timed.end for timed in measured.ops}
    started = {timed.op: timed.start for timed in measured.ops}
    between = {(m.source, m.target) for m in simulated.messages}
    problems += [f"{b} began before {a} had ended" for a, b in sorted(between) if started[b] < ended[a]]
    crossed = {(m.source, m.target) for m in measured.messages}
    problems += [] if crossed == between else [f"messages {sorted(crossed ^ between)}"]
    return problems


def rows(timeline: ps.Timeline) -> list[list[ps.Op]]:
    """The ops of each rank in the order in which they began."""
    found: list[list[ps.Op]] = [[] for _ in range(timeline.schedule.num_ranks)]
    for timed in sorted(timeline.ops, key=lambda timed: timed.start):
        found[timed.rank].append(timed.op)
    return found
