"""The command line: what it prints where, and the codes it exits with."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from qcompile import sample_text, texts
from qcompile.__main__ import main
from qcompile.cli import bench, console, tune
from qcompile.errors import ResourceError, UsageError
from qcompile.runtime.cuda.executor import CudaExecutor

Build = Callable[[str], Path]
Capture = pytest.CaptureFixture[str]
COMMANDS = ("build", "run", "chat", "eval", "bench", "inspect", "verify", "sign", "export", "doctor", "passes")


def code_of(*arguments: object) -> int:
    """Exit code of `qcompile ARGUMENTS`, in this process."""
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    return int(exit.value.code or 0)


def json_of(capsys: Capture, *arguments: object) -> Any:
    """What a command prints with --json."""
    assert code_of(*arguments, "--json") == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refusal(capsys: Capture, code: int, *arguments: object) -> str:
    """The one line on stderr of a command that must exit with `code` and print nothing else."""
    assert code_of(*arguments) == code
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1, captured
    assert captured.err.startswith("qcompile: ")
    return captured.err


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands show no progress, however long they take where others share the cores."""
    monkeypatch.setattr(console, "QUIET_SECONDS", 600.0)


# ---- without a model ---------------------------------------------------------------------------------


MOST_MODULES_OF_HELP = 310
"""There are 307 in a fresh environment."""


def test_help_is_quick_and_names_every_command() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "qcompile", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    # Imports are what takes time. Their number and names do not depend on what else the machine does.
    assert "qcompile.cli.models" in modules and len(modules) < MOST_MODULES_OF_HELP
    assert not modules & {"torch", "numpy", "transformers", "tokenizers", "networkx", "jinja2", "pydantic", "triton"}
    assert done.returncode == 0 and all(command in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_json(command: str, capsys: Capture) -> None:
    assert code_of(command, "--help") == 0
    text = capsys.readouterr().out
    assert "Example:" in text and f"qcompile {command} " in text and "--json" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "fly' (see qcompile --help)"),
        (["run", "x", "--promt", "x"], "(see qcompile run --help)"),
        (["build", "model"], "--output"),
        (["build", "model", "-o", "out", "--recipe", "w3a3"], "recipe w3a3 is unknown; there are f32"),
        (["build", "model", "-o", "out", "--target", "tpu"], "target tpu is unknown; there are cpu"),
        (["build", "", "-o", "out/of-no-name"], "the model's name is empty"),
        (["build", "model", "-o", "out", "--set", "rounding"], "--set rounding: write pass.field=value"),
        (["run", "nowhere", "--prompt", "x"], "nowhere: no such artifact directory"),
        (["run", "nowhere", "--prompt", "x", "--temperature", "-1"], "temperature must be a finite number, at least 0"),
        (["run", "nowhere", "--prompt", "x", "--threads", "0"], "threads"),
        (["run", "nowhere", "--prompt", "x", "--gamma", "²"], "--gamma ²: write a whole number"),
        (["run", "nowhere", "--prompt", "x", "--gamma", "9" * 5000], "write a whole number"),
        (["bench", "nowhere", "--pp", "1,x"], "--pp 1,x: write whole numbers"),
        (["bench", "nowhere", "--verify", "0"], "at least 1"),
        (["inspect", "nowhere"], "no such artifact directory"),
        (["verify", "nowhere"], "no such artifact directory"),
        (["eval", "nowhere", "--data", "nothing.jsonl"], "nothing.jsonl: no such file"),
    ],
)
def test_wrong_requests_exit_2_with_one_line(arguments: list[str], message: str, capsys: Capture) -> None:
    assert message in refusal(capsys, 2, *arguments)


@pytest.mark.parametrize(
    ("shell", "code", "message"),
    [
        ("{q} inspect {a} >&-", 0, ""),
        ("{q} run {a} -p - <&-", 2, "the prompt is empty"),
        ("printf 'ab\\xff' | {q} run {a} -p -", 2, "not valid Unicode at character 2"),
        ("PYTHONUTF8=0 PYTHONIOENCODING=utf-8:strict {q} run {a} -p - < /bin/true", 2, "not valid Unicode"),
        ("{q} inspect {a} > /dev/full", 5, "No space left on device"),
        ("{q} inspect {a} --json > /dev/full", 5, "No space left on device"),
        ("{q} inspect nowhere 2> /dev/full", 2, ""),
        ("PYTHONIOENCODING=ascii {q} run {a} -p 'é' --max-tokens 1 --threads 1 | grep -q '^.xe9'", 0, "prompt tokens"),
        ("{q} inspect $'new\\nline'", 2, "new\\nline: no such artifact directory"),
        ("{q} inspect {long}", 2, "give another path"),
    ],
)
def test_whatever_the_streams_are(shell: str, code: int, message: str, tiny_artifact: Build) -> None:
    """Closed, full, of another encoding, or not text: an exit code and at most one line, never a traceback."""
    command = shell.format(q=f"{sys.executable} -m qcompile", a=tiny_artifact("w4a8"), long="a" * 300)
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, env=usual)
    assert done.returncode == code and message in done.stderr, done
    assert len(done.stderr.splitlines()) == bool(message)


