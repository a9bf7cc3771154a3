"""Randomness that does not depend on the schedule, the number of ranks or the partition.

A pipeline runs layers in another order than a plain loop, and in other processes. So each layer's random
draws (dropout) come from a seed made of (seed, step, microbatch, layer), and a plain loop that uses the
same seeds draws the same numbers.

Torch's generators are the process's, so one pipeline steps at a time in a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

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


@contextmanager
def restored(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Leaves the generators as they were found, so that the user's own draws are not disturbed. Gives a function that
    tells whether anything was drawn.
    """
    states = _states(device)
    with torch.random.fork_rng([one for one in states if one.type == "cuda"]):
        yield lambda: not all(map(torch.equal, states.values(), _states(device).values()))


def _states(device: torch.device) -> dict[torch.device, Tensor]:
    """By device the states of the generators that ops on `device` draw from."""
    found = {torch.device("cpu"): torch.get_rng_state()}
    return found if device.type != "cuda" else found | {device: torch.cuda.get_rng_state(device)}
