"""The chat page in a real Chromium, on a server with replies that are written here."""

from __future__ import annotations

import functools
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from qcompile.errors import ResourceError
from qcompile.runtime.llm import LLM
from tests.runtime.server.test_server import Client, serving
from tests.support.browser import chromium, findings, opened
from tests.support.fake import byte_tokenizer, fake_llm
from tests.support.scripted import Script, ScriptedService

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 360, "height": 740}
LOOKS = {
    "narrow": {"viewport": NARROW, "color_scheme": "light", "has_touch": True},
    "wide": {"viewport": WIDE, "color_scheme": "dark", "permissions": ["clipboard-read", "clipboard-write"]},
}
REPLY = """# A title

**Two** kinds of `code`:

```python
def main(argument_that_makes_a_line_too_long_for_a_narrow_screen: int = 0) -> int:
    return argument_that_makes_a_line_too_long_for_a_narrow_screen
```

| name | a number | another number | yet another number |
|:--|--:|--:|--:|
| x | 1 | 2 | 3 |

1. one
2. two, see [a page](https://example.org)
"""


def pieces(text: str) -> list[str]:
    return re.findall(r"\S+\s*|\s+", text)


def written(messages: list[dict[str, Any]], **variables: object) -> str:
    """A chat template."""
    return "".join(f"{m['role']}:{m['content']}|" for m in messages)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as result:
        yield result


@pytest.fixture
def llm() -> Iterator[LLM]:
    """For a test with a server of its own."""
    with fake_llm(tokenizer=byte_tokenizer()) as result:
        yield result


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[Client, Script]]:
    script = Script()
    service = functools.partial(ScriptedService, script=script)
    with fake_llm(tokenizer=byte_tokenizer()) as llm, serving(llm, service, page=True, template=written) as client:
        yield client, script


@pytest.fixture
def script(scripted: tuple[Client, Script]) -> Script:
    fresh = Script()
    scripted[1].__dict__.update(fresh.__dict__)
    return scripted[1]


@pytest.fixture
def address(scripted: tuple[Client, Script]) -> str:
    return f"http://127.0.0.1:{scripted[0].port}/"


def say(page: Page, text: str, ended: bool = True) -> None:
    """Send a message by the keyboard, and wait for the end of its reply."""
    page.locator("#message").fill(text)
    page.keyboard.press("Enter")
    if ended:
        page.locator('#log[aria-busy="false"]').wait_for()


def soon(holds: Callable[[], bool]) -> bool:
    """Whether something holds within a while: servers notice late that clients leave."""
    return any(holds() or time.sleep(0.01) for _ in range(1000))


def fits(page: Page) -> bool:
    """Whether nothing is wider than the screen but what scrolls by itself."""
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def shown(page: Page, texts: list[str]) -> list[str]:
    """The elements that each Markdown text becomes, as HTML."""
    return page.evaluate(
        """(texts) => texts.map((text) => {
          const container = document.createElement("div");
          showMarkdown(container, text);
          return container.innerHTML;
        })""",
        texts,
    )


