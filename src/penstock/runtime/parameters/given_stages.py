"""The stages that processes were given: built where they run, and compared before anything of them is shared.

    list of stages --build_copies--> own stages --forms, or the error--> all processes: alike, or refused by all

A function makes a stage where it runs alone, so only those who run a stage can compare it. The parameters of a
module are compared wherever it is given. One without parameters may stand in for a stage that other processes run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import require_same
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.pipeline_copies import build_copies
from penstock.runtime.stage.stage import Copy, Stage, StageSource
from penstock.schedule import Placement


def form_of(module: nn.Module, prefix: str = "") -> list[str]:
    """A line for each parameter: what must be alike of it in every process."""
    return [_line(f"parameter {name}", each) for name, each in module.named_parameters(prefix)]


def _line(what: str, tensor: Tensor) -> str:
    return f"{what} of shape {'that is not known yet' if is_lazy(tensor) else list(tensor.shape)}, {tensor.dtype}"


def digest_of(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def build_alike(sources: Sequence[Stage | StageSource], placement: Placement, mesh: ProcessMesh) -> dict[Copy, Stage]:
    """The copies of stages that this process hosts. Every process calls it.

    Raises:
        RuntimeFailure: in every process, if some were given other stages than others, or one of them could not build
            its own; there its own error is raised.
    """
    found: dict[Copy, Stage] = {}
    forms: dict[str, list[str]] = {}
    error: Exception | None = None
    try:
        found = build_copies(sources, placement, mesh.pipeline.here)
        forms = _forms_of(sources, {stage: one for (_, stage), one in found.items()})
    except Exception as failure:  # the others would wait for this process
        error = failure
    digests = {subject: digest_of(lines) for subject, lines in forms.items()}
    told = mesh.everyone.gather((digests, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for rank, (_, failed) in enumerate(told):
        if failed is not None:
            raise RuntimeFailure(f"rank {rank} could not build its stages: {failed}")
    for subject in sorted({subject for each, _ in told for subject in each}):
        if len({each[subject] for each, _ in told if subject in each}) > 1:
            _refuse(subject, mesh.everyone.gather(forms.get(subject)))
    return found


def _forms_of(sources: Sequence[Stage | StageSource], stages: Mapping[int, Stage]) -> dict[str, list[str]]:
    """By subject the forms that this process knows. Where a stage runs, buffers may grow and parameters may be frozen
    between two pipelines, so processes that run it compare these alone.
    """
    forms = {f"stage {index}": form_of(stage) for index, stage in stages.items()}
    for index, stage in stages.items():
        running = [_line(f"buffer {name}", buffer) for name, buffer in stage.named_buffers()]
        running += [f"{name} {'trained' if p.requires_grad else 'frozen'}" for name, p in stage.named_parameters()]
        forms[f"state of stage {index}"] = running
    for index, source in enumerate(sources):
        if isinstance(source, nn.Module) and index not in stages:
            form = form_of(source, "" if isinstance(source, Stage) else str(index))
            forms |= {f"stage {index}": form} if form else {}
    return forms


def _refuse(subject: str, forms: Sequence[list[str] | None]) -> None:
    """Raises RuntimeFailure, which says the first line in which a process differs from the first one."""
    first, known = next((rank, form) for rank, form in enumerate(forms) if form is not None)
    other, form = next((rank, form) for rank, form in enumerate(forms) if form is not None and form != known)
    place = next((n for n, (a, b) in enumerate(zip(known, form)) if a != b), min(len(known), len(form)))
    mine, theirs = (lines[place] if place < len(lines) else "no more" for lines in (known, form))
    require_same(
        [{} if form is None else {subject: form} for form in forms],
        f"rank {first} has {mine}, and rank {other} has {theirs}; give every rank the same stages",
        shown=False,
    )
