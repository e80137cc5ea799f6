"""Patterns of modules' names that others have written: none may take long, whatever a checkpoint's author wants."""

from __future__ import annotations

import time

import pytest

from qcompile.checkpoints.stored import patterns
from qcompile.checkpoints.stored.patterns import NamePatterns
from qcompile.errors import UnsupportedError, UsageError

NAME = "model.layers.17.mlp.gate_proj"


def test_the_beginning_of_a_name_decides() -> None:
    read = NamePatterns().read
    for text, wanted in {
        r".*\.17\..*gate": True,
        r"model\.layers\.(1|17)\.mlp\.(gate|up)_proj": True,
        "layers": False,
        "MODEL": False,
        "": True,
    }.items():
        assert read("targets", text).matches(NAME) is wanted, text
    whole = read("targets", "gate_proj", r"(?:.*\.)?(?:{})$")
    assert whole.matches(NAME) and not whole.matches("gate_proj_") and not whole.matches("up.agate_proj")


@pytest.mark.parametrize(
    "text", ["(?:a|a|a|a)" * 40 + "!", "(a|a)" * 60 + "!", "[a-z]*" * 5 + "[0-9]", "a?" * 60 + "!"]
)
def test_a_pattern_ends_in_time(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is refused or not; all patterns of a configuration share the time."""
    monkeypatch.setattr(patterns, "SECONDS", 0.1)
    all = NamePatterns()
    began = time.monotonic()
    for _ in range(40):
        try:
            all.read("targets", text).matches("a" * patterns.MOST_LETTERS)
        except UnsupportedError as error:
            assert str(error).startswith("targets: ") and "takes too long to match" in str(error)
    assert time.monotonic() - began < 2  # 40 times 0.1 s if each had its own


def test_time_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a match takes depends on the machine, so the bound from which on it counts is moved to either side."""
    all = NamePatterns()
    monkeypatch.setattr(patterns, "_SLOW", 1e-6)
    slow = all.read("targets", "(?:a|a|a|a)" * 8 + "!")
    for _ in range(3):
        slow.matches("a" * 40)
    assert all.left < patterns.SECONDS
    left = all.left
    monkeypatch.setattr(patterns, "_SLOW", 10.0)
    all.read("targets", "x").matches(NAME)
    assert all.left == left


def test_refused() -> None:
    read = NamePatterns().read
    for text in ("((a{999}){999}){999}", "(a+)+b", "a*" * 6, "a|" * 1001):
        with pytest.raises(UnsupportedError, match=r"targets: .* repeats a group"):
            read("targets", text)
    for text in ("(", "a)(b", "[", "a{5,3}", "(?P<n>a)(?P<n>b)", "(" * 200):
        with pytest.raises(UsageError, match=r"targets: .* is no pattern"):
            read("targets", text)
    with pytest.raises(UnsupportedError, match="names of over 128 letters"):
        read("targets", "a").matches("a" * 129)
