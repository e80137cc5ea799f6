"""Scripts for shells: what they offer where, in the shells that this machine has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from qcompile.recipes import RECIPES
from tests.cli.test_app import code_of, refusal

Capture = pytest.CaptureFixture[str]
LINES = {
    "qcompile bu": {"build"},
    "qcompile --debug cache ": {"list", "remove", "path"},
    "qcompile cache remove --unu": {"--unused"},
    "qcompile run m --recipe w8a8 --targ": {"--target"},
    "qcompile build m --recipe w4a4": {"w4a4", "w4a4-g128"},
    "qcompile build m --recipe ": set(RECIPES),
    "qcompile build m --set rotate.on": {"rotate.online="},
    "qcompile build m --explain rotate_": {"rotate_keys"},
    "qcompile serve m --device ": {"auto", "cpu", "gpu"},
    "qcompile run m --gamma ": {"auto"},
    "qcompile completion ": {"bash", "zsh", "fish"},
}
BASH = """
source "$1"
while IFS= read -r line; do
    read -ra COMP_WORDS <<< "$line"; [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=(); compopt() { :; }
    _qcompile; echo "${COMPREPLY[*]}"
done
"""
FISH = "source $argv[1]; while read -l line; string join -- ' ' (complete -C $line | string split -f 1 \\t); end"
ZSH = """
compdef() { :; }; _files() { :; }
compadd() { if [[ $1 == -S ]]; then shift 2; fi; print -r -- ${(M)${(P)2}:#$PREFIX*}; return 0; }
source $1
while IFS= read -r line; do
    words=(${(s: :)line}); [[ $line == *" " ]] && words+=("")
    CURRENT=${#words}; PREFIX=${words[-1]}
    _qcompile
done
"""


def script(shell: str, capsys: Capture) -> str:
    """What `qcompile completion` prints."""
    assert code_of("completion", shell) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("shell", "command"), [("bash", BASH), ("zsh", ZSH), ("fish", FISH)])
def test_shells_offer_what_fits(shell: str, command: str, tmp_path: Path, capsys: Capture) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = tmp_path / "script"
    file.write_text(script(shell, capsys))
    arguments = [file] if shell == "fish" else ["completing", file]
    done = subprocess.run(
        [shell, "-c", command, *arguments], input="\n".join(LINES) + "\n", capture_output=True, text=True
    )
    result = dict(zip(LINES, map(set, map(str.split, done.stdout.splitlines())), strict=True))
    assert result == LINES, done.stderr


def test_files_are_offered_where_nothing_else_is(tmp_path: Path, capsys: Capture) -> None:
    """bash falls back to files where a script offers nothing: options do not stand in the way of a model's path."""
    text = script("bash", capsys)
    lines = "qcompile run \nqcompile build m --dump-ir \n"
    file = tmp_path / "script"
    file.write_text(text)
    done = subprocess.run(["bash", "-c", BASH, "completing", file], input=lines, capture_output=True, text=True)
    assert done.stdout == "\n\n" and "complete -o default" in text


def test_other_shells_are_refused(capsys: Capture) -> None:
    assert "there are scripts for bash, zsh, fish (did you mean bash?)" in refusal(capsys, 2, "completion", "bsh")
