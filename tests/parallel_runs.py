"""Stages whole and sharded over tensor-parallel ranks, side by side in each process: loss and gradients of both.

`compare(rank, names)` runs many cases in one start of the processes, and tells how far each is from the whole.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from penstock.models import (
    BERTConfig,
    BERTLoss,
    CrossEntropy,
    GPTConfig,
    bert_stage,
    clip_presets,
    gpt_stage,
    parallelize,
    tower_stage,
)
from penstock.models.block import MLP, Attention
from penstock.models.seeded import built, generator_of
from penstock.runtime import RuntimeFailure
from penstock.runtime.sharded import Sharding, summed
from penstock.runtime.split import Tape, prepare, slot
from penstock.train.tasks.layers import recomputed

GPT = GPTConfig(vocab_size=27, context=8, depth=2, width=32, num_heads=4)
BERT = BERTConfig(vocab_size=27, context=8, depth=2, width=32, num_heads=4)


@dataclass(frozen=True)
class Case:
    """A stage that can be built again, what it is called with, and what makes a number of its output."""

    build: Callable[[], nn.Module]
    call: tuple[Any, ...]
    loss: Callable[..., Tensor]
    split: bool = False


@dataclass(frozen=True)
class Distance:
    """How far a sharded stage is from the whole one.

    Attributes:
        loss: relative. gradient: the largest difference of a parameter, by its largest entry; and its name.
        sharded: how many parameters are DTensors. deferred: bytes that waited for W.
    """

    loss: float
    gradient: float
    worst: str
    sharded: int
    deferred: int


def tokens(seed: int, *shape: int, below: int = 27) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def masked(targets: Tensor) -> Tensor:
    targets[0, :3] = -100
    return targets


def gpt(**changes: Any) -> Case:
    config = replace(GPT, **changes)
    inputs, targets = tokens(1, 3, 8, below=config.vocab_size), masked(tokens(2, 3, 8, below=config.vocab_size))
    return Case(lambda: gpt_stage(config, range(4)), (inputs, targets), CrossEntropy())


def bert(**changes: Any) -> Case:
    config = replace(BERT, **changes)
    real = torch.arange(8).expand(3, 8) < torch.tensor([[8], [6], [5]])
    inputs = {"tokens": tokens(1, 3, 8), "segments": tokens(3, 3, 8, below=2), "real": real}
    targets = {"tokens": masked(tokens(2, 3, 8)), "next": torch.tensor([1, 0, 1])}
    return Case(lambda: bert_stage(config, range(4)), (inputs, targets), BERTLoss())


def tower(name: str) -> Case:
    config = clip_presets["nano"]
    size = config.towers[name]
    generator = torch.Generator().manual_seed(4)
    given = (
        tokens(1, 3, size.context, below=size.vocab_size)
        if size.vocab_size is not None
        else torch.randn(3, size.context, size.num_features or 0, generator=generator)
    )
    wanted = torch.randn(3, 32, generator=generator)
    return Case(lambda: tower_stage(config, name, range(4)), (given, wanted), functional.mse_loss)


def middle() -> Case:
    """A stage of blocks alone, whose input gets a gradient."""
    x = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(5)).requires_grad_()
    y = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(6))
    return Case(lambda: gpt_stage(GPT, [1, 2]), (x, y), functional.mse_loss)


def head() -> Case:
    """A stage of the head alone, as ranks that share it have it."""
    x = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(5)).requires_grad_()
    return Case(lambda: gpt_stage(GPT, [3]), (x, masked(tokens(2, 3, 8))), CrossEntropy())


def embedding() -> Case:
    y = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(6))
    return Case(lambda: gpt_stage(GPT, [0]), (tokens(1, 3, 8), y), functional.mse_loss)


def all_masked() -> Case:
    case = gpt()
    return replace(case, call=(case.call[0], torch.full((3, 8), -100)))


class TorchsOwn(nn.Module):
    """An MLP that is cut by torch's own styles, which make its activations DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = built(lambda: MLP(32), generator_of(0, "mlp"), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def shard_over(self, sharding: Sharding) -> None:
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(self.inner, sharding.mesh, styles)
        sharding.takes(self.inner)


def torchs_own() -> Case:
    return replace(middle(), build=TorchsOwn, split=True)


