"""The recipes for several machines are whole, and one line both begins a run and goes on with it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.train.checks import SettingsError
from penstock.train.job import order_of

yaml = pytest.importorskip("yaml")

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_one_folder_to_begin_and_to_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = order_of({"preset": "nano", "ranks": 2, "steps": 8}, str(run), str(run), None, False)
    assert (first.resume, first.folder) == (False, str(run))
    run.mkdir()
    (run / "settings.json").write_text(first.settings.to_json())
    again = order_of({"preset": "nano", "ranks": 2, "steps": 8}, str(run), str(run), None, False)
    assert again.resume
    assert again.settings == first.settings


def test_what_else_was_an_error_stays_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="goes on in its own folder"):
        order_of({}, str(tmp_path / "a"), str(tmp_path / "b"), None, False)
    with pytest.raises(SettingsError, match="settings"):
        order_of({}, None, str(tmp_path / "none"), None, False)
    held = tmp_path / "held"
    (held / "checkpoints").mkdir(parents=True)
    with pytest.raises(SettingsError, match="holds a run"):
        order_of({}, str(held), str(held), None, False)


def test_the_script_for_slurm_is_one_that_bash_reads() -> None:
    script = EXAMPLES / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    options = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert any("--ntasks-per-node=1" in line for line in options)


def test_the_job_for_kubernetes_is_consistent() -> None:
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes" / "train.yaml").read_text())
    pod = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"]}
    assert int(given["NUM_HOSTS"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert given["FIRST"].startswith(f"{job['metadata']['name']}-0.{pod['spec']['subdomain']}:")
    used = {part.partition(")")[0] for word in container["args"] for part in word.split("$(")[1:]}
    assert used == set(given)
    volumes = {each["name"] for each in pod["spec"]["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes
