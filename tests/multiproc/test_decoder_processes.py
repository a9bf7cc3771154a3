"""The stages of a Hugging Face model, one process a rank, beside the same stages in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import penstock as ps
from processes import run_ranks_to_end

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def trained() -> list[float]:
    """Losses of a model whose embedding and head are one weight, with nothing said about that weight."""
    from transformers import LlamaConfig

    from penstock.models.huggingface import Decoder

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, vocab_size=50, tie_word_embeddings=True)
    decoder = Decoder(config, compare=False)
    tokens = torch.randint(50, (8, 12), generator=torch.Generator().manual_seed(0))
    schedule = ps.build("1f1b", 2, 4)
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731
    with ps.Pipeline(decoder.stages(2), schedule, loss_fn=decoder.loss, optimizer=optimizer) as pipe:
        return [float(pipe.step({"input_ids": tokens}, tokens).loss) for _ in range(4)]


def rank_trains(rank: int) -> list[float]:
    return trained()


def test_stages_name_the_weight_that_they_share() -> None:
    """Without `ParallelOptions(tied=...)` each process trained its own copy of the weight, without a word."""
    pytest.importorskip("transformers")
    expected = trained()
    for outcome in run_ranks_to_end(2, rank_trains):
        assert outcome.value == expected
