"""One way to act in all processes: each says how it went, and where one failed all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.host_process import chain, limit_behind
from penstock.runtime.errors import CheckpointError, DamagedCheckpointError, DeadlineExceeded, PeerFailed, PeerLost
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

    def act() -> tuple[T | None, str | None]:
        """The result, or the damage that was found."""
        try:
            return action(), None
        except DamagedCheckpointError as error:
            return None, error.damage
        except (CheckpointError, DeadlineExceeded, PeerLost):
            raise
        except Exception as error:  # whatever it is, the other processes wait to hear of it
            raise _explained(error, what) from error

    try:
        everyone = peers.together(act, "do its part")
    except PeerFailed as error:
        raise CheckpointError(str(error)) from None
    for damage in (each for _, each in everyone if each is not None):
        raise DamagedCheckpointError(damage)
    return [result for result, _ in everyone]  # type: ignore[misc] # None is a result where T allows it


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
