"""Hugging Face families: cut into stages from a folder, each learns to the bit what the whole model does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from hf_families import FAMILIES, REFUSED, TRAINED, batch_of, config_of, model_of, plain_step, reads_and_writes, table
from penstock.cli import main
from penstock.models import CrossEntropy
from penstock.models.huggingface import Decoder, DecoderError
from penstock.models.huggingface.compare import small_model
from penstock.runtime.checkpoint import Reader
from penstock.runtime.checkpoint.save_load import find
from penstock.train.settings import Settings
from penstock.train.tasks.huggingface import DecoderTask
from tiers import others_nightly
from train_runs import losses

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]


def test_the_table_in_the_docs_is_what_is_tested_here() -> None:
    assert len(FAMILIES) >= 25
    assert len(TRAINED) >= 20
    docs = (Path(__file__).parents[2] / "docs/hugging-face.md").read_text(encoding="utf-8")
    listed = docs.partition("<!-- families -->\n")[2].partition("\n<!-- end of families -->")[0]
    assert listed == table()


@pytest.mark.slow
@pytest.mark.parametrize("name", others_nightly(TRAINED, TRAINED[::2]))
def test_a_folder_trains_as_the_whole_model_does(name: str, tmp_path: Path) -> None:
    model, batch = model_of(name), batch_of(name)
    model.save_pretrained(tmp_path)
    decoder = Decoder(tmp_path)
    schedule = ps.build("zb-h1", 4, 3)
    pipe = ps.Pipeline(
        decoder.stages(4), schedule, loss_fn=decoder.loss, parallel=ps.ParallelOptions(tied=decoder.tied)
    )
    result = pipe.step(*decoder.inputs_and_targets(batch), update=False)
    loss, gradients = plain_step(model, batch, 3, decoder.loss)
    assert torch.equal(torch.as_tensor(result.loss), loss)
    found = {key: parameter.grad for key, parameter in pipe.named_parameters()}
    differing = [key for key, gradient in found.items() if not _equal(gradient, gradients[key])]
    assert differing == []
    names = {id(parameter): key for key, parameter in model.named_parameters(remove_duplicate=False) if key in found}
    assert names.keys() == {id(parameter) for parameter in model.parameters()}


def test_bug_a_model_that_was_evaluated_under_inference_mode_could_not_be_trained() -> None:
    """What its blocks were given, such as rotations by position, was kept for the next step of the same shape."""
    decoder = Decoder(model_of("llama"), compare=False)
    tokens = torch.randint(5, (4, 6))
    with ps.Pipeline(decoder.stages(2), ps.build("1f1b", 2, 2), loss_fn=decoder.loss) as pipe:
        with torch.inference_mode():
            before = pipe.evaluate(tokens, tokens).loss
        assert torch.equal(pipe.step(tokens, tokens).loss, before)
        with torch.inference_mode():
            assert torch.equal(pipe.evaluate(tokens, tokens).loss, before)


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return not any(each.any() for each in (one, other) if each is not None)
    return torch.equal(one, other)


LARGE = {
    "llama": {"num_hidden_layers": 32},
    "jamba": {"num_hidden_layers": 32, "output_router_logits": True},
    "mixtral": {"output_router_logits": True},
    "deepseek_v3": {},
    "gemma3_text": {"num_hidden_layers": 34},
    "mamba": {"num_hidden_layers": 48},
    "llava": {},
    "paligemma": {},  # whose copy had pictures as wide as the model, and was refused
    "t5": {"decoder_start_token_id": 0, "num_layers": 24},
    "bart": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", others_nightly(LARGE, ["jamba", "paligemma", "t5"]))
def test_a_model_of_its_real_size_is_compared_on_a_small_copy(name: str) -> None:
    """With the sizes that transformers has for it, up to 671 billion weights, of which none is ever made."""
    named = {"architectures": FAMILIES[name]["architectures"], "model_type": name}
    decoder = Decoder(transformers.AutoConfig.for_model(**named, **LARGE[name]))
    depths = {"t5": 24 + 24 + 3, "bart": 12 + 12 + 3, "llava": 32 + 2, "paligemma": 18 + 2}
    assert decoder.num_layers == depths.get(name, decoder.config.get_text_config().num_hidden_layers + 2)
    assert all(parameter.device.type == "meta" for parameter in decoder._model.parameters())


@pytest.mark.slow
def test_a_small_copy_has_every_kind_of_block() -> None:
    config = transformers.AutoConfig.for_model("jamba", num_hidden_layers=16)
    small = small_model(Decoder(config, compare=False)._model, Decoder(config, compare=False).anatomy)
    kinds = {type(block.feed_forward).__name__ + type(block).__name__ for block in small.model.layers}
    assert len(kinds) == 4 - 1, "attention never comes with experts in it"
    late = transformers.Qwen2Config(use_sliding_window=True, max_window_layers=5, num_hidden_layers=12)
    decoder = Decoder(late)
    assert small_model(decoder._model, decoder.anatomy).config.layer_types[-1] == "sliding_attention"


def test_a_part_of_the_experts_in_a_file_is_named(tmp_path: Path) -> None:
    model = model_of("qwen3_moe")
    model.save_pretrained(tmp_path)
    decoder = Decoder(tmp_path)
    from safetensors.torch import load_file, save_file

    kept = load_file(tmp_path / "model.safetensors")
    lost = "model.layers.2.mlp.experts.1.up_proj.weight"
    save_file({key: value for key, value in kept.items() if key != lost}, tmp_path / "model.safetensors")
    Decoder(tmp_path, compare=False).layers([1])
    with pytest.raises(
        DecoderError, match=r"model\.layers\.2\.mlp\.experts\.gate_up_proj cannot .* 4 like .* 3 like"
    ):
        Decoder(tmp_path, compare=False).layers([3])
    assert decoder.has_router_loss


def test_experts_that_became_one_weight_were_in_memory_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are taken as they were made. What lies in the file is copied, as its pages are the file's."""
    model_of("mixtral").save_pretrained(tmp_path)
    decoder = Decoder(tmp_path, compare=False)
    read: dict[str, Any] = {}
    before = type(decoder._source)._read
    monkeypatch.setattr(
        type(decoder._source), "_read", lambda self, name, wanted: read.setdefault(name, before(self, name, wanted))
    )
    stage = decoder.stage(range(1, 3))
    taken = {name for name, p in stage.named_parameters() if p.data_ptr() == read[name].tensor.data_ptr()}
    assert taken == {name for name in read if ".experts." in name}
    assert len(taken) == 4
    assert all(p.data_ptr() % 64 == 0 for p in stage.parameters())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    draw = random.Random(1)
    file.write_text(" ".join(draw.choice(["rank", "stage", "op", "plan"]) for _ in range(2000)))
    return file


