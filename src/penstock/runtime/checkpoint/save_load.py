"""Checkpoints of a pipeline: every process writes and reads its share, and all of them do it or none.

    process 0 chooses --> all open the same --> each reads and checks its share --> each puts it in place
                              |                          |
                       one sees another:           one cannot: none loads,
                       none loads                  or all try the one before

Whatever can go wrong goes wrong before anything is changed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file

from penstock.formats.files import replaced
from penstock.runtime.checkpoint.folder import Kind, Reader, candidates, complete, latest, match, set_aside, sync
from penstock.runtime.checkpoint.object_state import (
    EXTRA,
    STATE,
    Stateful,
    bases_in,
    objects_of_caller,
    states_of,
    to_write,
)
from penstock.runtime.checkpoint.optimizer import merged_meta
from penstock.runtime.checkpoint.together import UNWRITTEN, together
from penstock.runtime.checkpoint.training_state import COUNTERS, MODEL, StagedState, TrainingState
from penstock.runtime.errors import CheckpointError, DamagedCheckpointError, listed
from penstock.runtime.mesh.peers import Peers
from penstock.runtime.mesh.process_mesh import ProcessMesh

OPTIMIZER = "optimizer"


class LoadResult(NamedTuple):
    """What a load brought besides the state itself.

    Attributes:
        counters: of the pipeline. meta: the caller's. notices: what a person should know of it.
    """

    counters: dict[str, int]
    meta: dict[str, Any]
    notices: list[str]


class Expected(NamedTuple):
    """What the model of all processes consists of.

    Attributes:
        kinds: shape and type by stored name of parameters and persistent buffers. modules: those with extra state.
        members: of each process. aliases: by other name of a parameter the stored one.
    """

    kinds: dict[str, Kind]
    modules: set[str]
    members: list[list[list[str]]]
    aliases: dict[str, str]


def save(
    directory: str | Path,
    state: TrainingState,
    mesh: ProcessMesh,
    counters: Mapping[str, int],
    meta: Mapping[str, Any] | None,
    stateful: Mapping[str, Stateful] | None,
    keep: int,
    number: int | None = None,
) -> Path:
    """Writes a checkpoint; every process must call it. Raises CheckpointError in all of them where one cannot."""
    from penstock.runtime.checkpoint.dcp import write

    peers, keep, step = mesh.everyone, int(keep), int(counters["num_steps"] if number is None else number)
    own: tuple[Any, ...] = ()

    def collect() -> tuple[Any, ...]:
        """What the others must know of this process's share."""
        nonlocal own
        if keep < 1 or step < 0:
            raise CheckpointError(f"got keep={keep}, number={step}: keep= is at least 1, number= is at least 0")
        given = {"meta": _json_of(meta), "number": step, "keep": keep, "stateful": sorted(stateful or {})}
        *tensors, optimizer = state.share()
        states, told = states_of([*state.objects(), *objects_of_caller(stateful, mesh)])
        own = *tensors, states, state.scaler()
        return optimizer, told, given

    parts = together(peers, collect, f"checkpoint in {directory} {UNWRITTEN}")
    writes, helps, states, scaler = own
    optimizers, told, given = zip(*parts, strict=True)
    for process, mine in enumerate(given):
        if other := [name for name, value in mine.items() if value != given[0][name]]:
            raise CheckpointError(
                f"process {process} was given another {other[0]}= than process 0; give all the same"
            )
    content = {**(meta or {}), COUNTERS: {**counters, **scaler}}
    if (optimizer := merged_meta(optimizers)) is not None:
        content[OPTIMIZER] = optimizer
    writes |= to_write(states, told, peers.here[0])
    return write(directory, step, writes, content, peers=peers, keep=keep, shards=helps)


def _json_of(meta: Mapping[str, Any] | None) -> str:
    """The caller's meta as text. Raises CheckpointError for what JSON cannot say, and for our own keys."""
    if taken := sorted({COUNTERS, OPTIMIZER} & set(meta or {})):
        raise CheckpointError(f"meta has the key {taken[0]!r}, which is the pipeline's own: give it another name")
    try:
        return json.dumps(meta, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"meta must be plain JSON (dicts, lists, text, numbers): {error}") from None


def load(
    directory: str | Path,
    state: TrainingState,
    mesh: ProcessMesh,
    stateful: Mapping[str, Stateful] | None,
    fallback: bool,
) -> LoadResult:
    """Loads a checkpoint, or the newest of a folder; every process must call it.

    Args:
        fallback: whether one that is damaged is set aside and the newest whole one before it loaded instead. Process
            0's value counts.

    Raises:
        CheckpointError: none there, damaged, of another model, or not the same in all processes. Nothing is changed
            then, in any process.
    """
    peers = mesh.everyone
    paths, fallback = _choose(directory, peers, fallback)
    expected = _expected(state, peers)
    damaged: dict[Path, str] = {}
    for path in paths if fallback else paths[:1]:
        try:
            loaded = _load_one(path, state, mesh, stateful, expected)
        except DamagedCheckpointError as error:
            damaged[path] = error.damage
            continue
        for other, damage in damaged.items():
            if peers.here[0] == 0:
                with contextlib.suppress(OSError):
                    set_aside(other)
            loaded.notices.append(
                f"{damage}; {path} was loaded instead, and {other.name} set aside as {other.name}.damaged"
            )
        return loaded
    looks = peers.here[0] == 0 and not fallback  # else none is whole
    older = next(filter(complete, paths[1:]), None) if looks else None
    raise DamagedCheckpointError(damaged[paths[0]], peers.gather(older)[0])


