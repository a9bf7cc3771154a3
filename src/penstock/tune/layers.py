"""Times the layers of a model on one rank, each as a stage of its own, run by the runtime's own stage runner.

All ranks measure at the same time, so that they share memory, caches and clock like the ranks of a real run. A step
runs some microbatches, with as many in flight as there are ranks, then clips and updates:

    F0 F1 | B0 F2 | B1 F3 | B2 | B3 | update        layers in order in F, in reverse in B, I and W

If ranks share the first and the last layer (`num_sharing`), these two are measured as shared layers, too: each rank
has a part of them, and the ranks run every op together, with the sums between them that the op needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.data import Corpus, PairedSamples
from penstock.library import build
from penstock.models import ContrastiveLoss, parallelize, tower_stage
from penstock.models.clip import contrast_stage
from penstock.runtime import Stage, partition, split
from penstock.runtime.mesh.peers import LocalPeers
from penstock.runtime.parameters.gradients import begin_norm, scale_gradients
from penstock.runtime.split_backward import SplitReport, Tape, prepare, unprepare
from penstock.runtime.stage.microbatches import cut_batch
from penstock.runtime.stage.ops import Purpose, StageRunner, StepSettings
from penstock.runtime.tensors.autograd import GraphInputs
from penstock.runtime.tensors.dtensor import local
from penstock.runtime.tensors.message import Payload
from penstock.runtime.tensors.pytree import flatten, unflatten
from penstock.runtime.tensors.rng import mix
from penstock.train.inputs import device_of, optimizer_class, over_trained
from penstock.train.kinds import CONTRAST
from penstock.train.own_file import is_own
from penstock.train.settings import Settings
from penstock.train.tasks.chain import GPTTask
from penstock.train.tasks.clip import clip_config, forms_of
from penstock.train.tasks.layers import recomputed
from penstock.train.tasks.open import open_layers
from penstock.train.tasks.own import OwnTask
from penstock.train.tasks.task import Task, TaskData
from penstock.tune.errors import TuneError
from penstock.tune.transfer import undisturbed

NUM_MICROBATCHES = 4
"""Microbatches of a measured step. The first fills gradients, the others add to them."""

WARM_UPS = 2
"""Steps for warming up, which are not counted."""

NO_LAYER = -1
"""Stands for a stage without layers. Its ops cost what every op costs besides its layers."""

Times = dict[tuple[int, str], list[float]]
"""(layer, kind) -> milliseconds."""


Texts = dict[tuple[str | None, str | None], Corpus]
"""Texts that a process has read, by data and tokenizer."""


@dataclass(frozen=True)
class RankShare:
    """What one rank measures, for one microbatch size.

    Attributes:
        part: for a model of several towers, the tower that is measured, or the contrast.
        num_sharing: ranks that share the first and the last layer. If there are several, only these two
            layers are measured.
    """

    settings: Settings
    microbatch_size: int
    recompute: bool
    rank: int
    num_ranks: int
    seconds: float
    part: str | None = None
    num_sharing: int = 1


@dataclass(frozen=True)
class Layers:
    """Layers of a model, each a stage of its own.

    Attributes:
        stages: by number. num_layers: of the whole model. again: those that keep only their input where asked for.
        inputs, targets: of `NUM_MICROBATCHES` microbatches. loss: of one.
        hidden: what passes between two layers; where its form is not known, as many numbers.
        tied: bytes of what the first and the last layer share.
        entering: what other stages send to the first layer, where it does not take the batch.
        leaving: the gradient that comes back to the last layer, where the loss is another stage's.
    """

    stages: dict[int, Stage]
    num_layers: int
    again: Collection[int]
    inputs: Any
    targets: Any
    loss: Callable[..., Tensor]
    hidden: Tensor
    tied: int = 0
    entering: Any = None
    leaving: Tensor | None = None

    @property
    def loss_layer(self) -> int | None:
        """The layer with the loss; None if another stage has it."""
        return self.num_layers - 1 if self.leaving is None else None


def read_once(task: Task, settings: Settings, texts: Texts) -> TaskData:
    """The data of a task. A text that this process has read before is not read again."""
    key = settings.data, settings.tokenizer
    data = task.read(texts.get(key))
    if data.corpus is not None:
        texts[key] = data.corpus
    return data


def own_layers(share: RankShare) -> Layers:
    """All layers of the user's own model, on the first samples of their data.

    Raises:
        TuneError: batches of fewer samples.
    """
    task = OwnTask(replace(share.settings, recompute=share.recompute), build("gpipe", 1, 1))
    tried = task.tried()
    first, inputs, targets = _repeated(tried.inputs, tried.targets, share.microbatch_size)
    cut = split(tried.model, example=first)
    stages = dict(enumerate(cut))
    assert cut.sent is not None, "on an example"
    ends = [{id(p): p.nbytes for p in cut[place].parameters()} for place in (0, -1)]
    tied = sum(size for key, size in ends[0].items() if key in ends[1]) if len(cut) > 1 else 0
    numbers = max(1, max(cut.sent) // 4)
    return Layers(stages, len(cut), range(len(cut)), inputs, targets, task.loss, torch.randn(numbers), tied)


def listed_layers(share: RankShare, texts: Texts) -> Layers:
    """Layers of a model that Penstock knows, on the first samples of its data.

    Of a GPT each rank measures the layers that it would hold in a pipeline of all ranks. Of another model each rank
    measures all layers, since only running them shows what passes between them.
    """
    size, task = share.microbatch_size, open_layers(share.settings)
    builders, last = task.stages(), len(task.layer_costs) - 1
    own: Sequence[int] = range(last + 1)
    if isinstance(task, GPTTask):
        hidden = torch.randn(size, task.config.context, task.config.width)
        own = partition(task.layer_costs, share.num_ranks)[share.rank]
    else:
        per_batch = task.message_bytes(build("gpipe", last + 1, 1))[0]
        hidden = torch.randn(max(1, round(per_batch / 4 / share.settings.batch * size)))
    if share.num_sharing > 1:
        own = (0, last)
    stages = {index: _as_stage(builders[index]()) for index in own}
    example = read_once(task, share.settings, texts).batches[0]
    _, inputs, targets = _repeated(example.inputs, example.targets, size)
    tied = _tied_bytes(task.tied, stages.get(0), stages.get(last))
    return Layers(stages, last + 1, range(1, last), inputs, targets, task.loss, hidden, tied)


def _tied_bytes(tied: Sequence[Sequence[str]], first: Stage | None, last: Stage | None) -> int:
    """Bytes of the weights of the first layer that the last one has, too; 0 where this rank has no first layer.

    Args:
        tied: groups of names of parameters that are one. last: None if another rank has it.
    """
    sizes = {} if first is None else {name: p.nbytes for name, p in first.named_parameters()}
    final = None if last is None else {name for name, _ in last.named_parameters()}
    return sum(
        max(sizes[name] for name in group if name in sizes)
        for group in tied
        if sizes.keys() & set(group) and (final is None or final & set(group))
    )


def _as_stage(module: Any) -> Stage:
    assert isinstance(module, Stage), "tasks of listed layers build stages"
    return module


def _repeated(inputs: Any, targets: Any, size: int) -> tuple[Any, Any, Any]:
    """Inputs of the first `size` samples, and inputs and targets of as many for each microbatch.

    Raises:
        TuneError: batches of fewer samples.
    """
    leaves, skeleton = flatten((inputs, targets))
    if len(leaves[0]) < size:
        raise TuneError(
            f"--data gives batches of {len(leaves[0])} samples, and microbatches of {size} were to be measured; give "
            "a smaller --microbatch-size, or a larger --batch"
        )
    first, _ = unflatten([leaf[:size] for leaf in leaves], skeleton)
    repeated = [leaf[:size].repeat(NUM_MICROBATCHES, *[1] * (leaf.dim() - 1)) for leaf in leaves]
    return first, *unflatten(repeated, skeleton)


def tower_layers(share: RankShare) -> Layers:
    """All layers of one tower of a CLIP, on generated samples; or the contrast, on vectors like those
    that towers send.
    """
    settings, size, part = share.settings, share.microbatch_size, str(share.part)
    config, draws = clip_config(settings), torch.Generator().manual_seed(1)
    vectors = tuple(torch.randn((size, config.shared_width), generator=draws) for _ in config.towers)
    if part == CONTRAST:
        inputs = tuple(each.repeat(NUM_MICROBATCHES, 1) for each in vectors)
        return Layers({0: contrast_stage(config)}, 1, (), inputs, None, ContrastiveLoss(), vectors[0], 0, vectors)
    tower = config.tower(part)
    samples = PairedSamples(forms_of(config), seed=settings.seed).samples(range(size * NUM_MICROBATCHES))
    hidden = torch.randn((size, tower.context, tower.width), generator=draws)
    return Layers(
        {index: tower_stage(config, part, [index], settings.seed) for index in range(tower.num_layers)},
        tower.num_layers,
        range(1, tower.num_layers - 1),
        torch.from_numpy(samples[part]),
        None,
        ContrastiveLoss(),
        hidden,
        leaving=vectors[0] * 1e-3,
    )


def layers_of(share: RankShare, texts: Texts) -> Layers:
    """What a rank measures of a model."""
    if share.part is not None:
        return tower_layers(share)
    return own_layers(share) if is_own(share.settings.model) else listed_layers(share, texts)


def measure_layers(share: RankShare, meet: Callable[[], None], texts: Texts | None = None) -> dict[str, Any]:
    """Times and bytes of this rank's layers, as plain data.

    Args:
        meet: returns when all ranks have called it, so that they measure at the same time.
        texts: that this process has read before.
    """
    layers = layers_of(share, {} if texts is None else texts)
    sharers = _cut_ends(share, layers) if share.num_sharing > 1 else None
    sizes = _bytes_of(share, layers)
    for index, stage in layers.stages.items() if share.recompute else ():
        for layer in stage.in_order if index in layers.again else ():
            recomputed(layer)
    device = device_of(share.settings)
    layers = replace(layers, stages={index: stage.to(device) for index, stage in layers.stages.items()})
    chain = Chain(share, layers, device)
    times: Times = {}
    for split_backward in (False, True):
        if split_backward:
            chain.prepare()
        for _ in range(WARM_UPS):
            chain.step(split_backward, None)
        meet()
        end = time.perf_counter() + share.seconds / 2
        while True:
            chain.step(split_backward, times)
            if _agreed(time.perf_counter() >= end, sharers):
                break
        meet()
    return {
        "layers": list(layers.stages),
        "step": middle_mean([chain.norm_time() for _ in range(9)]),
        "times": {f"{layer} {kind}": chain.mean(times, (layer, kind)) for layer, kind in times},
        "bytes": {str(index): {**sizes[index], "state": chain.state_bytes(index)} for index in layers.stages},
        "tied": -(-layers.tied // share.num_sharing),
    }


def _cut_ends(share: RankShare, layers: Layers) -> DeviceMesh:
    """Cuts the first and the last layer over the ranks that share them, as a run does. Returns these ranks."""
    mesh = init_device_mesh(
        "cpu", (share.num_ranks // share.num_sharing, share.num_sharing), mesh_dim_names=("copies", "sharing")
    )["sharing"]
    for stage in layers.stages.values():
        parallelize(stage, mesh)
    return mesh


def _agreed(done: bool, sharers: DeviceMesh | None) -> bool:
    """Whether a rank is done. For ranks that run each op together: whether any of them is."""
    if sharers is None:
        return done
    said = torch.tensor(float(done))
    dist.all_reduce(said, dist.ReduceOp.MAX, group=sharers.get_group())
    return bool(said)


def middle_mean(values: Sequence[float]) -> float:
    """The mean of the middle half. Disturbances of a few values do not affect it, and means can be added up."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return fmean(ordered[cut : len(ordered) - cut])