BY_DAY = ("deepseek_v3", "led")
"""One with mixtures of experts, and one that is refused. tests/unit/test_hf_pictures.py has pictures.

All of them are trained to the bit by `test_a_folder_trains_as_the_whole_model_does`.
"""
READ_TEXT = [name for name in FAMILIES if name in REFUSED or not reads_and_writes(name)]


@pytest.mark.slow
@pytest.mark.parametrize("name", others_nightly(READ_TEXT, BY_DAY))
def test_at_the_prompt(name: str, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From a folder with weights: the first loss is the whole model's own, and the last one lower."""
    model_of(name).save_pretrained(tmp_path / "model")
    options = "--context 16 --batch 16 --sample 4 --steps 6 --lr 0.01 --evaluate-every 0 --threads 1 --in-process"
    line = f"train --model {tmp_path / 'model'} --data {text} --out {tmp_path / 'run'} {options} --json"
    code = main(line.split())
    said = capfd.readouterr()
    if name in REFUSED:
        assert code == 2
        assert REFUSED[name] in said.out
        return
    assert code == 0, said.out
    assert json.loads(said.out)["num_ranks"] == 4
    first, *_, last = losses(tmp_path / "run")
    settings = Settings.from_mapping(json.loads((tmp_path / "run/settings.json").read_text()))
    task = DecoderTask(settings, settings.replica_schedule())
    batch = task.read(None).batches[0]
    model = model_of(name)
    inputs = batch.inputs if isinstance(batch.inputs, dict) else {"input_ids": batch.inputs}
    parts = [{key: value.chunk(8)[m] for key, value in inputs.items()} for m in range(8)]
    targets = batch.targets.chunk(8)
    out = [(model(**part, use_cache=False), wanted) for part, wanted in zip(parts, targets, strict=True)]
    added = [model.router_aux_loss_coef * each.aux_loss if task.decoder.has_router_loss else 0.0 for each, _ in out]
    plain = CrossEntropy()
    wanted = sum((plain(each.logits, t) + more).item() for (each, t), more in zip(out, added, strict=True)) / 8
    if name != "bert":  # of which each microbatch has another number of masked tokens
        assert first == pytest.approx(wanted, rel=1e-6)
    assert last < first


WORDS = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}


