"""Delegates with stages on a GPU: copies beside the computation through pinned memory, and the same numbers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from delegate_ranks import Chain, run_delegate_ranks
from gpu_cases import build_batch, build_model
from packed import packed
from penstock.runtime.tensors.message import Payload
from penstock.runtime.transport.delegate import DelegateTransport
from plain_loop import plain_step
from processes import run_ranks_to_end

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

NUM_MESSAGES = 8


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def leaves_of(number: int) -> list[Tensor | None]:
    """Dense, transposed, with gaps, repeated, small types, and none: every layout that a stage may send."""
    generator = torch.Generator().manual_seed(number)
    base = torch.randn(512, 256, generator=generator).cuda()
    return [base, base.t(), base[:, ::2], base[:, :1].expand(512, 64), base.bfloat16(), None, base[:0]]


def exchange(rank: int, gather: Any) -> tuple[bool, bool, int]:
    chain = Chain(2, NUM_MESSAGES)
    options = {"device": "cuda", "host_memory": 64 << 20}
    transport = DelegateTransport(rank, gather, chain.tags, 60.0, **options)  # type: ignore[arg-type]
    same, num = True, 0
    try:
        chain.begin(transport, rank)
        for edge, target in chain.outgoing(rank):
            leaves = leaves_of(edge.consumer.microbatch)
            assert transport.send(edge, target, Payload(leaves, 0, [False] * len(leaves)))
            del leaves  # their memory may be used again at once, while the copies are not done
            torch.full((512, 256), 7.0, device="cuda")
        while num < NUM_MESSAGES:
            for edge in transport.wait([], lambda: "waits"):
                found = transport.take(edge).leaves
                for leaf, wanted in zip(found, leaves_of(edge.consumer.microbatch), strict=True):
                    if leaf is None or wanted is None:
                        same = same and leaf is wanted
                        continue
                    same = same and leaf.is_cuda and leaf.stride() == wanted.stride() and torch.equal(leaf, wanted)
                num += 1
        transport.end()
        pinned = transport._delegate.out_memory.part(0, 1).is_pinned()
        return same, pinned, transport.counters.messages
    finally:
        transport.close()


def test_tensors_of_every_layout_pass_from_gpu_to_gpu() -> None:
    outcomes = run_delegate_ranks(2, exchange, deadline=100)
    assert all(not one.error for one in outcomes), "\n".join(one.text for one in outcomes)
    assert [one.value for one in outcomes] == [(True, True, NUM_MESSAGES)] * 2


def train(rank: int, name: str, dispatch: str) -> dict[str, list[float]]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    schedule = ps.build(name, 2, 8)
    options = {"loss_fn": nn.functional.mse_loss, "dispatch": dispatch, "device": "cuda:0", "transport": "delegate"}
    pipe = ps.Pipeline(build_model(), schedule, **packed(**options))  # type: ignore[arg-type]
    try:
        result = pipe.step(*build_batch(), update=False)
        found = {key: p.grad.flatten().tolist() for key, p in pipe.named_parameters() if p.grad is not None}
        return {"loss": [float(result.loss)], **found}
    finally:
        pipe.close()


@pytest.mark.parametrize(("name", "dispatch"), [("1f1b", "frozen"), ("zb-v", "dynamic")])
def test_training_by_delegates_is_the_plain_loop(name: str, dispatch: str) -> None:
    model = build_model()
    loss = plain_step(model, *build_batch(), 8, nn.functional.mse_loss)
    outcomes = run_ranks_to_end(2, train, name, dispatch, deadline=100.0)
    found = {key: value for o in outcomes for key, value in o.value.items()}
    assert found.pop("loss") == [float(loss)]
    assert found == {key: p.grad.flatten().tolist() for key, p in model.named_parameters() if p.grad is not None}
