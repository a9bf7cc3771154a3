"""Modules with forwards of their own, cut into stages of one process each, are the plain loop's to the bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import penstock as ps
from own_loop import plain_evaluate, plain_step, state
from own_models import MODELS
from plain_loop import cut, differences
from processes import run_ranks_to_end
from tiers import NIGHTLY

pytestmark = pytest.mark.multiproc

NAMES = ("resnet", "unet", "encoder-decoder", "gpt", "moe", "siamese", "inception", "albert", "vae")
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def train(rank: int) -> list[str]:
    """What differs, of what this rank holds."""
    found = []
    for name in NAMES if NIGHTLY else NAMES[::2]:
        own = MODELS[name]
        torch.manual_seed(1)
        reference, model = own.make(), own.make()
        model.load_state_dict(reference.state_dict())
        inputs, targets = own.inputs(), own.targets()
        stages = ps.split(model, 4, example=cut(inputs, 4)[0] if own.example else None)
        layers = [path for paths in stages.layers for path in paths]
        pipe = ps.Pipeline(stages, ps.build("zb-h1", 4, 4), loss_fn=own.loss, optimizer=SGD)
        optimizer = SGD(reference.parameters())
        for step in (1, 2):
            want = plain_step(reference, layers, inputs, targets, 4, own.loss, step)
            if not torch.equal(pipe.step(inputs, targets, update=False).loss, want):
                found.append(f"{name}: loss of step {step}")
            mine = {n for n, _ in pipe.named_parameters()} | {n for n, _ in stages[rank].named_buffers()}
            mine |= {f"gradient of {n}" for n in mine}
            own_part = [{n: t for n, t in state(each).items() if n in mine} for each in (reference, model)]
            found += [f"{name}, step {step}: {text}" for text in differences(*own_part)]
            optimizer.step()
            optimizer.zero_grad()
            pipe.update()
        want = plain_evaluate(reference, inputs, targets, 4, own.loss)
        if not torch.equal(pipe.evaluate(inputs, targets).loss, want):
            found.append(f"{name}: evaluation")
        pipe.close()
    return found


@pytest.mark.slow
def test_own_models_in_four_processes() -> None:
    outcomes = run_ranks_to_end(4, train)
    assert not [f"rank {o.rank}, {text}" for o in outcomes for text in o.value]
