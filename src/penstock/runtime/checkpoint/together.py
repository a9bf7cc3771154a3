"""One way to act in all processes: each says how it went, and where one failed all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.host_process import chain, limit_behind
from penstock.runtime.errors import CheckpointError, DamagedCheckpointError
from penstock.runtime.mesh.peers import Peers

T = TypeVar("T")

UNWRITTEN = "could not be written"
WHAT_TO_DO = "make room there if it is full, or save to another folder, one that can be written to"


def together(peers: Peers, action: Callable[[], T], what: str) -> list[T]:
    """Runs an action in every process and returns everyone's result. Every process must call it.

    Args:
        what: the subject of the error, where the action raises something other than CheckpointError.

    Raises:
        CheckpointError: in every process, where the action failed in one. DamagedCheckpointError only where nothing
            else failed, as the caller may try an older checkpoint then.
    """
    result, error = None, None
    try:
        result = action()
    except CheckpointError as failure:
        error = failure
    except Exception as failure:  # whatever it is, the other processes wait to hear of it
        error = _explained(failure, what)
        error.__cause__ = failure
    said = None
    if error is not None:
        said = (True, error.damage) if isinstance(error, DamagedCheckpointError) else (False, str(error))
    everyone = peers.gather((result, said))
    failures = [(process, each) for process, (_, each) in enumerate(everyone) if each is not None]
    if not failures:
        return [each for each, _ in everyone]
    process, (is_damage, text) = min(failures, key=lambda failure: failure[1][0])
    if error is not None and said == (is_damage, text):
        raise error
    raise (DamagedCheckpointError if is_damage else CheckpointError)(f"process {process}: {text}")


def _explained(failure: Exception, what: str) -> CheckpointError:
    """The disk's error where there is one, which torch.save hides behind one of its own."""
    found = next((each for each in chain(failure) if isinstance(each, OSError)), None)
    if found is None:
        return CheckpointError(f"{what}: {type(failure).__name__}: {failure}".splitlines()[0])
    reason = f"{what}: {found.strerror or found}"
    if not what.endswith(UNWRITTEN):
        return CheckpointError(reason)
    advice = limit_behind(found) or WHAT_TO_DO
    return CheckpointError(f"{reason}. Nothing of it is left; older ones are untouched; {advice}")
