"""Costs that are given and not measured: `--costs` of a preset or a file, as `penstock simulate` takes it.

gpt2-7b:device=a100     a preset, by its layers
profile.json            layers and messages that `penstock tune --profile-only --out` measured
costs.json              {"f": [...], "i": [...], "w": [...]}, here with one entry per layer, for one sample

A preset and a file of costs give a profile of every microbatch size. Everything grows with the number of samples,
except weights, the optimizer's state and updates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.cost import Costs
from penstock.cost.presets import is_preset, parse_preset
from penstock.formats.costs import read_costs
from penstock.formats.files import read_json
from penstock.formats.profile import MessageCosts, Profile, is_profile, read_profile
from penstock.tune.errors import TuneError


@dataclass(frozen=True)
class CostsByLayer:
    """Costs by layer.

    Attributes:
        name: of the model. sizes: the microbatch sizes that are known; None for all.
        has_recompute: whether profiles with recompute are known.
        has_weights: whether it is known what weights take.
        profile: by (microbatch size, ranks side by side, recompute); None if it is not known.
        transfer: by number of ranks; raises TuneError if it is not known.
        tp: devices that share each layer.
    """

    name: str
    sizes: list[int] | None
    has_recompute: bool
    has_weights: bool
    profile: Callable[[int, int, bool], Profile | None]
    transfer: Callable[[int], MessageCosts]
    tp: int = 1


def given_costs(source: str) -> CostsByLayer:
    """Reads `--costs`.

    Raises:
        TuneError, CostError: no such preset or file, an option of a preset that tune searches itself, or a file with
            something else in it. The message names it.
    """
    if is_preset(source):
        return _of_preset(source)
    path = Path(source)
    try:
        value = read_json(path.read_text(encoding="utf-8-sig"))
        if is_profile(value):
            return _of_profile(source, value)
        rows = [row for row in value.values() if isinstance(row, list)] if isinstance(value, dict) else []
    except FileNotFoundError:
        rows = [[0.0]]  # read_costs says what to do
    except ValueError as error:
        raise TuneError(f"{source}: {error}") from None
    if not rows:
        raise TuneError(
            f"{source} has no lists; to be cut into stages, costs need one entry per layer, as in "
            '{"f": [1, 2], "i": [1, 2], "w": [1, 2]}'
        )
    costs = read_costs(source, len(rows[0]))
    if costs.factors or costs.overlap is not None:
        raise TuneError(f"{source} says how microbatches or pairs of ops differ, which tune does not simulate")
    if costs.gradient_bytes not in ((), costs.weight_bytes):
        raise TuneError(
            f"{source} has gradient_bytes that are not its weight_bytes, and tune counts gradients as large as "
            "weights; leave gradient_bytes out, or give the file to penstock plan and simulate, which count them"
        )
    if costs.weight_bytes and "activation" not in value:
        raise TuneError(f"{source} has weight_bytes and no activation; give the bytes that each layer keeps")
    assumed = MessageCosts.assumed()
    return CostsByLayer(
        path.stem, None, any(costs.message_bytes) and "activation" in value, bool(costs.weight_bytes),
        lambda size, num_parallel, recompute: _layers_of(costs, path.stem, size, size, recompute),
        lambda num_ranks: assumed,
    )  # fmt: skip


def _of_preset(source: str) -> CostsByLayer:
    if given := [option for option in ("microbatch", "split") if f"{option}=" in source]:
        raise TuneError(f"--costs {source}: tune searches microbatch sizes and cuts itself; leave {given[0]} out")
    preset = replace(parse_preset(source), split="layers")  # in as many stages as layers, each stage is one layer
    links = MessageCosts.assumed(bandwidth=preset.device.link_gb * 1e6)  # GB/s are 1e6 bytes a ms

    def profile(size: int, num_parallel: int, recompute: bool) -> Profile:
        of_size = preset.changed(None, None, microbatch_size=size)
        return _layers_of(of_size.costs(preset.shape.num_layers), preset.name, size, 1, recompute)

    return CostsByLayer(preset.name, None, True, True, profile, lambda num_ranks: links, preset.shape.tensor_parallel)


def _of_profile(source: str, value: object) -> CostsByLayer:
    file = read_profile(value)
    profiles = {(each.microbatch_size, each.num_parallel, each.recompute): each for each in file.profiles}
    transfers = {int(number): each for number, each in file.transfers.items()}
    assumed = MessageCosts.assumed()

    def profile(size: int, num_parallel: int, recompute: bool) -> Profile | None:
        known = [number for known_size, number, again in profiles if (known_size, again) == (size, recompute)]
        nearest = max((number for number in known if number <= num_parallel), default=min(known, default=0))
        return profiles.get((size, nearest, recompute))

    def transfer(num_ranks: int) -> MessageCosts:
        measured = min(2, num_ranks)  # one rank sends no messages; among more, each costs what it does between two
        if transfers and measured not in transfers:
            raise TuneError(
                f"{source} says what messages and steps cost for {' and '.join(map(str, transfers))} ranks, not for "
                f"{num_ranks}; measure it again with penstock tune --profile-only --out {source}"
            )
        return transfers[measured] if transfers else assumed

    sizes = sorted({size for size, _, _ in profiles})
    has_recompute = any(again for _, _, again in profiles)
    first = file.profiles[0]
    return CostsByLayer(first.model, sizes, has_recompute, any(first.weight), profile, transfer)


def _layers_of(costs: Costs, name: str, microbatch_size: int, scale: float, recompute: bool) -> Profile:
    """The profile of costs whose stages are layers.

    With recompute, all but the first and the last layer keep only their input, which is the message of the layer
    before, and run their forward again in the backward.
    """
    num_layers = costs.num_stages
    f, i, w, b, activation, output = (
        [each * scale for each in getattr(costs, row)] for row in ("f", "i", "w", "b", "activation", "message_bytes")
    )
    held = [each * (1 - costs.freed_by_input) for each in activation]
    transient = 0.0
    if recompute:
        inner = range(1, num_layers - 1)
        transient = max((activation[layer] for layer in inner), default=0.0)
        for layer in inner:
            i[layer] += f[layer]
            b[layer] += f[layer]
            activation[layer] = output[layer - 1]
    nothing = (0.0,) * num_layers
    return Profile(
        model=name, layers=tuple(f"layer {number}" for number in range(num_layers)),
        microbatch_size=microbatch_size, num_parallel=1,
        f=tuple(f), b=tuple(b), f_split=tuple(f), i=tuple(i), w=tuple(w),
        activation=tuple(activation), held=tuple(held), output=tuple(output),
        weight=tuple(costs.weight_bytes) or nothing, state=tuple(costs.optimizer_bytes) or nothing,
        update=tuple(costs.duration("U", layer) for layer in range(num_layers)),
        recompute=recompute, transient=transient, source=name,
    )  # fmt: skip
