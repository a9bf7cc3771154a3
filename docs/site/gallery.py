"""The gallery: a picture of every schedule of the library, its numbers, what it is for, and where it comes from.

All but the words is made by the library itself when the site is built, so nothing here can go stale.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import penstock as ps
from penstock.draw import to_svg
from penstock.draw.panel import panels
from penstock.library import ASYNCHRONOUS

RANKS = 4
WIDTH = 960
ON_PHONES = 400
"""The width in pixels of the pictures that narrow screens show, where numbers in a wide one would be too small."""
_LANE = re.compile(r'<rect class="lane" x="[^"]*" y="([^"]*)" width="[^"]*" height="([^"]*)"')
NOT_IN_THE_PLAYGROUND = ("distmm", "mllm", *ASYNCHRONOUS)
"""It draws neither branches, nor stages that ranks share, nor updates as ops."""


@dataclass(frozen=True)
class Exhibit:
    """One schedule of the gallery: when to use it, its source, and how it is made for the picture."""

    name: str
    use: str
    source: str
    microbatches: int = 8
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> ps.Schedule:
        return ps.build(self.name, RANKS, self.microbatches, **self.options)

    @property
    def line(self) -> str:
        """The line of Python that makes it."""
        options = "".join(f", {key}={value!r}" for key, value in self.options.items())
        return f'ps.build("{self.name}", num_ranks={RANKS}, num_microbatches={self.microbatches}{options})'


ZERO_BUBBLE = "Qi et al., *Zero Bubble Pipeline Parallelism*, ICLR 2024"
CONTROLLABLE = "Qi et al., *Pipeline Parallelism with Controllable Memory*, NeurIPS 2024"
MEGATRON = "Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters*, SC 2021"
FLEXPIPE = "FlexPipe, see [the three papers](papers.md#flexpipe)"

FAMILIES: dict[str, tuple[Exhibit, ...]] = {
    "One stage per rank": (
        Exhibit(
            "gpipe",
            "The simplest schedule, to start with and to compare with. Every rank holds the activations of all "
            "microbatches.",
            "Huang et al., *GPipe*, NeurIPS 2019",
        ),
        Exhibit(
            "1f1b",
            "The default of `penstock train`. The bubble is GPipe's, and a rank holds at most as many microbatches "
            "as there are ranks from it to the end.",
            "Fan et al., *DAPPLE*, PPoPP 2021; Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training*, "
            "ICML 2021",
        ),
    ),
    "Several stages per rank": (
        Exhibit(
            "interleaved-1f1b",
            "It has a smaller bubble, and is for fast links: with v stages per rank the bubble is v times smaller, "
            'and there are v times as many messages. `backward="split"` makes the bubble smaller still.',
            MEGATRON,
        ),
        Exhibit(
            "looped-bfs",
            "It is for weights that have to be gathered before use (FSDP): each stage's weights are used once in "
            "each direction. It has the bubble of interleaved 1F1B, and needs the memory of GPipe.",
            "Lamy-Poirier, *Breadth-First Pipeline Parallelism*, MLSys 2023",
        ),
        Exhibit(
            "hanayo",
            "It has a small bubble with one copy of the weights. The stages go down the ranks and back up, twice by "
            "default (`waves`).",
            "Liu et al., *Hanayo*, SC 2023",
        ),
    ),
    "Zero bubble: backwards in two halves": (
        Exhibit(
            "zb-h1",
            "It needs the memory of 1F1B, and ranks wait a third as long, if F, I and W take as long as each other. "
            "It is a good first step away from 1F1B.",
            ZERO_BUBBLE,
        ),
        Exhibit(
            "zb-h2",
            "It has no bubble between the first and the last op of a rank, and needs about twice the memory of "
            "1F1B. One step takes no less time than with zb-h1, since ranks begin one after another. It gains where "
            "a rank may begin the next step before the others have ended this one.",
            ZERO_BUBBLE,
        ),
        Exhibit(
            "zb",
            "It is for links that are late. Each warm-up count says how many forwards a rank runs first. The more "
            "two neighbouring counts differ, the later the link between these ranks may be.",
            "PipeMorph, see [the three papers](papers.md#pipemorph)",
            options={"warmup": [7, 5, 3, 1]},
        ),
        Exhibit(
            "zb-v",
            "It has no bubble between the first and the last op of a rank, and needs the memory of 1F1B. Every rank "
            "hosts two stages, which lie in a V.",
            CONTROLLABLE,
        ),
        Exhibit(
            "v-half",
            "It needs less memory: over p ranks a rank holds at most p/2 + 1 activations, where 1F1B holds p. With "
            "many ranks they wait nearly half as long as under 1F1B, and with the four ranks here less than that.",
            CONTROLLABLE,
        ),
        Exhibit(
            "v-min",
            "It needs the least memory: over p ranks a rank holds about p/3 + 1 activations, where 1F1B holds p. "
            "With many ranks they wait up to two thirds as long as under 1F1B.",
            CONTROLLABLE,
        ),
    ),
    "Two directions": (
        Exhibit(
            "chimera",
            "It has a smaller bubble than 1F1B, where there is room for two copies of the weights: one pipeline "
            "goes down the ranks, the other one up. Where a backward takes as long as a forward, ranks wait at most "
            "half as long. In the picture it takes twice as long, and they wait two thirds as long.",
            "Li and Hoefler, *Chimera*, SC 2021",
        ),
        Exhibit(
            "bitpipe",
            "It has half of the bubble of Chimera, with two stages per rank in each direction.",
            "Wu et al., *BitPipe*, 2024",
        ),
        Exhibit("vchimera", "It is BitPipe with the stages of each direction in a V.", FLEXPIPE),
        Exhibit(
            "dualpipe",
            "A forward and a backward of different microbatches lie next to each other nearly all the time, so that "
            "the communication of one can hide behind the computation of the other.",
            "DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024",
        ),
        Exhibit(
            "dualpipe-v",
            "It is DualPipe with one copy of the weights: the stages lie in a V.",
            "DeepSeek-AI and Sea AI Lab, *DualPipeV*, 2025",
        ),
    ),
    "Models that are no chain": (
        Exhibit(
            "distmm",
            "It is for towers that are compared by a contrastive loss, like those of CLIP. Each tower has ranks of "
            "its own, and a gather brings their outputs together.",
            "Huang et al., *DistMM*, NSDI 2024",
        ),
        Exhibit(
            "mllm",
            "It is for large vocabularies. All ranks share the embedding and the head, and the other stages lie on "
            "one rank each.",
            "Lin et al., *Tessel*, HPCA 2024; " + FLEXPIPE,
        ),
    ),
    "Asynchronous: the pipeline is never drained": (
        Exhibit(
            "pipedream",
            "This is the oldest asynchronous schedule. Each rank keeps the weights that its forwards read, one "
            "version for every microbatch in flight.",
            "Narayanan et al., *PipeDream*, SOSP 2019",
            16,
            {"window": 1},
        ),
        Exhibit(
            "pipedream-2bw",
            "Every rank has two versions of the weights, and gradients are one update late.",
            "Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training*, ICML 2021",
            16,
            {"window": 4},
        ),
        Exhibit(
            "spectrain",
            "Forwards and backwards read weights that are predicted from the momentum.",
            "Chen et al., *Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU "
            "Platform*, 2018",
            16,
            {"window": 1},
        ),
        Exhibit(
            "xpipe",
            "Forwards read weights that are predicted from Adam's next step. Backwards read the newest.",
            "Guan et al., *XPipe*, 2019",
            16,
            {"window": 4},
        ),
        Exhibit(
            "vnag",
            "It has PipeDream's order, with an optimizer (NAdam) that looks ahead to make up for the delay.",
            "Ajanthan et al., *Nesterov Method for Asynchronous Pipeline Parallel Optimization*, ICML 2025",
            16,
            {"window": 1},
        ),
        Exhibit(
            "amdp",
            "Ranks are busy nearly all the time, and each microbatch meets at most one update. Each of p ranks "
            "holds the weights of p/2 stages.",
            "AMDP, see [the three papers](papers.md#amdp)",
            16,
            {"window": 4},
        ),
    ),
}

FILTERS = {
    "all": "All",
    **{f"family-{number}": family.partition(":")[0] for number, family in enumerate(FAMILIES)},
    "small": "No more memory than 1F1B",
}
"""What the buttons above the thumbnails show, by the class of the cards that stay."""

HEAD = """# Gallery of schedules

