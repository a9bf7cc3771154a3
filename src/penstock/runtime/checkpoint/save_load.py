"""Checkpoints of a pipeline: every process writes and reads its share, and all of them do it or none.

    process 0 chooses --> all open the same --> each reads and checks its share --> each puts it in place
                              |                          |
                       others see another:         one cannot: none loads,
                       none loads                  or all try the one before

Whatever can go wrong goes wrong before anything is changed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file

from penstock.formats.files import replaced
from penstock.runtime.checkpoint.folder import candidates, complete, latest, set_aside, sync
from penstock.runtime.checkpoint.object_state import (
    EXTRA,
    STATE,
    Stateful,
    objects_of_caller,
    states_of,
    to_write,
)
from penstock.runtime.checkpoint.optimizer import merged_meta
from penstock.runtime.checkpoint.reader import Kind, Reader, match
from penstock.runtime.checkpoint.together import UNWRITTEN, together
from penstock.runtime.checkpoint.training_state import BUFFERS, MODEL, StagedState, TrainingState
from penstock.runtime.errors import CheckpointError, DamagedCheckpointError, listed
from penstock.runtime.mesh.peers import Peers
from penstock.runtime.mesh.process_mesh import ProcessMesh

COUNTERS = "pipeline"
OPTIMIZER = "optimizer"
LARGEST_STEP = 10**18 - 1
"""The largest number that fits into the name of a checkpoint's folder."""
SHARED = "All processes must read one shared folder, and nothing may write to it meanwhile"


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
        kinds: shape and type by stored name. holders: of modules' extra state, by their own names in a checkpoint.
        members: of each process. aliases: by other name of a parameter the stored one.
    """

    kinds: dict[str, Kind]
    holders: set[str]
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
        if keep < 1 or not 0 <= step <= LARGEST_STEP:
            raise CheckpointError(
                f"got keep={keep}, number={step}: keep= is at least 1; number= is at least 0 and at most "
                f"{LARGEST_STEP}"
            )
        given = {"meta": _json_of(meta), "number": step, "keep": keep, "stateful": sorted(stateful or {})}
        states, told = states_of([*state.objects(), *objects_of_caller(stateful, mesh)])
        own = state.share(), states, state.scaler()
        return own[0].optimizer, told, given

    parts = together(peers, collect, f"checkpoint in {directory} {UNWRITTEN}")
    share, states, scaler = own
    optimizers, told, given = zip(*parts, strict=True)
    for process, mine in enumerate(given):
        if other := [name for name, value in mine.items() if value != given[0][name]]:
            raise CheckpointError(
                f"process {process} was given another {other[0]}= than process 0; give all the same"
            )
    content = {**(meta or {}), COUNTERS: {**counters, **scaler}}
    if (optimizer := merged_meta(optimizers)) is not None:
        content[OPTIMIZER] = optimizer
    writes = share.writes | to_write(states, told, peers.here[0])
    return write(directory, step, writes, content, peers=peers, keep=keep, shards=share.helps)


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
            0's counts.

    Raises:
        CheckpointError: none there, damaged, of another model, or not the same in all processes. Nothing is changed
            then, in any process.
    """
    peers = mesh.everyone
    paths, fallback = _choose(directory, peers, fallback)
    expected = _expected(state, peers)
    damaged: list[tuple[Path, str]] = []
    for path in paths:
        try:
            loaded = _load_one(path, state, mesh, stateful, expected)
        except DamagedCheckpointError as error:
            if fallback and path != paths[-1]:
                damaged.append((path, error.damage))
                continue
            later = "".join(f"; {each.name} is damaged too: {damage}" for each, damage in damaged)
            older = next(filter(complete, paths[paths.index(path) + 1 :]), None) if peers.here[0] == 0 else None
            raise DamagedCheckpointError(error.damage + later, peers.gather(older)[0]) from error
        return loaded._replace(notices=[*_set_aside(damaged, path, peers), *loaded.notices])
    raise AssertionError("a load ends with a checkpoint or an error")


def _choose(directory: str | Path, peers: Peers, fallback: bool) -> tuple[list[Path], bool]:
    """The checkpoints that may be loaded, the newest first, and whether any but the first may be.

    As process 0 sees them: if every process looked for the newest, they might come to different ones.
    """

    def look() -> tuple[list[str], bool, bool]:
        if peers.here[0] != 0:
            return [], False, False
        paths = _found(directory)
        return [path.name for path in paths], paths[0] == Path(directory), fallback

    names, is_itself, fallback = together(peers, look, f"{directory} cannot be read")[0]
    given = Path(directory)
    if is_itself:
        return [given, *(given.parent / name for name in names[1:])], fallback
    return [given / name for name in names], fallback