CASES: dict[str, Callable[[], Case]] = {
    "torch's own": torchs_own,
    "gpt": gpt,
    "gpt tied": lambda: gpt(tied=True),
    "gpt without biases": lambda: gpt(bias=False),
    "gpt of five words": lambda: gpt(vocab_size=5),
    "gpt split": lambda: replace(gpt(), split=True),
    "gpt tied, split": lambda: replace(gpt(tied=True), split=True),
    "gpt recomputed": lambda: replace(gpt(), build=lambda: gpt_stage(GPT, range(4), wrap=recomputed)),
    "gpt recomputed, split": lambda: replace(
        gpt(), build=lambda: gpt_stage(GPT, range(4), wrap=recomputed), split=True
    ),
    "all masked": all_masked,
    "middle": middle,
    "middle split": lambda: replace(middle(), split=True),
    "head": head,
    "embedding": embedding,
    "bert": bert,
    "bert untied": lambda: bert(tied=False, next_sentence=False),
    "bert split": lambda: replace(bert(), split=True),
    "text tower": lambda: tower("text"),
    "audio tower": lambda: tower("audio"),
}


def decoder(config: Any) -> Case:
    from penstock.models.huggingface import Decoder, NextTokenLoss

    mask = torch.ones(3, 8, dtype=torch.long)
    mask[1, :3] = 0
    labels = tokens(1, 3, 8)
    given = {"input_ids": labels, "attention_mask": mask}

    def build() -> nn.Module:
        made = Decoder(config, compare=False)
        return made.stage(range(made.num_layers))

    return Case(build, (given, labels.masked_fill(mask == 0, -100)), NextTokenLoss())


KINDS = (
    "gpt2", "llama", "qwen2", "qwen3", "mistral", "gpt_neox", "opt", "phi", "bloom", "gemma", "gemma2"
)  # fmt: skip


def decoders() -> dict[str, Callable[[], Case]]:
    """By kind of model, small ones."""
    return {kind: lambda kind=kind: decoder(decoders_config(kind)) for kind in KINDS}  # type: ignore[misc]


