"""`penstock train --model FOLDER --data FILE.py:NAME`: a Hugging Face model on batches of a person's own."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_families import batch_of, config_of, model_of, plain_step
from penstock.cli import main
from penstock.models.huggingface import Decoder
from penstock.train.checks import SettingsError
from penstock.train.tasks.huggingface import TokenBatchReader
from tiers import others_nightly
from train_runs import losses

pytestmark = pytest.mark.unit

Train = Callable[..., dict[str, Any]]
TESTS = str(Path(__file__).parents[1])

FILE = """
import sys
sys.path.insert(0, {tests!r})
import torch
from hf_families import batch_of
from own_batches import Batches

def drawn(step):
    rows = torch.randperm(8, generator=torch.Generator().manual_seed(step))
    return {{name: tensor[rows] for name, tensor in batch_of({name!r}, 8).items()}}

def batches():
    return Batches([drawn(step) for step in range(3)])

class Kept:
    '''Knows where it stands, and can't be drawn again up to there.'''
    def __init__(self):
        self.position = 0
    def __iter__(self):
        while True:
            self.position += 1
            yield drawn(self.position)
    def state_dict(self):
        return {{"position": self.position}}
    def load_state_dict(self, state):
        self.position = state["position"]

def unlabelled():
    return Batches([{{name: tensor for name, tensor in drawn(0).items() if name != "labels"}}])
