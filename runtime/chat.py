"""Renders conversations as text with the chat template that an artifact has from its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile.artifact.hashes import listed_file
from qcompile.errors import ArtifactError, UsageError
from qcompile.runtime.parsers.formats import tool_format
from qcompile.runtime.renderer import Renderer, TemplateError
from qcompile.runtime.special_tokens import CONFIG, json_object, special_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = dict[str, Any]
"""With the keys `role` and `content`, and as in OpenAI's API `name`, `tool_calls` and `tool_call_id`."""
Render = Callable[..., str]
"""Renders messages, with the variables of a template as keywords."""

_TOOL_TEMPLATE = "tool_use"
"""The name of the template for conversations with tools, where a checkpoint has several."""


class ChatTemplate:
    """A chat template as a function of the messages, run in a process of its own with what transformers provides.

    sources: the templates by name, one of them `default`. special: texts of special tokens by name.
    """

    def __init__(self, sources: dict[str, str], special: dict[str, str]) -> None:
        self._sources, self._special = sources, special
        self._renderer = Renderer(sources)

    @property
    def text(self) -> str:
        """All that the templates say."""
        return "\n".join(self._sources.values())

    @cached_property
    def reads(self) -> frozenset[str]:
        """The names of the variables that the templates read. Raises UsageError for one that is no template."""
        try:
            return self._renderer.reads()
        except TemplateError as error:
            raise UsageError(f"the chat template is malformed: {error}") from error

    def __call__(self, messages: list[Message], **variables: Any) -> str:
        """Render messages, and the start of a reply. Raises UsageError if the template does not take them."""
        name = _TOOL_TEMPLATE if variables.get("tools") and _TOOL_TEMPLATE in self._sources else "default"
        given = {"tools": None, "documents": None, "add_generation_prompt": True} | variables
        try:
            return self._renderer.render(name, self._special | given | {"messages": messages})
        except TemplateError as error:
            raise UsageError(f"the chat template does not take this conversation: {error}") from error


def up_to_content(text: str, content: str) -> str:
    """A rendered conversation up to the end of its last message's content, for a reply that continues the message.

    White space that the template keeps stays. Raises UsageError if the content is empty, or not in the text as it is.
    """
    inner = content.strip()
    if not inner:
        raise UsageError("continue_final_message needs a last message that has content")
    place = text.rfind(inner)
    if place < 0:
        raise UsageError("continue_final_message: the chat template does not write the last message as it is")
    kept = content.lstrip()
    return text[: place + len(kept if text.startswith(kept, place) else inner)]


def chat_template(out: Path, files: dict[str, Any]) -> ChatTemplate | None:
    """The chat template of the artifact at `out`; None without one. files: those of the artifact's manifest."""
    sources, special = _template_sources(out, files)
    return ChatTemplate(sources, special) if "default" in sources else None


_REPLY = "An example of a reply"


def closing_tokens(render: Render, tokenizer: Tokenizer | None) -> list[int]:
    """The token that a template writes after a reply, if it writes one: a model ends its replies with it.

    It is found in a rendered example. Several models' configurations name only the token that ends a whole text. Where
    a reply consists of several messages, the token ends only one of them.
    """
    form = tool_format(render.text) if isinstance(render, ChatTemplate) else None
    if tokenizer is None or (form is not None and form.whole):
        return []
    roles = (("user", "Hello"), ("assistant", _REPLY), ("user", "Thanks"))
    try:
        text = render([{"role": role, "content": content} for role, content in roles])
    except UsageError:  # it takes other conversations only
        return []
    _, reply_mark, rest = text.partition(_REPLY)
    rest = rest.lstrip()
    added = tokenizer.get_added_tokens_decoder()
    fitting = [token for token, each in added.items() if reply_mark and rest.startswith(each.content)]
    return [max(fitting, key=lambda token: len(added[token].content))] if fitting else []


def _template_sources(out: Path, files: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """The sources of the templates by name, and the special tokens that they may refer to."""
    special = special_tokens(out, files)
    alone = out / "chat_template.jinja"
    content = listed_file(out, files, alone.name)
    if content is not None:
        try:
            return {"default": content.decode()}, special
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{alone} is not text in UTF-8: {error}") from error
    source = json_object(out, files, CONFIG).get("chat_template")
    if isinstance(source, list):  # several named templates
        pairs = ((each.get("name"), each.get("template")) for each in source if isinstance(each, dict))
        return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}, special
    return ({"default": source} if isinstance(source, str) else {}), special
