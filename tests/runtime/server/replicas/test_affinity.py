"""Which replica a prompt goes to."""

from __future__ import annotations

from qcompile.runtime.server.replicas.affinity import Affinity, blocks_of

IDLE = {0: 0, 1: 0}
LONG = "".join(chr(97 + at % 26) for at in range(1000))


def messages(*texts: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def test_a_turn_begins_as_the_turn_before() -> None:
    first, second = blocks_of(messages(LONG)), blocks_of(messages(LONG, "yes", LONG))
    assert len(first) == 4 and second[:4] == first and len(second) == 8
    assert blocks_of({"prompt": LONG}) != blocks_of({"prompt": "x" + LONG})
    assert not blocks_of({"prompt": "x"}) and not blocks_of({})


def test_what_comes_before_a_prompt_and_whose_it_is_count() -> None:
    asked = {"prompt": LONG}
    variants = [asked, asked | {"model": "style"}, asked | {"system": "Be brief."}, asked | {"tools": [{"name": "f"}]}]
    assert len({tuple(blocks_of(one)) for one in variants}) == 4
    assert blocks_of(asked, "one key") != blocks_of(asked, "another")
    assert len(blocks_of({"prompt": list(range(1000))})) > 10
    assert blocks_of({"prompt": [LONG, "x"]})[:3] == blocks_of(asked)[:3]
    assert len(blocks_of({"prompt": "x" * (1 << 21)})) == 1024  # the rest of a prompt is not looked at


def test_a_prompt_goes_where_most_of_it_has_been() -> None:
    affinity, blocks = Affinity(), blocks_of({"prompt": LONG})
    assert affinity.choose(blocks, IDLE) == 0  # all are equal
    affinity.note(1, blocks[:1])
    assert affinity.choose(blocks, IDLE) == 1
    affinity.note(0, blocks)
    assert affinity.choose(blocks, IDLE) == 0
    affinity.forget(0)
    assert affinity.choose(blocks, IDLE) == 1


def test_load_decides_between_equals_and_against_the_too_busy() -> None:
    affinity, blocks = Affinity(), blocks_of({"prompt": LONG})
    assert affinity.choose(blocks, {0: 1, 1: 0}) == 1
    affinity.note(0, blocks)
    assert affinity.choose(blocks, {0: 4, 1: 0}) == 0
    assert affinity.choose(blocks, {0: 5, 1: 0}) == 1
    assert affinity.choose([], IDLE) == 1  # it was sent fewer prompts
    assert affinity.choose(blocks, {1: 99}) == 1  # the other one is down


def test_only_so_many_beginnings_are_noted() -> None:
    affinity = Affinity()
    affinity.note(0, range(1 << 16))
    affinity.note(0, [-1])
    assert affinity._shared(0, range(1 << 16)) == (1 << 16) - 1  # the end of the longest prompt is forgotten first
