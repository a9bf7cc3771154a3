"""On a GPU: bfloat16 by autocast, and stages of which torch.compile made kernels, beside plain loops of the same."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
import penstock.runtime.split_backward.prepared as slot_module
from packed import packed
from penstock.models.block import TransformerBlock
from plain_loop import plain_step
from processes import run_ranks_to_end

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

WIDTH, NUM_MICROBATCHES = 64, 4


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(slot_module, "COMPILED_MERGE_WORK", 0)  # so that small work waits for W too
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def build_blocks(backend: str | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [TransformerBlock(WIDTH, 4) for _ in range(8)]
    made = [block.cuda() if backend is None else torch.compile(block.cuda(), backend=backend) for block in blocks]
    return nn.Sequential(*made)  # type: ignore[arg-type]


def build_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 16, WIDTH, device="cuda"), torch.randn(8, 16, WIDTH, device="cuda")


def same(pipeline_model: nn.Module, plain_model: nn.Module) -> list[str]:
    """Names of parameters whose gradients differ."""
    pairs = zip(pipeline_model.named_parameters(), plain_model.parameters(), strict=True)
    return [name for (name, one), other in pairs if not torch.equal(one.grad, other.grad)]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_bfloat16_is_the_plain_loop(name: str) -> None:
    model, plain = build_blocks(), build_blocks()
    loss = plain_step(plain, *build_batch(), NUM_MICROBATCHES, nn.functional.mse_loss, autocast=torch.bfloat16)
    options = packed(loss_fn=nn.functional.mse_loss, autocast=torch.bfloat16)
    with ps.Pipeline(model, ps.build(name, 4, NUM_MICROBATCHES), **options) as pipe:
        result = pipe.step(*build_batch(), update=False)
        assert torch.equal(result.loss, loss.cpu())
        assert same(model, plain) == []


def in_bfloat16(rank: int, transport: str) -> dict[str, list[float]]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    options = packed(
        loss_fn=nn.functional.mse_loss,
        autocast=torch.bfloat16,
        device="cuda:0",
        transport=transport,
        dispatch="dynamic",
    )
    with ps.Pipeline(build_blocks(), ps.build("zb-v", 2, NUM_MICROBATCHES), **options) as pipe:
        result = pipe.step(*build_batch(), update=False)
        found = {key: p.grad.flatten().tolist() for key, p in pipe.named_parameters() if p.grad is not None}
        return {"loss": [float(result.loss)], **found}


@pytest.mark.parametrize("transport", ["host", "delegate"])
def test_bfloat16_between_processes_is_the_plain_loop(transport: str) -> None:
    plain = build_blocks()
    loss = plain_step(plain, *build_batch(), NUM_MICROBATCHES, nn.functional.mse_loss, autocast=torch.bfloat16)
    outcomes = run_ranks_to_end(2, in_bfloat16, transport, deadline=100.0)
    found = {key: value for o in outcomes for key, value in o.value.items()}
    assert found.pop("loss") == [float(loss)]
    assert found == {key: p.grad.flatten().tolist() for key, p in plain.named_parameters() if p.grad is not None}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_compiled_stages_are_the_compiled_plain_loop(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the backward is split: weight gradients then wait outside of the compiled graphs.

    The kernels are those of one compiled model: a compiler that measures may choose others for the next. It measures
    in the first step, which is not compared.
    """
    monkeypatch.setattr("torch._inductor.config.deterministic", True)
    model = build_blocks(backend)
    plain_step(model, *build_batch(), NUM_MICROBATCHES, nn.functional.mse_loss)
    model.zero_grad()
    losses, gradients = [], []
    for _ in range(2):
        losses.append(plain_step(model, *build_batch(), NUM_MICROBATCHES, nn.functional.mse_loss))
        gradients.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True)), "the plain loop does not repeat itself"
    with ps.Pipeline(model, ps.build(name, 4, NUM_MICROBATCHES), loss_fn=nn.functional.mse_loss) as pipe:
        result = pipe.step(*build_batch(), update=False)
        assert torch.equal(result.loss, losses[0].cpu())
        pairs = zip(model.named_parameters(), gradients[0], strict=True)
        moved = {key: (p.grad, wanted) for (key, p), wanted in pairs if not torch.equal(p.grad, wanted)}  # type: ignore[arg-type]
    if (name, backend) == ("zb-v", "inductor"):
        # The sums of biases are the compiler's own, in an order of its own in the graph of I alone.
        assert all(key.endswith(".bias") for key in moved), [*moved]
        for found, wanted in moved.values():
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    else:
        assert [*moved] == []
