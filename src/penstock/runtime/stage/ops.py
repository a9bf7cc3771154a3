"""Runs the ops of one stage: forward, backward, the two halves of a split backward, and a forward run again.

Between F and backward of a microbatch, a `StageRunner` keeps the stage's inputs and outputs; their autograd graph is
the held activation. Between I and W it keeps only what the deferred weight gradients need, and between F and R only
the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.split_backward import DeferredShare, SplitStage, Tape
from penstock.runtime.stage.host_memory import HostMemory, SavedTensors, copied_to
from penstock.runtime.stage.loss import LossCheck, LossFn, module_of, weightless
from penstock.runtime.stage.microbatches import NO_LOSS, Microbatches, Signature
from penstock.runtime.stage.recompute import BufferHistory, Buffers, GradientAskedFor, keeping_nothing
from penstock.runtime.stage.stage import Stage
from penstock.runtime.tensors.autograd import GraphInputs, added, exits, run_backward
from penstock.runtime.tensors.message import Payload
from penstock.runtime.tensors.pytree import flatten, require_no_mask, shown, unflatten
from penstock.runtime.tensors.rng import mix
from penstock.runtime.tensors.storage import copy_of, separate, storage_of


@dataclass(slots=True)
class HeldMicrobatch:
    """A microbatch between its F and its backward; between I and W only its tape.

    Attributes:
        entry: where its inputs entered the graph. outputs: which of them get a gradient.
        saved: what its forward saved, if that goes to host memory.
        leaves: the outputs, as registered ops have read them.
        start: the gradient of the only output that ops have given.
    """

    entry: GraphInputs
    outputs: list[Tensor]
    tape: Tape | None
    saved: SavedTensors | None = None
    leaves: list[Tensor] | None = None
    start: list[Tensor | None] | None = None


class Purpose(Enum):
    """The purpose of a step."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"


@dataclass(frozen=True)
class StepSettings:
    """Settings of one step, for every stage.

    Attributes:
        microbatches: the batch, cut into microbatches.
        purpose: training, with backwards; or forwards alone, for the loss or for the outputs.
        seed: the seed of this step. None: what is drawn comes from the generators as they are.
        split: (stage, microbatch) pairs whose backward is split into I and W.
        recomputed: (stage, microbatch) pairs whose forward runs again (R) before their backward.
        counts: number of microbatches of each stage in the schedule.
        away: (stage, microbatch) pairs whose activations go to host memory between forward and backward.
        taped_out_of_order: stages whose backwards come in another order than the forwards that build their graphs.
        loss_scale: what losses are multiplied by before their backward; None for nothing.
        keeps_batch: whether stages and the loss get copies of the batch, as the step may be repeated from it.
    """

    microbatches: Microbatches
    purpose: Purpose
    seed: int | None = None
    split: frozenset[tuple[int, int]] = frozenset()
    recomputed: frozenset[tuple[int, int]] = frozenset()
    counts: Sequence[int] = ()
    taped_out_of_order: frozenset[int] = frozenset()
    away: frozenset[tuple[int, int]] = frozenset()
    loss_scale: float | None = None
    keeps_batch: bool = False

    def first(self, stage: int) -> int:
        """The number of a stage's first microbatch here in the whole batch, after those of earlier replicas."""
        return self.microbatches.replica * self.counts[stage] if self.counts else 0

    @property
    def training(self) -> bool:
        return self.purpose is Purpose.TRAIN


