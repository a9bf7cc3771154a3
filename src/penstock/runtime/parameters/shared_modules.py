"""Modules and buffers that several stages have: what a forward changes in them would be changed in another order.

    plain loop    stage 0, stage 3 of microbatch 0; stage 0, stage 3 of microbatch 1; ...
    pipeline      stage 0 of microbatches 0 1 2 3, and stage 3 of microbatch 0 some time later

So BatchNorm that two stages share is refused while it gathers statistics. Tables and masks, which never change, may
lie in any number of stages, and so may BatchNorm in evaluation mode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.stage.statistics import GATHERS


class SharedModules:
    """What several stages have besides parameters.

    Args:
        sources: the whole model, as it was given; functions make modules of their own.
        stages: those in this process.
    """

    def __init__(self, sources: Sequence[Any], stages: Mapping[int, nn.Module]) -> None:
        given = [source for source in sources if isinstance(source, nn.Module)]
        modules = Counter(module for source in given for module in source.modules())
        buffers = Counter(buffer for source in given for buffer in source.buffers())
        self._gathering = [
            (module, [n for n, source in enumerate(sources) if source in given and module in set(source.modules())])
            for module, num in modules.items()
            if num > 1 and isinstance(module, GATHERS) and module.track_running_stats
        ]
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for index, stage in stages.items():
            found = [
                (module, name)
                for module in stage.modules()
                for name, buffer in module._buffers.items()
                if modules[module] > 1 or (buffer is not None and buffers[buffer] > 1)
            ]
            if found:
                self._places[index] = found

    @property
    def has_any(self) -> bool:
        """Whether a stage here has a buffer that another one has too."""
        return bool(self._places)

    def require_unchanging(self) -> None:
        """Before training. Raises RuntimeFailure, the same on every rank, where stages gather statistics together."""
        for module, stages in self._gathering:
            if module.training:
                which = " and ".join(map(str, stages))
                raise RuntimeFailure(
                    f"stages {which} have one {type(module).__name__}, which gathers statistics over their "
                    "microbatches in the order in which they come, and that is not the plain loop's; give each stage "
                    "one of its own, or put it into evaluation mode"
                )

    @contextmanager
    def unchanged(self, stage: int) -> Iterator[None]:
        """Around an op of a stage. Raises RuntimeFailure where it changed a buffer that other stages have too."""
        places = self._places.get(stage, ())
        before = [_state(module, name) for module, name in places]
        yield
        for (module, name), (buffer, version) in zip(places, before, strict=True):
            now, number = _state(module, name)
            if now is not buffer or number != version:
                raise RuntimeFailure(
                    f"stage {stage} changed buffer {name!r} of {type(module).__name__}, which other stages have too, "
                    "and a pipeline changes it in another order than the plain loop; give each stage one of its own"
                )


def _state(module: nn.Module, name: str) -> tuple[Tensor | None, int | None]:
    buffer = module._buffers.get(name)
    return buffer, None if buffer is None else buffer._version
