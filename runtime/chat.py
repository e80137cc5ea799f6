"""Conversations as text: the chat template that an artifact brought from its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qcompile.artifact import listed_file
from qcompile.errors import ArtifactError, UsageError

Message = dict[str, str]
"""`role` and `content`."""
Render = Callable[[list[Message]], str]


def chat_template(out: Path, files: dict[str, Any]) -> Render | None:
    """The chat template of an artifact whose manifest has `files`, as a function of the messages, or None.

    Templates run in a sandbox.
    """
    source, special = _template_source(out, files)
    if source is None:
        return None
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    def render(messages: list[Message]) -> str:
        try:
            template = environment.from_string(source, {"raise_exception": refuse})
            return template.render(messages=messages, add_generation_prompt=True, **special)
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise UsageError(f"{out}: the chat template does not take this conversation: {error}") from error

    return render


def _template_source(out: Path, files: dict[str, Any]) -> tuple[str | None, dict[str, str]]:
    """The template's text and the special tokens it may name."""
    config: dict[str, Any] = {}
    path = out / "tokenizer_config.json"
    content = listed_file(out, files, path.name)
    if content is not None:
        try:
            config = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"{path} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise ArtifactError(f"{path} holds a JSON {type(config).__name__} where an object belongs")
    special = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            special[name] = text
    alone = out / "chat_template.jinja"
    content = listed_file(out, files, alone.name)
    if content is not None:
        try:
            return content.decode(), special
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{alone} is not text in UTF-8: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[0].get("template") if named else None
    return (source if isinstance(source, str) else None), special
