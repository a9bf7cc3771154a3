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
import os
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file

from penstock.formats.files import replaced
from penstock.runtime.checkpoint.codec import digests_of
from penstock.runtime.checkpoint.folder import candidates, complete, latest, set_aside, sync
from penstock.runtime.checkpoint.optimizer import merged_meta
from penstock.runtime.checkpoint.reader import LARGEST_STEP, Kind, Reader, match, require_plain
from penstock.runtime.checkpoint.together import UNWRITTEN, together
from penstock.runtime.checkpoint.training_state import (
    BUFFERS,
    EXTRA,
    MODEL,
    CheckpointShare,
    StagedState,
    TrainingState,
    extra_to_write,
)
from penstock.runtime.checkpoint.user_state import ProcessPlace, StagedUserState, Stateful, packed, to_write
from penstock.runtime.errors import CheckpointError, DamagedCheckpointError
from penstock.runtime.mesh.peers import Peers
from penstock.runtime.mesh.process_mesh import ProcessMesh

COUNTERS = "pipeline"
OPTIMIZER = "optimizer"
SHARED = "All processes must read one shared folder, and nothing may write to it meanwhile"
COUNTS = ("num_steps", "num_updates", "seed")


class LoadResult(NamedTuple):
    """What a load brought besides the state itself.

    Attributes:
        counters: of the pipeline. meta: the caller's. notices: what a person should know of it.
    """

    counters: dict[str, int]
    meta: dict[str, Any]
    notices: list[str]


class ChosenCheckpoint(NamedTuple):
    """What may be loaded, the newest first, and what the model of all processes consists of."""

    paths: list[Path]
    expected: dict[str, Kind]
    extra_names: set[tuple[str, str]]
    members: list[dict[str, list[list[str]]]]
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
    peers, place = mesh.everyone, _place_of(mesh)
    meta, stateful = {} if meta is None else meta, {} if stateful is None else stateful
    share, extra, states, scaler = CheckpointShare({}, {}, None), {}, {}, {}

    def collect() -> tuple[Any, ...]:
        """What the others must know of this process's share."""
        nonlocal share, extra, states, scaler
        _require_types(directory, stateful)
        _require_call(meta, keep, number)
        share, extra, states, scaler = state.share(), state.extra(), packed(stateful), state.scaler()
        given = {"meta": json.dumps(meta, sort_keys=True), "number": number, "keep": keep}
        return share.optimizer, digests_of(extra), digests_of(states), place, given

    parts = together(peers, collect, f"checkpoint in {directory} {UNWRITTEN}")
    optimizers, extra_digests, state_digests, places, given = zip(*parts, strict=True)
    for process, mine in enumerate(given):
        if other := [name for name, value in mine.items() if value != given[0][name]]:
            raise CheckpointError(
                f"process {process} was given another {other[0]}= than process 0; give all the same"
            )
    me = peers.here[0]
    writes = share.writes | extra_to_write(extra, extra_digests, me) | to_write(states, state_digests, places, me)
    content = {**meta, COUNTERS: {**counters, **scaler}}
    if (optimizer := merged_meta(optimizers)) is not None:
        content[OPTIMIZER] = optimizer
    from penstock.runtime.checkpoint.dcp import write

    step = counters["num_steps"] if number is None else int(number)
    return write(Path(directory), step, writes, content, peers=peers, keep=int(keep), shards=share.helps)


def _require_call(meta: Any, keep: Any, number: Any) -> None:
    if not isinstance(meta, Mapping):
        raise CheckpointError(f"meta= is a dict of small JSON data, got {type(meta).__name__}")
    for name, count, least in (("keep", keep, 1), ("number", 0 if number is None else number, 0)):
        if not isinstance(count, Integral) or count < least:
            raise CheckpointError(f"{name}= is a whole number, at least {least}, got {count!r:.60}")
    if number is not None and number > LARGEST_STEP:
        raise CheckpointError(f"number= is at most {LARGEST_STEP}, as no longer one is found again, got {number}")
    require_plain(meta)
    if taken := sorted({COUNTERS, OPTIMIZER} & set(meta)):
        raise CheckpointError(f"meta has the key {taken[0]!r}, which is the pipeline's own: give it another name")


