"""The tokens that end a text: the model's, the tokenizer's, and the one that a chat template writes after a reply."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

import qcompile
from qcompile.artifact import layout
from qcompile.artifact.reader import read_manifest
from qcompile.cli.chat import Conversation
from qcompile.errors import ArtifactError
from qcompile.runtime.chat import chat_template, closing_tokens
from qcompile.runtime.llm import LLM
from qcompile.runtime.special_tokens import end_tokens, special_tokens
from tests.runtime.server.test_server import serving
from tests.support.fake import byte_tokenizer, fake_llm, listed

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TURNS = """{%- for m in messages -%}
{%- if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]{% else %} {{ m.content | trim }} </s>{% endif -%}
{%- endfor -%}"""


def marked(special: bool = True, more: tuple[str, ...] = ()) -> Tokenizer:
    """Bytes, with the marks of the templates here as tokens from 257 on."""
    tokenizer = byte_tokenizer()
    marks = ("<|im_start|>", "<|im_end|>", "</s>", *more)
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark in marks])
    return tokenizer


START, END, S = range(257, 260)


def template(folder: Path, text: str, **config: Any) -> Any:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": text} | config))
    return chat_template(folder, listed(folder))


@pytest.mark.parametrize(
    ("text", "closes"),
    [
        (CHATML, [END]),
        (TURNS, [S]),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", []),
        ("{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}{% endfor %}", [START]),
        ("{% for m in messages %}{{ m.content }} then <|im_end|>{% endfor %}", []),
        ("{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}", []),
        ("{{ raise_exception('one turn alone') if messages | length > 1 }}", []),
        ("{# several messages in a reply: <|channel|><|message|> #}" + CHATML, []),
    ],
)
def test_the_token_that_a_template_writes_after_a_reply(tmp_path: Path, text: str, closes: list[int]) -> None:
    """The longest, of those that the text after the reply begins with."""
    for special in (True, False):
        assert closing_tokens(template(tmp_path, text), marked(special, ("<|im",))) == closes
    assert closing_tokens(template(tmp_path, text), None) == []


def test_the_tokenizers_own_end(tmp_path: Path) -> None:
    tokenizer = marked()
    assert end_tokens(tmp_path, {}, tokenizer) == []
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}, "pad_token": null}')
    assert end_tokens(tmp_path, listed(tmp_path), tokenizer) == [S]
    template(tmp_path, "", eos_token="<|im_end|>", bos_token={"content": "<|im_start|>"})
    assert end_tokens(tmp_path, listed(tmp_path), tokenizer) == [END]
    assert special_tokens(tmp_path, listed(tmp_path)) == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    assert end_tokens(tmp_path, listed(tmp_path), None) == []
    template(tmp_path, "", eos_token="<none>")
    assert end_tokens(tmp_path, listed(tmp_path), tokenizer) == []
    for content, said in (("[]", "holds a JSON list"), ("{", "is not JSON")):
        (tmp_path / "special_tokens_map.json").write_text(content)
        with pytest.raises(ArtifactError, match=f"special_tokens_map.json {said}"):
            end_tokens(tmp_path, listed(tmp_path), tokenizer)


@pytest.mark.parametrize("special", [True, False])
def test_a_reply_ends_with_its_template(special: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chats of the server and of the command; the token is in no text, also if it is no special one."""
    render, options = template(tmp_path, CHATML), {"temperature": 0, "max_tokens": 30}
    body = {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"98": 50, str(END): 40}} | options

    def opened() -> LLM:
        return fake_llm(tokenizer=marked(special))

    with opened() as llm, serving(llm, template=render) as client:
        (choice,) = client.ask("/v1/chat/completions", body | {"presence_penalty": 2, "frequency_penalty": 2})[1][
            "choices"
        ]
        assert choice["finish_reason"] == "stop" and 0 < len(choice["message"]["content"]) < 12
        assert "<|" not in choice["message"]["content"]
    bias, penalties = {98: 50.0, END: 40.0}, {"presence_penalty": 2.0, "frequency_penalty": 2.0}
    with opened() as llm:
        asked = Conversation(llm, None).prompt(render([{"role": "user", "content": "x"}]), 1)
        endless = llm.generate([asked], logit_bias=bias, **options, **penalties)[0].outputs[0]
        assert endless.finish_reason == "length" and END in endless.token_ids
        Conversation(llm, render)
        ended = llm.generate([asked], logit_bias=bias, **options, **penalties)[0].outputs[0]
        assert ended.text == choice["message"]["content"] and ended.finish_reason == "stop"


def test_an_artifact_whose_tokenizer_names_another_end(tiny_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    """Its configuration says 0; `load` takes both."""
    root = tmp_path / "artifact"
    shutil.copytree(tiny_artifact("w4a8"), root)
    manifest = read_manifest(root)
    with qcompile.load(root, threads=1, max_batch=1) as llm:
        free = llm.generate("def main(", temperature=0, max_tokens=20)[0].outputs[0]
        at = next(i for i, token in enumerate(free.token_ids) if i > 4 and token not in free.token_ids[:i])
        end = llm.tokenizer.id_to_token(free.token_ids[at])  # type: ignore[union-attr]
    assert free.finish_reason == "length"
    (root / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    manifest["files"]["tokenizer_config.json"] = listed(root)["tokenizer_config.json"]
    manifest["sha256"] = layout.seal(manifest)
    (root / layout.MANIFEST).write_bytes(layout.canonical_json(manifest))
    with qcompile.load(root, threads=1, max_batch=1) as llm:
        assert manifest["model"]["eos_token_ids"] == [0] and len(llm.engine.postprocessor.eos) == 2
        result = llm.generate("def main(", temperature=0, max_tokens=20)[0].outputs[0]
        assert result.token_ids == free.token_ids[: at + 1] and result.finish_reason == "stop"
        assert llm.generate("def main(", temperature=0, max_tokens=20, ignore_eos=True)[0].outputs[0] == free


def test_structured_outputs_end_with_added_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_llm(tokenizer=marked()) as llm:
        options: dict[str, Any] = {
            "temperature": 0,
            "structured_outputs": {"regex": "ab{1,9}"},
            "logit_bias": {END: 50},
        }
        before = llm.generate("x", **options)[0].outputs[0]
        llm.end_at([END])
        after = llm.generate("x", **options)[0].outputs[0]
        assert END not in before.token_ids and (after.text, after.token_ids[-1]) == ("ab", END)
        kept = dict(llm.engine.grammars._kept)
        llm.end_at([END])  # known already: grammars stay compiled
        assert kept and dict(llm.engine.grammars._kept) == kept
