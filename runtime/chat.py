"""Renders conversations as text with the chat template that an artifact has from its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile.artifact.hashes import listed_file
from qcompile.errors import ArtifactError, UsageError
from qcompile.runtime.special_tokens import CONFIG, json_object, special_tokens

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer

Message = dict[str, str]
"""With the keys `role` and `content`."""
Render = Callable[[list[Message]], str]


def chat_template(out: Path, files: dict[str, Any]) -> Render | None:
    """The chat template of the artifact at `out`, as a function of the messages; None without one.

    files: those of the artifact's manifest. Templates run in a sandbox with the functions and filters that transformers
    provides. Tools and documents are not supported.
    """
    source, special = _template_source(out, files)
    if source is None:
        return None
    from jinja2 import TemplateError

    environment, values = _environment(), special | {"tools": None, "documents": None}
    compiled = cache(lambda: environment.from_string(source))  # compiling a long one takes as long as many steps

    def render(messages: list[Message]) -> str:
        try:
            return compiled().render(messages=messages, add_generation_prompt=True, **values)
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise UsageError(f"the chat template does not take this conversation: {error}") from error

    return render


_REPLY = "An example of a reply"


def closing_tokens(render: Render, tokenizer: Tokenizer | None) -> list[int]:
    """The token that a template writes after a reply, if it writes one: a model ends its replies with it.

    It is found in a rendered example. Several models' configurations name only the token that ends a whole text.
    """
    if tokenizer is None:
        return []
    roles = (("user", "Hello"), ("assistant", _REPLY), ("user", "Thanks"))
    try:
        text = render([{"role": role, "content": content} for role, content in roles])
    except UsageError:  # it takes other conversations only
        return []
    _, found, rest = text.partition(_REPLY)
    rest = rest.lstrip()
    added = tokenizer.get_added_tokens_decoder()
    fitting = [token for token, each in added.items() if found and rest.startswith(each.content)]
    return [max(fitting, key=lambda token: len(added[token].content))] if fitting else []


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that templates expect: Jinja with transformers' additional functions, filter and tag."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.nodes import Node, Scope
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; here its content is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012, as Jinja declares it

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    def now(form: str) -> str:
        return datetime.now().strftime(form)

    def as_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        """JSON without the HTML escapes of Jinja's own `tojson`."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": refuse, "strftime_now": now}
    environment.filters["tojson"] = as_json
    return environment


def _template_source(out: Path, files: dict[str, Any]) -> tuple[str | None, dict[str, str]]:
    """The template's source, and the special tokens that it may refer to."""
    special = special_tokens(out, files)
    alone = out / "chat_template.jinja"
    content = listed_file(out, files, alone.name)
    if content is not None:
        try:
            return content.decode(), special
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{alone} is not text in UTF-8: {error}") from error
    source = json_object(out, files, CONFIG).get("chat_template")
    if isinstance(source, list):  # several named templates
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[0].get("template") if named else None
    return (source if isinstance(source, str) else None), special
