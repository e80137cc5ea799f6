"""The command line. Results go to stdout, everything else to stderr; errors.py has the exit codes.

Each command imports what it needs when it runs: only `build` and `doctor` wait for torch.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from qcompile import __version__, texts
from qcompile.cli import console, generate
from qcompile.cli.options import Artifact, CacheBytes, Drafts, Head, Json, Options, Recipe, Remote, Target, Threads
from qcompile.errors import EXIT_BUG, EXIT_SIGNAL, QCompileError, ResourceError, UsageError

app = typer.Typer(
    help="Compile PyTorch decoder language models to quantized kernels, and run them.",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"qcompile {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def build(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint directory, or a name on the model hub.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="Artifact directory to write.")],
    target: Target = "cpu",
    recipe: Recipe = "w4a8",
    head_dtype: Head = None,
    drafts: Drafts = None,
    options: Options = None,
    dump_ir: Annotated[
        Path | None,
        typer.Option("--dump-ir", metavar="DIR", help="Write the graph of every stage to DIR, as text and SVG."),
    ] = None,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="PASS", help="Report what this pass left alone, and why.")
    ] = None,
    calib: Annotated[
        Path | None,
        typer.Option("--calib", metavar="FILE", help='Calibration text: plain, or JSON lines with a "text" field.'),
    ] = None,
    samples: Annotated[
        int, typer.Option("--num-calibration-samples", min=1, metavar="N", help="Number of calibration samples.")
    ] = 128,
    length: Annotated[
        int, typer.Option("--max-seq-length", min=2, metavar="TOKENS", help="Tokens per calibration sample.")
    ] = 1024,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed that chooses the calibration samples.")] = 0,
    bits: Annotated[
        float | None,
        typer.Option(
            "--target-bits", metavar="BITS", help="Average weight bits, mixing 4-bit and 8-bit output features."
        ),
    ] = None,
    rise: Annotated[
        float | None,
        typer.Option(
            "--max-perplexity-increase",
            metavar="X",
            help="Use the fewest bits that keep the increase on --calib text within X.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run the graph of every stage on a short text; record each pass's error.")
    ] = False,
    allow_remote_code: Remote = False,
    json: Json = False,
) -> None:
    """Compile a model into an artifact directory.

    \b
    Example:
      qcompile build samples/pycode-26m -o out/pycode --recipe w4a8
      qcompile build samples/pycode-26m -o out/kv8 --recipe f32 --set cache.format=kv8
      qcompile build samples/pycode-26m -o out/qserve --recipe qserve --calib text.jsonl
      qcompile build samples/pycode-26m -o out/auto --recipe auto --calib text.jsonl --target-bits 4.4
      qcompile build samples/pycode-26m -o out/fast --recipe ml-specqd --draft samples/pycode-1m --draft lookup
    """
    from qcompile.recipes import allocation, get_recipe, parse_options
    from qcompile.targets import get_target

    settings = parse_options(options or []) | allocation(bits, rise)
    chosen, _ = get_recipe(recipe), get_target(target)  # refuse unknown names before torch is imported
    if calib is not None:
        texts.check(calib)
    with console.Progress() as progress:
        progress("import", 0, 1)
        gc.set_threshold(50_000, 20, 100)  # imports and traces are not garbage: looking for it would take 0.5 s
        from qcompile.calibration import CalibrationSource
        from qcompile.pipeline import PASSES
        from qcompile.pipeline import build as build_model

        known = [kind.name for kind in PASSES]
        if explain is not None and explain not in known:
            raise UsageError(f"--explain {explain}: there is no such pass; there are {', '.join(known)}")
        report = build_model(
            model,
            output,
            target=target,
            recipe=recipe,
            options=settings,
            head_dtype=head_dtype,
            drafts=drafts or (),
            progress=progress,
            dump_ir=dump_ir,
            check_passes=check,
            calib=None if calib is None else CalibrationSource(calib, samples, length, seed),
            allow_remote=allow_remote_code,
        )
    if chosen.calibrated and calib is None:
        console.log(f"qcompile: recipe {recipe} wants --calib FILE: without it weights are rounded to nearest")
    from qcompile.cli.build import print_build

    print_build(report, recipe, target, explain, json)


@app.command()
def passes(json: Json = False) -> None:
    """List the passes in execution order, with their options and defaults.

    \b
    Example:
      qcompile passes
    """
    from qcompile.pipeline import PASSES

    rows: list[dict[str, Any]] = []
    for kind in PASSES:
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        rows.append({"name": kind.name, "options": kind().options(), "summary": summary})
    if json:
        console.print_json(rows)
        return
    for row in rows:
        options = ", ".join(f"{name}={value}" for name, value in row["options"].items())
        print(f"{row['name']:18}{options or '-'}\n{'':18}{row['summary']}")


app.command()(generate.run)
app.command()(generate.chat)
app.command()(generate.serve)


@app.command("eval")
def evaluate(
    out: Artifact,
    data: Annotated[Path, typer.Option("--data", metavar="FILE", help='JSON lines with a "text" field.')],
    max_windows: Annotated[
        int | None, typer.Option("--max-windows", min=1, metavar="N", help="Stop after N windows.")
    ] = None,
    window: Annotated[
        int, typer.Option("--window", min=2, metavar="TOKENS", help="Tokens per window, at most the context length.")
    ] = 2048,
    kv_cache_bytes: CacheBytes = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure perplexity on documents, joined and cut into non-overlapping windows.

    \b
    Example:
      qcompile eval out/pycode --data heldout.jsonl --json
    """
    from dataclasses import asdict

    import qcompile

    texts.check(data)
    with qcompile.load(out, threads, kv_cache_bytes=kv_cache_bytes, gamma=0) as llm, console.Progress() as progress:
        result = llm.perplexity(data, window, lambda done, total: progress("windows", done, total), max_windows)
    if json:
        console.print_json(asdict(result))
    else:
        windows = f"{console.counted(result.windows, 'window')} of {result.window} tokens"
        print(f"perplexity {result.perplexity:.4f} ({windows}, {result.tokens} predictions)")