class Chain:
    """The layers of one rank, each as a stage, and one stage without layers."""

    def __init__(self, share: RankShare, layers: Layers, device: torch.device) -> None:
        settings = share.settings
        self._device, self._clip, self._seed = device, settings.clip, settings.seed
        self._stages, self._loss = layers.stages, layers.loss
        self._in_flight = min(share.num_ranks, NUM_MICROBATCHES)
        self._batch = cut_batch(layers.inputs, layers.targets, NUM_MICROBATCHES, layers.loss)
        self._activation = layers.hidden.to(device)
        self._gradient = (layers.hidden * 1e-3).to(device)
        self._leaving = None if layers.leaving is None else layers.leaving.to(device)
        leaves, self._form_of_entering = flatten(layers.entering)
        self._entering = [leaf.to(device) for leaf in leaves]
        self._autocast = torch.bfloat16 if settings.precision == "bfloat16" else None
        self._last, self._loss_layer = layers.num_layers - 1, layers.loss_layer
        self._num_layers = layers.num_layers
        self._runners = {index: self._runner(stage, index, None) for index, stage in self._stages.items()}
        self._empty = self._runner(Stage({}, []), NO_LAYER, None)
        held = dict.fromkeys(p for stage in self._stages.values() for p in stage.parameters())
        self._optimizer = over_trained(optimizer_class(settings))(list(held))
        self._num_steps = 0
        # One thread of compute never waits, so its own time is what the op takes, also on a machine that others use.
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._sharing = share.num_sharing > 1
        self._waits: Times | None = {} if alone and self._sharing else None
        self._clock = time.thread_time_ns if alone else time.perf_counter_ns

    def prepare(self) -> None:
        """From now on backwards may be split."""
        self._runners = {index: self._runner(stage, index, prepare(stage)) for index, stage in self._stages.items()}

    def mean(self, times: Times, key: tuple[int, str]) -> float:
        """Milliseconds of an op. For an op that ranks run together, it is the rank's own time and the time that sums
        take once all ranks are there. The latter is the shortest of its waits, since the others include waiting for
        ranks that are late.
        """
        if self._waits is None:
            return undisturbed(times[key]) if self._sharing else middle_mean(times[key])
        return middle_mean(times[key]) + min(self._waits[key])

    def state_bytes(self, index: int) -> int:
        """What an optimizer keeps for a layer's parameters. Parameters that layers share count in each of them."""
        known = self._optimizer.state
        kept = [v for p in set(self._stages[index].parameters()) & known.keys() for v in known[p].values()]
        return sum(local(value).nbytes for value in kept if isinstance(value, Tensor))

    def norm_time(self) -> float:
        """Milliseconds that a rank takes to combine the norms of the whole model's parameters."""
        if not self._clip:
            return 0.0
        here = sum(1 for stage in self._stages.values() for _ in stage.parameters())
        everywhere = here * self._num_layers // len(self._stages)
        names = {str(number): torch.float32 for number in range(everywhere)}
        start = self._clock()
        begin_norm(names, {}, {}, LocalPeers(1))()
        return (self._clock() - start) / 1e6

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
        last = index == self._loss_layer
        runner = StageRunner(stage, index, last, self._device, self._loss, self._autocast)
        if report is not None and report.can_split:
            runner.may_split(report.shared)
        return runner

    def _forward(self, m: int, kind: str, times: Times | None) -> None:
        payload: Payload | None = None
        for index, runner in self._runners.items():
            received = payload if payload is not None else self._sent(index)
            with self._timed(times, index, kind):
                payload = runner.forward(m, received)
        received = self._sent(NO_LAYER)
        with self._timed(times, NO_LAYER, kind):
            self._empty.forward(m, received)

    def _backward(self, m: int, split: bool, times: Times | None) -> None:
        kind, name = ("I", "i") if split else ("B", "b")
        payload: Payload | None = None
        for index, runner in reversed(self._runners.items()):
            received = payload if payload is not None else self._returned(index)
            with self._timed(times, index, name):
                payload = runner.backward(kind, m, received)
        received = self._returned(NO_LAYER)
        with self._timed(times, NO_LAYER, name):
            self._empty.backward(kind, m, received)
        if split:
            for index, runner in [*self._runners.items(), (NO_LAYER, self._empty)]:
                with self._timed(times, index, "w"):
                    runner.backward_weight(m)

    def _update(self, times: Times | None) -> None:
        """Updates the layers one after another, by one optimizer as in a run, and then nothing: what is left is what
        an update costs besides its layers.
        """
        waiting = {p: p.grad for stage in self._stages.values() for p in stage.parameters()}
        for parameter in waiting:
            parameter.grad = None
        for index, stage in [*self._stages.items(), (NO_LAYER, self._empty.stage)]:
            named = {}
            for name, parameter in stage.named_parameters():
                parameter.grad = waiting.pop(parameter, None)
                if parameter.grad is not None:
                    named[name] = parameter
            parameters = list(named.values())
            with self._timed(times, index, "update"):
                if self._clip:
                    dtypes = {name: p.dtype for name, p in named.items()}
                    norm = begin_norm(dtypes, named, named, LocalPeers(1))()
                    scale_gradients(parameters, self._clip, norm)
                self._optimizer.step()
                for parameter in parameters:
                    parameter.grad = None

    def _sent(self, index: int) -> Payload | None:
        """What the layer before the first one here would send; nothing if the first one takes the batch."""
        if index:
            return Payload([self._activation], 0, [True])
        if not self._entering:
            return None
        return Payload([*self._entering], self._form_of_entering, [True] * len(self._entering))

    def _returned(self, index: int) -> Payload | None:
        """What the layer after the last one here would send back; nothing if the last one has the loss."""
        if index == self._loss_layer:
            return None
        leaving = self._leaving if index == self._last else None
        return Payload.gradients([self._gradient if leaving is None else leaving])

    @contextmanager
    def _timed(self, times: Times | None, layer: int, kind: str) -> Iterator[None]:
        wall = time.perf_counter_ns()
        start = self._clock()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        end = self._clock()
        passed = time.perf_counter_ns() - wall
        if times is not None:
            times.setdefault((layer, kind), []).append((end - start) / 1e6)
            if self._waits is not None:
                self._waits.setdefault((layer, kind), []).append(max(0, passed - (end - start)) / 1e6)


