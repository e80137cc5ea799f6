"""Prompts that end with the last turn, or within the last message: the prompts of transformers."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from qcompile.errors import UsageError
from qcompile.runtime.chat import ChatTemplate, up_to_content
from qcompile.runtime.dialogue import DialogueFormat
from qcompile.runtime.server.chat_api import ChatRequest
from qcompile.runtime.server.tokenization import TokenizeRequest

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ CONTENT }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATES = {"as it is": TURNS.replace("CONTENT", "m.content"), "trimmed": TURNS.replace("CONTENT", "m.content | trim")}


def prompt_of(template: str, content: str, request: type[ChatRequest] | type[TokenizeRequest], **fields: Any) -> str:
    messages = [{"role": "user", "content": "Is it so?"}, {"role": "assistant", "content": content}]
    asked = request.model_validate({"messages": messages} | fields).dialogue()
    assert asked is not None
    return DialogueFormat(ChatTemplate({"default": template}, {}), None).turn(asked).prompt


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
@pytest.mark.parametrize("content", ["It is", "  It is", "It is ", "\n It is so\n", "so"])
def test_a_message_is_continued_as_by_transformers(template: str, content: str) -> None:
    messages = [{"role": "user", "content": "Is it so?"}, {"role": "assistant", "content": content}]
    for fields in ({"add_generation_prompt": False, "continue_final_message": True}, {"add_generation_prompt": False}):
        expected, _ = render_jinja_template([messages], chat_template=template, **fields)
        for request in (ChatRequest, TokenizeRequest):
            assert [prompt_of(template, content, request, **fields)] == expected
    assert prompt_of(template, content, ChatRequest).endswith("<assistant>")


def test_what_cannot_be_continued_is_refused() -> None:
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(UsageError, match="needs add_generation_prompt: false"):
        prompt_of(TEMPLATES["trimmed"], "x", ChatRequest, continue_final_message=True)
    with pytest.raises(UsageError, match="needs a last message that has content"):
        prompt_of(TEMPLATES["trimmed"], " ", ChatRequest, **continued)
    with pytest.raises(UsageError, match="does not write the last message as it is"):
        prompt_of(TURNS.replace("CONTENT", "m.content | upper"), "x", ChatRequest, **continued)
    with pytest.raises(UsageError, match="consists of several messages"):
        harmony = "<|start|>assistant<|channel|>final<|message|>{{ messages }}"
        prompt_of(harmony, "x", ChatRequest, **continued)


@pytest.mark.parametrize("field", [{"add_generation_prompt": False}, {"continue_final_message": True}])
def test_a_text_has_no_last_message(field: dict[str, bool]) -> None:
    with pytest.raises(UsageError, match="add_generation_prompt and continue_final_message need messages"):
        TokenizeRequest.model_validate({"prompt": "x"} | field).dialogue()


def test_the_last_of_equal_texts_is_continued() -> None:
    assert up_to_content("<user>so</><assistant>so</>", "so") == "<user>so</><assistant>so"
