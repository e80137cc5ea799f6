"""`bench --serve`: what it asks of a server, and the figures that it makes of the answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from aiohttp import web

from qcompile.__main__ import main
from qcompile.cli.load_test import figures, server, text
from qcompile.cli.load_test.answers import read
from qcompile.cli.load_test.client import Recording
from qcompile.cli.load_test.level import Level, Run
from qcompile.cli.load_test.workload import Lengths, Material, Query, Recorded, Synthetic, read_prompts
from qcompile.errors import UsageError

Capture = pytest.CaptureFixture[str]


def code_of(*arguments: object) -> int:
    """Exit code of `qcompile ARGUMENTS`, in this process."""
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    return int(exit.value.code or 0)


# ---- answers -------------------------------------------------------------------------------------------


def event(text: str | None = None, total: int | None = None, **more: Any) -> dict[str, Any]:
    """An event of a completion's stream."""
    made: dict[str, Any] = {"choices": [] if text is None else [{"text": text, "finish_reason": more.pop("end", None)}]}
    return made | ({} if total is None else {"usage": {"prompt_tokens": 5, "completion_tokens": total}}) | more


def recording(*sent: tuple[float, Any], status: int = 200) -> Recording:
    """A recording that began at time 10, with these events (or bytes) at these times after it."""
    pieces = [
        (10 + at, each if isinstance(each, bytes) else b"data: " + json.dumps(each).encode() + b"\n\n")
        for at, each in sent
    ]
    return Recording(Query("x", 4), due=9.5, sent=10.0, ended=10 + sent[-1][0], status=status, pieces=pieces)


def test_tokens_are_counted_piece_by_piece() -> None:
    done = b"data: [DONE]\n\n"
    result = read(recording((1, event("a", 1)), (3, event("bc", 5)), (4, event("", 5, end="stop")), (4, done)))
    assert (result.failure, result.late, result.first, result.whole) == (None, 0.5, 1, 4)
    assert (result.input_tokens, result.output_tokens, result.gaps) == (5, 5, [0.5] * 4) and result.between == 0.5


def test_a_token_without_text_counts_when_the_server_says_so() -> None:
    result = read(recording((1, event("", 1)), (2, event("é", 2, end="length"))))
    assert result.first == 1 and result.gaps == [1]


def test_a_sum_is_spread_over_the_pieces() -> None:
    result = read(recording((1, event("a")), (2, event("b")), (3, event("", end="stop")), (3, event(total=6))))
    assert result.output_tokens == 6 and result.first == 1 and result.gaps == [pytest.approx(1 / 3)] * 3


def test_without_any_count_a_piece_is_a_token() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    said = {"choices": [{"delta": {"content": "a"}}]}
    thought = {"choices": [{"delta": {"reasoning_content": "b"}, "finish_reason": "stop"}]}
    result = read(recording((1, role), (2, said), (4, thought)))
    assert (result.first, result.gaps, result.output_tokens, result.input_tokens) == (2, [2], 2, 0)


def test_an_event_counts_when_its_last_byte_came() -> None:
    whole = b"data: " + json.dumps(event("a", 1, end="stop")).encode() + b"\n\n"
    assert read(recording((1, whole[:20]), (2, whole[20:]))).first == 2


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (recording((1, event("a", 1)), (2, {"error": {"message": "engine\nended"}})), "engine ended"),
        (recording((1, event("a", 1))), "without a finish reason"),
        (recording((1, event("", end="stop"))), "no token"),
        (recording((1, b"data: {\n\n")), "not JSON"),
        (recording((1, b'{"error": {"message": "queue"}}'), status=429), "HTTP 429: queue"),
        (recording((1, b"<html>"), status=502), "HTTP 502"),
    ],
)
def test_failures_are_told_apart(made: Recording, why: str) -> None:
    result = read(made)
    assert result.failure is not None and why in result.failure and result.output_tokens == 0


# ---- figures -------------------------------------------------------------------------------------------