Every schedule of the library, drawn over four ranks. A row is a rank, the colour is the kind of op, the number is the
microbatch, and grey is a bubble. Click a picture for its numbers and its source.
"""
LEGEND = """
## What the numbers mean

A forward, an input gradient and a weight gradient of a rank's whole share of the model take 1 each, and an update
half of that. In the pictures synchronous schedules have 8 microbatches and asynchronous ones 16, so compare shares
only where the number is the same.

- **Waits** is for how long a rank waits, in the mean over the ranks.
- **Bubble** is that time as a share of the whole. "Half of another's bubble" below means half of the time. The share
  falls by less, as the whole becomes shorter too.
- **Memory** is what the fullest rank holds at most. Its unit is what one microbatch leaves in a rank's share of the
  model. I gives half of that back and W the other half.

A schedule with several pipelines holds a copy of the weights for each, which is not
counted here.

A synchronous schedule gives the same gradients as a plain loop, to the last bit where it has one pipeline. An
asynchronous one updates the weights while
microbatches are on their way, so it trains differently. [The tutorial](tutorials/asynchronous.md) says how much.
"""


def exhibits() -> list[Exhibit]:
    return [one for family in FAMILIES.values() for one in family]


def share_of_a_rank(schedule: ps.Schedule) -> float:
    """What one stage is of a rank's share of the model."""
    return ps.Costs.assumed(schedule.num_ranks, schedule.placement).f[0]