"""
OPTIONS = "--lr 0.02 --set lr_decay=constant --set lr_warmup=0 --clip 0 --microbatches 4 --ranks 2"


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Iterator[Train]:
    """Trains in this process, into tmp_path/NAME; returns the one JSON object it prints."""
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()

    def call(name: str, options: str) -> dict[str, Any]:
        out = "" if "--resume" in options else f"--out {tmp_path / name}"
        line = f"{out} --threads 1 --in-process --evaluate-every 0 {options} --json"
        assert main(["train", *shlex.split(line)]) == 0, capfd.readouterr()
        value: dict[str, Any] = json.loads(capfd.readouterr().out)
        return value

    yield call
    torch.set_num_threads(before)


def prepared(folder: Path, name: str) -> Any:
    """The model in a folder, and a file with batches for it beside that; returns the model itself."""
    model = model_of(name)
    model.save_pretrained(folder / "model")
    (folder / "data.py").write_text(FILE.format(tests=TESTS, name=name))
    return model


def drawn(name: str, step: int) -> dict[str, Tensor]:
    rows = torch.randperm(8, generator=torch.Generator().manual_seed(step))
    return {key: tensor[rows] for key, tensor in batch_of(name, 8).items()}


def plain(name: str, model: Any, steps: int) -> list[float]:
    """The losses of the model's own loop over the same microbatches, with the command's optimizer."""
    loss_fn = Decoder(model, compare=False).loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    found = []
    for step in range(steps):
        found.append(float(plain_step(model, drawn(name, step % 3), 4, loss_fn)[0]))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", others_nightly(["llama", "mixtral", "t5", "bert", "llava"], ["mixtral", "t5", "llava"])
)
def test_it_trains_as_the_plain_loop(train: Train, tmp_path: Path, name: str) -> None:
    """A decoder, one whose routers learn, an encoder before it, masked words, pictures: to the bit."""
    model = prepared(tmp_path, name)
    options = f"--model model --data data.py:batches {OPTIONS} --steps 5 --schedule zb-h1"
    report = train("run", options)
    assert losses(tmp_path / "run") == plain(name, model, 5)
    assert report["samples_per_second"] > 0
    assert report["tokens_per_second"] is None
    said = "on 3 batches that it is trained on too (batches takes no `train`)"
    assert report["unit"] == f"nats a token, {said}"
    saved = json.loads((tmp_path / "run/settings.json").read_text())
    assert (saved["batch"], saved["tokenizer"]) == (8, None)


@pytest.mark.slow
def test_it_goes_on_where_its_data_stood(train: Train, tmp_path: Path) -> None:
    prepared(tmp_path, "llama")
    options = f"--model model {OPTIONS} --steps 5 --save-every 3 --set keep=4"
    for data in ("batches", "Kept"):
        train(f"part-{data}", f"{options} --data data.py:{data}")
        part = tmp_path / f"part-{data}"
        whole = losses(part)
        for file in (part / "checkpoints/step-00000005").iterdir():
            file.unlink()
        (part / "checkpoints/step-00000005").rmdir()
        train("again", f"--resume {part} --schedule zb-h1")
        assert losses(part) == whole
        assert len(set(whole)) == 5


def test_data_without_labels_is_refused_at_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(config_of("llama").to_dict()))
    Path("data.py").write_text(FILE.format(tests=TESTS, name="llama"))
    line = "train --model config.json --microbatches 4 --in-process --data data.py"
    for data, more, words in (
        ("unlabelled", "", "batch 0 of data.py:unlabelled has input_ids, attention_mask, and"),
        ("batches", "--context 16", "--context 16 with --data"),
        ("batches", "--tokenizer data.py", "its batches are made already"),
        ("batches", "--batch 6", "gives batches of 8 samples, not 6"),
    ):
        assert main(f"{line}:{data} {more}".split()) == 2
        assert words in " ".join(capsys.readouterr().err.split()), data
    assert not Path("runs").exists()


TOKENS = torch.arange(3, 15).reshape(2, 6)
GOOD = {"input_ids": TOKENS, "labels": TOKENS}
BAD: dict[str, tuple[Any, str]] = {
    "no dict": (
        (TOKENS, TOKENS),
        "a batch is a tuple, and FOLDER takes dicts of tensors [samples, tokens]; give input",
    ),
    "no labels": ({"input_ids": TOKENS}, "a batch has input_ids, and FOLDER takes dicts"),
    "no tokens": ({"tokens": TOKENS, "labels": TOKENS}, "give input_ids as the collators of transformers do"),
    "a name of no argument": ({**GOOD, "attention_maks": TOKENS}, "has attention_maks, which the forward of FOLDER"),
    "pictures": ({**GOOD, "pixel_values": torch.zeros(2, 3, 8, 8)}, "has pixel_values, which the forward of FOLDER"),
    "labels that do not count": (
        {**GOOD, "labels": torch.full_like(TOKENS, -100).index_fill(1, torch.tensor([0]), 5)},
        "no label in a batch counts, so nothing would be learnt from it",
    ),
    "too long": (
        {"input_ids": TOKENS.repeat(1, 11), "labels": TOKENS.repeat(1, 11)},
        "has samples of 66 tokens, and FOLDER takes 64",
    ),
    "beyond the vocabulary": (
        {**GOOD, "input_ids": TOKENS + 290},
        "has token 304 of 300 from 0 on; use the model's",
    ),
    "below it": ({**GOOD, "input_ids": TOKENS - 4}, "has token -1 of 300 from 0 on"),
    "lists": ({**GOOD, "input_ids": [[1, 2], [3, 4]]}, "give input_ids as the collators of transformers do"),
    "samples that differ": ({**GOOD, "attention_mask": TOKENS[:1]}, "have 1, 2 samples in dimension 0"),
}


@pytest.fixture(scope="module")
def reader() -> TokenBatchReader:
    return TokenBatchReader(Decoder(config_of("llama", max_position_embeddings=64), compare=False), "FOLDER")


@pytest.mark.parametrize(("batch", "words"), BAD.values(), ids=BAD.keys())
def test_a_batch_that_does_not_fit_is_refused(reader: TokenBatchReader, batch: Any, words: str) -> None:
    assert reader(GOOD, "a batch").targets is TOKENS
    with pytest.raises(SettingsError) as caught:
        reader(batch, "a batch")
    assert words in str(caught.value)


WRONG: dict[str, Any] = {
    "labels beyond it": {**GOOD, "labels": TOKENS + 290},
    "labels below it": {**GOOD, "labels": TOKENS - 5},
    "labels of another length": {**GOOD, "labels": TOKENS[:, :5]},
    "broken numbers": {**GOOD, "input_ids": TOKENS * 1.0},
    "embeddings too": {**GOOD, "inputs_embeds": torch.zeros(2, 6, 8)},
}


@pytest.mark.parametrize("batch", WRONG.values(), ids=WRONG.keys())
def test_what_torch_and_transformers_refuse_never_becomes_a_loss(reader: TokenBatchReader, batch: Any) -> None:
    decoder = Decoder(config_of("llama", max_position_embeddings=64), compare=False)
    inputs, labels = reader(batch, "a batch")
    model = nn.Sequential(*decoder.layers())
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        decoder.loss(model(inputs), labels)


def test_pictures_of_other_samples_are_refused() -> None:
    see = TokenBatchReader(Decoder(config_of("llava"), compare=False), "FOLDER")
    batch = {name: tensor[:2] for name, tensor in batch_of("llava").items()}
    see(batch, "a batch")
    with pytest.raises(SettingsError, match="2 samples in dimension 0"):
        see({**batch, "pixel_values": batch["pixel_values"][:1]}, "a batch")


def test_a_tokenizer_that_is_not_read_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text was cut into bytes where the folder's tokenizer lay in another file than tokenizer.json."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(config_of("llama").to_dict()))
    Path("text.txt").write_text("a text " * 100)
    Path("tokenizer.model").write_bytes(b"pieces of sentences")
    assert main(["train", "--model", "config.json", "--data", "text.txt", "--in-process"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "has a tokenizer in tokenizer.model, and no tokenizer.json, which alone is read" in told
    assert "save_pretrained(FOLDER) of transformers writes one, or give another with --tokenizer" in told
