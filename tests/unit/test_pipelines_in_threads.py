"""Pipelines in several threads of one process: layers draw from the process's generators."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.runtime import RuntimeFailure
from penstock.runtime.tensors.rng import restored_after_step

pytestmark = pytest.mark.unit


class SlowDropout(nn.Dropout):
    """Gives way to other threads before it draws."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.001)
        return super().forward(x)


def made(seed: int) -> ps.Pipeline:
    torch.manual_seed(seed)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), SlowDropout(0.5)) for _ in range(4)))
    sgd = partial(torch.optim.SGD, lr=0.01)
    return ps.Pipeline(layers, ps.build("1f1b", 2, 8), loss_fn=nn.MSELoss(), optimizer=sgd, seed=seed)


def train(pipe: ps.Pipeline, losses: list[float]) -> None:
    """Adds the losses of some steps."""
    x = torch.ones(16, 8)
    losses += [pipe.step(x, x).loss.item() for _ in range(3)]


def test_bug_dropout_of_pipelines_in_two_threads_drew_from_one_anothers_seeds() -> None:
    alone: list[list[float]] = [[], []]
    together: list[list[float]] = [[], []]
    for seed, losses in enumerate(alone):
        train(made(seed), losses)
    pipes = [made(seed) for seed in range(2)]
    before = torch.get_rng_state()
    threads = [threading.Thread(target=train, args=each) for each in zip(pipes, together, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert torch.equal(torch.get_rng_state(), before)


def test_steps_in_two_threads_are_refused_where_ops_of_one_wait_for_other_processes() -> None:
    device = torch.device("cpu")
    said: list[str] = []

    def other(waits: bool) -> None:
        try:
            with restored_after_step(device, waits):
                said.append("")
        except RuntimeFailure as error:
            said.append(str(error))

    for own, others in ((False, True), (True, False), (False, False)):
        with restored_after_step(device, own):
            thread = threading.Thread(target=other, args=(others,))
            thread.start()
            thread.join()
    assert [text[:13] for text in said] == ["two pipelines", "two pipelines", ""]