@app.command()
def bench(
    out: Artifact,
    tg: Annotated[int, typer.Option("--tg", min=1, metavar="N", help="Tokens to decode one at a time.")] = 64,
    pp: Annotated[str, typer.Option("--pp", metavar="N,N", help="Prompt lengths to prefill.")] = "512",
    verify: Annotated[str, typer.Option("--verify", metavar="N,N", help="Steps of N tokens, all with logits.")] = "",
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, metavar="N", help="Repetitions; medians are reported.")
    ] = 5,
    kv_cache_bytes: CacheBytes = None,
    threads: Threads = None,
    json: Json = False,
    jsonl: Annotated[bool, typer.Option("--jsonl", help='Print one line {"test", "tok_s"} per measurement.')] = False,
) -> None:
    """Measure speed, and compare every kernel with the memory and compute limits of this machine.

    \b
    Example:
      qcompile bench out/pycode --threads 2 --tg 64 --pp 128,512 --verify 1,2,4,8
    """
    import qcompile
    from qcompile.cli import bench as benchmark

    sizes = benchmark.Sizes(tg, console.numbers("--pp", pp), console.numbers("--verify", verify), repeats)
    with qcompile.load(out, threads, kv_cache_bytes=kv_cache_bytes, gamma=0) as llm, console.Progress() as progress:
        speeds = benchmark.measure(llm, sizes, progress)
        if jsonl:
            for test, speed in speeds.items():
                console.print_json_line({"test": test, "tok_s": speed})
            return
        result = benchmark.report(llm, out, sizes, speeds, progress)
    if json:
        console.print_json(result)
    else:
        print(benchmark.as_text(result))


