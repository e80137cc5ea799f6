"""Requests that turn texts and conversations into tokens, and tokens into texts, in vLLM's format."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from qcompile.errors import UsageError, shown
from qcompile.runtime.dialogue import Dialogue
from qcompile.runtime.server.api import BodyPart, Tokens
from qcompile.runtime.server.chat_api import ChatMessage, ChatRequest, ToolPart
from qcompile.runtime.server.served import AnsweringModel
from qcompile.runtime.tokenizer import encode


class TokenizeRequest(BodyPart):
    """POST /tokenize: a text, or messages as /v1/chat/completions takes them.

    add_special_tokens: whether the tokenizer adds its own; the default is that of the two endpoints.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[ToolPart], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    def dialogue(self) -> Dialogue | None:
        """The conversation; None if the request has a text. Raises UsageError unless it has one of both."""
        if (self.messages is None) == (self.prompt is None):
            raise UsageError("give one of prompt and messages")
        if self.messages is None:
            if self.tools or self.chat_template_kwargs:
                raise UsageError("tools and chat_template_kwargs need messages")
            if self.continue_final_message or not self.add_generation_prompt:
                raise UsageError("add_generation_prompt and continue_final_message need messages")
            return None
        asked = ChatRequest.model_construct(messages=self.messages, tools=self.tools)
        asked.chat_template_kwargs = self.chat_template_kwargs
        asked.add_generation_prompt = self.add_generation_prompt
        asked.continue_final_message = self.continue_final_message
        return asked.dialogue()

    def reply(self, llm: AnsweringModel, text: str) -> dict[str, Any]:
        """The tokens of a text, which is the prompt or a rendered conversation. Raises UsageError."""
        if llm.tokenizer is None:
            raise UsageError("this artifact has no tokenizer")
        special = self.messages is None if self.add_special_tokens is None else self.add_special_tokens
        tokens = encode(llm.tokenizer, text, special)
        spelled = [llm.tokenizer.id_to_token(token) for token in tokens] if self.return_token_strs else None
        return {"count": len(tokens), "max_model_len": llm.context, "tokens": tokens, "token_strs": spelled}


class DetokenizeRequest(BodyPart):
    """POST /detokenize: the text of tokens, special ones included."""

    model: str | None = None
    tokens: Tokens

    def reply(self, llm: AnsweringModel) -> dict[str, Any]:
        """The text. Raises UsageError."""
        if llm.tokenizer is None:
            raise UsageError("this artifact has no tokenizer")
        for token in self.tokens:
            if not 0 <= token < llm.vocab_size:
                raise UsageError(f"token {shown(token)} is outside the vocabulary of {llm.vocab_size}")
        return {"prompt": llm.decode(self.tokens)}
