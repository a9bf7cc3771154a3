"""Stages whole and sharded over tensor-parallel ranks, side by side in each process: loss and gradients of both.

`compare(rank, names)` runs many cases in one start of the processes, and tells how far each is from the whole.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from parallel_cases import CASES, GPT, Case, decoder, decoders, decoders_config, gpt, tokens
from penstock.models import CrossEntropy, gpt_stage, parallelize
from penstock.models.block import Attention
from penstock.runtime import RuntimeFailure
from penstock.runtime.split_backward import Tape, prepare, prepared
from penstock.runtime.tensor_parallel import summed
from penstock.train.tasks.layers import recomputed
from processes import appears


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


def compare(rank: int, names: Sequence[str]) -> dict[str, Distance]:
    """Of each case the distance."""
    prepared.MERGE_WORK = 0
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
    strides = {} if case.split else strides_of_gradients(stage)  # what has a hook is not deferred
    loss, found, deferred = run(case, stage)
    for name, (own, of_gradients) in strides.items():
        assert of_gradients <= {own}, f"torch 2.11 lays {name}'s gradient out anew, and only where it is so: a hang"
    assert found.keys() == wanted.keys(), set(found) ^ set(wanted)
    whole = max(float(g.abs().max()) for g in wanted.values())
    far = {
        name: float((found[name] - g).abs().max()) / max(float(g.abs().max()), 1e-3 * whole, 1e-30)
        for name, g in wanted.items()
    }
    worst = max(far, key=lambda name: far[name])
    sharded = sum(isinstance(p, DTensor) for p in stage.parameters())
    return Distance(abs(loss - wanted_loss) / max(abs(wanted_loss), 1e-30), far[worst], worst, sharded, deferred)


def strides_of_gradients(stage: nn.Module) -> dict[str, tuple[Any, set[Any]]]:
    """Of each shard its strides, and those that its gradients will have."""
    strides: dict[str, tuple[Any, set[Any]]] = {}
    for name, p in stage.named_parameters():
        if isinstance(p, DTensor):
            strides[name] = p.stride(), set()
            p.register_hook(lambda g, name=name: strides[name][1].add(g.stride()))
    return strides


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


def left_alone(rank: int, folder: Path) -> list[str]:
    """What the first of two ranks is told when the other does not come to a sum, and when it has ended."""
    patient = init_device_mesh("cpu", (2,))
    short = dist.new_group([0, 1])
    short.set_timeout(timedelta(seconds=1))  # once both have come, however late
    said: list[str] = []
    for mesh, ends in ((DeviceMesh.from_group(short, "cpu"), False), (patient, True)):
        if rank == 0:
            try:
                summed(torch.ones(2), mesh)
            except RuntimeFailure as error:
                said.append(f"{type(error).__name__}: {error}")
            (folder / "gave up").touch()
        elif ends:
            os._exit(0)
        else:
            appears(folder / "gave up")
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
    case = decoder(decoders_config("llama", attention_dropout=0.3))
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
