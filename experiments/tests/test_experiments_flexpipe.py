"""FlexPipe's figures as experiments: a small sample of each command, and what their raw results say."""

from __future__ import annotations

import importlib
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from experiments.common import results
from tiers import sample

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parents[2] / "experiments" / "flexpipe"
RESULTS = FOLDER / "results"
COMMANDS = ("figure2", "figure12", "figure13", "figure14", "figure15", "figure16", "table5", "guessed_towers", "all")


@pytest.fixture(scope="module")
def load() -> Any:
    """Imports one of the modules."""
    return lambda name: importlib.import_module(f"experiments.flexpipe.{name}")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_says_its_command_and_how_long_it_takes_and_the_readme_has_it(load: Any, name: str) -> None:
    about = load(name).__doc__
    assert f"python -m experiments.flexpipe.{name}" in about
    assert any(word in about for word in ("second", "minute", "hour"))
    assert f"experiments.flexpipe.{name}" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_all_runs_each_command_there_is(load: Any) -> None:
    commands = {path.stem for path in FOLDER.glob("*.py") if "def main" in path.read_text(encoding="utf-8")}
    assert {*load("all").SIMULATED} == commands - {"all"} | {"figure12", "figure13"}
    assert {*load("all").MEASURED} <= {*load("all").SIMULATED}


# The models and the machines


def test_models_have_the_papers_sizes(load: Any) -> None:
    """Table 3, which gives billions with one digit; its 6.3 and 16.1 are cut, not rounded."""
    setups = load("setups")
    sizes = [
        [setups.MODELS[name].num_parameters(v) / 1e9 for v in setups.MODELS[name].vocabularies]
        for name in setups.MODELS
    ]
    assert sizes[0] == pytest.approx([5.4, 5.7, 6.3, 7.7, 10.2], abs=0.06)
    assert sizes[1] == pytest.approx([18.2, 20.3, 24.3, 25.1, 25.9], abs=0.06)


def test_costs_have_the_profile_of_figure_2(load: Any) -> None:
    rows = list(load("figure2").rows_of())
    assert rows[-1]["time"] == pytest.approx(5.63, abs=0.02), "fitted"
    assert rows[-1]["memory"] == pytest.approx(4.87, abs=0.25), "not fitted"
    assert all(a["time"] < b["time"] for a, b in pairwise(rows))


def test_rings_and_links_by_hand(load: Any) -> None:
    """pp = 4, dp = 8: replicas of a rank fill a node, each pair of ranks is apart and an eighth of its network's."""
    mesh = load("cluster").Mesh(4, 8)
    assert mesh.replica_ring_ms(8e9) == pytest.approx(14 * (0.01 + 1e9 / 150e6))
    assert mesh.pipeline_ring_ms(4e6) == pytest.approx(6 * (0.01 + 1e6 / 12.5e6))
    assert mesh.links(12.5e6).delay(0, 1) == pytest.approx(1.01)
    two = load("cluster").Mesh(8, 4)
    assert two.links(200e6).delay(0, 1) == pytest.approx(1.01), "in one node"
    assert two.links(25e6).delay(1, 2) == pytest.approx(1.01), "one of four pairs, an adapter each"


def test_shared_ends_split_the_vocabulary_and_keep_the_work(load: Any) -> None:
    setup = load("setups").Setup(load("setups").GPT_5B, 1000, 8, 4, 1)
    whole, part = setup.head(), setup.head(8)
    assert part.parameters == pytest.approx(whole.parameters / 8, rel=1e-3)
    rings = part.f + part.i - (whole.f + whole.i) / 8
    assert 0 < rings < 1, "ms of all-reduces"
    assert part.w == pytest.approx(whole.w / 8, rel=1e-3)


def test_zero1_shares_state_and_step_out(load: Any) -> None:
    setup = load("setups").Setup(load("setups").GPT_5B, 64, 4, 8, 1)
    zero = replace(setup, updates="zero1")
    assert setup.state_bytes(1e9) == 18e9
    assert zero.state_bytes(1e9) == 6e9 + 12e9 / 8
    assert zero.step_ms(1e9) < setup.step_ms(1e9)
    assert zero.tail_ms(1e9) == setup.tail_ms(1e9) / 2


# GPT: figures 12 to 15


@pytest.mark.slow
def test_megatron_is_out_of_memory_where_the_papers_is(load: Any) -> None:
    """16.1B: from 1M words on, with whatever is computed again."""
    setups, search = load("setups"), load("search").search
    fits = {v: search("Megatron-LM", setups.GPT_16B, v, 32).run is not None for v in (512, 1000)}
    assert fits == {512: True, 1000: False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "vocabulary", "setup", "shape", "least"),
    [
        ("5B", 1000, (8, 4, 1, "none"), "v-shape", 1.9),
        pytest.param("16.1B", 512, (8, 4, 1, "scores"), "circular", 2.1, marks=pytest.mark.nightly),
    ],
)
def test_headlines_simulated_anew(
    load: Any, model: str, vocabulary: int, setup: tuple[Any, ...], shape: str, least: float
) -> None:
    """One point and one placement of FlexPipe's grid against the best of all of Megatron-LM's points."""
    setups, grid, methods = load("setups"), load("grid"), load("methods")
    base = load("search").search("Megatron-LM", setups.MODELS[model], vocabulary, 32).run
    one = setups.Setup(setups.MODELS[model], vocabulary, *setup)
    runs = list(methods.searched("FlexPipe", grid.Grid((shape,)))(one, inf))
    best = min((methods.separated(run) for run in runs[:3]), key=lambda run: run.iteration_ms())
    assert best.fits
    ps.check(best.schedule)
    assert base.iteration_ms() / best.iteration_ms() >= least