def test_figures_of_a_level() -> None:
    quick = recording((1, event("a", 1)), (2, event("b", 2, end="stop")))
    slow = recording((3, event("a", 1)), (8, event("b", 2, end="stop")))
    refused = recording((1, b""), status=429)
    run = Run(Level(1.0, None, concurrency=3), [quick, slow, refused], seconds=10.0, cpu_seconds=1.0, lags=[0.0, 0.2])
    result = figures.figures(run, figures.limits("ttft=2s,itl=1500ms"), {"drafted": 8.0, "accepted": 6.0})
    assert (result["requests"], result["failed"], result["failures"]) == (2, 1, {"HTTP 429": 1})
    assert result["output_tokens_per_second"] == 0.4 and result["total_tokens_per_second"] == 1.4
    assert result["ttft_seconds"] == {"mean": 2, "p50": 2, "p90": pytest.approx(2.8), "p99": pytest.approx(2.98)}
    assert result["itl_seconds"]["mean"] == 3 and result["e2e_seconds"]["p50"] == 5
    assert result["goodput"] == {"share": pytest.approx(1 / 3), "requests_per_second": 0.1}
    assert result["drafts"] == {"drafted_tokens": 8, "acceptance_rate": 0.75}
    assert result["client"]["core_share"] == 0.1 and result["client"]["late_p99_seconds"] == 0.5
    assert figures.client_limits(result)  # late by a quarter of the median to the first token
    assert not figures.kept(read(slow), {"e2e": 7.9}) and figures.kept(read(slow), {"e2e": 8})


def test_a_level_without_answers_has_no_times() -> None:
    result = figures.figures(Run(Level(1.0, None, rate=2.0)), {"ttft": 1.0}, None)
    assert result["ttft_seconds"] is None and result["goodput"]["share"] == 0 and "drafts" not in result
    report = {"server": {"model": "m", "url": "u"}, "limits_seconds": {"ttft": 1.0}, "levels": [result]}
    asked = {"input_tokens": "4", "output_tokens": "4 ± 2", "shared_prefix_tokens": 3, "endpoint": "completions"}
    shown = text.as_text(report | {"workload": asked, "client": {"request_fields": []}})
    assert "rate 2  " in shown and "after 3 shared ones" in shown and "one for each piece" in shown


# ---- workload ------------------------------------------------------------------------------------------


def test_arrivals_are_a_poisson_process() -> None:
    level = Level(2000.0, None, rate=5.0, seed=3)
    at = list(level.arrivals())
    gaps = [b - a for a, b in zip([0.0, *at], at, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert at == list(level.arrivals()) != list(Level(2000.0, None, rate=5.0, seed=4).arrivals())
    assert mean == pytest.approx(0.2, rel=0.05)  # 10,000 gaps: 1 % is a standard deviation
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(0.04, rel=0.1)


def test_prompts_have_the_lengths_and_the_shared_start() -> None:
    made = Synthetic(Material(range(1000)), Lengths(20, 5), Lengths(7), prefix=10, seed=1)
    asked = [query for query, _ in zip(made.queries(), range(200), strict=False)]
    again = [query for query, _ in zip(made.queries(), range(200), strict=False)]
    assert asked == again and {query.output_tokens for query in asked} == {7}
    lengths = [len(query.prompt) - 10 for query in asked]
    assert min(lengths) >= 1 and sum(lengths) / 200 == pytest.approx(20, abs=1.5) and len(set(lengths)) > 5
    assert (
        len({tuple(query.prompt[:10]) for query in asked}) == 1 < len({tuple(query.prompt[10:12]) for query in asked})
    )
    assert Material("abc", 2.0).cut(0.9, 2) == "cabc"


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"prompt": [1, 2]}\n{"messages": [{"role": "user"}]}\n')
    asked = read_prompts(path)
    queries = Recorded(asked, Lengths(9)).queries()
    first = [next(queries) for _ in range(3)]
    assert {query.output_tokens for query in first} == {3, 9} and any(query.given for query in first)
    for wrong in (
        '{"prompt": []}',
        '{"prompt": "a", "max_tokens": -1}',
        "[]",
        '{"messages": []}',
        '{"prompt": [true]}',
    ):
        path.write_text(f'{{"text": "fine"}}\n{wrong}\n')
        with pytest.raises(UsageError, match="line 2"):
            read_prompts(path)


# ---- a server ------------------------------------------------------------------------------------------


@dataclass
class FakeServer:
    """A server of OpenAI's API that answers from a list of behaviors; notes what it was asked."""

    knows: tuple[str, ...] = ("counts", "ignore_eos", "tokenize", "metrics")
    status: int = 200
    key: str | None = None
    seconds: float = 0.0
    port: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    running: int = 0
    most: int = 0
    drafted: int = 0

    async def models(self, request: web.Request) -> web.StreamResponse:
        if self.status // 100 == 3:
            raise web.HTTPFound("http://127.0.0.1:1/elsewhere")
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "who?"}}, status=401)
        return web.json_response({"data": [{"id": "fake", "max_model_len": 4096}]})

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        if "tokenize" not in self.knows:
            raise web.HTTPNotFound
        return web.json_response({"tokens": list(range(500))})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        if "metrics" not in self.knows:
            raise web.HTTPNotFound
        lines = [f'qcompile_drafted_tokens_total{{model_name="m"}} {self.drafted}.0', "# a comment", "other 1"]
        return web.Response(text="\n".join([*lines, f"qcompile_accepted_tokens_total {self.drafted // 2}.0\n"]))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        wants = asked.get("stream_options", {})
        if self.status != 200:
            return web.json_response({"error": {"message": "not today"}}, status=self.status)
        for name, unknown in (("ignore_eos", "ignore_eos" in asked), ("counts", "continuous_usage_stats" in wants)):
            if unknown and name not in self.knows:
                return web.json_response({"error": {"message": f"{name}?"}}, status=400)
        self.asked.append(asked)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.drafted += 4
        count = min(asked["max_tokens"], 4)
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(1, count + 1):
            piece = event(
                "x", number if "continuous_usage_stats" in wants else None, end="stop" if number == count else None
            )
            await response.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        if wants:
            await response.write(b"data: " + json.dumps(event(total=count)).encode() + b"\n\n")
        self.running -= 1
        return response