def casting(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """`torch.autocast` to a type; nothing if there is none."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


class StageRunner:
    """Runs the ops of one stage on this rank. What it receives is on its device.

    Args:
        is_last: whether its output goes to the loss.
        autocast: a type for `torch.autocast` around forwards and the loss, or None.
        num_targets: how many stages it feeds.
        note_casts: called with (stage, microbatch) after a forward, inside its autocast.
        host: the host memory to which activations are moved.
        is_checked: whether the first step checks the loss, see `LossCheck`.
    """

    def __init__(
        self,
        stage: Stage,
        index: int,
        is_last: bool,
        device: torch.device,
        loss_fn: LossFn,
        autocast: torch.dtype | None,
        num_targets: int = 1,
        note_casts: Callable[[int, int], None] | None = None,
        host: HostMemory | None = None,
        is_checked: bool = False,
    ) -> None:
        self.stage = stage
        self.index = index
        self.losses: dict[int, Tensor] = {}
        self.results: dict[int, Any] = {}
        self.has_gradient = False
        """Whether one of the losses has a gradient."""
        self._is_last = is_last
        self._device = device
        self.loss_fn = loss_fn
        self._loss_check = LossCheck(loss_fn, device, not is_checked)
        self.autocast = autocast
        self._note_casts = note_casts
        # Where I and W can run apart; where not, I runs the full backward and W does nothing.
        self._split: SplitStage | None = None
        self._whole_because, self._is_reported = "", False
        self._held: dict[int, HeldMicrobatch] = {}
        self._kept: dict[int, tuple[Payload | None, Buffers]] = {}
        """Of microbatches between F and R the inputs, None on the first stage, and the buffers that F found."""
        self._host = host or HostMemory(device)
        self._buffers = BufferHistory(stage, module_of(loss_fn) if is_last else None)
        # Microbatches of which nothing was found worth deferring, while none of another kind was: no tape for them.
        self._plain: set[Signature] = set()
        self._defers = False
        self._settings: StepSettings | None = None
        self._first = 0
        self._num_targets = num_targets
        self._own: frozenset[int] | None = None
        self._differentiates = False
        """Whether its forward asks for gradients of its own, as one that was to be run again has shown."""

    def may_split(self, shared: SplitStage | None, reason: str = "") -> None:
        """Sets, between two steps, whether I and W can run separately from now on.

        Args:
            shared: what the stage's prepared modules share. None if I and W cannot run separately.
            reason: why they cannot. Empty if the schedule does not split backwards.
        """
        self._split, self._whole_because, self._is_reported = shared, reason, False

    def deferred_share(self) -> DeferredShare | None:
        """What the last step's split backward deferred. None if the schedule has none, or before it ran."""
        if self._split is not None:
            return self._split.share()
        return DeferredShare(0, 0, {self._whole_because: ()}) if self._whole_because else None

    def new_share(self) -> DeferredShare | None:
        """The same, once per configuration: after the first step that counted."""
        if self._is_reported or self._split is None:
            return None
        share = self._split.share()
        self._is_reported = share is not None
        return share

    @property
    def settings(self) -> StepSettings:
        if self._settings is None:
            raise RuntimeFailure(f"stage {self.index} was asked to run outside a step")
        return self._settings

    def begin(self, settings: StepSettings) -> None:
        """Starts a step, and drops what a failed step left."""
        self._settings = settings
        self._first = settings.first(self.index)
        if self._split is not None:
            self._split.begin(self)
        self._own = None
        self._let_go()
        self.losses.clear()
        self.results.clear()
        self.has_gradient = False
        if self._is_last and self.loss_fn is not None:
            _ = settings.microbatches.scales  # what the user's loss says of them is no part of an op

    def complete(self) -> None:
        """After the ops of a step, if all of them ran: later steps need not check the loss."""
        self._loss_check.is_over |= self.settings.training

    def end(self) -> None:
        """Ends a step, however it went: releases the batch and everything that was held."""
        self._settings = None
        self._let_go()

    def _let_go(self) -> None:
        self._held.clear()
        self._kept.clear()
        self._buffers.begin()
        self._loss_check.drop()

    def forward(self, m: int, received: Payload | None) -> Payload:
        """Runs F and returns what the next stage gets. The last stage returns nothing."""
        if not self.settings.training:
            value, _ = self._input(m, received)
            with torch.no_grad(), casting(self._device, self.autocast):
                output = self._call(value, m)
                if not self._is_last:
                    return self._outgoing(output)[0]
                if self.settings.purpose is Purpose.EVALUATE:
                    self._loss(m, output)
                else:
                    self.results[m] = output
                return Payload([])
        if (self.index, m) in self.settings.recomputed and not self._differentiates:
            try:
                return self._forward_keeping_input(m, received)
            except GradientAskedFor:
                self._differentiates = True
        return self._forward_keeping_all(m, received)

    def recompute(self, m: int) -> None:
        """Runs R: the forward of a microbatch again, which now keeps what its backward needs."""
        if m in self._kept:
            received, found = self._kept.pop(m)
            with self._buffers.as_found(found):
                self._forward_keeping_all(m, received)

    def _forward_keeping_input(self, m: int, received: Payload | None) -> Payload:
        value, _ = self._input(m, received, copied=True)
        with self._buffers.noted() as found, casting(self._device, self.autocast), keeping_nothing():
            output = self._output(value, m)
        self._kept[m] = received, found
        return self._outgoing(output)[0]

    def _forward_keeping_all(self, m: int, received: Payload | None) -> Payload:
        value, entry = self._input(m, received)
        tape = None if self._split is None else self._tape(self._split, m)
        away = self.settings.away
        saved = SavedTensors(self._host) if away and (self.index, m) in away else None
        if self.autocast is None and tape is None and saved is None:
            output = self._output(value, m)
        else:
            keeping = nullcontext() if saved is None else saved.recording()
            recording = nullcontext() if tape is None else tape.recording()
            with keeping, casting(self._device, self.autocast), recording:
                output = self._output(value, m)
                if self.autocast is not None and self._note_casts is not None:
                    self._note_casts(self.index, m)
        if tape is not None:
            self._note(tape, m)
        payload, outputs = self._outgoing(output)
        if entry is not _NO_ENTRY:
            entry.close()
        if saved is not None:
            gave = [leaf for leaf in payload.leaves if leaf is not None]
            saved.close(self._own_memory(), [*flatten(value)[0], *gave, *outputs])
        self._held[m] = HeldMicrobatch(entry, outputs, tape, saved)
        return payload

    def _output(self, value: Any, m: int) -> Any:
        """What the stage returns; of the last one, the loss of that."""
        output = self._call(value, m)
        return self._loss(m, output) if self._is_last else output

    def _tape(self, split: SplitStage, m: int) -> Tape | None:
        """A tape, if the backward is split and something may wait for W.

        Once anything waits, every microbatch is taped. One that did not wait would add its weight gradients before
        those of earlier microbatches that do. Microbatches are taped in the order of their forwards. If their
        backwards come in another order, all of them wait with everything that can.
        """
        if (self.index, m) not in self.settings.split:
            return None
        if self.index in self.settings.taped_out_of_order:
            return Tape(split, defer_small=True)
        known_plain = not self._defers and self.settings.microbatches.signature(m) in self._plain
        return None if known_plain else Tape(split)

    def _note(self, tape: Tape, m: int, ran: bool = False) -> None:
        """Records microbatches in which nothing is deferred, until something is.

        Args:
            ran: whether I ran. Before it, nobody knows what compiled parts defer.
        """
        if self._defers:
            return
        self._defers = tape.deferring
        if ran or not tape.has_taps:
            self._plain.add(self.settings.microbatches.signature(m))

    def _input(self, m: int, received: Payload | None, copied: bool = False) -> tuple[Any, GraphInputs]:
        """Returns the stage's input, and where those parts of it that need a gradient enter the graph."""
        if received is None:
            leaves, skeleton = flatten(self._on_device(self.settings.microbatches.inputs[self.index][m]))
            if copied:
                leaves = [copy_of(leaf).requires_grad_(leaf.requires_grad) for leaf in leaves]
                return unflatten(leaves, skeleton), _NO_ENTRY
            # Microbatches cut from one tensor count its changes together: one in place would look like one in all.
            return unflatten([leaf if leaf.requires_grad else leaf.data for leaf in leaves], skeleton), _NO_ENTRY
        leaves = [leaf for leaf in received.leaves if leaf is not None]
        if copied:
            leaves = [copy_of(leaf) for leaf in leaves]
        elif received.skeleton == 0 and received.needs_grad == _WANTED and self.settings.training:  # most stages
            entry = GraphInputs(leaves)
            return entry.tensors[0], entry
        wanted = [place for place, needed in enumerate(received.needs_grad) if needed and self.settings.training]
        entry = GraphInputs([leaves[place] for place in wanted]) if wanted else _NO_ENTRY
        for place, tensor in zip(wanted, entry.tensors, strict=True):
            leaves[place] = tensor
        return unflatten(leaves, received.skeleton), entry

    def _on_device(self, value: Any) -> Any:
        leaves, skeleton = flatten(value)
        there = [copied_to(self._device, leaf) for leaf in leaves]
        if self.settings.keeps_batch:
            there = [leaf if leaf.requires_grad else copy_of(leaf) for leaf in there]
        return unflatten(there, skeleton)

    def _call(self, value: Any, m: int) -> Any:
        seed = self.settings.seed
        try:
            return self.stage(value, None if seed is None else mix(seed, self._first + m))
        except Exception as error:
            rules = "; batch=ps.BatchRules(...) says how inputs are cut" * (self.index == 0)
            error.add_note(f"stage {self.index} was given {shown(value)} as microbatch {m}{rules}")
            raise

    def _loss(self, m: int, output: Any) -> Tensor:
        if self.loss_fn is None:
            raise RuntimeFailure(NO_LOSS.format("train"))
        batch, check = self.settings.microbatches, self._loss_check
        target = self._on_device(batch.targets[m])
        checked = None if check.is_over or not self.settings.training else check.inputs(m, output, target, batch)
        try:
            loss = self.loss_fn(output, target)
        except Exception as error:
            if type(error) not in _LOSS_ERRORS:  # what is of another class says more by that
                raise
            given = "that were not given" if target is None else shown(target)
            raise RuntimeFailure(
                f"loss_fn failed on output {shown(output)} and targets {given} ({type(error).__name__}: {error})"
                f"{'; call step(inputs, targets)' * (target is None)}"
            ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise RuntimeFailure(
                f'loss_fn must return one number as a tensor, it returned {got}; return a mean (reduction="mean")'
            )
        if checked is not None:
            check.compare(checked, loss, batch)
        scale = batch.scales[m]
        loss = loss * scale if scale else weightless(loss, output)
        self.losses[m] = loss.detach().reshape(())
        self.has_gradient = self.has_gradient or loss.requires_grad
        if self.settings.loss_scale is not None:
            loss = loss * torch.tensor(self.settings.loss_scale, device=loss.device)  # float32, as torch's scaler
        return loss

    def _outgoing(self, output: Any) -> tuple[Payload, list[Tensor]]:
        """Returns what goes to the next stages, and the outputs from which the backward starts."""
        if (
            type(output) is Tensor and output.requires_grad and not (output.is_leaf or output._is_view())
        ):  # most stages
            return Payload([output.detach()], 0, _WANTED), [output]
        leaves, skeleton = flatten(output)
        needs = [leaf.requires_grad for leaf in leaves]
        outputs = [leaf for leaf in leaves if leaf.requires_grad]
        if not self._num_targets:
            if not outputs and not self._is_last:
                outputs = leaves  # an op may read it, though nothing comes back
            return Payload([leaf.detach() for leaf in leaves], skeleton, needs), outputs
        require_no_mask(skeleton, self.index)
        return Payload([*separate(leaves, self._own_memory)], skeleton, needs), [*map(exits, outputs)]

    def _own_memory(self) -> frozenset[int]:
        """The addresses of the memory of its parameters and buffers, as a step found them."""
        if self._own is None:
            self._own = frozenset(map(storage_of, (*self.stage.parameters(), *self.stage.buffers()))) - {0}
        return self._own

    def saved(self, m: int) -> SavedTensors:
        """What the forward of a microbatch saved, if its activation goes to host memory."""
        saved = self._held[m].saved
        assert saved is not None
        return saved

    def leaves(self, m: int) -> list[Tensor]:
        """The outputs of a microbatch that need a gradient, as leaves. All outputs if none does.

        Raises:
            RuntimeFailure: the forward runs again later, so no output is held yet.
        """
        held = self._held.get(m)
        if held is None:
            raise RuntimeFailure(
                f"nothing is held of microbatch {m} of stage {self.index}: an op that reads outputs comes "
                "between F and the backward, and the forward is not run again (R)"
            )
        if held.leaves is None:
            held.leaves = [o.detach().requires_grad_(o.requires_grad) for o in held.outputs]
        return held.leaves

    def start_from(self, m: int, gradient: Tensor | None) -> None:
        """Adds a gradient to a microbatch's only output. Its backward starts from it."""
        held = self._held[m]
        held.start = [added(held.start[0] if held.start else None, gradient)]

    def backward(
        self, kind: str, m: int, received: Payload | None, also: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> Payload:
        """Runs B or I and returns the gradients of the stage's inputs.

        Args:
            received: the gradients of the stage's outputs; None for the loss.
            also: tensors of the graph, and gradients that they get from elsewhere.
        """
        held = self._held[m]
        outputs, gradients = self._starts_of(m, held, received)
        outputs += [tensor for tensor, _ in also]
        gradients += [gradient for _, gradient in also]
        if self._split is not None:
            self._split.turn_to(self)
        try:
            if outputs and held.tape is not None:
                held.tape.backward_input(outputs, gradients)
                self._note(held.tape, m, ran=True)
            elif outputs:
                run_backward(outputs, gradients)
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                error.add_note(_CHANGED.format(m=m, stage=self.index))
            raise
        payload = Payload.gradients(held.entry.grads)
        if kind == "B":
            del self._held[m]
        else:
            self._held[m] = HeldMicrobatch(_NO_ENTRY, [], held.tape if outputs else None)
        return payload

    def _starts_of(
        self, m: int, held: HeldMicrobatch, received: Payload | None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The tensors from which a backward starts, and the gradients of these; None for that of the loss."""
        outputs = held.outputs
        if received is not None:
            gradients = received.leaves
        elif self._is_last:
            return list(outputs), [None] * len(outputs)
        elif held.start is not None:
            gradients = held.start
        else:
            raise RuntimeFailure(
                f"no loss was given for microbatch {m} of stage {self.index}, which feeds no other stage; an op "
                "that comes before its backward must call add_loss"
            )
        given = [(output, g) for output, g in zip(outputs, gradients, strict=True) if g is not None]
        return [output for output, _ in given], [g for _, g in given]

    def backward_weight(self, m: int) -> None:
        """Runs W: computes the weight gradients that I deferred."""
        tape = self._held.pop(m).tape
        if tape is not None:
            tape.backward_weight()


_NO_ENTRY = GraphInputs([])
_WANTED = [True]
"""`needs_grad` of a single tensor that needs its gradient; nobody changes it."""
_CHANGED = (
    "where a plain loop does not fail so, a forward of stage {stage} changes a buffer in place, or a hook changes a "
    "parameter, and here forwards of later microbatches run before the backward of microbatch {m}; assign a new "
    "tensor to the buffer (self.n = self.n + 1), and leave parameters to the optimizer"
)
_LOSS_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Classes of errors of a loss that is given what it doesn't expect."""