MARKDOWN = {
    "a *b* **c** ***d*** ~~e~~": "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> <del>e</del></p>",
    "snake_case_name _so_ 2*3*4": "<p>snake_case_name <em>so</em> 2<em>3</em>4</p>",
    "**open *inner* rest": "<p>**open <em>inner</em> rest</p>",
    r"\*a\* \\ \d": r"<p>*a* \ \d</p>",
    "`a*b*` ``c`d`` `open": "<p><code>a*b*</code> <code>c`d</code> `open</p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# T #\n### U": "<h2>T</h2><h4>U</h4>",
    "#no": "<p>#no</p>",
    "a\n***\n> b\n> - c": "<p>a</p><hr><blockquote><p>b</p><ul><li>c</li></ul></blockquote>",
    "- a\n- b\n  - c\n\n1. x\n3) y": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>"
    '<ol start="1"><li>x</li></ol><ol start="3"><li>y</li></ol>',
    "4. a\n\n   b\n5. c": '<ol start="4"><li><p>a</p><p>b</p></li><li><p>c</p></li></ol>',
    "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "1. a\n  - b\n2. c": '<ol start="1"><li>a<ul><li>b</li></ul></li><li>c</li></ol>',
    "x 1. y\n1986. z": "<p>x 1. y<br>1986. z</p>",
    "|a|b\\|c|\n|-|:-:|\n|`1`|2|\n|3|": '<div class="table" tabindex="0" role="group" aria-label="Table"><table>'
    '<thead><tr><th class="">a</th><th class="center">b|c</th></tr></thead><tbody><tr><td class=""><code>1</code></td>'
    '<td class="center">2</td></tr><tr><td class="">3</td><td class="center"></td></tr></tbody></table></div>',
    "a | b": "<p>a | b</p>",
    "<b>x</b> &amp; <script>a</script>": "<p>&lt;b&gt;x&lt;/b&gt; &amp;amp; &lt;script&gt;a&lt;/script&gt;</p>",
    "[x](javascript:a(1)) [y](data:text/html,z) [z](/p)": "<p>[x](javascript:a(1)) [y](data:text/html,z) [z](/p)</p>",
}
LINK = '<a href="{0}" target="_blank" rel="noopener noreferrer nofollow" title="{0}">{1}</a>'
LINKS = {
    "[a *b*](https://x.org/a_(b))": LINK.format("https://x.org/a_(b)", "a <em>b</em>"),
    "![pic](https://x.org/p.png)": LINK.format("https://x.org/p.png", "pic"),
    "[![pic](https://x.org/p)](https://y.org)": LINK.format("https://y.org", "pic"),
    '<https://x.org>, [t](mailto:a@b.org "title")': LINK.format("https://x.org", "https://x.org")
    + ", "
    + LINK.format("mailto:a@b.org", "t"),
    "(see https://x.org/a_b).": "(see " + LINK.format("https://x.org/a_b", "https://x.org/a_b") + ").",
}


def test_markdown_becomes_elements(browser: Browser, address: str) -> None:
    cases = MARKDOWN | {text: f"<p>{result}</p>" for text, result in LINKS.items()}
    code = "~~~ c x\n\tint a;\n```\n\n  <b>\n~~~\nafter\n- x\n  ```\n  y\n    z\n  ```\n\n```py\nopen"
    with opened(browser, address) as page:
        for (text, expected), result in zip(cases.items(), shown(page, list(cases)), strict=True):
            assert result == expected, text
        (result,) = shown(page, [code])
        blocks = re.findall(r"<code>(.*?)</code>", result, re.DOTALL)
        assert blocks == ["\tint a;\n```\n\n  &lt;b&gt;", "y\n  z", "open"]
        assert re.findall(r'data-language="(\w*)"', result) == ["c", "", "py"] and "<p>after</p>" in result


TAGS = """
p br em strong del code pre div span button svg use a ul ol li blockquote hr h2 h3 h4 h5 h6 input
table thead tbody tr th td
"""


def test_what_is_above_stays_while_a_text_grows(browser: Browser, address: str) -> None:
    """A selection there would be lost with its elements; a block of code that grows keeps its place, too."""
    with opened(browser, address) as page:
        kept = page.evaluate(
            """() => {
              const container = document.createElement("div");
              showMarkdown(container, "one\\n\\n```c\\nint a;");
              const [above, code] = container.children;
              showMarkdown(container, "one\\n\\n```c\\nint a;\\nint b;\\n```\\n\\nmore");
              return [container.children[0] === above, container.children[1] === code, container.innerText];
            }"""
        )
    assert kept[:2] == [True, True] and "int a;\nint b;" in kept[2] and kept[2].endswith("more")


