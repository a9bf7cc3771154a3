"""What a run trains, as the rest of the run sees it: a model cut for its schedule, its data, and how good it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn

from penstock.data import Corpus
from penstock.runtime import Pipeline
from penstock.runtime.checkpoint.object_state import Stateful
from penstock.runtime.checkpoint.save_load import export_model
from penstock.schedule import Schedule

if TYPE_CHECKING:
    from penstock.train.tasks.documents import Documents


BYTES = 4
"""Bytes of a number that passes between stages. Sums along the model are kept in float32."""
VALIDATION_BATCHES = 4


class Example(NamedTuple):
    """A batch in the form that `ps.Pipeline.step` takes."""

    inputs: Any
    targets: Any


class TaskBatches(Protocol):
    """The batch of each step, from 0 on; the same on every rank."""

    def __getitem__(self, step: int, /) -> Example: ...


class StepBatches:
    """Batches made by a function of the step's number."""

    def __init__(self, make: Callable[[int], Example]) -> None:
        self._make = make

    def __getitem__(self, step: int, /) -> Example:
        return self._make(step)


@dataclass(frozen=True)
class TaskData:
    """What a task learns from.

    Attributes:
        description: the data in words. unit: the unit of the loss on the validation data, in words.
        digest: a short text, which differs if the data differs.
        batches: the batches of the steps. validation: at least one batch on which the model is evaluated.
        corpus: the text, which a parent reads once for all its ranks; None if there is none.
        documents: the documents that `batches` packs if whole documents are packed; else None.
        stateful: by name, the objects whose positions in the data a checkpoint has.
        is_dealt: whether batches are only this replica's part.
    """

    description: str
    unit: str
    digest: str
    batches: TaskBatches
    validation: Iterable[Example]
    corpus: Corpus | None = None
    documents: Documents | None = None
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    is_dealt: bool = False


class Task(ABC):
    """A model of some kind, cut into the stages of a schedule. It is checked when it is made, with nothing built yet.

    Attributes:
        config: the sizes of the model. sizes: by name those on which its costs depend.
        layer_costs: the cost of each layer, if the model is a known chain of layers. A run cuts it by these costs.
        loss: the loss of a microbatch.
        num_tokens: tokens of a sample, in which the speed is counted; None if a sample is no row of tokens.
        tied: groups of names of parameters that are one parameter.
        writes: whether the model writes text at the end of a run.
    """

    config: Any
    sizes: Mapping[str, Any]
    layer_costs: Sequence[float]
    loss: Callable[..., Tensor]
    num_tokens: int | None = None
    tied: Sequence[Sequence[str]] = ()
    writes = False

    @abstractmethod
    def stages(self) -> list[Callable[[], nn.Module]]:
        """For each stage, the function that builds it, so that a rank holds only its own layers."""

    @abstractmethod
    def message_bytes(self, schedule: Schedule) -> list[float]:
        """By stage, the bytes that one of its microbatches sends on."""

    @abstractmethod
    def read(self, corpus: Corpus | None) -> TaskData:
        """The data. If `corpus` is given, it is not read again. Raises DataError."""

    def write(self, pipe: Pipeline) -> str | None:
        """Text that the model writes; None for a model that writes none. Every rank must call it."""
        return None

    def export(self, path: Path, checkpoints: Path) -> None:
        """Writes the newest checkpoint as a file, by plain names of parameters. Raises CheckpointError."""
        export_model(path, checkpoints)
