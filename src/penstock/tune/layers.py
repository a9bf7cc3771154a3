"""Times the layers of a model on one rank, each as a stage of its own, run by the runtime's own stage runner.

Every rank holds the layers it would hold in a pipeline of all of them, and all measure at the same time, so that
they share memory, caches and clock as ranks of a real run do. A step is some microbatches with as many in flight as
there are ranks, then clipping and the optimizer:

    F0 F1 | B0 F2 | B1 F3 | B2 | B3 | update        layers in order in F, the other way round in B, I and W
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models import CrossEntropy, GPTConfig, build_layers, gpt_costs
from penstock.runtime import Stage, partition
from penstock.runtime.mesh.peers import LocalPeers
from penstock.runtime.parameters.clip import global_norm, scale_gradients
from penstock.runtime.stage.microbatches import cut_batch
from penstock.runtime.stage.ops import Purpose, StageRunner, StepSettings
from penstock.runtime.stage.split_backward import SplitReport, Tape, prepare, unprepare
from penstock.runtime.tensors.message import Payload
from penstock.runtime.tensors.rng import mix
from penstock.train.inputs import device_of, optimizer_class
from penstock.train.settings import Settings
from penstock.train.tasks.layers import recomputed

NUM_MICROBATCHES = 4
"""Of a measured step: the first fills gradients, the others add to them."""

WARM_UPS = 2
"""Steps that are not counted."""

NO_LAYER = -1
"""Stands for a stage without layers, whose ops cost what every op costs."""

Times = dict[tuple[int, str], list[float]]
"""(layer, kind) -> milliseconds."""


@dataclass(frozen=True)
class Share:
    """What one rank measures: its share of the layers, for one microbatch size."""

    settings: Settings
    config: GPTConfig
    microbatch_size: int
    recompute: bool
    rank: int
    num_ranks: int
    seconds: float

    @property
    def own_layers(self) -> range:
        """The layers this rank would hold in a pipeline of all ranks."""
        return partition(gpt_costs(self.config), self.num_ranks)[self.rank]


def measure_layers(share: Share, meet: Callable[[], None]) -> dict[str, Any]:
    """Times and bytes of this rank's layers, as plain data.

    Args:
        meet: returns when all ranks have called it, so that they measure side by side.
    """
    own, config = share.own_layers, share.config
    blocks = range(1, config.num_layers - 1)
    layers = dict(zip(own, build_layers(config, own, share.settings.seed)))
    sizes = {index: _bytes_of(share, index, layer) for index, layer in layers.items()}
    if share.recompute:
        layers = {index: recomputed(layer) if index in blocks else layer for index, layer in layers.items()}
    device = device_of(share.settings)
    stages = {index: Stage({f"layers.{index}": layer}, [index]).to(device) for index, layer in layers.items()}
    chain = Chain(share, stages, device)
    times: Times = {}
    for split in (False, True):
        if split:
            chain.prepare()
        for _ in range(WARM_UPS):
            chain.step(split, None)
        meet()
        end = time.perf_counter() + share.seconds / 2
        while True:
            chain.step(split, times)
            if time.perf_counter() >= end:
                break
        meet()
    return {
        "layers": list(own),
        "step": middle_mean([chain.norm_time(config) for _ in range(9)]),
        "times": {f"{layer} {kind}": middle_mean(values) for (layer, kind), values in times.items()},
        "bytes": {str(index): {**sizes[index], "state": chain.state_bytes(index)} for index in own},
    }


def middle_mean(values: Sequence[float]) -> float:
    """The mean of the middle half: what disturbs a few of them has no part in it, and means add up."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return fmean(ordered[cut : len(ordered) - cut])