@pytest.fixture
def serving() -> Iterator[Callable[..., FakeServer]]:
    """Starts fake servers, each in a thread of its own."""
    ends: list[Callable[[], None]] = []

    def start(**options: Any) -> FakeServer:
        fake, ready, loop = FakeServer(**options), threading.Event(), asyncio.new_event_loop()

        async def listen() -> None:
            app = web.Application()
            app.router.add_get("/v1/models", fake.models)
            app.router.add_get("/metrics", fake.metrics)
            app.router.add_post("/tokenize", fake.tokenize)
            app.router.add_post("/v1/completions", fake.complete)
            app.router.add_post("/v1/chat/completions", fake.complete)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            fake.port = runner.addresses[0][1]
            ready.set()

        loop.create_task(listen())
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        assert ready.wait(10)
        ends.append(lambda: (loop.call_soon_threadsafe(loop.stop), thread.join(5)))  # type: ignore[func-returns-value]
        return fake

    yield start
    for end in ends:
        end()


def bench(capsys: Capture, fake: FakeServer, *options: object) -> Any:
    """The JSON report on a fake server."""
    url = f"http://127.0.0.1:{fake.port}/v1/"
    assert code_of("bench", "--serve", url, "--json", *options) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_clients_wait_for_their_answers(serving: Callable[..., FakeServer], capsys: Capture) -> None:
    fake = serving(seconds=0.01)
    result = bench(capsys, fake, "--concurrency", "1,3", "--seconds", 30, "--requests", 9, "--slo", "ttft=1us,e2e=20s")
    first, second = result["levels"]
    assert (first["requests"], second["requests"], second["failed"]) == (9, 9, 0) and fake.most == 3
    assert second["output_tokens"] == 9 * 4 and second["goodput"]["share"] == 0 and first["seconds"] < 20
    assert second["drafts"] == {"drafted_tokens": 9 * 4, "acceptance_rate": 0.5}  # not those of the warm-up
    prompts = [asked["prompt"] for asked in fake.asked if asked["max_tokens"] == 64]
    assert len(prompts) >= 18 and all(len(prompt) == 128 and isinstance(prompt[0], int) for prompt in prompts)
    assert fake.asked[-1]["ignore_eos"] and result["server"]["context"] == 4096


def test_requests_of_a_rate_do_not_wait(serving: Callable[..., FakeServer], capsys: Capture) -> None:
    fake = serving(seconds=0.5)
    result = bench(capsys, fake, "--rate", 40, "--seconds", 0.5, "--warmup", 0)["levels"]
    due = len(list(Level(0.5, None, rate=40.0).arrivals()))
    assert [level["load"] for level in result] == ["rate 40"] and result[0]["requests"] == due
    assert fake.most > due / 2  # most arrive before the first is answered


def test_a_server_that_knows_little(serving: Callable[..., FakeServer], capsys: Capture) -> None:
    fake = serving(knows=())
    options = ("--concurrency", 2, "--requests", 4, "--chat", "--input-tokens", 10, "--shared-prefix", 5)
    result = bench(capsys, fake, *options)
    assert result["client"]["request_fields"] == ["usage"] and "drafts" not in result["levels"][0]
    said = [asked["messages"][0]["content"] for asked in fake.asked[-4:]]
    assert len({content[:20] for content in said}) == 1 < len(set(said)) and "ignore_eos" not in fake.asked[-1]
    assert result["levels"][0]["output_tokens"] == 16 and result["levels"][0]["input_tokens"] == 20
    assert code_of("bench", "--serve", f"http://127.0.0.1:{fake.port}", *options) == 0
    shown = capsys.readouterr().out
    assert "does not take ignore_eos" in shown and "spread evenly" in shown