def load(
    directory: str | Path,
    state: TrainingState,
    mesh: ProcessMesh,
    stateful: Mapping[str, Stateful] | None,
    fallback: bool,
) -> LoadResult:
    """Loads a checkpoint, or the newest of a folder; every process must call it.

    Args:
        fallback: whether one that is damaged is set aside and the newest whole one before it loaded instead.

    Raises:
        CheckpointError: none there, damaged, of another model, or not the same in all processes. Nothing is changed
            then, in any process.
    """
    peers, place = mesh.everyone, _place_of(mesh)
    stateful = {} if stateful is None else stateful
    chosen = _choose(directory, state, peers, stateful, fallback)
    damaged: list[tuple[Path, str]] = []
    for path in chosen.paths:
        try:
            loaded, staged = _load_one(path, state, peers, place, stateful, chosen)
        except DamagedCheckpointError as error:
            if fallback and path != chosen.paths[-1]:
                _require_damaged(path, error.damage, peers)
                damaged.append((path, error.damage))
                continue
            later = "".join(f"; {each.name} is damaged too: {damage}" for each, damage in damaged)
            raise DamagedCheckpointError(error.damage + later, _older(path, chosen.paths, peers)) from error
        staged.put()
        return loaded._replace(notices=[*_set_aside(damaged, path, peers), *loaded.notices])
    raise AssertionError("a load ends with a checkpoint or an error")


def _require_types(directory: Any, stateful: Any) -> None:
    """Raises CheckpointError for what is no path, and no dict of objects with a state."""
    if not isinstance(directory, str | os.PathLike) or "\0" in str(directory):
        raise CheckpointError(f"a folder is named by text or a Path without zero bytes, got {directory!r:.80}")
    if not isinstance(stateful, Mapping):
        raise CheckpointError(f"stateful= is a dict of objects by name, got {type(stateful).__name__}")


def _place_of(mesh: ProcessMesh) -> ProcessPlace:
    peers = mesh.everyone
    num_processes = peers.num_ranks if len(peers.here) == 1 else 1
    return ProcessPlace(mesh.replica, mesh.num_replicas, peers.here[0], num_processes)


def _choose(
    directory: Any, state: TrainingState, peers: Peers, stateful: Mapping[str, Stateful], fallback: bool
) -> ChosenCheckpoint:
    """As process 0 sees them: if every process looked for the newest, they might come to different ones."""

    def look() -> tuple[Any, ...]:
        _require_types(directory, stateful)
        paths: list[Path] = []
        try:
            paths = candidates(directory)
            if not paths:
                raise CheckpointError(f"{directory}: no checkpoint there; give a checkpoint or a folder of them")
        except CheckpointError:
            if peers.here[0] == 0:
                raise
        given = paths[0].name if paths and paths[0] == Path(directory) else None
        call = {"checkpoint": given, "stateful": sorted(map(str, stateful)), "fallback": fallback}
        names = [path.name for path in paths]
        return names, call, state.expected(), state.extra_names(), state.members(), state.aliases()

    parts = together(peers, look, f"{directory} cannot be read")
    names, call, *_ = parts[0]
    for process, (own, other, *_) in enumerate(parts):
        if own and other != call:
            key = next(key for key in call if other[key] != call[key])
            raise CheckpointError(
                f"process {process} was given {key} {other[key]!r} and process 0 {call[key]!r}: every process must "
                "make the same call of load"
            )
    parent = Path(directory) if call["checkpoint"] is None else Path(directory).parent
    _, _, expected, extra_names, members, aliases = zip(*parts, strict=True)
    return ChosenCheckpoint(
        [parent / name for name in names],
        {name: kind for part in expected for name, kind in part.items()},
        {name for part in extra_names for name in part},
        list(members),
        {other: name for part in aliases for other, name in part.items()},
    )


def _load_one(
    path: Path,
    state: TrainingState,
    peers: Peers,
    place: ProcessPlace,
    stateful: Mapping[str, Stateful],
    chosen: ChosenCheckpoint,
) -> tuple[LoadResult, StagedState]:
    """Reads and checks a checkpoint in all processes; all of them raise where one does."""
    what = f"checkpoint {path} could not be loaded"
    reader = _open(path, peers)

    loaded: LoadResult
    staged: StagedState
    users: StagedUserState

    def stage() -> None:
        nonlocal loaded, staged, users
        reader.rename(chosen.aliases)
        match(reader, chosen.expected, prefix=MODEL)
        loaded = _read_meta(reader)
        loaded.notices.extend(_unknown(reader, chosen))
        users = StagedUserState(stateful, reader, place)
        if users.left:
            loaded.notices.append(
                f"{path} has the state of {', '.join(users.left)}, which was not loaded: give load(..., stateful=...)"
            )
        staged = state.stage(reader, loaded.counters["num_updates"], reader.meta[COUNTERS], chosen.members)
        loaded.notices.extend(staged.notices)

    def give() -> None:
        staged.trial.give()
        users.trial.give()

    together(peers, stage, what)
    try:
        together(peers, give, what)
    except BaseException as refused:
        users.trial.take_back(refused)
        staged.trial.take_back(refused)
        raise
    return loaded, staged