def _expected(state: TrainingState, peers: Peers) -> Expected:
    holders = {each.narrowest for each in state.modules}
    parts = peers.gather((state.expected(), holders, state.members(), state.aliases()))
    kinds, modules, members, aliases = zip(*parts, strict=True)
    return Expected(
        {name: kind for part in kinds for name, kind in part.items()},
        set().union(*modules),
        list(members),
        {other: name for part in aliases for other, name in part.items()},
    )


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
        match(reader, expected.kinds, MODEL)
        _require_modules(reader, expected.holders)
        objects, counters = objects_of_caller(stateful, mesh), reader.meta[COUNTERS]
        staged = state.stage(reader, counters["num_updates"], counters, expected.members, objects)

    together(peers, stage, what)
    staged.put_together(peers, what)
    meta = {name: value for name, value in reader.meta.items() if name not in (COUNTERS, OPTIMIZER)}
    notices = [*staged.notices, *_untaken(reader, expected, stateful or {})]
    return LoadResult(reader.meta[COUNTERS], meta, notices)


def _open(path: Path, peers: Peers) -> Reader:
    """The checkpoint, if all processes see the same. Raises CheckpointError in all of them otherwise."""
    reader, failure = None, None
    try:
        reader = Reader(path)
    except CheckpointError as error:
        failure = error
    opened = peers.gather((reader and reader.digest, failure and str(failure)))
    if differing := [process for process, each in enumerate(opened) if each != opened[0]]:
        process = next((process for process, (_, said) in enumerate(opened) if said), differing[0])
        said = opened[process][1]
        found = "another checkpoint" if said is None else f"none ({said})"
        raise CheckpointError(f"process {process} sees {found} at {path}, and others do not. {SHARED}")
    if reader is None:
        raise failure or AssertionError
    return reader


def _bases(names: Iterable[str], prefix: str) -> set[str]:
    """The objects whose states have these names, whoever holds them."""
    return {
        name.removeprefix(prefix).partition("#")[0].partition("@")[0] for name in names if name.startswith(prefix)
    }


def _require_modules(reader: Reader, holders: set[str]) -> None:
    """Raises CheckpointError for extra state of a module that is not here."""
    for name in sorted(_bases(reader.names(), EXTRA) - _bases(holders, EXTRA)):
        raise CheckpointError(
            f"checkpoint {reader.path} has extra state of {name or 'the model'}, and no module here has that name "
            "and takes it: build the model it was written with, or choose another checkpoint"
        )


def _untaken(reader: Reader, expected: Expected, stateful: Mapping[str, Stateful]) -> list[str]:
    """Notices of what the checkpoint has and nobody takes, or others do."""
    there = set(reader.names())
    apart = {name for name in there if name.startswith(EXTRA) and "@" in name}
    named = {
        "the state of {}, which was not loaded: give load(..., stateful=...)": _bases(there, STATE) - set(stateful),
        "{}, buffers that are not persistent and that no module here has so far: they were not loaded": {
            name.removeprefix(BUFFERS) for name in there - expected.kinds.keys() if name.startswith(BUFFERS)
        },
        "an extra state of {} for each of other replicas than here: those it does not know got the first's": (
            _bases(apart ^ expected.holders, EXTRA) & _bases(apart, EXTRA)
        ),
    }
    return [f"{reader.path} has {text.format(listed(sorted(names)))}" for text, names in named.items() if names]


def _set_aside(damaged: Sequence[tuple[Path, str]], loaded: Path, peers: Peers) -> list[str]:
    """Renames damaged checkpoints, so that they are not found the newest again; says so, and what was loaded."""
    names = []
    for path, _ in damaged if peers.here[0] == 0 else ():
        with contextlib.suppress(OSError):
            names.append(set_aside(path).name)
    names = peers.gather(names)[0] if damaged else []
    notices = [f"{damage}; {loaded} was loaded instead" for _, damage in damaged]
    return [*notices, *(f"a damaged checkpoint was set aside as {name}: it can be deleted" for name in names)]


def later_than(path: Path) -> list[str]:
    """A notice where a load of the folder would choose another checkpoint than this one, which was just saved."""
    newest = None
    with contextlib.suppress(CheckpointError):  # it is saved, whatever became of the folder since
        newest = latest(path.parent)
    if newest in (None, path):
        return []
    return [
        f"{newest} is later than what was saved beside it, and a load of the folder chooses it; if training went "
        "back to an earlier step, move it away, or save to another folder"
    ]


def find(directory: str | Path) -> Path:
    """The checkpoint meant by a path: itself, or the newest inside. Raises CheckpointError."""
    return _found(directory)[0]


def _found(directory: str | Path) -> list[Path]:
    """See `candidates`. Raises CheckpointError where there are none."""
    if paths := candidates(directory):
        return paths
    raise CheckpointError(f"{directory}: no checkpoint there; give a checkpoint or a folder of them")


def export_model(path: str | Path, checkpoint: str | Path) -> Path:
    """Writes a checkpoint's model as one safetensors file with plain parameter names, and returns its path.

    Raises CheckpointError when the checkpoint has no model, a tensor cannot be stored or the disk refuses; a file of
    that name is then as it was.
    """
    path, reader = Path(path), Reader(find(checkpoint))
    names = [name for name in reader.names() if name.startswith(MODEL)]
    if not names:
        raise CheckpointError(f"{path} would be empty: {reader.path} has no tensors named {MODEL}... to export")
    tensors = {name.removeprefix(MODEL): tensor for name, tensor in reader.iterate(names)}
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