PAIRS = """import torch
from torch.utils.data import Dataset

class Pairs(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, number):
        tokens = torch.randint(3, 290, (12,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens[:7]}
"""
EXPORTED = ("gpt2", "mixtral", "deepseek_v3", "llava", "bert", "t5", "marian")


@pytest.mark.slow
@pytest.mark.parametrize("name", others_nightly(EXPORTED, ["gpt2", "deepseek_v3", "t5"]))
def test_what_is_exported_is_opened_by_from_pretrained(name: str, text: Path, tmp_path: Path) -> None:
    """With every weight and buffer as it was trained, and the tokenizer."""
    folder, out = tmp_path / "model", tmp_path / "out"
    model_of(name).save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate(["rank", "stage", "op", "plan", "[UNK]", "[MASK]"])}
    words = {**WORDS, "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    options = "--batch 16 --steps 1 --sample 0 --lr 0.01 --evaluate-every 0 --threads 1 --in-process"
    data = f"{text} --context 16"
    if reads_and_writes(name):
        (tmp_path / "pairs.py").write_text(PAIRS)
        data = f"{tmp_path / 'pairs.py'}:Pairs"
    line = f"train --model {folder} --data {data} --out {tmp_path / 'run'} {options} --export {out}"
    assert main(line.split()) == 0
    kind = getattr(transformers, FAMILIES[name]["architectures"][0])
    opened, said = kind.from_pretrained(out, output_loading_info=True)
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    trained = Reader(find(tmp_path / "run/checkpoints"))
    kept = dict(opened.state_dict(keep_vars=True))
    for stored in trained.names():
        if stored.startswith("model/"):
            assert torch.equal(kept[stored.removeprefix("model/")], trained.load([stored])[stored]), stored
    before = dict(model_of(name).named_parameters())
    assert any(not torch.equal(before[key], value) for key, value in opened.named_parameters())
    assert (out / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    again = f"train --model {out} --data {data} --out {tmp_path / 'again'} {options} --export {out}"
    assert main(again.split()) == 2, "the folder is not empty"


@pytest.mark.parametrize("has_config", [True, False])
def test_bug_an_export_had_the_tokenizer_of_the_folder_and_not_the_one_it_was_trained_with(
    text: Path, tmp_path: Path, has_config: bool
) -> None:
    folder, given, out = tmp_path / "model", tmp_path / "given", tmp_path / "out"
    model_of("gpt2").save_pretrained(folder)
    given.mkdir()
    vocabulary = {word: number for number, word in enumerate(["rank", "stage", "op", "plan", "[UNK]"])}
    words = {**WORDS, "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}}
    (given / "words.json").write_text(json.dumps(words))
    if has_config:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "op"}
        (given / "tokenizer_config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "generation_config.json"):
        (folder / name).write_text("{}")
    options = "--context 16 --batch 16 --steps 1 --sample 0 --evaluate-every 0 --threads 1 --in-process"
    line = f"train --model {folder} --tokenizer {given / 'words.json'} --data {text} --out {tmp_path / 'run'}"
    assert main(f"{line} {options} --export {out}".split()) == 0
    assert (out / "tokenizer.json").read_text() == (given / "words.json").read_text()
    assert {"vocab.json", "merges.txt"}.isdisjoint(file.name for file in out.iterdir())
    assert (out / "generation_config.json").exists()
    opened = transformers.AutoTokenizer.from_pretrained(out)
    assert (opened("plan rank")["input_ids"], opened.eos_token) == ([3, 0], "op" if has_config else None)


def test_a_large_export_is_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.models.huggingface.export.SMALLEST", 20_000)
    model = model_of("qwen3_moe")
    decoder = Decoder(model, compare=False)
    pipe = ps.Pipeline(
        decoder.stages(2),
        ps.build("1f1b", 2, 2),
        parallel=ps.ParallelOptions(tied=decoder.tied),
        loss_fn=decoder.loss,
    )
    pipe.save(tmp_path / "checkpoints")
    decoder.export(tmp_path / "out", tmp_path / "checkpoints")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert len(modes) == 1, "weights can be read by whoever reads the config"
    opened = type(model).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(opened[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    with pytest.raises(DecoderError, match=REFUSED[name]):
        Decoder(config_of(name))
