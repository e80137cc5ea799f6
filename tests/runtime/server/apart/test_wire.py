"""What crosses the channel between the two processes arrives as it was."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import pytest

from qcompile import errors
from qcompile.errors import AsleepError, BusyError, OverflowedError, QCompileError, UsageError
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.structured import Reasoning, StructuredOutputsParams, StructureError, named_as
from qcompile.runtime.server.apart import wire
from qcompile.runtime.server.apart.channel import Received, encoded
from qcompile.runtime.speculation.explained import GammaFacts

STRUCTURES: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": [1.5, None, "é"]}}}},
    {"regex": "[a-z]+", "disable_any_whitespace": True},
    {"choice": ["yes", "nö"]},
    {"json_object": True},
    {"calls": [("<call>", {"type": "object"})], "reasoning": Reasoning("<think>", "</think>", True, "", ("a", "b"))},
]
PARAMS: list[dict[str, Any]] = [
    {},
    {"n": 2, "best_of": 3, "temperature": 0.1 + 0.2, "top_p": 1e-9, "seed": -(2**63), "max_tokens": None},
    {"logit_bias": {5: -100.0, 70000: 1.5}, "stop": ["a", "b"], "stop_token_ids": [7, 8], "priority": -3},
    {"stop": "x", "allowed_token_ids": [1, 2], "min_tokens": 2, "bad_words": ["c"], "logprobs": 5, "lora": "style"},
    {"prompt_logprobs": 3, "max_tokens": 0, "truncate_prompt_tokens": -1, "skip_special_tokens": False},
    *({"structured_outputs": structure} for structure in STRUCTURES),
]


def sent(value: Any) -> Any:
    """A value behind the channel."""
    [received] = Received().add(encoded(value))
    return received


@pytest.mark.parametrize("given", PARAMS)
def test_parameters(given: dict[str, Any]) -> None:
    if structure := given.get("structured_outputs"):
        given = {"structured_outputs": StructuredOutputsParams(**structure)}
    params = SamplingParams(**given)
    arrived = wire.params_of(sent(wire.params_value(params)))
    for field in fields(params):
        if field.name not in ("structured_outputs", "stop"):
            assert getattr(arrived, field.name) == getattr(params, field.name), field.name
    assert arrived.stops == params.stops
    if params.structure:
        assert arrived.structure and arrived.structure.source == params.structure.source


def test_every_field_of_parameters_is_tried() -> None:
    """A field that is added later must be added to PARAMS, too."""
    tried = {name for given in PARAMS for name in given}
    untried = {field.name for field in fields(SamplingParams)} - tried
    plain = {"top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "ignore_eos"}
    assert untried - plain == {"include_stop_str_in_output"}


@pytest.mark.parametrize("given", STRUCTURES[1:4])
def test_structures(given: dict[str, Any]) -> None:
    structure = StructuredOutputsParams(**given)
    assert wire.structure_of(sent(wire.structure_value(structure))).source == structure.source


KINDS = [
    UsageError("no"),
    BusyError("later"),
    AsleepError(),
    OverflowedError("layer 3: "),
    errors.ResourceError("x\ny"),
]


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
def test_errors(error: QCompileError) -> None:
    arrived = wire.error_of(sent(wire.error_value(error)))
    assert type(arrived) is type(error) and str(arrived) == str(error) and arrived.exit_code == error.exit_code


def test_an_error_of_a_structure_is_named_as_its_field() -> None:
    arrived = wire.error_of(sent(wire.error_value(StructureError("regex", "is empty"))))
    with pytest.raises(UsageError, match=r"^guided_regex is empty$"), named_as("guided_regex"):
        raise arrived


@pytest.mark.parametrize("name", ["Exception", "shown", "EXIT_BUG", "os"])
def test_only_errors_of_qcompile_are_made(name: str) -> None:
    assert type(wire.error_of([name, "text", None])) is QCompileError


def test_drafting() -> None:
    facts = GammaFacts(4, 1000, 3, 0.7, {1: 1.1, 3: 1.4}, {}, waits=True)
    assert wire.drafting_of(sent(wire.drafting_value([facts]))) == [facts]


def test_numbers_keep_their_bits() -> None:
    numbers = [0.1, 1e-320, -0.0, math.inf, -math.inf, 2**63, 1.0]
    assert list(map(repr, sent(numbers))) == list(map(repr, numbers)) and math.isnan(sent([math.nan])[0])


@pytest.mark.parametrize("size", [1, 2, 5, 7, 1000])
def test_messages_arrive_whole_however_their_bytes_come(size: int) -> None:
    messages = [["grown", [[1, "é" * count]]] for count in (0, 1, 300)]
    content, received = b"".join(map(encoded, messages)), Received()
    arrived = [one for at in range(0, len(content), size) for one in received.add(content[at : at + size])]
    assert arrived == json.loads(json.dumps(messages))