def test_no_command_shows_the_help(capsys: Capture) -> None:
    assert code_of() == 2
    assert "Commands:" in capsys.readouterr().err


def test_a_bug_exits_1_with_one_line_and_a_hint(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise RuntimeError("what is this\nsecond line")

    monkeypatch.setattr("qcompile.cli.inspect.summary", broken)
    line = refusal(capsys, 1, "inspect", "x")
    assert "RuntimeError: what is this" in line and "--debug" in line
    assert code_of("--debug", "inspect", "x") == 1
    assert "Traceback" in capsys.readouterr().err


def test_what_one_may_not_read_is_no_bug(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("qcompile.cli.inspect.summary", forbidden)
    assert refusal(capsys, 2, "inspect", "x") == "qcompile: Permission denied (x): give another path\n"


def test_a_text_may_be_a_pipe_but_no_folder(capsys: Capture, tmp_path: Path) -> None:
    for command in (("eval", "nowhere", "--data"), ("build", "nowhere", "-o", tmp_path / "out", "--calib")):
        assert "is a directory: give a file" in refusal(capsys, 2, *command, tmp_path)
        assert "nowhere" in refusal(capsys, 2, *command, "/dev/null")


@pytest.mark.parametrize("name", ["dataset_info.json", "dataset_dict.json"])
def test_a_saved_dataset_is_named_with_a_way_out(name: str, capsys: Capture, tmp_path: Path) -> None:
    """Requests are JSON lines; texts may be tables, too."""
    (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match="is a saved dataset: give JSON lines"):
        texts.check(tmp_path)
    assert "is a saved dataset" not in refusal(capsys, 2, "eval", "nowhere", "--data", tmp_path)


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m qcompile --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode in (0, 128 + signal.SIGPIPE) and done.stderr == ""


def test_version(capsys: Capture) -> None:
    assert code_of("--version") == 0
    assert capsys.readouterr().out.startswith("qcompile 0.")


def test_progress_tells_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.time, "monotonic", lambda: 100.0)
    progress = console.Progress()
    assert progress.line(101.0) == "starting: 1 s so far"  # while a text is made into tokens, say
    progress("import", 0, 1)
    assert progress.line(103.0) == "import: 3 s so far"
    progress("weights", 5, 40)
    assert progress.line(105.0) == "weights: 12 %, 35 s left"


def test_progress_is_seen_while_a_stage_is_silent(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(console, "LINE_SECONDS", 0.01)
    with console.Progress() as progress:
        progress("import", 0, 1)
        time.sleep(0.1)
    assert "import: 0 s so far" in capsys.readouterr().err


def test_tables_and_sizes() -> None:
    assert console.table(["a", "b"], [["x", "10"], ["long", "1"]]) == "a      b\nx     10\nlong   1"
    assert [console.byte_size(n) for n in (12, 1536, 5 << 20, 3 << 31)] == ["12 B", "1.5 KiB", "5.0 MiB", "6.0 GiB"]


# ---- with a tiny model -------------------------------------------------------------------------------


def test_build_says_what_each_pass_did(capsys: Capture, tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = json_of(
        capsys, "build", tiny_checkpoint, "-o", out, "--set", "cache.format=kv8", "--set", "rounding=nearest"
    )
    assert Path(result["path"]) == out and result["bytes"] > 0 and 4 < result["bits_per_weight"] < 9
    assert {"raise", "merge", "quantize", "cache", "fuse"} <= {p["name"] for p in result["passes"]}
    assert json_of(capsys, "inspect", out)["kv"]["format"] == "kv8"


def test_build_refuses_an_unknown_field(capsys: Capture, tiny_checkpoint: Path, tmp_path: Path) -> None:
    build = ("build", tiny_checkpoint, "-o", tmp_path / "out", "--set")
    assert "there are" in refusal(capsys, 2, *build, "cache.fromat=kv8")
    assert "kv16" in refusal(capsys, 2, *build, "cache.format=kv7")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        pytest.param(b"def add(a, b):\n", "is too short", marks=pytest.mark.exhaustive),
        pytest.param(b"\x7fELF\xff\xfe", "is not text", marks=pytest.mark.exhaustive),
        ("天地玄黄 宇宙洪荒 ".encode() * 400, "is outside the vocabulary"),
    ],
)
def test_build_refuses_text_it_cannot_calibrate_by(
    content: bytes, message: str, capsys: Capture, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    model, text = tmp_path / "model", tmp_path / "calib.txt"
    shutil.copytree(tiny_checkpoint, model)
    if "vocabulary" in message:
        words = Tokenizer(models.WordLevel({"<unk>": 3, "def": 4}, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        words.save(str(model / "tokenizer.json"))
    text.write_bytes(content)
    command = ("build", model, "-o", tmp_path / "out", "--recipe", "mixllm", "--calib", text)
    assert message in refusal(capsys, 2, *command)
    if not content:
        assert "write a share between 0 and 1" in refusal(capsys, 2, *command, "--set", "salience.fraction=1.5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calib.txt", "model"]


@pytest.mark.parametrize(
    ("recipe", "calib", "used", "said"),
    [
        ("qserve", None, sample_text.FOLDER, "calibrated on the package's sample text"),
        ("qserve", "none", None, ""),
        ("w4a8", None, None, ""),
        ("w4a8", "sample", sample_text.FOLDER, ""),
        ("w4a8", "TEXT", "TEXT", ""),
    ],
)
def test_recipes_that_need_a_text_take_that_of_the_package(
    recipe: str,
    calib: str | None,
    used: Any,
    said: str,
    capsys: Capture,
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[Any] = []

    def note(*_: object, calib: Any, **__: object) -> None:
        taken.append(calib and calib.given)
        raise ResourceError("enough")

    monkeypatch.setattr("qcompile.pipeline.build", note)
    text = tmp_path / "TEXT"
    text.write_text("x")
    given = () if calib is None else ("--calib", text if calib == "TEXT" else calib)
    assert code_of("build", tiny_checkpoint, "-o", tmp_path / "out", "--recipe", recipe, *given) == 5
    assert taken == [text if used == "TEXT" else used] and said in capsys.readouterr().err


def test_a_model_without_a_tokenizer_reads_no_text(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qcompile.pipeline.build", lambda *_, calib, **__: sys.exit(7 if calib is None else 8))
    (tmp_path / "config.json").write_text("{}")
    assert code_of("build", tmp_path, "-o", tmp_path / "out", "--recipe", "qserve") == 7
    assert "no tokenizer: no calibration" in capsys.readouterr().err


def test_build_refuses_what_is_not_a_model(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "config.json" in refusal(capsys, 2, "build", tmp_path / "empty", "-o", tmp_path / "out")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "frobnicator"}')
    assert "frobnicator" in refusal(capsys, 3, "build", tmp_path / "empty", "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty" / "config.json").rename(tmp_path / "empty" / "qcompile.json")
    for command in (("build", tmp_path / "empty", "-o", tmp_path / "out"), ("doctor", tmp_path / "empty")):
        assert "is an artifact, built already: give the folder of a model" in refusal(capsys, 2, *command)


def test_a_trace_without_memory_is_no_fault_of_the_model(
    capsys: Capture, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("torch.export.export", export)
    monkeypatch.setenv("QCOMPILE_CACHE", str(tmp_path / "cache"))  # which may hold the trace
    assert "out of memory" in refusal(capsys, 5, "build", tiny_checkpoint, "-o", tmp_path / "out")


def test_a_prompt_from_stdin_keeps_its_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\r\nb\rc\n"), "utf-8"))
    assert console.everything() == "a\r\nb\rc\n"


def test_build_without_a_compiler_says_so(tiny_checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "qcompile", "build", str(tiny_checkpoint), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 5 and "no C++ compiler found" in done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_run_prints_the_prompt_and_its_continuation(capsys: Capture, tiny_artifact: Build) -> None:
    run = ("run", tiny_artifact("w4a8"), "--prompt", "def main(", "--max-tokens", "6")
    result = json_of(capsys, *run)
    assert len(result["token_ids"]) == 6 and result["prefill_seconds"] > 0 and result["decode_seconds"] > 0
    assert result["decode_tokens_per_second"] == pytest.approx(5 / result["decode_seconds"])
    assert code_of(*run, "--threads", "1") == 0
    captured = capsys.readouterr()
    assert captured.out == "def main(" + result["text"] + "\n"
    assert "tokens/s, 1 thread]" in captured.err
    assert code_of(*run, "--threads", "2") == 0
    assert "tokens/s, 2 threads]" in capsys.readouterr().err


def test_run_reads_a_prompt_from_stdin(capsys: Capture, tiny_artifact: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    from io import StringIO

    monkeypatch.setattr("sys.stdin", StringIO("import "))
    assert json_of(capsys, "run", tiny_artifact("w4a8"), "-p", "-", "--max-tokens", "1")["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("prompt", "message"), [("", "empty"), ("x = 1\n" * 400, "context"), ("x\udcff", "Unicode at character 1")]
)
def test_run_refuses_prompts_without_a_place(prompt: str, message: str, capsys: Capture, tiny_artifact: Build) -> None:
    run = ("run", tiny_artifact("w4a8"), "--prompt", prompt)
    assert message in refusal(capsys, 2, *run, "--json")
    assert code_of(*run) == 2 and not capsys.readouterr().out


def test_chat_answers_each_line(capsys: Capture, tiny_artifact: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    from io import StringIO

    monkeypatch.setattr("sys.stdin", StringIO("import os\n\nimport sys\n"))
    assert code_of("chat", tiny_artifact("w4a8"), "--max-tokens", "4", "--seed", "1", "--json") == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(answers) == 2 and answers[1]["prompt_tokens"] > answers[0]["prompt_tokens"]


def test_chat_without_a_tokenizer_is_refused_at_once(capsys: Capture, tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    assert json_of(capsys, "build", tmp_path / "model", "-o", tmp_path / "out")
    assert "has no tokenizer, so it cannot chat" in refusal(capsys, 2, "chat", tmp_path / "out")


def test_chat_goes_on_after_a_line_too_long(
    capsys: Capture, tiny_artifact: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    from io import StringIO

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    chat = ("chat", tiny_artifact("w4a8"), "--max-tokens", "4", "--seed", "1", "--json")
    monkeypatch.setattr("sys.stdin", Terminal("import os\n" + "x = 1 " * 400 + "\nimport sys\n"))
    assert code_of(*chat) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2 and "shorten it" in captured.err
    for text in ("x = 1 " * 400 + "\n", "import os\nx = \udcff\n"):
        monkeypatch.setattr("sys.stdin", StringIO(text))
        assert code_of(*chat) == 2


def test_a_client_that_hangs_up_does_not_end_the_server(
    capsys: Capture, tiny_artifact: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing to who has gone raises SIGPIPE, which other commands heed: their reader has all it wants."""
    result = []
    monkeypatch.setattr("qcompile.runtime.server.app.serve", lambda *_: result.append(signal.getsignal(signal.SIGPIPE)))
    assert code_of("serve", tiny_artifact("w4a8"), "--port", "0") == 0
    assert result == [signal.SIG_IGN]


def test_names_that_are_no_text(capsys: Capture, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """File names are bytes: those that are not UTF-8 are as good as others."""
    model, out = (tmp_path / os.fsdecode(name) for name in (b"mod\xffel", b"ou\xfft"))
    shutil.copytree(tiny_checkpoint, model)
    assert json_of(capsys, "build", model, "-o", out)["path"] == str(out)
    assert json_of(capsys, "inspect", out)["model"]["name"] == "mod\ufffdel"
    assert json_of(capsys, "run", out, "--prompt", "x", "--max-tokens", 1, "--threads", 1)["token_ids"]
    assert json_of(capsys, "verify", out)["ok"]


def test_a_server_keeps_to_the_cache_it_is_given(
    capsys: Capture, tiny_artifact: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("uvicorn")
    pages: list[int] = []
    monkeypatch.setattr(
        "qcompile.runtime.server.app.serve", lambda served, *_: pages.append(served.llm.engine.pool.total)
    )
    serve = ("serve", tiny_artifact("w4a8"), "--port", "0")
    assert code_of(*serve) == code_of(*serve, "--kv-cache-bytes", "300000") == 0
    assert 0 < pages[1] < pages[0]
    assert "less than one page" in refusal(capsys, 2, *serve, "--kv-cache-bytes", "1")


@pytest.mark.parametrize(
    "command",
    [["run", "--prompt", "x"], ["chat"], ["eval", "--data", "TEXT"], ["bench", "--tg", "2", "--pp", "2"], ["tune"]],
    ids=lambda command: command[0],
)
def test_every_command_that_loads_a_model_takes_the_size_of_its_cache(
    command: list[str], capsys: Capture, tiny_artifact: Build, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text('{"text": "import os"}\n')
    command = [str(tmp_path / "text") if part == "TEXT" else part for part in command]
    out = tiny_artifact("qspec" if command[0] == "tune" else "w4a8")
    told = refusal(capsys, 2, command[0], out, *command[1:], "--kv-cache-bytes", "1")
    assert "kv_cache_bytes 1 is less than one page" in told


def test_chat_takes_the_number_of_drafts(capsys: Capture, tiny_artifact: Build) -> None:
    assert "--gamma few: write a whole number, or auto" in refusal(
        capsys, 2, "chat", tiny_artifact("w4a8"), "--gamma", "few"
    )


def test_serve_refuses_an_empty_key(capsys: Capture, tiny_artifact: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = ("serve", tiny_artifact("w4a8"), "--port", "0")
    assert "API key is empty" in refusal(capsys, 2, *serve, "--api-key", "")
    monkeypatch.setenv("QCOMPILE_API_KEY", "")
    assert "API key is empty" in refusal(capsys, 2, *serve)


@pytest.mark.parametrize("command", [["serve", "no_such"], ["run-batch", "no_such", __file__, "-o", "no_such"]])
def test_unknown_parsers_are_refused_before_a_model_is_opened(command: list[str], capsys: Capture) -> None:
    line = refusal(capsys, 2, *command, "--tool-parser", "hermess")
    assert "there is no tool-parser 'hermess': use one of " in line


def test_serve_lets_a_model_sleep_only_with_a_key(capsys: Capture) -> None:
    assert "give an API key" in refusal(capsys, 2, "serve", "nowhere", "--port", "0", "--enable-sleep")


def test_eval_has_the_keys_scripts_rely_on(capsys: Capture, tiny_artifact: Build, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"def f{i}(x):\n    return x + {i}\n" * 20}) for i in range(9)))
    result = json_of(capsys, "eval", tiny_artifact("w4a8"), "--data", data, "--window", "64", "--max-windows", "3")
    assert result["windows"] == 3 and result["tokens"] == 3 * 63 and result["perplexity"] > 1 and result["nll"] > 0
    text = data.read_text()
    data.write_text("\ufeff" + text.replace("return", "\u2028\x85").replace("\n", "\r\n"), encoding="utf-8")
    again = json_of(capsys, "eval", tiny_artifact("w4a8"), "--data", data, "--window", "64", "--max-windows", "3")
    assert again["windows"] == 3 and again["nll"] != result["nll"]
    assert code_of("eval", tiny_artifact("w4a8"), "--data", data, "--window", "64", "--max-windows", "3") == 0
    assert capsys.readouterr().out.endswith("(3 windows of 64 tokens, 189 predictions)\n")
    for wrong in ("not json", '{"text": "\\ud800"}', "[" * 100_000, "{}", '{"text": 3}', "[]"):
        data.write_text(wrong + "\n")
        assert "line 1" in refusal(capsys, 2, "eval", tiny_artifact("w4a8"), "--data", data)


def test_bench_measures_tests_and_kernels(capsys: Capture, tiny_artifact: Build) -> None:
    sizes = ("--tg", "8", "--pp", "32", "--verify", "1,4", "--repeats", "1", "--threads", "1")
    result = json_of(capsys, "bench", tiny_artifact("w4a8"), *sizes)
    assert result["decode_tokens_per_second"] > 0 and result["prefill_tokens_per_second"] > 0
    assert set(result["tests"]) == {"tg8", "pp32", "verify1", "verify4"}
    for kernel in result["kernels"]:
        assert kernel["predicted_us"] > 0 and kernel["measured_us"] > 0 and kernel["bytes"] > 0 and kernel["ops"] > 0
    assert code_of("bench", tiny_artifact("w4a8"), *sizes, "--jsonl") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["test"] for line in lines] == ["tg8", "pp32", "verify1", "verify4"] and all(
        line["tok_s"] > 0 for line in lines
    )
    assert code_of("bench", tiny_artifact("w4a8"), *sizes) == 0
    shown = capsys.readouterr().out
    assert "predicted us" in shown and "ceilings with 1 thread:" in shown
    smaller = "of 1000 tokens does not fit the context of 256: give smaller ones by --tg, --pp and --verify"
    assert smaller in refusal(capsys, 2, "bench", tiny_artifact("w4a8"), "--pp", "1000")
    both = ("--tg", "8", "--pp", "4,32", "--verify", "4", "--repeats", "1", "--threads", "1")
    assert set(json_of(capsys, "bench", tiny_artifact("w4a8"), *both)["tests"]) == {"tg8", "pp4", "pp32", "verify4"}


def test_inspect_shows_what_was_built(capsys: Capture, tiny_artifact: Build) -> None:
    result = json_of(capsys, "inspect", tiny_artifact("w4a8"))
    assert result["recipe"]["name"] == "w4a8" and result["target"]["name"] == "cpu"
    assert result["bits_per_weight"] > 4 and result["passes"][0]["fired"] > 0
    assert result["sizes"]["total"] == sum(p.stat().st_size for p in tiny_artifact("w4a8").rglob("*") if p.is_file())
    assert code_of("inspect", tiny_artifact("w4a8")) == 0
    assert "quantize" in capsys.readouterr().out


def test_what_a_gpu_computes_tells_of_no_threads() -> None:
    assert CudaExecutor.threads == 0
    assert bench.as_text({"tests": {}, "kernels": [], "ceilings": {"f32": 2.0}, "threads": 0}).startswith("ceilings: 2")
    assert tune.as_text({"threads": 0, "acceptance": 0.5, "table": []}).startswith("acceptance 0.500\n")
    assert tune.as_text({"threads": 1, "acceptance": 0.5, "table": []}).startswith("acceptance 0.500, 1 thread\n")


def test_verify_names_the_damaged_file(capsys: Capture, tiny_artifact: Build, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_artifact("w4a8"), tmp_path / "copy")
    assert json_of(capsys, "verify", copy) == {"ok": True, "problems": [], "signature": None}
    weights = copy / "weights-00000.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "weights-00000.safetensors" in refusal(capsys, 6, "verify", copy)
    assert "weights-00000.safetensors" in refusal(capsys, 6, "run", copy, "--prompt", "x")
    (copy / "qcompile.json").write_text("{}")
    assert refusal(capsys, 6, "verify", copy) == refusal(capsys, 6, "inspect", copy)
    (copy / "qcompile.json").unlink()
    assert refusal(capsys, 6, "verify", copy) == f"qcompile: {copy}: not an artifact (no qcompile.json)\n"
    (copy / "config.json").touch()
    assert "this is a model, make an artifact of it with `qcompile build`" in refusal(capsys, 6, "inspect", copy)


def test_explaining_a_pass_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "qcompile", "build", "nowhere", "-o", str(tmp_path / "out"), "--explain", "rotat"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "--explain rotat: there is no such pass" in result.stderr
    assert not (tmp_path / "out").exists()


def test_inspect_passes(capsys: Capture, tmp_path: Path, tiny_checkpoint: Path) -> None:
    plain, checked = tmp_path / "plain", tmp_path / "checked"
    assert code_of("build", tiny_checkpoint, "-o", plain, "--recipe", "w4a8") == 0
    switch = ("--set", "fold_norms.enabled=true", "--set", "rotate.enabled=true")
    assert code_of("build", tiny_checkpoint, "-o", checked, "--recipe", "w4a8", "--check", *switch) == 0
    capsys.readouterr()
    assert all(entry["seconds"] is None for entry in json_of(capsys, "inspect", plain, "--passes"))
    result = {entry["name"]: entry for entry in json_of(capsys, "inspect", checked, "--passes")}
    assert result["raise"]["max_relative_error"] < 1e-5 and result["rotate"]["max_relative_error"] < 1e-5
    assert 1e-4 < result["quantize"]["max_relative_error"] < 1 and result["rotate"]["seconds"] > 0
    assert result["rotate"]["fired"] > 0 and result["rotate"]["options"]["online"] is False
    assert code_of("inspect", checked, "--passes") == 0
    assert "rotate" in capsys.readouterr().out
    assert code_of("verify", checked) == 0  # passes.json differs from build to build and is not sealed
    capsys.readouterr()
    for damage in ("[1]", '[{"name": "raise", "max_relative_error": "x", "seconds": []}]', "[" * 100_000):
        (checked / "passes.json").write_text(damage)
        assert "passes.json is damaged" in refusal(capsys, 6, "inspect", checked, "--passes")