def test_messages_of_a_file_are_chats(serving: Callable[..., FakeServer], capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}\n')
    fake = serving()
    result = bench(capsys, fake, "--concurrency", 1, "--requests", 3, "--prompts", path)
    assert result["workload"]["endpoint"] == "chat/completions" and result["workload"]["prompts"] == "chats.jsonl"
    assert result["levels"][0]["output_tokens"] == 6 and fake.asked[-1]["messages"][0]["content"] == "hello"


def test_a_key_is_sent_and_not_forwarded(serving: Callable[..., FakeServer], capsys: Capture) -> None:
    fake = serving(key="secret")
    url = f"http://127.0.0.1:{fake.port}"
    assert code_of("bench", "--serve", url) == 2 and "wants an API key" in capsys.readouterr().err
    assert code_of("bench", "--serve", url, "--api-key", "no") == 2 and "another API key" in capsys.readouterr().err
    assert bench(capsys, fake, "--api-key", "secret", "--requests", 1, "--concurrency", 1)["levels"][0]["requests"] == 1
    moved = serving(status=302)
    assert code_of("bench", "--serve", f"http://127.0.0.1:{moved.port}") == 5
    assert "HTTP 302" in capsys.readouterr().err


def test_what_cannot_be_measured_is_said_in_a_line(
    serving: Callable[..., FakeServer], capsys: Capture, tmp_path: Path
) -> None:
    def refused(code: int, *arguments: object) -> str:
        assert code_of("bench", *arguments) == code
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1, error
        return error

    broken, fine = serving(status=500), serving()
    url = f"http://127.0.0.1:{fine.port}"
    assert "HTTP 500: not today" in refused(5, "--serve", f"http://127.0.0.1:{broken.port}")
    assert "does a server run there?" in refused(5, "--serve", "http://127.0.0.1:1")
    assert "do not fit the context of 4096" in refused(2, "--serve", url, "--input-tokens", 5000)
    for option, value, why in (
        ("--concurrency", "0", "at least 1"),
        ("--rate", "0", "above 0"),
        ("--rate", "x", "write requests per second"),
        ("--input-tokens", "1:x", "--input-tokens 1:x"),
        ("--output-tokens", "0", "--output-tokens 0"),
        ("--slo", "ttft=3", "--slo ttft=3"),
        ("--plot", "load.gif", ".svg, .png"),
        ("--plot", tmp_path / "no" / "x.svg", "there is no folder"),
        ("--prompts", tmp_path / "none", "cannot read"),
        ("--threads", 2, "--threads is for an artifact"),
        ("--tg", 3, "--tg is not measured with --serve"),
    ):
        assert why in refused(2, "--serve", url, option, value)
    assert "write the URL of a server" in refused(2, "--serve", "ftp://x")
    assert "measure it with --serve" in refused(2, url)
    assert "--rate needs --serve" in refused(2, tmp_path, "--rate", 1)
    assert "--model is for a server that runs" in refused(2, "--serve", tmp_path, "--model", "x")


def test_urls() -> None:
    for given in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert server.root_of(given) == "http://h:1"
    assert server.root_of("https://h/a/v1") == "https://h/a"
    for given in ("http://", "http://h:x", "h:1", "http://h?x=1"):
        with pytest.raises(UsageError):
            server.root_of(given)


def test_a_server_of_an_artifact(tiny_artifact: Callable[[str], Path], tmp_path: Path, capsys: Capture) -> None:
    """From `bench --serve OUT` to figures and a plot, with drafts that the server itself counts."""
    plot = tmp_path / "load.svg"
    sizes = ("--input-tokens", "12:3", "--output-tokens", 24, "--threads", 1, "--gamma", 2)
    levels = ("--concurrency", 2, "--rate", 50, "--seconds", 0.5)
    assert code_of("bench", "--serve", tiny_artifact("qspec"), *sizes, *levels, "--json", "--plot", plot) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["client"]["request_fields"] == ["counts", "ignore_eos"]
    for level in result["levels"]:
        assert level["requests"] > 2 and level["failed"] == 0
        assert level["output_tokens"] == 24 * level["requests"] and level["drafts"]["acceptance_rate"] > 0
        assert 0 < level["ttft_seconds"]["p50"] < level["e2e_seconds"]["p50"]
    assert ElementTree.parse(plot).getroot().get("width", "").endswith("pt")