def _choose(directory: str | Path, peers: Peers, fallback: bool) -> tuple[list[Path], bool]:
    """The checkpoints that may be loaded, the newest first, and whether any but the first may be.

    As process 0 sees them: if every process looked for the newest, they might come to different ones.
    """

    def look() -> tuple[list[str], bool]:
        if peers.here[0] != 0:
            return [], False
        find(directory)
        return [os.path.relpath(path, directory) for path in candidates(directory)], fallback

    names, fallback = together(peers, look, f"{directory} cannot be read")[0]
    return [Path(os.path.normpath(Path(directory) / name)) for name in names], fallback


def _expected(state: TrainingState, peers: Peers) -> Expected:
    mine = (
        state.expected(MODEL),
        bases_in([each.narrowest for each in state.modules], EXTRA),
        state.members(),
        state.aliases(),
    )
    kinds, modules, members, aliases = zip(*peers.gather(mine), strict=True)
    return Expected(dict(ChainMap(*kinds)), set().union(*modules), list(members), dict(ChainMap(*aliases)))


def _load_one(
    path: Path, state: TrainingState, mesh: ProcessMesh, stateful: Mapping[str, Stateful] | None, expected: Expected
) -> LoadResult:
    """Reads and checks a checkpoint in all processes, and puts it in place. All of them raise where one does."""
    peers, what = mesh.everyone, f"checkpoint {path} could not be loaded"
    reader = _open(path, peers)
    staged: StagedState

    def stage() -> None:
        nonlocal staged
        reader.rename(expected.aliases)
        match(f"checkpoint {path}", reader.kinds(MODEL), expected.kinds)
        if unknown := sorted(bases_in(reader, EXTRA) - expected.modules):
            raise CheckpointError(
                f"checkpoint {path} has extra state of {unknown[0] or 'the model'}, and no "
                "module here takes it: build the model it was written with, or choose another checkpoint"
            )
        objects = objects_of_caller(stateful, mesh)
        staged = state.stage(reader, reader.meta, f"checkpoint {path}", expected.members, objects)

    together(peers, stage, what)
    staged.put_together(peers, what)
    notices = []
    if untaken := sorted(bases_in(reader, STATE) - set(stateful or {})):
        notices = [f"{path} has the state of {listed(untaken)}, which was not loaded: give load(..., stateful=...)"]
    meta = {name: value for name, value in reader.meta.items() if name not in (COUNTERS, OPTIMIZER)}
    return LoadResult(reader.meta[COUNTERS], meta, notices)


def _open(path: Path, peers: Peers) -> Reader:
    """The checkpoint, if all processes see the same. Raises CheckpointError in all of them otherwise."""
    reader: Reader | CheckpointError
    try:
        reader = Reader(path)
    except CheckpointError as error:
        reader = error
    seen = peers.gather(reader.digest if isinstance(reader, Reader) else str(reader))
    if other := [process for process, each in enumerate(seen) if each != seen[0]]:
        raise CheckpointError(
            f"process {other[0]} and process 0 see different checkpoints at {path}, or one sees none: all processes "
            "must read one shared folder, and nothing may write to it meanwhile"
        )
    if isinstance(reader, CheckpointError):
        raise reader
    return reader


def later_than(path: Path) -> list[str]:
    """A notice where a load of the folder would choose another checkpoint than this one, which was just saved."""
    newest = latest(path.parent)
    if newest in (None, path):
        return []
    return [
        f"{newest} is later than what was saved beside it, and a load of the folder chooses it; if training went "
        "back to an earlier step, move it away, or save to another folder"
    ]


def find(directory: str | Path) -> Path:
    """The checkpoint meant by a path: itself, or the newest inside. Raises CheckpointError where there is none."""
    if (path := latest(directory)) is None:
        raise CheckpointError(f"{directory}: no checkpoint there; give a checkpoint or a folder of them")
    return path


def export_model(path: str | Path, checkpoint: str | Path) -> Path:
    """Writes a checkpoint's model as one safetensors file with plain parameter names, and returns its path.

    Raises CheckpointError when the checkpoint has no model, a tensor cannot be stored or the disk refuses; a file of
    that name is then as it was.
    """
    path, reader = Path(path), Reader(find(checkpoint))
    names = [name for name in reader.names() if name.startswith(MODEL)]
    if not names:
        raise CheckpointError(f"{path} would be empty: {reader.path} has no tensors named {MODEL}... to export")
    tensors = {name.removeprefix(MODEL): reader[name] for name in names}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as beside:
            beside.touch()
            mode = beside.stat().st_mode  # of a new file here; safetensors makes its own for the owner alone
            save_file(tensors, beside)
            beside.chmod(mode)
            sync(beside)
        sync(path.parent)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} could not be written: {reason}. It is as it was") from error
    return path