@pytest.mark.nightly
def test_a_search_finds_what_trying_everything_finds(load: Any) -> None:
    setups, search = load("setups"), load("search")
    small = setups.Model("small", 8, 1024, 8, 512, (8,))
    for method in ("Megatron-LM", "Tessel", "FlexPipe"):
        found = search.search(method, small, 8, 4, batch=4)
        tried = [
            run
            for setup in search.setups(method, small, 8, 4, batch=4)
            for run in search.alternatives(method, setup)
            if run.fits
        ]
        assert found.run.iteration_ms() == pytest.approx(min(run.iteration_ms() for run in tried), rel=0.02)
    assert len({run.setup.pp for run in tried}) == 2


@pytest.mark.parametrize(("figure", "model"), [("figure12", "GPT_5B"), ("figure13", "GPT_16B")])
def test_raw_results_make_the_figure_and_hold_what_is_claimed(load: Any, figure: str, model: str) -> None:
    sweep, gpt = load("sweep"), getattr(load("setups"), model)
    rows = results.load(RESULTS, figure)
    text = "\n".join(sweep.lines(rows, gpt, load(figure).PAPER))
    assert "as a multiple of" in text
    assert "paper's FlexPipe" in text
    assert "</svg>" in str(sweep.chart(rows, gpt, figure))
    at, flexpipe, ours = {"figure12": (1000, 1.9, 2.0), "figure13": (512, 2.1, 2.2)}[figure]
    assert sweep.speedup(rows, at, "FlexPipe", "Megatron-LM") >= flexpipe
    assert sweep.speedup(rows, at, "ours", "Megatron-LM") >= ours
    for vocabulary in gpt.vocabularies:
        for rival in ("T-1F1B", "Tessel"):
            assert sweep.speedup(rows, vocabulary, "FlexPipe", rival) > 1
        assert sweep.speedup(rows, vocabulary, "ours", "FlexPipe") >= 1


def test_a_row_is_made_anew_from_its_choices(load: Any) -> None:
    sweep, setups = load("sweep"), load("setups")
    rows = results.load(RESULTS, "figure12")
    for method in ("Megatron-LM", "T-1F1B", "Tessel"):
        row = results.find(rows, vocabulary=1000, method=method)
        again = sweep.facts(sweep.chosen(setups.GPT_5B, row))
        assert again["samples"] == pytest.approx(row["samples"], rel=1e-4)


def test_figure_14_adds_up(load: Any) -> None:
    module = load("figure14")
    rows = list(module.chosen(RESULTS))
    for _, row in rows:
        assert sum(module.parts_of(row).values()) == pytest.approx(row["iteration_ms"], rel=1e-3)
    waiting = {name: module.parts_of(row)["waiting"] for name, row in rows}
    assert waiting["5B, FlexPipe"] < waiting["5B, Tessel"] < waiting["5B, T-1F1B"] < waiting["5B, Megatron-LM"]
    assert "16.1B, Megatron-LM" not in waiting
    assert "</svg>" in str(module.chart(rows))


def test_figure_15_scales(load: Any) -> None:
    module = load("figure15")
    rows = results.load(RESULTS, "figure15")
    assert any("FlexPipe" in line for line in module.lines(rows))
    for method in load("methods").METHODS:
        rates = [results.find(rows, method=method, gpus=num)["samples"] for num in module.GPUS]
        assert all(1.7 < b / a <= 2.05 for a, b in pairwise(rates))
    assert "</svg>" in str(module.chart(rows))


def test_table_5_has_the_papers_rows(load: Any) -> None:
    module = load("table5")
    rows = results.load(RESULTS, "table5")
    text = "\n".join(module.lines(rows))
    assert "163.62" in text
    assert "534.78" in text
    assert [row["devices"] for row in rows] == [2, 4, 8, 16, 32]
    assert all(row["FlexPipe makespan_ms"] < row["mllm makespan_ms"] for row in rows if row["devices"] > 2)


# CLIP: figure 16


def test_towers_have_the_papers_sizes(load: Any) -> None:
    clip = load("clip")
    assert [t.num_parameters / 1e9 for t in (clip.AUDIO, clip.TEXT, clip.VIDEO)] == pytest.approx(
        [3.0, 1.7, 5.5], abs=0.05
    )
    sums = [sum(tower.num_parameters for tower in towers) / 1e9 for towers in clip.CLIPS.values()]
    assert sums == pytest.approx([4.7, 8.2, 9.7], abs=0.06)