class Chain:
    """The layers of one rank, one stage each, and an empty stage beside them."""

    def __init__(self, share: Share, stages: dict[int, Stage], device: torch.device) -> None:
        settings, config = share.settings, share.config
        self._device, self._clip, self._seed = device, settings.clip, settings.seed
        self._stages = stages
        self._in_flight = min(share.num_ranks, NUM_MICROBATCHES)
        draws = torch.Generator().manual_seed(1)
        num_samples = share.microbatch_size * NUM_MICROBATCHES
        shape = (num_samples, config.context)
        tokens, targets = (torch.randint(0, config.vocab_size, shape, generator=draws) for _ in range(2))
        self._batch = cut_batch(tokens, targets, NUM_MICROBATCHES, CrossEntropy())
        hidden = share.microbatch_size, config.context, config.width
        self._activation = torch.randn(hidden, generator=draws).to(device)
        self._gradient = (torch.randn(hidden, generator=draws) * 1e-3).to(device)
        self._autocast = torch.bfloat16 if settings.precision == "bfloat16" else None
        self._last = config.num_layers - 1
        self._num_layers = config.num_layers
        self._runners = {index: self._runner(stage, index, None) for index, stage in stages.items()}
        self._empty = self._runner(Stage({}, []), 1, None)
        build = optimizer_class(settings)
        self._optimizers = {index: build(list(stage.parameters())) for index, stage in stages.items()}
        self._num_steps = 0
        # One thread of compute never waits, so its own time is what the op takes, also on a machine that others use.
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time_ns if alone else time.perf_counter_ns

    def prepare(self) -> None:
        """From here on backwards may be split."""
        self._runners = {index: self._runner(stage, index, prepare(stage)) for index, stage in self._stages.items()}

    def state_bytes(self, index: int) -> int:
        """What the optimizer keeps for a layer."""
        kept = [value for state in self._optimizers[index].state.values() for value in state.values()]
        return sum(value.nbytes for value in kept if isinstance(value, Tensor))

    def norm_time(self, config: GPTConfig) -> float:
        """Milliseconds that a rank takes to bring together the norms of the whole model's parameters."""
        if not self._clip:
            return 0.0
        here = sum(1 for stage in self._stages.values() for _ in stage.parameters())
        everywhere = here * config.num_layers // len(self._stages)
        names = {str(number): torch.float32 for number in range(everywhere)}
        start = time.perf_counter()
        global_norm(names, {}, {}, LocalPeers(1))
        return (time.perf_counter() - start) * 1e3

    def step(self, split: bool, times: Times | None) -> None:
        """One step; its times are added to `times`, if given."""
        self._num_steps += 1
        halves = frozenset((index, m) for index in self._runners for m in range(NUM_MICROBATCHES)) if split else None
        settings = StepSettings(self._batch, Purpose.TRAIN, mix(self._seed, self._num_steps), halves or frozenset())
        everyone = [*self._runners.values(), self._empty]
        for runner in everyone:
            runner.begin(settings)
        ahead = self._in_flight
        for m in range(NUM_MICROBATCHES + ahead):
            if m < NUM_MICROBATCHES:
                self._forward(m, "f_split" if split else "f", times)
            if m >= ahead:
                self._backward(m - ahead, split, times)
        for runner in everyone:
            runner.end()
        self._update(times)

    def _runner(self, stage: Stage, index: int, report: SplitReport | None) -> StageRunner:
        last = index == self._num_layers - 1
        runner = StageRunner(stage, index, last, self._device, CrossEntropy(), self._autocast)
        if report is not None and report.can_split:
            runner.may_split(report.shared)
        return runner

    def _forward(self, m: int, kind: str, times: Times | None) -> None:
        payload: Payload | None = None
        for index, runner in self._runners.items():
            received = payload if payload is not None or index == 0 else self._sent()
            with self._timed(times, index, kind):
                payload = runner.forward(m, received)
        received = self._sent()
        with self._timed(times, NO_LAYER, kind):
            self._empty.forward(m, received)

    def _backward(self, m: int, split: bool, times: Times | None) -> None:
        kind, name = ("I", "i") if split else ("B", "b")
        payload: Payload | None = None
        for index, runner in reversed(self._runners.items()):
            received = payload if payload is not None or index == self._last else self._returned()
            with self._timed(times, index, name):
                payload = runner.backward(kind, m, received)
        received = self._returned()
        with self._timed(times, NO_LAYER, name):
            self._empty.backward(kind, m, received)
        if split:
            for index, runner in [*self._runners.items(), (NO_LAYER, self._empty)]:
                with self._timed(times, index, "w"):
                    runner.backward_weight(m)

    def _update(self, times: Times | None) -> None:
        for index, stage in self._stages.items():
            named = dict(stage.named_parameters())
            parameters = list(named.values())
            with self._timed(times, index, "update"):
                if self._clip:
                    norm = global_norm({name: p.dtype for name, p in named.items()}, named, named, LocalPeers(1))
                    scale_gradients(parameters, self._clip, norm)
                self._optimizers[index].step()
                for parameter in parameters:
                    parameter.grad = None

    def _sent(self) -> Payload:
        """What the layer before the first one here would have sent."""
        return Payload([self._activation], 0, [True])

    def _returned(self) -> Payload:
        """What the layer after the last one here would have sent back."""
        return Payload.gradients([self._gradient])

    @contextmanager
    def _timed(self, times: Times | None, layer: int, kind: str) -> Iterator[None]:
        start = self._clock()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        end = self._clock()
        if times is not None:
            times.setdefault((layer, kind), []).append((end - start) / 1e6)


def _bytes_of(share: Share, index: int, layer: nn.Module) -> dict[str, float]:
    """Bytes of a layer's weights, of what a microbatch keeps of it, and of what it sends on."""
    settings, config = share.settings, share.config
    recompute = share.recompute and 0 < index < config.num_layers - 1
    shape = (share.microbatch_size, config.context)
    value: Tensor = torch.zeros(shape, dtype=torch.int64) if index == 0 else torch.zeros(*shape, config.width)
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    stage = Stage({f"layers.{index}": layer}, [index])
    prepare(stage)
    tape = Tape()
    autocast = torch.bfloat16 if settings.precision == "bfloat16" else None
    entered = value if index == 0 else value.requires_grad_()
    casting = torch.autocast("cpu", dtype=autocast, enabled=autocast is not None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), casting, tape.recording():
        output = stage(entered)
        sent = output.nbytes
        if index == config.num_layers - 1:
            output, sent = CrossEntropy()(output, torch.zeros(shape, dtype=torch.int64)), 0
    whole = float(sum(kept.values()))
    tape.backward_input([output], [torch.ones_like(output)])
    held = float(tape.deferred_bytes)
    tape.backward_weight()
    for parameter in layer.parameters():
        parameter.grad = None
    unprepare(stage)
    return {
        "weight": float(sum(p.nbytes for p in layer.parameters())),
        "activation": float(value.nbytes) if recompute else whole,
        "held": held,
        "output": float(sent),
        "transient": whole if recompute else 0.0,
    }