PARTS = [*"*_`[)<>\n|#a \\\t🙂", "**", "```", "](", "![", "\n\n", "- ", "1. ", "> ", "-|-", "~~", "    ", "\u202e"]
PARTS += ["<img src=x onerror=alert(1)>", "javascript:", "https://x.y/"]
LONG = [*"[|~", "](", "*a ", "**a", "``````` ", "> ", "- ", "_a_ ", "<https://", "  \n", "[a](", "# ", "a*", "http"]


def test_no_text_becomes_anything_else(browser: Browser, address: str) -> None:
    """Whatever is written: only these elements, links to the web alone, and all of it soon."""
    draw = random.Random(1)
    texts = ["".join(draw.choices(PARTS, k=draw.randrange(1, 40))) for _ in range(400)]
    long_texts = [part * (12_000 // len(part)) for part in LONG] + ["`".join("`" * n for n in range(150))]
    long_texts += ["".join("  " * n + "- a\n" for n in range(100)), "|-" * 3000 + "\n" + "|-" * 3000]
    long_texts += ["#" + " " * 12_000 + "x", " |" + " " * 12_000 + "x\n|-" + " " * 12_000 + "x"]
    nested = "*a **b " * 200 + "c** d* " * 200
    console: list[str] = []
    with opened(browser, address, console) as page:
        with pytest.raises(Exception, match="TrustedHTML"):
            page.evaluate("document.body.innerHTML = '<b>x</b>'")
        assert len(console) == 1 and "TrustedHTML" in console.pop()
        depth = page.evaluate(
            """(text) => {
              const container = document.createElement("div");
              showMarkdown(container, text);
              let depth = 0;
              for (let all = [container]; all.length; all = all.flatMap((each) => [...each.children])) depth += 1;
              return depth;
            }""",
            nested,
        )
        assert depth < 30  # deeply nested elements end the process that shows them
        tags = page.evaluate(
            """(texts) => {
              const found = new Set();
              for (const text of texts) {
                const container = document.createElement("div");
                for (const end of [text.length / 2, text.length]) showMarkdown(container, text.slice(0, end));
                const whole = document.createElement("div");
                showMarkdown(whole, text);
                if (whole.innerHTML !== container.innerHTML) found.add("grown otherwise: " + text);
                for (const each of container.querySelectorAll("*")) {
                  found.add(each.localName);
                  for (const name of each.getAttributeNames()) if (name.startsWith("on")) found.add(name);
                  if (each.localName === "a" && !/^(https?|mailto):/.test(each.href)) found.add(each.href);
                }
              }
              return [...found];
            }""",
            texts,
        )
        seconds = page.evaluate(
            """(texts) => texts.map((text) => {
              const begin = performance.now();
              showMarkdown(document.createElement("div"), text);
              return (performance.now() - begin) / 1000;
            })""",
            long_texts,
        )
    assert console == [] and set(tags) <= {*TAGS.split()}
    # Linear work takes a few ms; quadratic work over 12,000 letters seconds. The machine may be busy with other tests.
    assert max(seconds) < 1, list(zip(seconds, (text[:20] for text in long_texts), strict=True))


@pytest.mark.parametrize("look", LOOKS)
def test_a_conversation(browser: Browser, address: str, script: Script, look: str) -> None:
    with opened(browser, address, **LOOKS[look]) as page:
        page.locator("#model", has_text="tiny").wait_for()
        assert page.evaluate("document.activeElement.id") == "message" and fits(page)
        assert findings(page) == []
        script.pieces, script.hold, script.drafted, script.accepted = pieces(REPLY), 12, 4, 3
        say(page, "hello", ended=False)
        page.locator(".code code", has_text="def").wait_for()
        assert page.locator("#log").get_attribute("aria-busy") == "true"
        assert page.get_by_role("button", name="Stop").is_visible()
        assert page.locator(".numbers").inner_text().startswith("12 tokens · ")
        assert findings(page) == []
        page.keyboard.press("Escape")
        page.locator(".numbers", has_text="stopped").wait_for()
        assert soon(lambda: script.cancelled == 1)
        script.hold, script.wait = None, 0.001
        page.get_by_role("button", name="Regenerate").press("Enter")
        page.locator("td", has_text="3").wait_for()
        page.locator('#log[aria-busy="false"]').wait_for()
        assert page.locator(".assistant").count() == 1 and fits(page)
        told = page.locator(".numbers").inner_text()
        assert re.fullmatch(r"\d+ tokens · [\d.]+ tokens/s · first after [\d.]+ s · 75\u00a0% of drafts accepted", told)
        assert page.evaluate("document.activeElement.id") == "message"
        assert findings(page) == []
        script.pieces = ["fine"]
        say(page, "and\nyou")
        assert [asked for asked, _ in script.asked] == [
            "user:hello|",
            "user:hello|",
            f"user:hello|assistant:{REPLY}|user:and\nyou|",
        ]
        if look == "wide":
            page.locator(".code").get_by_role("button", name="Copy").click()
            page.locator(".code", has_text="Copied").wait_for()
            copied = page.evaluate("navigator.clipboard.readText()")
            assert (
                copied.startswith("def main(argument") and copied.endswith("narrow_screen") and "\n    return" in copied
            )
        page.locator(".user").last.hover()
        page.get_by_role("button", name="Edit").last.click()
        assert page.locator("#message").input_value() == "and\nyou" and page.locator(".turn").count() == 2
        script.pieces, script.hold = ["fine", "ly"], 1
        page.keyboard.press("Enter")
        page.locator(".said", has_text="fine").wait_for()
        page.get_by_role("button", name="New chat").click()
        assert page.locator(".turn").count() == 0 and page.locator("#welcome").is_visible()
        assert soon(lambda: script.cancelled == 2) and page.locator("#status").inner_text() == ""


def test_numbers(browser: Browser, address: str) -> None:
    """The tokens that came first tell nothing of the speed after them."""
    with opened(browser, address) as page:
        told = page.evaluate(
            """() => [{ completion_tokens: 12 }, { completion_tokens: 2 }, {}].map((usage) => {
              const reply = new Reply();
              Object.assign(reply, { usage, firstTokens: 2, asked: 1000, first: 1250, last: 3250 });
              return reply.numbers().join(" ");
            })"""
        )
    assert told == ["12 tokens 5.00 tokens/s first after 0.25 s", "2 tokens first after 0.25 s", ""]


def test_settings(browser: Browser, address: str, script: Script) -> None:
    with opened(browser, address, viewport=NARROW) as page:
        page.get_by_role("button", name="Settings").press("Enter")
        drawer = page.get_by_role("dialog", name="Settings")
        drawer.wait_for()
        assert findings(page) == [] and fits(page)
        drawer.get_by_label("System prompt").fill("be brief")
        for label, value in (("Temperature", "0.5"), ("Top p", "2"), ("Max tokens", "7"), ("Seed", "12")):
            drawer.get_by_label(label).fill(value)
        drawer.get_by_role("button", name="Done").click()
        assert drawer.get_by_text("A number from 0 to 1").is_visible()
        drawer.get_by_label("Top p").fill("0.9")
        page.keyboard.press("Enter")
        drawer.wait_for(state="hidden")
        say(page, "x")
        page.reload()
        say(page, "y")
        for text, params in script.asked:
            assert text[:-2] == "system:be brief|user:"
            assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.5, 0.9, 7, 12)
        page.get_by_role("button", name="Settings").click()
        drawer.get_by_role("button", name="Reset").click()
        drawer.get_by_label("Max tokens").fill("0.5")  # dropped where the drawer is closed all the same
        page.keyboard.press("Escape")
        say(page, "z")
        assert script.asked[-1][0] == "user:y|assistant:Hello|user:z|" and script.asked[-1][1].max_tokens is None
        assert script.asked[-1][1].temperature == 1 and script.asked[-1][1].seed is None


@pytest.mark.parametrize("chat", [True, False])
def test_probabilities(browser: Browser, llm: LLM, chat: bool) -> None:
    script = Script(["One ", "two\n", "3 ", "4 ", "5 ", "<6>", " 7 ", " 8 ", " 9 ", "10"])
    service = functools.partial(ScriptedService, script=script)
    with (
        serving(llm, service, page=True, template=written if chat else None) as client,
        opened(browser, f"http://127.0.0.1:{client.port}/", viewport=NARROW) as page,
    ):
        say(page, "x")
        assert script.asked[-1][1].logprobs is None
        button = page.get_by_role("button", name="Token probabilities")
        button.click()
        assert button.get_attribute("aria-pressed") == "true" and page.locator("#notice").inner_text()
        page.get_by_role("button", name="Regenerate").click()
        tokens = page.get_by_role("listbox", name="Tokens of the reply")
        tokens.wait_for()
        assert script.asked[-1][1].logprobs == 5 and page.locator("#notice").inner_text() == ""
        names = [each.get_attribute("aria-label") for each in tokens.get_by_role("option").all()]
        assert names[0] == '"One ", 100 %' and names[1] == '"two\\n", 77.9 %' and len(names) == 10
        colours = [each.get_attribute("class") for each in tokens.get_by_role("option").all()]
        assert colours[0] == "p0" and colours[1] == "p1" and colours[-1] == "p3" and len(set(colours)) == 4
        tokens.focus()
        page.keyboard.press("ArrowRight")
        rows = page.locator(".chances tr").all_inner_texts()
        assert rows[0].split() == ['"two\\n"', "77.9", "%"] and rows[1].split() == ['"other"', "5.0", "%"]
        tokens.get_by_text("<6>").click()
        assert page.locator(".chances .chosen th").inner_text() == '"<6>"'
        assert findings(page) == [] and fits(page)
        button.click()
        assert tokens.count() == 0 and "One two" in page.locator(".said").last.inner_text()


def test_a_model_without_a_template_continues_texts(browser: Browser, llm: LLM) -> None:
    script = Script(["    x = ", "**1**\n"], finish_reason="length")
    with (
        serving(llm, functools.partial(ScriptedService, script=script), page=True) as client,
        opened(browser, f"http://127.0.0.1:{client.port}/", viewport=WIDE) as page,
    ):
        page.locator("#welcome-text", has_text="no chat template").wait_for()
        say(page, "def main():\n")
        assert page.locator(".assistant .said").text_content() == "    x = **1**\n"
        assert "ended by the limit of tokens" in page.locator(".numbers").inner_text()
        say(page, "\n\ny")
        assert [asked for asked, _ in script.asked] == ["def main():\n", "def main():\n    x = **1**\n\n\ny"]
        assert script.asked[0][1].max_tokens == 256
        page.get_by_role("button", name="Settings").click()
        assert not page.get_by_label("System prompt").is_visible()
        assert findings(page) == []


def test_a_key_is_asked_for(browser: Browser, llm: LLM) -> None:
    script = Script()
    service = functools.partial(ScriptedService, script=script)
    with (
        serving(llm, service, page=True, template=written, api_key="ключ") as client,
        opened(browser, f"http://127.0.0.1:{client.port}/", viewport=NARROW) as page,
    ):
        dialog = page.get_by_role("dialog", name="This server asks for an API key")
        dialog.wait_for()
        assert findings(page) == []
        dialog.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        dialog.get_by_text("did not take the last one").wait_for()
        dialog.get_by_label("API key").fill("ключ")
        page.keyboard.press("Enter")
        page.locator("#model", has_text="tiny").wait_for()
        page.reload()
        say(page, "x")
        assert script.asked[-1][0] == "user:x|" and page.evaluate("localStorage.length") == 0


def test_a_message_waits_for_the_key(browser: Browser, llm: LLM) -> None:
    """A key may end while the page is open: the message that it is missing for is sent with the next one."""
    script, console = Script(), list[str]()
    options: dict[str, Any] = {"page": True, "template": written, "api_key": "geheim"}
    service = functools.partial(ScriptedService, script=script)
    with (
        serving(llm, service, **options) as client,
        opened(browser, f"http://127.0.0.1:{client.port}/", console, viewport=NARROW) as page,
    ):
        dialog = page.get_by_role("dialog", name="This server asks for an API key")
        dialog.get_by_label("API key").fill("geheim")
        page.keyboard.press("Enter")
        page.locator("#model", has_text="tiny").wait_for()
        page.evaluate("chat.connection.useKey('old')")
        say(page, "x", ended=False)
        dialog.get_by_label("API key").fill("geheim")
        page.keyboard.press("Enter")
        page.locator(".said", has_text="Hello").wait_for()
        assert len(script.asked) == 1 and page.locator(".turn").count() == 2


def test_errors_are_shown(browser: Browser, address: str, script: Script) -> None:
    script.pieces, script.error = ["some", "thing"], ResourceError("the engine has ended")
    with opened(browser, address, viewport=NARROW) as page:
        say(page, "x")
        alert = page.get_by_role("alert")
        assert (
            alert.inner_text().startswith("The engine has ended") and page.locator(".said").last.inner_text() == "some"
        )
        assert findings(page) == []
        script.error = None
        page.get_by_role("button", name="Try again").click()
        page.locator(".said", has_text="something").wait_for()
        assert alert.count() == 0


def test_a_request_that_is_refused_is_shown(browser: Browser, address: str, script: Script) -> None:
    refusal = {"error": {"message": "257 samples run or wait already", "code": None}}
    answers = "**/v1/chat/completions"
    console: list[str] = []
    with opened(browser, address, console) as page:
        alert = page.get_by_role("alert")
        page.route(answers, lambda route: route.fulfill(status=429, json=refusal))
        say(page, "x")
        assert alert.inner_text().startswith("257 samples run or wait already")
        page.route(answers, lambda route: route.abort())
        page.get_by_role("button", name="Try again").click()
        alert.get_by_text("does not answer").wait_for()
        page.route(answers, lambda route: route.fulfill(status=200, body='data: {"choices": []}\n\n'))
        page.get_by_role("button", name="Try again").click()
        alert.get_by_text("connection to the server was lost").wait_for()
        page.unroute(answers)
        page.get_by_role("button", name="Try again").click()
        page.locator(".said", has_text="Hello").wait_for()
        say(page, "x" * 2000)
        assert "Edit the message, or begin a new chat" in alert.inner_text()
        assert page.get_by_role("button", name="Try again").count() == 0
    assert not [line for line in console if "Failed to load resource" not in line]


def test_reasoning_is_apart(browser: Browser, llm: LLM) -> None:
    script = Script(["<think>", "so", "</think>", "it ", "is"], hold=2)
    service = functools.partial(ScriptedService, script=script)
    options: dict[str, Any] = {"page": True, "template": written, "reasoning_parser": "think"}
    with (
        serving(llm, service, **options) as client,
        opened(browser, f"http://127.0.0.1:{client.port}/", viewport=NARROW) as page,
    ):
        say(page, "x", ended=False)
        page.locator(".reasoning div", has_text="so").wait_for()  # it is open while there is nothing else to read
        page.keyboard.press("Escape")
        script.hold = None
        page.get_by_role("button", name="Regenerate").click()
        page.locator(".said", has_text="it is").wait_for()
        assert not page.locator(".reasoning div").is_visible()
        page.get_by_text("Reasoning").click()
        assert page.locator(".reasoning div").inner_text() == "so" and findings(page) == []


def test_pages_follow_a_real_model(browser: Browser, llm: LLM) -> None:
    """What a model computes arrives as its own bytes."""
    options: dict[str, Any] = {"page": True, "template": written}
    with serving(llm, **options) as client, opened(browser, f"http://127.0.0.1:{client.port}/") as page:
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Max tokens").fill("20")
        page.get_by_role("button", name="Done").click()
        say(page, "x")
        body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 20}
        text = client.ask("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
        assert page.evaluate("chat.turns[0].reply.content") == text != ""