def _open(path: Path, peers: Peers) -> Reader:
    """The checkpoint, if all processes see the same. Raises CheckpointError in all of them otherwise."""
    reader, failure = None, None
    try:
        reader = Reader(path)
    except CheckpointError as error:
        failure = error
    opened = peers.gather((reader and reader.digest, failure and str(failure)))
    if len(set(opened)) > 1 and any(said for _, said in opened):
        process, said = next((process, said) for process, (_, said) in enumerate(opened) if said)
        raise CheckpointError(f"process {process} cannot open what others can: {said}. {SHARED}")
    if reader is None:
        raise failure or AssertionError
    if other := [process for process, each in enumerate(opened) if each != opened[0]]:
        raise CheckpointError(f"process {other[0]} sees another checkpoint at {path} than process 0. {SHARED}")
    return reader


def _require_damaged(path: Path, damage: str, peers: Peers) -> None:
    """Raises CheckpointError where process 0 finds nothing wrong with what another process cannot read."""
    is_whole = False
    if peers.here[0] == 0:
        with contextlib.suppress(CheckpointError):
            Reader(path).verify()
            is_whole = True
    if peers.gather(is_whole)[0]:
        raise CheckpointError(f"{damage}; process 0 reads all of it. {SHARED}")


def _older(path: Path, paths: Sequence[Path], peers: Peers) -> Path | None:
    """The newest checkpoint before one that looks whole to process 0."""
    before = paths[paths.index(path) + 1 :]
    is_first = peers.here[0] == 0
    found: Path | None = peers.gather(next(filter(complete, before), None) if is_first else None)[0]
    return found


def _read_meta(reader: Reader) -> LoadResult:
    """The counters and the caller's meta. Raises CheckpointError."""
    meta = dict(reader.meta) if isinstance(reader.meta, dict) else {}
    counters = meta.pop(COUNTERS, None)
    if not isinstance(counters, dict):
        raise CheckpointError(f"checkpoint {reader.path} was not written by a pipeline: it has no counters")
    for name in COUNTS:
        value = counters.get(name)
        if type(value) is not int or not (name == "seed" or 0 <= value < 2**63):
            raise CheckpointError(f"checkpoint {reader.path}: its counter {name} is {value!r:.60}, which is no count")
    meta.pop(OPTIMIZER, None)
    return LoadResult({name: counters[name] for name in COUNTS}, meta, [])


def _unknown(reader: Reader, chosen: ChosenCheckpoint) -> list[str]:
    """What a checkpoint has and no process takes. Raises CheckpointError where it is extra state."""
    names = {name for name, _ in chosen.extra_names}
    others: list[str] = []
    dropped: set[str] = set()
    for name in reader.names():
        if name.startswith(BUFFERS) and name not in chosen.expected:
            others.append(name.removeprefix(BUFFERS))
        if name.startswith(EXTRA):
            base = name.removeprefix(EXTRA).rpartition("#")[0]
            module, _, holder = base.rpartition("@")
            if not {base, module} & names:
                raise CheckpointError(
                    f"checkpoint {reader.path} has extra state of {base or 'the model'}, and no module here has that "
                    "name and takes it: build the model it was written with, or choose another checkpoint"
                )
            if base not in names and (module, holder) not in chosen.extra_names:
                dropped.add(module)
    notices = [
        f"{reader.path} has extra state of {module} from more pipelines, replicas or shards than there are now, "
        "which differed: theirs is left out"
        for module in sorted(dropped)
    ]
    if others:
        listed = ", ".join(others)
        notices.append(f"{reader.path} has {listed}, buffers that are not persistent and not there yet: left out")
    return notices


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
    newest = latest(directory)
    if newest is None:
        raise CheckpointError(f"{directory}: no checkpoint there; give a checkpoint or a folder of them")
    return newest


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