def decoders_config(kind: str, **changes: Any) -> Any:
    """Of a small one."""
    from transformers import AutoConfig

    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 27}
    llama = {**common, "intermediate_size": 64, "max_position_embeddings": 16, "head_dim": 4}
    grouped = {**llama, "num_key_value_heads": 4}
    opt = {**common, "ffn_dim": 64, "max_position_embeddings": 16, "word_embed_proj_dim": 32}
    sizes: dict[str, dict[str, Any]] = {
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 27, "n_positions": 16},
        "llama": {**grouped, "tie_word_embeddings": True},
        "qwen2": grouped,
        "qwen3": grouped,
        "mistral": grouped,
        "gpt_neox": {**common, "intermediate_size": 64, "max_position_embeddings": 16},
        "opt": opt,
        "phi": {**common, "intermediate_size": 64, "max_position_embeddings": 16, "qk_layernorm": True},
        "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 27},
        "gemma": {**grouped, "pad_token_id": 0},
        "gemma2": {**grouped, "pad_token_id": 0},
    }
    # Nothing is to be drawn: dropout of a shard's heads differs from that of the whole.
    without = dict.fromkeys(
        ("attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "attention_dropout", "hidden_dropout"), 0.0
    )
    return AutoConfig.for_model(kind, **{**without, **sizes[kind], **changes})


def compare(rank: int, names: Sequence[str]) -> dict[str, Distance | str]:
    """Of each case the distance, or the error that it ended in on every rank."""
    slot.MERGE_WORK = 0
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    known = {**CASES, **(decoders() if set(names) - set(CASES) else {})}
    return {name: distance(known[name](), mesh) for name in names}


def distance(case: Case, mesh: DeviceMesh) -> Distance:
    """Two microbatches alike through the whole and the shards."""
    wanted_loss, wanted, _ = run(case, case.build())
    stage = case.build()
    wholes = [weakref.ref(p) for p in stage.parameters()]
    parallelize(stage, mesh)
    kept = {id(p) for p in stage.parameters()}
    assert all(whole() is None or id(whole()) in kept for whole in wholes), "the whole stage is still held"
    loss, found, deferred = run(case, stage)
    assert found.keys() == wanted.keys(), set(found) ^ set(wanted)
    whole = max(float(g.abs().max()) for g in wanted.values())
    far = {
        name: float((found[name] - g).abs().max()) / max(float(g.abs().max()), 1e-3 * whole, 1e-30)
        for name, g in wanted.items()
    }
    worst = max(far, key=lambda name: far[name])
    sharded = sum(isinstance(p, DTensor) for p in stage.parameters())
    return Distance(abs(loss - wanted_loss) / max(abs(wanted_loss), 1e-30), far[worst], worst, sharded, deferred)


def run(case: Case, stage: nn.Module) -> tuple[float, dict[str, Tensor], int]:
    """The loss, each gradient in full, and the bytes that waited for W."""
    given, targets = case.call
    deferred = 0
    if case.split:
        prepare(stage)
    if isinstance(given, Tensor):
        given.grad = None
    for _ in range(2):
        if not case.split:
            loss = case.loss(stage(given), targets)
            loss.backward()
            continue
        tape = Tape()
        with tape.recording():
            loss = case.loss(stage(given), targets)
        tape.backward_input([loss], [None])
        deferred = tape.deferred_bytes
        tape.backward_weight()
    found = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    if isinstance(given, Tensor) and given.grad is not None:
        found["the input"] = given.grad
    return (
        float(loss.detach()),
        {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()},
        deferred,
    )


def left_alone(rank: int) -> list[str]:
    """What the first of two ranks is told when the other does not come to a sum, and when it has ended."""
    patient = init_device_mesh("cpu", (2,))
    hasty = DeviceMesh.from_group(dist.new_group([0, 1], timeout=timedelta(seconds=1)), "cpu")
    said: list[str] = []
    for mesh, ends in ((hasty, False), (patient, True)):
        if rank == 0:
            try:
                summed(torch.ones(2), mesh)
            except RuntimeFailure as error:
                said.append(f"{type(error).__name__}: {error}")
        elif ends:
            os._exit(0)
        else:
            time.sleep(2.5)
    return said


def half_tied() -> nn.Module:
    """A stage whose embedding is also a weight of something that is not known."""
    stage = nn.Sequential(gpt_stage(GPT, [0]), nn.Linear(32, 27, bias=False))
    stage[1].weight = stage[0].get_parameter("layers.0.token.weight")
    return stage


@dataclass(frozen=True)
class Drawn:
    """What ranks made of one attention that drops out half of it, all of whose heads are alike."""

    heads: Tensor
    output: Tensor
    again: Tensor
    after: Tensor
    grads: list[Tensor]
    recomputed: list[Tensor]
    decoder: list[Tensor]


def drop(rank: int) -> Drawn:
    """This rank's heads, what all heads made, that again from the same seed, and the next number drawn."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    attention = Attention(8, 4, dropout=0.5)
    with torch.no_grad():
        rows = attention.qkv.weight.unflatten(0, (4, 6))
        rows.copy_(rows[:1].expand_as(rows).clone())
        attention.qkv.bias.zero_()
    parallelize(attention, mesh)
    heads: list[Tensor] = []
    attention.out.register_forward_pre_hook(lambda _, args: heads.append(args[0].detach()))
    x = torch.randn(2, 6, 8)
    made = []
    for _ in range(2):
        torch.manual_seed(7)
        made.append(attention(x).detach())
    after = torch.rand(3)
    plain, again = (
        dropping_grads(gpt_stage(replace(GPT, dropout=0.3), range(4), wrap=w)) for w in (None, recomputed)
    )
    case = decoder(decoders_config("gpt2", attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3))
    return Drawn(heads[0], *made, after, plain, again, dropping_grads(case.build(), case))


def dropping_grads(stage: nn.Module, case: Case | None = None) -> list[Tensor]:
    """The loss and this rank's gradients, from one seed."""
    case = case or gpt()
    parallelize(stage, init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.manual_seed(7)
    loss = case.loss(stage(case.call[0]), case.call[1])
    loss.backward()
    return [loss.detach(), *(p.grad for p in stage.parameters() if not isinstance(p.grad, DTensor))]


def refusals(rank: int) -> list[str]:
    """What was said of tokens and targets that are not in the vocabulary, and of models that cannot be shared."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    stage = gpt_stage(GPT, range(4))
    parallelize(stage, mesh)
    x = tokens(1, 3, 8)
    tries: list[Callable[[], Any]] = [
        lambda: stage(torch.full((1, 8), 27)),
        lambda: stage(torch.full((1, 8), -1)),
        lambda: CrossEntropy()(stage(x), torch.full((3, 8), 27)),
        lambda: parallelize(gpt_stage(replace(GPT, num_heads=1), [1]), mesh),
        lambda: parallelize(gpt_stage(replace(GPT, vocab_size=1), [0]), mesh),
        lambda: parallelize(gpt_stage(replace(GPT, vocab_size=1), [3]), mesh),
        lambda: parallelize(half_tied(), mesh),
        lambda: parallelize(nn.Linear(2, 2), init_device_mesh("cpu", (1, mesh.size()))),
    ]
    said = []
    for attempt in tries:
        try:
            attempt()
            said.append("nothing")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
