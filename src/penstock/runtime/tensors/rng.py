"""Randomness that does not depend on the schedule, the number of ranks or the partition.

A pipeline runs layers in another order than a plain loop, and in other processes. So each layer's random
draws (dropout) come from a seed made of (seed, step, microbatch, layer), and a plain loop that uses the
same seeds draws the same numbers.

Torch's generators are the process's. So where several threads have a pipeline each, one op at a time seeds and draws:

    thread 0    F0: seeds, draws |                  | B0 ...
    thread 1                     | F0: seeds, draws |       | F1 ...
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.runtime.errors import DeadlineExceeded, RuntimeFailure

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """One 63-bit seed from several counters (splitmix64 finaliser)."""
    state = 0
    for part in parts:
        state = (state + part + _MIX) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds the generator that ops on `device` draw from (and the CPU's)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


def generator_states() -> dict[str, bytes]:
    """By kind of device the state of the generator that this process draws from."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {kind: bytes(state.numpy()) for kind, state in states.items()}


def set_generator_states(states: dict[str, bytes]) -> None:
    """Draws go on from where `generator_states` found them, in this process or another."""
    for kind, state in states.items():
        if kind == "cpu":
            torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        elif torch.cuda.is_initialized():
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


MOST_SECONDS = 60.0
"""Seconds that an op waits for one of another thread to end."""
_drawing = threading.RLock()
"""Held by the thread that may seed and draw."""
_stepping: dict[int, bool] = {}
"""The threads in whose steps ops draw, and whether ops of theirs may wait for other processes."""
_found: dict[torch.device, Tensor] = {}
"""What states the first of them found the generators in."""


class DrawingAlone:
    """Around something that seeds the generators and draws: no other thread does so meanwhile. Raises
    DeadlineExceeded.
    """

    def __enter__(self) -> None:
        if not _drawing.acquire(timeout=MOST_SECONDS):
            raise DeadlineExceeded(
                f"waited {MOST_SECONDS:g} s for an op of a pipeline in another thread of this process to end, as one "
                "at a time may draw random numbers; give each pipeline a process"
            )

    def __exit__(self, *error: object) -> None:
        _drawing.release()


@contextmanager
def restored(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Leaves the generators as they were found, so that the user's own draws are not disturbed. Gives a function that
    tells whether anything was drawn. Raises DeadlineExceeded.
    """
    with DrawingAlone():
        states = _states(device)
        try:
            yield lambda: not all(map(torch.equal, states.values(), _states(device).values()))
        finally:
            _restore(states)


@contextmanager
def restored_after_step(device: torch.device, waits: bool) -> Iterator[None]:
    """The same around a step, whose ops draw alone. Of several threads that step at the same time the last one to end
    restores what the first one found.

    Args:
        waits: whether ops may wait for other processes, so that no op of another thread may wait for them.

    Raises:
        RuntimeFailure: ops of one of several such threads may wait. DeadlineExceeded: see `DrawingAlone`.
    """
    me = threading.get_ident()
    if me in _stepping:  # a layer has a pipeline of its own
        with restored(device):
            yield
        return
    with DrawingAlone():
        if _stepping and (waits or any(_stepping.values())):
            raise RuntimeFailure(
                "two pipelines of this process compute at the same time, in different threads, and ops of one wait "
                "for other processes that hold parts of a stage; their layers draw random numbers from the same "
                "generators, so let one call end before the other begins, or give each pipeline a process"
            )
        _stepping[me] = waits
        for one, state in _states(device).items():
            _found.setdefault(one, state)
    try:
        yield
    finally:
        with DrawingAlone():
            del _stepping[me]
            if not _stepping:
                _restore(_found)
                _found.clear()


def _states(device: torch.device) -> dict[torch.device, Tensor]:
    """By device the states of the generators that ops on `device` draw from."""
    found = {torch.device("cpu"): torch.get_rng_state()}
    return found if device.type != "cuda" else found | {device: torch.cuda.get_rng_state(device)}


def _restore(states: dict[torch.device, Tensor]) -> None:
    for device, state in states.items():
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