def _bytes_of(share: RankShare, layers: Layers) -> dict[int, dict[str, float]]:
    """Bytes by layer: of its weights, of what it keeps for a microbatch, and of what it sends on. Also how many
    parameters it has.
    """
    batch = cut_batch(layers.inputs, layers.targets, NUM_MICROBATCHES, layers.loss)
    inputs, targets = _alone(batch.inputs[0][0]), _alone(batch.targets[0])
    value: Any = layers.hidden
    found = {}
    for index, stage in layers.stages.items():
        entered = inputs if index == 0 else _entering(value)
        if index == 0 and layers.entering is not None:
            entered = _entering(layers.entering)
        loss = None if index != layers.loss_layer else lambda output: layers.loss(output, targets)
        recompute = share.recompute and index in layers.again
        found[index], value = _bytes_of_layer(stage, entered, loss, share.settings, recompute)
    return found


def _alone(value: Any) -> Any:
    """A microbatch in memory of its own, so that keeping it does not keep the whole batch."""
    leaves, skeleton = flatten(value)
    return unflatten([leaf.clone() for leaf in leaves], skeleton)


def _entering(value: Any) -> Any:
    """The input of a layer as a stage gets it: without the graph of the layer before, but requiring gradients.

    The tensors are not leaves of autograd, as the layer may change them in place.
    """
    leaves, skeleton = flatten(value)
    leaves = [leaf.detach() for leaf in leaves]
    wanted = [place for place, leaf in enumerate(leaves) if leaf.is_floating_point()]
    entry = GraphInputs([leaves[place] for place in wanted])
    for place, tensor in zip(wanted, entry.tensors, strict=True):
        leaves[place] = tensor
    entry.close()
    return unflatten(leaves, skeleton)


