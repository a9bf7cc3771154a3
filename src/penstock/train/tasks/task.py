"""What a run trains, as the rest of the run sees it: a model cut for its schedule, its data, and how good it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from penstock.cost import CostsByLength
from penstock.data import Corpus
from penstock.planning.batches import Lengths
from penstock.runtime import Pipeline
from penstock.runtime.checkpoint import Reader
from penstock.runtime.checkpoint.user_state import Stateful
from penstock.schedule import Schedule
from penstock.train.quality import ModelQuality

BYTES = 4
"""Of a number that passes between stages: sums along the model are kept in float32."""
VALIDATION_BATCHES = 4


class Example(NamedTuple):
    """A batch as `ps.Pipeline.step` takes it."""

    inputs: Any
    targets: Any


class TaskBatches(Protocol):
    """The batch of each step, from 0 on; the same on every rank."""

    def __getitem__(self, step: int, /) -> Example: ...


class StepBatches:
    """The batch of each step as a function of the step's number makes it."""

    def __init__(self, make: Callable[[int], Example]) -> None:
        self._make = make

    def __getitem__(self, step: int, /) -> Example:
        return self._make(step)


Draws = tuple[int, ...]
"""What a batch's random draws follow from."""


def redrawn(data: TaskData, make: Callable[[Example, Draws], Example], seed: int) -> TaskData:
    """Data each batch of which is made into another, by draws that follow from the seed and its number alone."""
    batches = StepBatches(lambda step: make(data.batches[step], (seed, 0, step)))
    fixed = [make(each, (seed, 1, number)) for number, each in enumerate(data.validation)]
    return replace(data, batches=batches, validation=fixed)


@dataclass(frozen=True)
class TaskData:
    """What a task learns from.

    Attributes:
        description: in words. digest: short, and another one where the data is other.
        batches: of the steps. validation: what is never trained on; at least one batch.
        corpus: the text behind it, which a parent reads once for all its ranks; None where there is none.
        documents: where whole documents are packed, what `batches` packs; else None.
        stateful: by name, what keeps where it stands, for the checkpoint.
        is_dealt: whether batches are this replica's part alone.
    """

    description: str
    digest: str
    batches: TaskBatches
    validation: Iterable[Example]
    corpus: Corpus | None = None
    documents: PackedDocuments | None = None
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    is_dealt: bool = False


class PackedDocuments(Protocol):
    """Sequences that are packed into the microbatches of each step.

    Attributes:
        num_replicas, num_microbatches: into how many of each. costs: by length, of the stages.
    """

    num_replicas: int
    num_microbatches: int

    @property
    def costs(self) -> CostsByLength: ...
    def of_step(self, step: int) -> Sequence[int]:
        """The numbers of a step's sequences, in order of arrival."""
        ...

    def lengths(self, sequences: Sequence[int]) -> Lengths:
        """Tokens of each; of a model of several towers, by tower."""
        ...

    def num_tokens(self, sequences: Sequence[int]) -> int:
        """Tokens of all of them together, as speed is counted."""
        ...

    def stage_lengths(self, stage: int, sequences: Sequence[int]) -> list[int]:
        """The lengths that an op of a stage takes where they are its microbatch, as `LengthSample` has them."""
        ...

    def example(self, microbatches: Sequence[Sequence[int]]) -> Example:
        """A batch of microbatches, each of so many sequences in one row."""
        ...


@runtime_checkable
class ExportableTask(Protocol):
    """A task whose model is exported as a folder."""

    def write_folder(self, target: Path, checkpoint: Reader) -> None:
        """Writes a checkpoint's model as a folder. Raises CheckpointError."""
        ...


class Task(Protocol):
    """A model of some kind, cut into the stages of a schedule; checked when it is made, with nothing built yet.

    Attributes:
        config: its sizes. sizes: those of them that a resumed run must share, by name.
        num_tokens: of a sample: what its speed is counted in; None where a sample is no row of tokens.
        loss: of a microbatch.
        tied: groups of names of parameters that are one.
    """

    config: Any

    @property
    def num_tokens(self) -> int | None: ...
    @property
    def sizes(self) -> Mapping[str, Any]: ...
    @property
    def loss(self) -> Callable[..., Tensor]: ...
    @property
    def tied(self) -> Sequence[Sequence[str]]: ...

    def stages(self) -> list[Callable[[], nn.Module]]:
        """For each stage the function that builds it, so that a rank holds just its own layers."""
        ...

    def message_bytes(self, schedule: Schedule) -> list[float]:
        """By stage, what one of its microbatches sends on."""
        ...

    def read(self, corpus: Corpus | None) -> TaskData:
        """The data; `corpus`, if given, is not read again. Raises DataError."""
        ...

    def judge(self, pipe: Pipeline, data: TaskData, loss: float) -> ModelQuality:
        """How good the model is, whose loss on the validation data is known. Every rank must call it."""
        ...


class LayeredTask(Task, Protocol):
    """A task whose model is a known chain of layers.

    Attributes:
        layer_costs: of each layer, by which a run cuts them unless told how.
    """

    layer_costs: Sequence[float]