@app.command()
def tune(
    out: Artifact,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FILE", help='JSON lines with a "prompt" or "text" field.')
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=8, metavar="N", help="Tokens per measurement.")] = 48,
    kv_cache_bytes: CacheBytes = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure cost and acceptance of drafts on this machine, and store them in the artifact for `--gamma auto`.

    \b
    Example:
      qcompile tune out/fast --data prompts.jsonl
    """
    from qcompile.cli import tune as tuning

    with console.Progress() as progress:
        found = tuning.tune(out, data, tokens, threads, progress, kv_cache_bytes=kv_cache_bytes)
    if json:
        console.print_json(found)
    else:
        print(tuning.as_text(found))


@app.command()
def inspect(
    out: Artifact,
    passes: Annotated[bool, typer.Option("--passes", help="List the passes: options, count, error, seconds.")] = False,
    json: Json = False,
) -> None:
    """Show the contents of an artifact: recipe, target, bits per weight, passes, sizes.

    \b
    Example:
      qcompile inspect out/pycode
      qcompile inspect out/pycode --passes
    """
    from qcompile.cli import inspect as inspect_artifact
    from qcompile.cli.inspect import as_text, summary

    if passes:
        listed = inspect_artifact.passes(out)
        console.print_json(listed) if json else print(inspect_artifact.passes_as_text(listed))
        return
    found = summary(out)
    if json:
        console.print_json(found)
    else:
        print(as_text(found))


@app.command()
def verify(out: Artifact, json: Json = False) -> None:
    """Check every file of an artifact against its hash; exits with 6 and names the damaged files.

    \b
    Example:
      qcompile verify out/pycode
    """
    from qcompile.artifact import reader
    from qcompile.artifact.hashes import damaged

    problems = reader.verify(out)
    if json:
        console.print_json({"ok": not problems, "problems": problems})
    elif not problems:
        print(f"{out}: every file is as built")
    if problems:
        reader.read_manifest(out)  # says itself what is wrong with it, or that this is no artifact
        raise damaged(out, problems)


@app.command()
def export(
    out: Artifact,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="MLIR file to write.")],
    format: Annotated[str, typer.Option("--format", metavar="torch-mlir|linalg", help="MLIR dialect.")] = "linalg",
    tokens: Annotated[int, typer.Option("--tokens", min=1, metavar="N", help="Number of input tokens.")] = 16,
    json: Json = False,
) -> None:
    """Write an artifact's graph as MLIR: a function from the token ids of one text to its logits.

    \b
    Example:
      qcompile export out/pycode --format linalg -o pycode.mlir
    """
    from qcompile.artifact import export as exporting

    size = exporting.write(out, output, format, tokens)
    found = {"path": str(output), "format": format, "tokens": tokens, "bytes": size}
    console.print_json(found) if json else print(f"{output}: {console.byte_size(size)}")


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint directory, or a name on the model hub.")],
    target: Target = "cpu",
    recipe: Recipe = "w4a8",
    head_dtype: Head = None,
    options: Options = None,
    allow_remote_code: Remote = False,
    json: Json = False,
) -> None:
    """Report whether a model can be compiled, how, and the memory and disk it needs. Reads no weights.

    \b
    Example:
      qcompile doctor samples/pycode-26m --recipe qserve
    """
    from qcompile.recipes import parse_options

    settings = parse_options(options or [])
    with console.Progress() as progress:
        progress("import", 0, 1)
        from qcompile.cli import doctor as doctor_module

        progress("trace", 0, 1)
        found = doctor_module.examine(model, target, recipe, settings, head_dtype, allow_remote=allow_remote_code)
    if json:
        console.print_json(found.as_json())
    else:
        print(found.as_text())
    if not found.exportable:
        raise typer.Exit(3)


def leave(command: Callable[[], NoReturn]) -> NoReturn:
    """Run `command` and leave at once: taking torch's modules apart one by one would cost a second."""
    console.open_streams()
    try:
        command()
    except SystemExit as exit:
        code = int(exit.code or 0)
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _refused_by_system(error) or EXIT_BUG
    with contextlib.suppress(OSError):  # the terminal may be gone
        sys.stderr.flush()
    if (number := code - EXIT_SIGNAL) in (signal.SIGTERM, signal.SIGHUP):  # who sent it sees that it was heeded
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with the code errors.py documents."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `qcompile inspect OUT | head` is no error
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_guarded(given))


