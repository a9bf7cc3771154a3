"""What tensor-parallel ranks can share out is told before any of them starts; over one rank nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.models import (
    ParallelError,
    bert_presets,
    clip_presets,
    gpt_stage,
    parallelize,
    presets,
    require_parallel,
)

pytestmark = pytest.mark.unit

NANO = presets["nano"]  # four heads


@pytest.fixture
def mesh_of_one() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def llama(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100}
    return transformers.LlamaConfig(**{**sizes, **changes})


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sizes_that_divide_are_accepted(num_ranks: int) -> None:
    for config in (NANO, bert_presets["nano"], clip_presets["nano"], llama()):
        require_parallel(config, num_ranks)
    require_parallel(replace(NANO, vocab_size=num_ranks), num_ranks)  # a vocabulary need not divide


@pytest.mark.parametrize(
    ("make", "num_ranks", "message"),
    [
        (lambda: NANO, 3, r"GPT of width 64 has 4 heads, which 3 .*divides them \(1, 2, 4\)"),
        (lambda: bert_presets["tiny"], 2, "BERT of width 96 has 3 heads, which 2"),
        (lambda: clip_presets["nano"], 4, "tower of width 32 has 2 heads, which 4"),
        (lambda: llama(num_key_value_heads=8), 3, "llama has 8 heads, which 3"),
        (llama, 4, "llama has 2 key and value heads, which 4"),
        (lambda: llama(vocab_size=1), 2, "vocabulary of 1, smaller than the 2 ranks"),
        (lambda: replace(NANO, vocab_size=3), 4, "vocabulary of 3, smaller than the 4 ranks"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(make: Any, num_ranks: int, message: str) -> None:
    with pytest.raises(ParallelError, match=message):
        require_parallel(make(), num_ranks)


def test_over_one_rank_a_stage_stays_as_it_is(mesh_of_one: DeviceMesh) -> None:
    stage, plain = gpt_stage(NANO, range(6)), gpt_stage(NANO, range(6))
    parallelize(stage, mesh_of_one)
    assert [type(module) for module in stage.modules()] == [type(module) for module in plain.modules()]
    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert torch.equal(stage(tokens), plain(tokens))


def test_decoders_follow_the_plan_of_their_kind() -> None:
    pytest.importorskip("transformers")
    from penstock.models.huggingface import Decoder

    shards = Decoder(llama(hidden_size=32, num_hidden_layers=1, intermediate_size=64)).shards
    assert shards.embedding == "model.embed_tokens"
    assert shards.head == "lm_head"
    assert set(shards.regions) == {"model.layers.0.self_attn", "model.layers.0.mlp"}
    assert shards.regions["model.layers.0.mlp"] == {
        "gate_proj": "colwise",
        "up_proj": "colwise",
        "down_proj": "rowwise",
    }


def test_an_attention_that_is_not_known_stays_whole() -> None:
    transformers = pytest.importorskip("transformers")
    from penstock.models.huggingface import Decoder

    # Its latent projections are in styles that we do not know, or in no plan.
    for config in (
        transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=50),
        transformers.Olmo2Config(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=50
        ),
    ):
        regions = Decoder(config, compare=False).shards.regions
        assert not [path for path in regions if "attn" in path or "attention" in path]
