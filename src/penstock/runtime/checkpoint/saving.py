"""Checkpoints of a pipeline: every process writes and reads its share, and all of them do it or none.

    rank 0 chooses --> all open the same --> each reads and checks its share --> each puts it in place
                           |                          |
                    others see another:         one cannot: none loads,
                    none loads                  or all try the one before

Whatever can go wrong goes wrong before anything is changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from penstock.runtime.checkpoint import (
    CheckpointError,
    DamagedCheckpointError,
    Kind,
    Reader,
    candidates,
    complete,
    digests_of,
    export,
    latest,
    match,
    merged_meta,
    set_aside,
    write,
)
from penstock.runtime.checkpoint.format import LARGEST_STEP
from penstock.runtime.checkpoint.training_state import (
    BUFFERS,
    EXTRA,
    MODEL,
    StagedState,
    TrainingState,
    extra_to_write,
)
from penstock.runtime.checkpoint.user_state import (
    ProcessPlace,
    StagedUserState,
    Stateful,
    packed,
    to_write,
)
from penstock.runtime.mesh.peers import Peers
from penstock.runtime.mesh.process_mesh import ProcessMesh

T = TypeVar("T")

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


class LoadFailure(NamedTuple):
    """An error as it goes to the other processes."""

    text: str
    is_damage: bool


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

    def collect() -> Any:
        _require_types(directory, stateful)
        if not isinstance(meta, Mapping):
            raise CheckpointError(f"meta= is a dict of small JSON data, got {type(meta).__name__}")
        for name, count, least in (("keep", keep, 1), ("number", 0 if number is None else number, 0)):
            if not isinstance(count, Integral) or count < least:
                raise CheckpointError(f"{name}= is a whole number, at least {least}, got {count!r:.60}")
        if number is not None and number > LARGEST_STEP:
            raise CheckpointError(f"number= is at most {LARGEST_STEP}, as no longer one is found again, got {number}")
        if taken := sorted({COUNTERS, OPTIMIZER} & set(meta)):
            raise CheckpointError(f"meta has the key {taken[0]!r}, which is the pipeline's own: give it another name")
        return state.share(), state.extra(), packed(stateful), state.scaler()

    found, error = _attempt(collect, f"checkpoint in {directory} could not be written")
    share, extra, states, scaler = found or (None, {}, {}, {})
    given = {"meta": _digest_of(meta), "number": number, "keep": keep}
    mine = (share and share.optimizer, digests_of(extra), digests_of(states), place, given)
    parts = _agree(peers, mine, error)
    _require_same([part[4] for part in parts])
    me = peers.here[0] if len(parts) > 1 else 0
    assert share is not None
    writes = share.writes | extra_to_write(extra, [part[1] for part in parts], me)
    writes |= to_write(states, [part[2] for part in parts], [part[3] for part in parts], me)
    content = {**meta, COUNTERS: {**counters, **scaler}}
    optimizer = merged_meta(part[0] for part in parts)
    content |= {} if optimizer is None else {OPTIMIZER: optimizer}
    path, error = None, None
    try:
        path = write(
            Path(directory),
            counters["num_steps"] if number is None else int(number),
            writes,
            content,
            rank=me,
            num_ranks=len(parts),
            barrier=peers.barrier,
            keep=int(keep),
            helped=share.helps,
        )
    except CheckpointError as failure:
        error = failure
    _agree(peers, None, error)  # so that every process can say why
    assert path is not None
    return path


def _digest_of(meta: Mapping[str, Any]) -> str:
    """Tells JSON data from others; empty for what is none, which is refused where it would be written."""
    try:
        return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
    except (TypeError, ValueError):
        return ""


def _require_same(given: Sequence[Mapping[str, Any]]) -> None:
    """Raises CheckpointError, the same in every process, where one was given something else than the first."""
    for process, mine in enumerate(given):
        for name, value in mine.items():
            if value != given[0][name]:
                raise CheckpointError(
                    f"process {process} was given another {name}= than process 0; give all the same"
                )


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
    _, error = _attempt(lambda: _require_types(directory, stateful), "checkpoint could not be loaded")
    if error is not None:
        directory, stateful = "", {}
    chosen = _choose(Path(directory), state, peers, stateful, fallback, error)
    damaged: list[tuple[Path, str]] = []
    for path, following in zip(chosen.paths, [*chosen.paths[1:], None]):
        try:
            loaded, staged = _load_one(path, state, peers, place, stateful, chosen)
        except DamagedCheckpointError as error:
            if fallback and following is not None:
                _require_damaged(path, error.damage, peers)
                damaged.append((path, error.damage))
                continue
            later = "".join(f"; {each.name} is damaged too: {damage}" for each, damage in damaged)
            raise DamagedCheckpointError(error.damage + later, _older(path, chosen.paths, peers)) from error
        staged.put()
        return loaded._replace(notices=[*_set_aside(damaged, path, peers), *loaded.notices])
    raise CheckpointError(f"{directory}: no checkpoint there; give a checkpoint or a folder of them")


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
    directory: Path,
    state: TrainingState,
    peers: Peers,
    stateful: Mapping[str, Stateful],
    fallback: bool,
    error: CheckpointError | None,
) -> ChosenCheckpoint:
    """As rank 0 sees it: if every process looked for the newest, one might come to an older one than the others.

    Args:
        error: what is wrong with this process's call, of which the others are told.
    """
    is_wrong = error is not None
    found = None
    if error is None:
        found, error = _attempt(lambda: candidates(directory), f"{directory} cannot be read")
    paths = found or []
    if not paths and error is None:
        error = CheckpointError(f"{directory}: no checkpoint there; give a checkpoint or a folder of them")
    given = paths[0].name if paths and paths[0] == directory else None
    call = {"checkpoint": given, "stateful": sorted(map(str, stateful)), "fallback": fallback}
    names_here = (state.expected(), state.extra_names(), state.members(), state.aliases())
    mine = ([path.name for path in paths], call, *names_here)
    parts = _agree(peers, mine, error if is_wrong or peers.here[0] == 0 else None)
    names = parts[0][0]
    for process, (own, other, *_) in enumerate(parts):
        if own and other != parts[0][1]:
            key = next(key for key in call if other[key] != parts[0][1][key])
            raise CheckpointError(
                f"process {process} was given {key} {other[key]!r} and process 0 {parts[0][1][key]!r}: every process "
                "must make the same call of load"
            )
    parent = directory if parts[0][1]["checkpoint"] is None else directory.parent
    expected = {name: kind for part in parts for name, kind in part[2].items()}
    extra_names = {name for part in parts for name in part[3]}
    # Earlier versions put the number of the only stage before all names.
    aliases = {f"0.{name}": name for name in (each.removeprefix(MODEL) for each in expected)}
    aliases |= {name: stored for part in parts for name, stored in part[5].items()}
    members = [part[4] for part in parts]
    return ChosenCheckpoint([parent / name for name in names], expected, extra_names, members, aliases)


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
    reader, error = _attempt(lambda: Reader(path), what)
    digests = peers.gather((reader and reader.digest, error and str(error)))
    if None in {digest for digest, _ in digests} and len(set(digests)) > 1:
        process, said = next((p, said) for p, (_, said) in enumerate(digests) if said is not None)
        raise CheckpointError(f"process {process} cannot open what others can: {said}. {SHARED}")
    if error is not None:
        raise error
    assert reader is not None
    if other := [process for process, digest in enumerate(digests) if digest != digests[0]]:
        raise CheckpointError(f"process {other[0]} sees another checkpoint at {path} than process 0. {SHARED}")

    def stage() -> tuple[LoadResult, StagedState, StagedUserState]:
        reader.rename(chosen.aliases)
        match(reader, chosen.expected, prefix=MODEL)
        loaded = _read_meta(reader)
        loaded.notices.extend(_unknown(reader, chosen))
        users = StagedUserState(stateful, reader, place)
        if users.left:
            loaded.notices.append(
                f"{path} has the state of {', '.join(users.left)}, which was not loaded: give load(..., stateful=...)"
            )
        num_updates = loaded.counters["num_updates"]
        staged = state.stage(reader, num_updates, reader.meta[COUNTERS], chosen.members)
        loaded.notices.extend(staged.notices)
        return loaded, staged, users

    found, error = _attempt(stage, what)
    _agree(peers, None, error)
    assert found is not None
    loaded, staged, users = found

    def give() -> None:
        staged.trial.give()
        users.trial.give()

    _, error = _attempt(give, what)
    try:
        _agree(peers, None, error)
    except BaseException as refused:
        users.trial.take_back(refused)
        staged.trial.take_back(refused)
        raise
    return loaded, staged


def _require_damaged(path: Path, damage: str, peers: Peers) -> None:
    """Raises CheckpointError where rank 0 finds nothing wrong with a checkpoint that another process cannot read."""
    whole = False
    if peers.here[0] == 0:
        _, error = _attempt(lambda: Reader(path).verify(), str(path))
        whole = error is None
    if peers.gather(whole)[0]:
        raise CheckpointError(f"{damage}; process 0 reads all of it. {SHARED}")


def _older(path: Path, paths: Sequence[Path], peers: Peers) -> Path | None:
    """The newest checkpoint before one that looks whole to rank 0."""
    before = paths[paths.index(path) + 1 :]
    place = next((p for p, each in enumerate(before) if complete(each)), None) if peers.here[0] == 0 else None
    place = peers.gather(place)[0]
    return None if place is None else before[place]


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


def _attempt(action: Callable[[], T], what: str) -> tuple[T | None, CheckpointError | None]:
    """What an action returns, or its error: whatever it is, the other processes wait to hear of it."""
    try:
        return action(), None
    except CheckpointError as error:
        return None, error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        failed = CheckpointError(f"{what}: {reason}")
        failed.__cause__ = error
        return None, failed


def _agree(peers: Peers, value: T, error: CheckpointError | None) -> list[T]:
    """Every process's value; where one has an error all raise it, damage last, as it may be gone round."""
    said = None
    if error is not None:
        is_damage = isinstance(error, DamagedCheckpointError)
        said = LoadFailure(error.damage if isinstance(error, DamagedCheckpointError) else str(error), is_damage)
    parts = peers.gather((value, said))
    errors = [(process, each) for process, (_, each) in enumerate(parts) if each is not None]
    if not errors:
        return [each for each, _ in parts]
    process, first = min(errors, key=lambda pair: pair[1].is_damage)
    if error is not None and said == first:
        raise error
    text = f"process {process}: {first.text}"
    raise DamagedCheckpointError(text) if first.is_damage else CheckpointError(text)


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
    """Writes a checkpoint's model as one safetensors file with plain parameter names. Raises CheckpointError."""
    return export(path, Reader(find(checkpoint)))
