"""Chat templates: which one is taken, what it may do, and what stands around it."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import processors
from transformers.utils.chat_template_utils import render_jinja_template

from qcompile.cli.chat import Conversation
from qcompile.errors import ArtifactError, ResourceError, UsageError
from qcompile.runtime import chat, renderer
from qcompile.runtime.sampling.params import SamplingParams
from tests.support.fake import byte_tokenizer, fake_llm, listed


def test_a_chat_template_has_all_special_tokens_itself() -> None:
    """Those that the tokenizer puts around a text would be there twice."""
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    with fake_llm(tokenizer=tokenizer) as llm:
        talk = Conversation(llm, lambda messages: "<eos>" + messages[0]["content"])
        assert talk.prompt("ab", 1) == llm.encode("ab") and llm.encode("ab")[0] == 0 != llm.encode("ab")[1]
        assert Conversation(llm, None).prompt("ab", 1) == llm.encode("ab")


def test_reasoning_is_no_content_of_the_history() -> None:
    with fake_llm(tokenizer=byte_tokenizer()) as llm:
        source = "{% for m in messages %}{{ m.role[0] }}{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"
        talk = Conversation(llm, chat.ChatTemplate({"default": source + "{# </think> #}"}, {}))
        assert talk.prompt("x", 1) == llm.encode("u|x;") and talk.params(SamplingParams()) == SamplingParams()
        talk.answered("<think>so</think>y")
        assert talk.prompt("z", 1) == llm.encode("u|x;aso|y;u|z;")


def test_who_allows_long_replies_is_remembered_too() -> None:
    with fake_llm(tokenizer=byte_tokenizer()) as llm:
        talk = Conversation(llm, None)
        for line in ("a" * 100, "b" * 100, "c" * 100):
            tokens = talk.prompt(line, 10 * llm.context)
            talk.answered("-")
        assert tokens == llm.encode("-".join(("a" * 100, "b" * 100, "c" * 100)))
        assert talk.prompt("d" * (llm.context // 2 - 1), 10 * llm.context) == llm.encode("d" * (llm.context // 2 - 1))


def test_a_chat_template_is_rendered_in_a_sandbox(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    config = {"bos_token": {"content": "<s>"}, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    render = chat.chat_template(tmp_path, listed(tmp_path))
    assert render and render([{"role": "user", "content": "hi"}]) == "<s>[user] hi"
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('only one turn') }}")
    render = chat.chat_template(tmp_path, listed(tmp_path))
    with pytest.raises(UsageError, match="only one turn"):
        assert render and render([])
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content + 1 }}")
    render = chat.chat_template(tmp_path, listed(tmp_path))
    with pytest.raises(UsageError, match=r"^the chat template does not take this conversation: "):
        assert render and render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ strftime_now('%Y-%m-%d') }}",
        "{% for m in messages %}{% generation %}\n<{{ m.content }}>\n{% endgeneration %}\n{% endfor %}.",
        "{%- for m in messages -%}\n{%- generation -%} {{ m.role }} {%- endgeneration -%} {% endfor %}",
        "{% set a = 1 %}{% generation %}{% set a = 2 %}{% set b = 3 %}{{ a }}{% endgeneration %}{{ a }}{{ b }}",
        "{% if tools is not none %}{{ tools | length }}{% endif %}{% if documents is not none %}none{% endif %}-",
        "{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(ensure_ascii=true) }}{% endfor %}",
        "{{ messages | tojson(indent=2) }}{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}",
        "{{ mask_token }}{{ unk_token }}{{ sep_token }}",
        "{% set ns = namespace(a=1, self=2) %}{% set ns.b = ns.a + ns.self %}{{ ns.b }}",
        "{{ dict(a=1) | tojson }}{{ dict([('b', 2)]).b }}{{ dict.fromkeys(['c']) | tojson }}",
    ],
)
def test_a_chat_template_finds_what_transformers_gives_it(template: str, tmp_path: Path) -> None:
    special = {"mask_token": "<mask>", "unk_token": "<unk>", "sep_token": "<sep>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} | special))
    messages = [{"role": "user", "content": "<a href='é'> & \"b\""}, {"role": "assistant", "content": "ü"}]
    expected, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **special)
    render = chat.chat_template(tmp_path, listed(tmp_path))
    assert render and render(messages) == expected[0]


@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace(_a=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ dict.mro() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_chat_template_has_no_way_out(template: str) -> None:
    with pytest.raises(UsageError, match="the chat template does not take this conversation"):
        chat.ChatTemplate({"default": template}, {})([{"role": "user", "content": "hi"}])


BOMBS = {
    "{{ 'A' * 4000000000 }}": "needs more than 256 MiB of memory",
    "{% set x = namespace(a='a') %}{% for i in range(60) %}{% set x.a = x.a + x.a %}{% endfor %}": "256 MiB of memory",
    "{{ messages | tojson(indent=999999999) }}": "needs more than 256 MiB of memory",
    "{{ 9 ** (9 ** 9) }}": "takes more than 0.5 seconds",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "takes more than 0.5 seconds",
    "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}": "its text has more than 1,0",
    "{{ " + "(" * 100_000: "recursion",
    "{{ raise_exception('a\nb' * 1000) }}": "a ba b",
}


@pytest.mark.parametrize("template", BOMBS)
def test_a_chat_template_takes_a_bounded_share_of_the_machine(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "SECONDS", 0.5 if "seconds" in BOMBS[template] else 10.0)
    sources = {"default": "{% if messages | length == 1 %}fine{% else %}" + template + "{% endif %}"}
    if any(constant in template for constant in ("((", "'A'", "9 **")):  # Jinja evaluates these when it compiles them
        sources["default"] = template
    render = chat.ChatTemplate(sources, {})
    for _ in range(2):
        with pytest.raises(UsageError, match=BOMBS[template]) as raised:
            render([{"role": "user", "content": "hi"}] * 2)
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 400
    if sources["default"] != template:
        assert render([{"role": "user", "content": "hi"}]) == "fine"


def test_a_conversation_may_be_long() -> None:
    content = "é\ud800" * 500_000
    render = chat.ChatTemplate({"default": "{{ messages[0].content }}{{ messages[0].content }}"}, {})
    assert render([{"role": "user", "content": content}]) == content * 2


def test_what_is_not_json_is_refused() -> None:
    render = chat.ChatTemplate({"default": "{{ x }}"}, {})
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (object(), {1, 2}, deep):
        with pytest.raises(UsageError, match="cannot be written as JSON"):
            render([], x=value)
    assert render([], x=[1, "a"]) == "[1, 'a']"


def test_a_process_that_ended_is_replaced() -> None:
    render = chat.ChatTemplate({"default": "{{ x }}"}, {})
    assert render([], x=1) == "1"
    worker = render._renderer._worker
    assert worker
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    assert render([], x=2) == "2"


def test_callers_share_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many may wait for it, and no more: each has a thread of the server."""
    source = "{{ x }}{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}"
    render = chat.ChatTemplate({"default": source}, {})
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda x: render([], x=x, n=1), range(100))) == [str(x) for x in range(100)]
    monkeypatch.setattr(renderer, "_MOST_CALLERS", 1)
    monkeypatch.setattr(renderer, "SECONDS", 1.0)
    render = chat.ChatTemplate({"default": source}, {})
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(render, [], x=1, n=99999)
        time.sleep(0.3)
        with pytest.raises(ResourceError, match="too many conversations wait"):
            render([], x=1, n=1)
        assert isinstance(slow.exception(), UsageError)


def test_a_process_ends_with_its_templates() -> None:
    render = chat.ChatTemplate({"default": "{{ x }}"}, {})
    assert render([], x=1) == "1"
    worker = render._renderer._worker
    assert worker and worker.alive
    process = worker._process
    del render, worker
    gc.collect()
    assert process.poll() is not None


def test_a_chat_template_is_one_of_the_artifacts_files(tmp_path: Path) -> None:
    """What lies there beside them is nobody's, and what is not as it was built is damaged."""
    files = listed(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("yes")
    assert chat.chat_template(tmp_path, files) is None
    files = listed(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("yet")
    with pytest.raises(ArtifactError, match=r"damaged: chat_template\.jinja: SHA-256 differs"):
        chat.chat_template(tmp_path, files)


def test_of_several_chat_templates_the_default_is_taken(tmp_path: Path) -> None:
    given = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{% for m in messages %}{% break %}"}]
    given[1]["template"] += "{% endfor %}yes"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": given, "eos_token": {"id": 1}}))
    render = chat.chat_template(tmp_path, listed(tmp_path))
    assert render and render([{"role": "user", "content": "hi"}]) == "yes"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ArtifactError, match="is not text"):
        chat.chat_template(tmp_path, listed(tmp_path))