def _bytes_of_layer(
    stage: Stage, entered: Any, loss: Callable[[Any], Tensor] | None, settings: Settings, recompute: bool
) -> tuple[dict[str, float], Any]:
    """Bytes of one layer, and what it returns."""
    own = {local(p).untyped_storage().data_ptr() for p in stage.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    prepare(stage)
    tape = Tape()
    autocast = torch.bfloat16 if settings.precision == "bfloat16" else None
    casting = torch.autocast("cpu", dtype=autocast, enabled=autocast is not None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), casting, tape.recording():
        output = stage(entered)
        sent = sum(leaf.nbytes for leaf in flatten(output)[0])
        returned = output
        if loss is not None:
            output, sent = loss(output), 0
    whole = float(sum(kept.values()))
    ends = [leaf for leaf in flatten(output)[0] if leaf.requires_grad]
    held = 0.0
    if ends:
        tape.backward_input(ends, [torch.ones_like(end) for end in ends])
        held = float(tape.deferred_bytes)
        tape.backward_weight()
    for parameter in stage.parameters():
        parameter.grad = None
    unprepare(stage)
    return {
        "weight": float(sum(local(p).nbytes for p in stage.parameters())),
        "activation": float(sum(leaf.nbytes for leaf in flatten(entered)[0])) if recompute else whole,
        "held": held,
        "output": float(sent),
        "transient": whole if recompute else 0.0,
        "tensors": float(len(list(stage.parameters()))),
    }, returned