def _guarded(arguments: list[str]) -> int:
    """Run a command; its exit code. Every failure prints one line."""
    interrupts = console.interrupts
    interrupts.clear()

    def interrupt(number: int, frame: Any) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    def unraisable(found: Any) -> None:
        if not (interrupts and isinstance(found.exc_value, KeyboardInterrupt)):  # it came while an object ended
            tell(found)

    tell, sys.unraisablehook = sys.unraisablehook, unraisable
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    heeded = {number: before for number, before in usual.items() if signal.getsignal(number) == before}
    for number in heeded:  # all but those that whoever started this wants ignored, as nohup does
        signal.signal(number, interrupt)
    try:
        code: Any = app(args=arguments, prog_name="qcompile", standalone_mode=False)
        if code == EXIT_SIGNAL + signal.SIGINT:  # what some versions of typer make of the exception
            code = _interrupted(interrupts)
    except KeyboardInterrupt:
        code = _interrupted(interrupts)
    except Exception as error:
        # Modules that are interrupted while they are imported may go on without what they lack, and fail later.
        code = _interrupted(interrupts) if interrupts else _failed(error, "--debug" in arguments[:1])
    finally:
        for number, before in heeded.items():
            signal.signal(number, before)
        sys.unraisablehook = tell
        interrupts.clear()
    return code if isinstance(code, int) else 0


def _interrupted(signals: Sequence[int]) -> int:
    """Say so; the exit code."""
    number = signals[0] if signals else signal.SIGINT
    how = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    console.log(f"qcompile: {how}")
    return EXIT_SIGNAL + number


def _failed(error: Exception, debug: bool) -> int:
    """Say in one line why a command failed; its exit code."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, QCompileError):
        console.log("qcompile: " + str(error).replace("\n", "\\n"))
        return error.exit_code
    if isinstance(error, MemoryError):
        console.log("qcompile: out of memory: close other programs, or take a smaller model")
        return ResourceError.exit_code
    if isinstance(error, OSError) and (code := _refused_by_system(error)):
        return code
    return _unexpected(error)


def _unexpected(error: Exception) -> int:
    """Typer's own errors (wrong options) are the user's; all others are ours."""
    if hasattr(error, "format_message"):
        message = error.format_message()
        if message.startswith("Usage:"):  # no command was given: the help text
            console.log(message)
        else:
            command = getattr(getattr(error, "ctx", None), "command_path", "qcompile")
            console.log(f"qcompile: {message.rstrip('.')} (see {command} --help)")
        return UsageError.exit_code
    if type(error).__name__ == "Abort":
        return _interrupted(())
    first = (str(error).splitlines() or [""])[0]
    console.log(f"qcompile: unexpected {type(error).__name__}: {first} (`qcompile --debug ...` shows where)")
    return EXIT_BUG


_SCARCE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_NO_PATH = {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM}


def _refused_by_system(error: OSError) -> int | None:
    """Say what the system lacks, or cannot take as a path, and the exit code; None where that says no such thing."""
    name = f" ({os.fsdecode(error.filename)})" if isinstance(error.filename, str | bytes) else ""
    if error.errno in _SCARCE:
        console.log(f"qcompile: {error.strerror}{name}: the system has no more of it, make some free")
        return ResourceError.exit_code
    if error.errno in _NO_PATH:
        console.log(f"qcompile: {error.strerror}{name}: give another path")
        return UsageError.exit_code
    return None