def gallery() -> tuple[str, dict[str, str]]:
    """The page in Markdown, and its pictures by their names in the folder `gallery/`."""
    table = [
        "| schedule | microbatches | waits | bubble | memory | copies of the weights | updates |",
        "|---|---|---|---|---|---|---|",
    ]
    body: list[str] = []
    cards: list[str] = []
    pictures: dict[str, str] = {}
    usual = max(ps.simulate(ps.build("1f1b", RANKS, 8)).peak_activations)
    for number, (family, shown) in enumerate(FAMILIES.items()):
        body += [f"## {family}", ""]
        for one in shown:
            schedule = one.build()
            timeline = panels(schedule)[0].timeline  # that of the picture
            bubble = f"{timeline.bubble_ratio:.1%}"
            waits = f"{timeline.makespan - sum(timeline.busy) / RANKS:.3g}"
            peak = f"{max(timeline.peak_activations) * share_of_a_rank(schedule):.3g}"
            copies = schedule.placement.num_pipelines
            updates = "asynchronous" if one.name in ASYNCHRONOUS else "synchronous"
            cells = (one.microbatches, waits, bubble, peak, copies, updates)
            small = " small" if float(peak) <= usual else ""
            narrow = to_svg(schedule, width=ON_PHONES)
            cards += [
                f'<a class="card all family-{number}{small}" href="#{one.name}">',
                _rows(narrow, f'<img class="thumb" alt="" loading="lazy" src="gallery/{one.name}-phone.svg">'),
                f"<b>{one.name}</b> <span>bubble {bubble}, memory {peak}</span></a>",
            ]
            table.append(f"| [`{one.name}`](#{one.name}) | {' | '.join(map(str, cells))} |")
            pictures[f"{one.name}.svg"] = to_svg(schedule, width=WIDTH)
            pictures[f"{one.name}-phone.svg"] = narrow
            body += [
                f"### {one.name}",
                "",
                one.use,
                "",
                f"[![{one.name} over {RANKS} ranks](gallery/{one.name}.svg)](gallery/{one.name}.svg){{ .schedule }}",
                "",
                f"**Bubble** {bubble} · **memory** {peak} · **source** {one.source}",
                "",
                "```python",
                one.line,
                "```",
                "",
            ]
            if one.name not in NOT_IN_THE_PLAYGROUND:
                options = "".join(
                    f"&o.{key}={','.join(map(str, value))}" for key, value in one.options.items() if key == "warmup"
                )
                address = f"playground.html#s={one.name}&p={RANKS}&n={one.microbatches}{options}"
                body += [f"[Change it in the playground]({address})", ""]
    return "\n".join([HEAD, *_thumbnails(cards), LEGEND, *table, "", *body]), pictures


def _rows(picture: str, image: str) -> str:
    """The image in a frame that shows the rows of the picture alone, without its title and legend."""
    lanes = [(float(y), float(height)) for y, height in _LANE.findall(picture)][:RANKS]  # the legend has one more
    top, bottom = min(y for y, _ in lanes) - 2, max(y + height for y, height in lanes) + 2
    shift = f"margin-top: {-top / ON_PHONES:.2%}"  # such margins are shares of the frame's width
    frame = f'<span class="rows" style="aspect-ratio: {ON_PHONES} / {bottom - top:g}">'
    return frame + image.replace("<img ", f'<img style="{shift}" ') + "</span>"


def _thumbnails(cards: list[str]) -> list[str]:
    """A grid of pictures, and buttons that leave some of them; both need no script."""
    buttons = [
        f'<input type="radio" name="show" id="show-{name}"{" checked" if name == "all" else ""}>'
        f'<label for="show-{name}">{text}</label>'
        for name, text in FILTERS.items()
    ]
    rules = "".join(
        f".gallery:has(#show-{name}:checked) .card:not(.{name}) {{ display: none; }}\n" for name in FILTERS
    )
    return ['<div class="gallery" markdown="0">', f"<style>{rules}</style>", *buttons, '<div class="cards">', *cards,
            "</div></div>", ""]  # fmt: skip
