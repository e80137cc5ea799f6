"""Launches around steps: tokens passed from step to step, and what surrounds verification in a speculation round."""

from __future__ import annotations

from collections.abc import Sequence

from qcompile.codegen.gpu.attention_splits import MOST_QUERIES
from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.codegen.gpu.launches import MOST_OUTPUTS, MOST_ROWS, TEXT_TOKENS, Launch, Variant
from qcompile.codegen.gpu.operands import CountRef, DraftRef, GridSize, InputRef, Operands, StateRef

PART = 1024
"""Most features of a row for each program that copies them."""
_ROUND_STATE = (
    "last",
    "place",
    "left",
    "most",
    "counter",
    "tokens",
    "gained",
    "pair_tokens",
    "pair_positions",
)
_HEAD_STATE = (*_ROUND_STATE[:7], "head_tokens", "head_positions", "head_outputs")
_LOOKUP_STATE = ("text", "length", "match", "most", "left", "counter", "gained", "tokens", "drafted")


def feedback_launch() -> Launch:
    """The launch that makes the tokens of a step the inputs of the next step, of the same rows."""
    return _of_tokens("advance", ("argmax", "token_ids", "positions", "decoded", "counter"), 2 * MOST_OUTPUTS)


def follow_launch() -> Launch:
    """The launch that replaces the token ids of a step that refer to outputs of the step before it."""
    return _of_tokens("follow", ("argmax", "token_ids"), 2 * MOST_OUTPUTS, MOST_ROWS)


def _of_tokens(name: str, inputs: Sequence[str], *classes: int) -> Launch:
    """The launch of a kernel with one program for all rows, in `classes` of the most rows."""
    arguments = _arguments(inputs, "M")
    args: Operands = {each: InputRef(each) for each in inputs} | {"M": CountRef("tokens")}
    sources = {most: render_template(f"{name}.py.jinja", arguments=arguments, block=most) for most in classes}
    kernels = {most: Kernel(name, source, arguments, 4, 1) for most, source in sources.items()}
    return Launch(name, "tokens", tuple(Variant(code, (1, 1, 1), args, most) for most, code in kernels.items()))


def round_launches(states: bool = False, draft_states: bool = False) -> tuple[Launch, Launch]:
    """The launches before and after verification in a speculation round.

    `states` and `draft_states`: the target or a draft has recurrent states, and needs to know what is certain.
    """
    operands: Operands = {name: InputRef(name) for name in ("token_ids", "positions", "argmax", "certain")}
    operands |= {name: StateRef(name) for name in _ROUND_STATE}
    operands |= {f"draft_{name}": DraftRef(name) for name in ("token_ids", "positions", "counter", "certain")}
    operands |= {"decoded": DraftRef("decoded"), "S": CountRef("sequences"), "Q": CountRef("queries")}
    rows = ("last", "place", "decoded", "token_ids", "positions", *("left", "certain") * states)
    accept = ("argmax", "decoded", *_ROUND_STATE, "draft_token_ids", "draft_positions", "draft_counter")
    return (
        _round_launch("round_rows", rows, operands, accept=False, states=states),
        _round_launch("round_accept", (*accept, *("draft_certain",) * draft_states), operands, True, draft_states),
    )


def head_round_launches(width: int, states: bool = False) -> tuple[Launch, Launch, Launch]:
    """The launches before and after verification in a round with a draft head.

    The last one keeps the features of the round's rows, of `width` elements, which the head reads in the next round.
    `states`: the target has recurrent states, and needs to know what is certain.
    """
    operands: Operands = {name: InputRef(name) for name in ("token_ids", "positions", "argmax", "features", "certain")}
    operands |= {name: StateRef(name) for name in _HEAD_STATE}
    operands |= {name: DraftRef(name) for name in ("decoded", "known")}
    operands |= {"S": CountRef("sequences"), "Q": CountRef("queries")}
    pointers = {"features": "*fp32", "known": "*fp32", "gained": "*i32", "counter": "*i32"}
    arguments = (*(Argument(*each) for each in pointers.items()), *_arguments((), "S", "Q"))
    values = {"arguments": arguments, "width": width, "part": PART}
    kernel = Kernel("keep_features", render_template("keep_features.py.jinja", **values), arguments, 4, 1)
    variant = Variant(kernel, (GridSize("tokens"), -(-width // PART), 1), operands)
    rows = ("last", "place", "decoded", "token_ids", "positions", *("left", "certain") * states)
    return (
        _round_launch("round_rows", rows, operands, accept=False, states=states),
        _round_launch("round_accept", ("argmax", "decoded", *_HEAD_STATE), operands, True, False, head=True),
        Launch("keep_features", "tokens", (variant,)),
    )


def head_draft_launches() -> tuple[Launch, Launch]:
    """The launch after the first step of a draft head in a round, and the one after each later step."""
    inputs, state = ("argmax", "token_ids", "positions"), ("proposed", "depth", "place")
    operands: Operands = {name: InputRef(name) for name in inputs} | {name: StateRef(name) for name in state}
    operands |= {"decoded": DraftRef("decoded"), "S": CountRef("sequences")}
    launches = []
    for first in (True, False):
        arguments = _arguments((*inputs, "decoded", *state[: 2 + first]), "S")
        name = f"head_draft{'_first' * first}"
        values = {"name": name, "arguments": arguments, "first": first, "most": MOST_OUTPUTS}
        kernel = Kernel(name, render_template("head_draft.py.jinja", **values), arguments, 4, 1)
        launches.append(Launch(name, "sequences", (Variant(kernel, (1, 1, 1), operands),)))
    return launches[0], launches[1]


def _round_launch(
    name: str, pointers: Sequence[str], operands: Operands, accept: bool, states: bool, head: bool = False
) -> Launch:
    arguments = _arguments(pointers, "S", "Q")
    values = {"name": name, "arguments": arguments, "accept": accept, "states": states, "head": head}
    values |= {"most": MOST_OUTPUTS}
    kernel = Kernel(name, render_template("speculation_round.py.jinja", **values), arguments, 4, 1)
    return Launch(name, "sequences", (Variant(kernel, (1, 1, 1), operands),))


def lookup_launch() -> Launch:
    """The launch that drafts by n-gram lookup in a speculation round."""
    operands: Operands = {name: StateRef(name) for name in _LOOKUP_STATE} | {"decoded": DraftRef("decoded")}
    arguments = _arguments(tuple(operands), "S", "Q")
    values = {"arguments": arguments, "text": TEXT_TOKENS, "queries": MOST_QUERIES}
    kernel = Kernel("ngram_lookup", render_template("ngram_lookup.py.jinja", **values), arguments, 8, 1)
    operands |= {"S": CountRef("sequences"), "Q": CountRef("queries")}
    return Launch("look_up", "sequences", (Variant(kernel, (GridSize("sequences"), 1, 1), operands),))


def _arguments(pointers: Sequence[str], *numbers: str) -> tuple[Argument, ...]:
    """Arguments that point to 32-bit integers, then numbers."""
    return (*(Argument(name, "*i32") for name in pointers), *(Argument(name, "i32") for name in numbers))
