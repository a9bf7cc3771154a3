"""`penstock tune` of models besides a GPT: of a BERT, of Hugging Face folders, of a CLIP."""

from __future__ import annotations

import json
import shlex
from itertools import product
from pathlib import Path

import pytest

import hf_families
from penstock.cli import main
from penstock.formats.profile import KINDS
from penstock.train.kinds import usual_of
from penstock.train.settings import Settings
from penstock.tune import meter, verify
from penstock.tune.layers import NO_LAYER, RankShare, measure_layers
from penstock.tune.tuned_model import tuned_model
from tiers import others_nightly
from train_runs import penstock
from tune_models import Ranks

pytestmark = pytest.mark.unit

FAMILIES = ("llama", "gpt2", "bert", "mixtral")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    return tmp_path


def settings_of(model: str, **more: object) -> Settings:
    given = {"data": "text.txt", "batch": 4, "microbatches": 1, "ranks": 1, "threads": 1, **usual_of(model), **more}
    return Settings(model=model, **given)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recompute"),
    others_nightly(
        product(["preset", *FAMILIES], [False, True]),
        [("preset", True), ("llama", False), ("gpt2", True), ("bert", False), ("mixtral", True)],
    ),
)
def test_every_layer_is_measured(folder: Path, name: str, recompute: bool) -> None:
    if name == "preset":
        settings = settings_of("bert", preset="nano", depth=2)
    else:
        (folder / "config.json").write_text(json.dumps(hf_families.config_of(name).to_dict()))
        settings = settings_of(str(folder / "config.json"))
    model = tuned_model(settings)
    told = measure_layers(RankShare(settings, 2, recompute, 0, 1, 0.01), lambda: None)
    assert told["layers"] == list(range(model.num_layers))
    for layer in (NO_LAYER, *told["layers"]):
        assert all(f"{layer} {kind}" in told["times"] for kind in KINDS)
    sizes = [told["bytes"][str(layer)] for layer in told["layers"]]
    assert all(size["activation"] > 0 for size in sizes)
    assert [size["output"] > 0 for size in sizes] == [True] * (len(sizes) - 1) + [False]
    assert all(size["weight"] > 0 for size in sizes)
    assert (sizes[1]["transient"] > sizes[1]["activation"]) == recompute


def test_another_config_or_context_is_measured_anew(folder: Path) -> None:
    def digest(**changes: object) -> str:
        (folder / "config.json").write_text(json.dumps(hf_families.config_of("llama", **changes).to_dict()))
        return tuned_model(settings_of("config.json")).digest

    assert digest() == digest()
    assert len({digest(), digest(rms_norm_eps=1e-3), tuned_model(settings_of("config.json", context=8)).digest}) == 3


@pytest.mark.slow
def test_batches_of_one_s_own_are_measured_and_told_apart(folder: Path) -> None:
    """A Hugging Face model on dicts of tokens and labels: what layers take depends on how long these are."""
    (folder / "config.json").write_text(json.dumps(hf_families.config_of("llama").to_dict()))

    def asked(length: int) -> Settings:
        file = folder / f"rows{length}.py"
        file.write_text(
            f"import torch\ntokens = torch.arange(32 * {length}).reshape(32, {length}) % 290\n"
            "class Rows(torch.utils.data.Dataset):\n"
            "    def __len__(self):\n        return 32\n"
            "    def __getitem__(self, at):\n        return {'input_ids': tokens[at], 'labels': tokens[at]}\n"
        )
        return settings_of("config.json", data=f"{file}:Rows", batch=8)

    short, long = tuned_model(asked(6)), tuned_model(asked(12))
    assert short.num_tokens is None
    assert short.digest != long.digest
    sent = []
    for length in (6, 12):
        told = measure_layers(RankShare(asked(length), 2, False, 0, 1, 0.01), lambda: None)
        sent.append(told["bytes"]["1"]["output"])
    assert sent[1] == 2 * sent[0] > 0


def line_of(folder: Path, model: str) -> list[str]:
    """The words of a `penstock tune` of such a model, whose files are made."""
    chain = "--data text.txt --batch 4 --ranks 2 --pp 2 --microbatch-size 1 --schedule chimera"
    if model == "bert":
        (folder / "run.toml").write_text("depth = 2")
        which = f"--model bert --preset nano --config run.toml {chain}"
    elif model == "clip":
        which = "--model clip --batch 16 --ranks 3 --pp 3 --dp 1 --microbatch-size 8"
    else:
        (folder / "config.json").write_text(json.dumps(hf_families.config_of("llama").to_dict()))
        (folder / "run.toml").write_text("context = 16")
        which = f"--model config.json --config run.toml {chain}"
    return f"tune {which} --verify 1 --json".split()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")  # the line says how many threads, and trains in this process
@pytest.mark.parametrize("model", ["bert", "hf"])
def test_the_closing_line_is_one_that_train_takes(
    folder: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for asks in (meter, verify):
        monkeypatch.setattr(asks, "run_job", Ranks())
    assert main(line_of(folder, model)) == 0
    words = shlex.split(json.loads(capsys.readouterr().out)["train"])[1:]
    assert main([*words, "--steps", "2", "--out", "run", "--in-process", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["num_ranks"], report["schedule"]) == (2, 2, "chimera")


@pytest.mark.nightly
@pytest.mark.multiproc
@pytest.mark.parametrize("model", ["bert", "hf", "clip"])
def test_the_closing_line_trains(folder: Path, model: str) -> None:
    """With the best measured and verified; then the line itself, word for word."""
    ended = penstock([*line_of(folder, model), "--seconds", "0.05"], folder)
    assert ended.code == 0, ended.err
    found = ended.json
    assert found["choice"]["measured"]["step_ms"] > 0
    program, *words = shlex.split(found["train"])
    assert program == "penstock"
    report = penstock([*words, "--steps", "2", "--out", "run", "--in-process", "--json"], folder).json
    assert (report["steps"], report["num_ranks"]) == (2, 3 if model == "clip" else 2)
