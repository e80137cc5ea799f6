"""What is refused at once, and what the environment says."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from qcompile.cli.options import Building, DraftedLoading, changed
from qcompile.cli.pass_fields import pass_fields
from qcompile.passes.features import FuseFeatures, ReturnFeatures
from qcompile.passes.final_state import ReturnFinalState
from qcompile.passes.schedule import PASSES
from tests.cli.test_app import code_of, refusal

Capture = pytest.CaptureFixture[str]
WRONG = {
    ("build", "nowhere", "-o", "x"): "nowhere does not exist",
    ("build", "m", "-o", "x"): "m/config.json is missing",
    ("build", "good", "-o", "good"): "holds other files: choose another",
    ("build", "good", "-o", "x", "--draft", "lookup", "--draft", "nowhere"): "nowhere does not exist",
    ("build", "good", "-o", "x", "--set", "cash.format=kv8"): "pass cash is unknown",
    ("build", "good", "-o", "x", "--set", "rotat.enabled=true"): "(did you mean rotate?)",
    ("build", "good", "-o", "x", "--set", "cache.formt=kv8"): "(did you mean format?)",
    ("build", "good", "-o", "x", "--set", "onlin=true"): "(did you mean online?)",
    ("build", "good", "-o", "x", "--set", "rotate.enabled=2"): "write true or false",
    ("build", "good", "-o", "x", "--head-dtype", "int9"): "(did you mean int8?)",
    ("build", "good", "-o", "x", "--embedding-dtype", "int9"): "(did you mean int8?)",
    ("build", "good", "-o", "x", "--explain", "rotat"): "there is no such pass",
    ("build", "good", "-o", "x", "--recipe", "w4a9"): "(did you mean w4a8?)",
    ("build", "good", "-o", "x", "--recipe", "W4A8"): "(did you mean w4a8?)",
    ("doctor", "m"): "m/config.json is missing",
    ("doctor", "good", "--target", "h2000"): "(did you mean h200?)",
    ("doctor", "good", "--target", "gpu"): "(name the GPU that is to run the model)",
    ("doctor", "good/config.json"): "good/config.json is a file: give the directory of a checkpoint",
    ("run", "good", "-p", "x", "--set", "rotate.enabled=2"): "write true or false",
    ("serv", "good"): "Did you mean 'serve'?",
    ("run", "good", "--promt", "x"): "--prompt",
}


def test_what_is_wrong_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "config.json").write_text("{}")
    program = f"""
import sys
from qcompile.__main__ import main
for request in {list(WRONG)!r}:
    try:
        main(request)
    except SystemExit as exit:
        assert exit.code == 2, request
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [line for line, expected in zip(lines, WRONG.values(), strict=True) if expected not in line] == []


@pytest.mark.parametrize("given", [(), ("--recipe", "w4a9")])
def test_a_wrong_value_of_a_variable_names_it(
    given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("QCOMPILE_RECIPE", "w4a9")
    (tmp_path / "config.json").write_text("{}")
    arguments = ("build", str(tmp_path), "-o", str(tmp_path / "x"), *given)
    monkeypatch.setattr(sys, "argv", ["qcompile", *arguments])
    assert refusal(capsys, 2, *arguments).rstrip().endswith("(from QCOMPILE_RECIPE)") == (not given)


def test_fields_of_passes_are_those_of_their_classes() -> None:
    """Those of draft heads have no place in PASSES, and no defaults, but --explain knows them."""
    wanted = {kind.name: {one.name: one.default for one in fields(kind)} for kind in PASSES}
    assert pass_fields() == wanted | {kind.name: {} for kind in (FuseFeatures, ReturnFeatures, ReturnFinalState)}


def test_help_names_the_recipes_and_targets(capsys: Capture) -> None:
    assert code_of("build", "--help") == 0
    text = capsys.readouterr().out
    assert "qspec-w4a4" in text and "h200" in text


# ---- the environment ---------------------------------------------------------------------------------


def test_variables_set_options(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("QCOMPILE_MAX_TOKENS", "x")
    assert "'--max-tokens'" in (line := refusal(capsys, 2, "run", "nowhere", "-p", "x")) and "QCOMPILE_MAX_T" in line
    monkeypatch.setenv("QCOMPILE_MAX_TOKENS", "3")
    assert "from QCOMPILE" not in refusal(capsys, 2, "run", "nowhere", "-p", "x", "--max-tokens", "y")
    monkeypatch.setenv("QCOMPILE_JSON", "1")
    assert code_of("cache", "path") == 0 and '"path"' in capsys.readouterr().out
    monkeypatch.setenv("QCOMPILE_DEBUG", "1")
    assert code_of("inspect", "nowhere") == 2 and "Traceback" in capsys.readouterr().err


def test_what_the_environment_sets_is_not_asked_of_each_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """QCOMPILE_RECIPE is for models: with an artifact it has no effect, whereas --recipe is refused."""
    assert changed(Building(recipe="w4a8")) == "recipe" and changed(DraftedLoading(threads=2)) == "threads"
    monkeypatch.setenv("QCOMPILE_RECIPE", "w4a8")
    monkeypatch.setenv("QCOMPILE_THREADS", "2")
    assert changed(Building(recipe="w4a8")) is None and changed(DraftedLoading(threads=2)) is None
    assert changed(Building(recipe="w4a8", rebuild=True)) == "rebuild"


# ---- how much is printed -----------------------------------------------------------------------------


def test_quiet_and_verbose(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from qcompile.cli import console

    monkeypatch.setattr(console, "verbosity", console.NORMAL)
    assert "give one of them" in refusal(capsys, 2, "cache", "path", "-qv")

    def printed(*flags: str) -> str:
        assert code_of("cache", "path", *flags) == 0
        with console.Progress() as progress:
            progress("import", 0, 1)
        console.note("a note")
        console.log("an error")
        return capsys.readouterr().err

    assert printed("-q") == "an error\n"
    assert printed() == "a note\nan error\n"
    assert printed("-v") == "qcompile: starting: 0.0 s\nqcompile: import: 0.0 s\na note\nan error\n"