def test_layouts_use_all_gpus(load: Any) -> None:
    clip = load("clip")
    found = list(clip.layouts(clip.CLIPS["4.7B"]))
    assert all(sum(share.num_gpus for share in layout) == 40 for layout in found)
    assert all(share.microbatch * share.num_microbatches * share.dp == 128 for layout in found for share in layout)


def test_all_replicas_take_as_long_as_one(load: Any) -> None:
    """40 ranks, simulated; gathers run beside FlexPipe's ranks. Layouts are the best of each method."""
    clip, methods = load("clip"), load("clip_methods")
    audio, text = clip.CLIPS["4.7B"]
    layouts = {
        "DistMM-Pipe": (clip.Share(audio, 8, 4, 8), clip.Share(text, 8, 1, 8)),
        "FlexPipe": (clip.Share(audio, 4, 8, 4), clip.Share(text, 2, 4, 1)),
    }
    found = {}
    for method, layout in layouts.items():
        run = min(methods.CLIP_METHODS[method](layout, inf), key=lambda run: run.iteration_ms())
        whole = run.whole()
        assert whole.schedule.num_ranks == 40
        assert whole.timeline.makespan == pytest.approx(run.timeline.makespan, rel=1e-6)
        found[method] = run.iteration_ms()
    assert found["DistMM-Pipe"] / found["FlexPipe"] >= 1.18


@pytest.mark.slow
def test_the_products_search_finds_what_trying_all_layouts_of_few_gpus_finds(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip, methods = load("clip"), load("clip_methods")
    for module in (clip, methods):
        monkeypatch.setattr(module, "NUM_GPUS", 6)
        monkeypatch.setattr(module, "BATCH", sample(8, 4))
    towers = tuple(replace(tower, num_blocks=12) for tower in clip.CLIPS["4.7B"])
    for method in ("DistMM-Pipe", "FlexPipe", "ours"):
        runs = [run for layout in clip.layouts(towers) for run in methods.CLIP_METHODS[method](layout, inf)]
        best = min(run.iteration_ms() for run in runs if run.fits)
        assert methods.best_run(method, towers).iteration_ms() == pytest.approx(best)


def test_guessed_towers_have_as_many_parameters(load: Any) -> None:
    module, clip = load("guessed_towers"), load("clip")
    for size in module.SIZES:
        assert module.towers_of(size, module.Guess()) == clip.CLIPS[size]
        for guess in module.GUESSES.values():
            total = sum(tower.num_parameters for tower in module.towers_of(size, guess)) / 1e9
            assert total == pytest.approx(float(size[:-1]), rel=0.06)
    rows = [
        {"clip": size, "guess": name, "parameters": 8e9, "DistMM-Pipe": 2.0, "FlexPipe": 2.0 + at}
        for size in module.SIZES
        for at, name in enumerate(module.GUESSES)
    ]
    text = "\n".join(module.lines(rows))
    assert "9.7B: 1.00 to 4.50 over 8 guesses" in text
    assert "8.2B 1.29, 9.7B 1.18" in text


def test_under_every_guess_at_towers_flexpipe_is_faster(load: Any) -> None:
    module = load("guessed_towers")
    rows = results.load(RESULTS, "guessed_towers")
    assert len(rows) == len(module.SIZES) * len(module.GUESSES)
    gains = {(row["clip"], row["guess"]): module.gain(row) for row in rows}
    assert min(gains.values()) == pytest.approx(1.15, abs=0.005)
    longer = [gains[clip, "video of twice the sequence"] / module.PAPER[clip] for clip in module.SIZES]
    assert all(abs(each - 1) < 0.03 for each in longer)
    # The figure's own towers, which are searched there too.
    figure = results.load(RESULTS, "figure16")
    for clip in module.SIZES:
        told = load("figure16").speedup(figure, clip, "FlexPipe")
        assert gains[clip, next(iter(module.GUESSES))] == pytest.approx(told, abs=0.005)


def test_figure_16_has_what_is_claimed(load: Any) -> None:
    module = load("figure16")
    rows = results.load(RESULTS, "figure16")
    text = "\n".join(module.lines(rows))
    assert "FlexPipe, paper" in text
    assert all(module.speedup(rows, clip, "FlexPipe") >= 1.18 for clip in module.PAPER)
    assert all(module.speedup(rows, clip, "ours") > module.speedup(rows, clip, "FlexPipe") for clip in module.PAPER)
    assert "</svg>" in str(module.chart(rows))
    row = results.find(rows, clip="4.7B", method="DistMM-Pipe")
    assert module.chosen(row).samples() == pytest.approx(row["samples"], rel=1e-4)


# Emulated devices


def test_shared_ends_on_emulated_devices(load: Any) -> None:
    setups, methods, measured = load("setups"), load("methods"), load("measured")
    tiny = setups.Model("tiny", 8, 256, 4, 64, (8,))
    (run,) = methods.t_1f1b(setups.Setup(tiny, 8, 2, 1, 1, batch=4))
    slow = replace(run, costs=replace(run.costs, f=[2.0] * 4, i=[2.0] * 4, w=[2.0] * 4, b=[4.0] * 4))
    assert measured.measure(slow) >= slow.iteration_ms() - 1
