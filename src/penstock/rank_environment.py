"""What a launcher says to each process in environment variables: its rank, of how many, and where they meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_INSTEAD = "start with `penstock train` or torchrun, which set it, or unset RANK to run without them"


class RankEnvironmentError(Exception):
    """A variable is missing or can't be. The message says which, what it is, the rule and what to do."""

    exit_code = 1


@dataclass(frozen=True)
class RankEnvironment:
    """What a launcher such as torchrun told this process in environment variables.

    Attributes:
        rank, num_ranks: RANK and WORLD_SIZE. local_rank, num_local: LOCAL_RANK and LOCAL_WORLD_SIZE, on this host.
        host, port: MASTER_ADDR and MASTER_PORT, where all processes meet.
    """

    rank: int
    num_ranks: int
    local_rank: int
    num_local: int
    host: str
    port: int

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> RankEnvironment | None:
        """What is said there; None where no launcher has started this process, and so RANK is not set.

        Raises:
            RankEnvironmentError: names the variable that cannot be.
        """
        if "RANK" not in variables:
            return None
        rank, num_ranks = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
        if rank >= num_ranks:
            raise RankEnvironmentError(
                f"environment variable RANK is {rank} and WORLD_SIZE is {num_ranks}: ranks are numbered from 0, "
                f"below their number; {_INSTEAD}"
            )
        port = _number(variables, "MASTER_PORT")
        if not 0 < port <= 65535:
            raise RankEnvironmentError(
                f"environment variable MASTER_PORT is {port}; a port is a number from 1 to 65535; give one that is "
                "free on the host of rank 0"
            )
        host = variables.get("MASTER_ADDR", "")
        if not host:
            raise RankEnvironmentError(f"environment variable MASTER_ADDR is not set, the host of rank 0; {_INSTEAD}")
        local_rank, num_local = _number(variables, "LOCAL_RANK", 0), _number(variables, "LOCAL_WORLD_SIZE", 1)
        return cls(rank, num_ranks, local_rank, num_local, host, port)


def rank_of(variables: Mapping[str, str]) -> int:
    """The rank of this process; 0 where no launcher has started it.

    Raises:
        RankEnvironmentError: names the variable that cannot be.
    """
    environment = RankEnvironment.of(variables)
    return 0 if environment is None else environment.rank


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None:
        if default is None:
            raise RankEnvironmentError(f"environment variable {name} is not set, and RANK is; {_INSTEAD}")
        return default
    if not (text.isascii() and text.isdigit()):
        raise RankEnvironmentError(f"environment variable {name} is {text!r}, not a number from 0 on; {_INSTEAD}")
    return int(text)
