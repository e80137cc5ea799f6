"""Models of the hub: what is fetched, what is kept, and what is said when that fails; against a hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from qcompile.checkpoints import hub
from qcompile.checkpoints.model_names import name_of
from qcompile.cli import doctor, models
from qcompile.cli.options import Building
from qcompile.errors import ResourceError, UsageError
from tests.support.hub_server import COMMIT, FakeHub, serving

NAME = "someone/tiny"
Capture = pytest.CaptureFixture[str]
WANTED = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


def address(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub use the hub at `url`, as HF_ENDPOINT does when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def fake(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with the tiny checkpoint, and an empty cache for its files."""
    with serving(FakeHub.of(NAME, tiny_checkpoint)) as served:
        address(served.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("QCOMPILE_CACHE", str(tmp_path / "cache"))
        yield served


def test_what_a_build_needs_is_fetched_once(fake: FakeHub, tiny_checkpoint: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = hub.find(NAME, progress=lambda *told: seen.append(told))
    assert fake.fetched() == WANTED == {path.name for path in folder.iterdir()}
    assert (folder / "model.safetensors").read_bytes() == (tiny_checkpoint / "model.safetensors").read_bytes()
    assert {stage for stage, _, _ in seen} == {"downloading"} and seen[-1][1] == seen[-1][2] > 1_000_000
    assert name_of(folder) == NAME
    fake.requests.clear()
    assert hub.find(NAME) == folder == hub.find(NAME, revision="v1") == hub.find(NAME, revision=COMMIT)
    assert fake.fetched() == set()
    assert "code.py" in {path.name for path in hub.find(NAME, allow_remote=True).iterdir()}


def test_a_download_that_broke_off_goes_on(
    fake: FakeHub, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
    fake.cut["model.safetensors"] = 120_000
    try:
        folder = hub.find(NAME)
    except UsageError:  # some versions of the client leave it to the next attempt
        folder = hub.find(NAME)
    assert "GET model.safetensors from 100000" in fake.requests
    assert (folder / "model.safetensors").read_bytes() == (tiny_checkpoint / "model.safetensors").read_bytes()


def test_private_and_gated_models(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.token = "secret"
    with pytest.raises(UsageError, match=rf"^{fake.url} has no model {NAME}, or not for this token: .*--token, HF_TO"):
        hub.find(NAME)
    with pytest.raises(UsageError, match="not for this token"):
        hub.find(NAME, token="wrong")
    fake.gated = True
    with pytest.raises(UsageError, match=rf"^{NAME} asks for an agreement: accept it at {fake.url}/{NAME}"):
        hub.find(NAME)
    assert hub.find(NAME, token="secret").is_dir()


def test_what_does_not_exist(fake: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no model someone/else"):
        hub.find("someone/else")
    with pytest.raises(UsageError, match=rf"^{NAME} has no revision v2 at {fake.url}$"):
        hub.find(NAME, revision="v2")
    with pytest.raises(UsageError, match=r"--revision v1: .* is a directory"):
        hub.find(tmp_path, revision="v1")


def test_without_a_network(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    address("http://127.0.0.1:9", monkeypatch)  # nothing listens there
    with pytest.raises(UsageError, match=rf"^{NAME} is neither a directory nor reachable on the hub: .*refused"):
        hub.find(NAME)
    address(fake.url, monkeypatch)
    folder = hub.find(NAME)
    address("http://127.0.0.1:9", monkeypatch)
    assert hub.find(NAME) == folder  # what was fetched serves


def test_a_full_disk(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **options: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ResourceError, match=rf"no space left in .* for {NAME}: free some, or set HF_HOME"):
        hub.find(NAME)


def test_variables_of_the_hub(fake: FakeHub, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE, in processes of their own, which import no torch."""
    fake.token = "secret"
    program = f"import sys; from qcompile.checkpoints import hub; print(hub.find({NAME!r}))"
    program += "; assert 'torch' not in sys.modules"

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"HF_ENDPOINT": fake.url, "HF_HOME": str(tmp_path / "home")} | variables
        return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)

    offline = run(HF_HUB_OFFLINE="1")
    assert f"{NAME} is not in {tmp_path}/home/hub, and HF_HUB_OFFLINE is set: unset it" in offline.stderr
    online = run(HF_TOKEN="secret")
    assert online.returncode == 0 and online.stdout.startswith(f"{tmp_path}/home/hub/models--someone--tiny"), online
    fake.requests.clear()
    again = run(HF_HUB_OFFLINE="1")
    assert again.stdout == online.stdout and fake.requests == []


# ---- the commands ------------------------------------------------------------------------------------


def test_doctor_fetches_no_weights(fake: FakeHub, capsys: Capture) -> None:
    from tests.cli.test_app import json_of

    result = json_of(capsys, "doctor", NAME, "--recipe", "w4a8")
    assert result["exportable"] and result["plan"]["model"] == NAME
    assert fake.fetched() == WANTED - {"model.safetensors"}
    whole = hub.find(NAME)
    assert doctor.examine(whole, "cpu", "w4a8", {}, None).as_json()["plan"]["parameters"] > 0


def test_weights_that_are_there_in_part_are_not_read(fake: FakeHub) -> None:
    fake.files["model.safetensors.index.json"] = b'{"weight_map": {"a": "model.safetensors", "b": "two.safetensors"}}'
    folder = hub.find(NAME)
    assert not doctor._has_weights(folder)
    (folder / "two.safetensors").touch()
    assert doctor._has_weights(folder)


def test_a_model_of_the_hub_is_built_on_demand(
    fake: FakeHub, tiny_artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    import shutil

    from qcompile import pipeline
    from tests.cli.test_app import code_of

    built: list[tuple[object, ...]] = []
    made = tiny_artifact("w8a8")

    def build(model: str, out: Path, **options: object) -> pipeline.BuildReport:
        built.append((model, options["name"]))
        shutil.copytree(made, out)
        return pipeline.BuildReport(out, (), {}, 8.0, {})

    monkeypatch.setattr(pipeline, "build", build)
    fake.token = "secret"
    run = ("run", NAME, "-p", "ab", "--max-tokens", "2", "--threads", "1")
    assert code_of(*run) == 2 and "not for this token" in capfd.readouterr().err
    assert code_of(*run, "--token", "secret", "--revision", "v1") == 0, capfd.readouterr().err
    assert [name for _, name in built] == [NAME]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert models.artifact_of(NAME, Building(revision=COMMIT)).name == NAME and len(built) == 1
    assert "secret" not in capfd.readouterr().err
