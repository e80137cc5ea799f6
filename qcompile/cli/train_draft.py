"""The command `train-draft`, which waits for torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from qcompile import texts
from qcompile.checkpoints import hub
from qcompile.cli import console, refusals
from qcompile.cli.options import Hub, Json, Model, command
from qcompile.errors import ResourceError, UsageError

_WRITTEN_AT_ONCE = 16
"""Pieces of text that the model writes at the same time, in multiples of those of a training step."""
_DEVICES = ("auto", "cpu", "gpu")


@dataclass(frozen=True)
class HeadOptions:
    """What the head is like."""

    depth: Annotated[
        int, typer.Option("--depth", min=1, max=8, metavar="N", help="Tokens in a row that the head learns to draft.")
    ] = 4
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            envvar="QCOMPILE_DRAFT_LAYERS",
            show_envvar=False,
            metavar="I,J,K",
            help="Layers after which the head reads hidden states. Default: 2, the middle, and the third last.",
        ),
    ] = None
    draft_vocab_size: Annotated[
        int,
        typer.Option(
            "--draft-vocab-size",
            min=1,
            metavar="N",
            help="Number of tokens that the head can draft: the most frequent ones in FILE.",
        ),
    ] = 32_000


@dataclass(frozen=True)
class TrainingRun:
    """How long it is trained, and on what."""

    steps: Annotated[
        int | None, typer.Option("--steps", min=1, metavar="N", help="Optimizer steps. Default: one pass over FILE.")
    ] = None
    batch: Annotated[int, typer.Option("--batch-size", min=1, metavar="N", help="Pieces of text per step.")] = 4
    length: Annotated[int, typer.Option("--max-seq-length", min=2, metavar="TOKENS", help="Tokens per piece.")] = 512
    continue_after: Annotated[
        int | None,
        typer.Option(
            "--continue-after",
            min=1,
            metavar="TOKENS",
            help="Keep this many tokens of each piece, and let the model write the rest: the head then learns the "
            "model's own text. Default: the text as it is.",
        ),
    ] = None
    rate: Annotated[float, typer.Option("--learning-rate", min=0.0, metavar="X", help="Largest learning rate.")] = 5e-4
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of first weights and of the order of text.")] = 0
    device: Annotated[
        str, typer.Option("--device", metavar="auto|cpu|gpu", help="Where to train; auto: a GPU if there is one.")
    ] = "auto"


@command
def train_draft(  # parameters: the groups of its options
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Directory to write the head to.")],
    data: Annotated[
        Path, typer.Option("--data", metavar="FILE", help='Plain text, or JSON lines with a "text" field.')
    ],
    head: HeadOptions,
    run: TrainingRun,
    access: Hub,
    json: Json = False,
) -> None:
    """Train a draft head of the EAGLE-3 type for a model. After an interrupt, the same command goes on.

    \b
    Example:
      qcompile train-draft samples/pycode-26m --data samples/text.jsonl -o out/head
    """
    layers = console.numbers("--layers", head.layers) if head.layers else ()
    if run.device not in _DEVICES:
        raise UsageError(f"--device {run.device}: choose one of {', '.join(_DEVICES)}")
    texts.check(data, tables=True)
    refusals.check_models(model)
    with console.Progress() as progress:
        source = hub.find(model, progress=progress, **asdict(access))
        progress("import", 0, 1)
        result = _train(source, output, data, layers, head, run, progress)
    if json:
        console.print_json({"path": str(output)} | result)
        return
    shares = ", ".join(f"{share:.3f}" for share in result["agreement"])
    console.show(f"loss {result['loss']:.3f}, agreement by depth {shares} (text held back)")
    console.show(f"{output}: {console.counted(result['steps'], 'step')}, {result['tokens']} tokens")


def _train(
    model: Path,
    output: Path,
    data: Path,
    layers: tuple[int, ...],
    head: HeadOptions,
    run: TrainingRun,
    progress: console.Progress,
) -> dict[str, Any]:
    """Import torch and train."""
    from qcompile.calibration import CalibrationSource, open_source
    from qcompile.checkpoints.identity import identity
    from qcompile.checkpoints.tokenizer_files import load_tokenizer
    from qcompile.heads.continuation import continued
    from qcompile.heads.target import HeadTarget
    from qcompile.heads.training import Training, TrainingOptions, check_output

    check_output(output)
    target = HeadTarget.load(model, _device(run.device))
    text = open_source(
        CalibrationSource(data, samples=1 << 40, length=run.length, seed=run.seed),
        load_tokenizer(model),
        bos=target.begin,
        vocabulary=target.output_weight.shape[0],
        context=target.context,
    )
    options = TrainingOptions(run.steps or 0, run.batch, head.depth, layers, head.draft_vocab_size, run.rate, run.seed)
    name, windows = identity(model, progress), text.tokens
    if run.continue_after is not None:
        windows = continued(
            target,
            windows,
            run.continue_after,
            batch=_WRITTEN_AT_ONCE * run.batch,
            output=output,
            identity=name,
            progress=progress,
        )
    training = Training(target, windows, options, output, name)
    if training.losses:
        console.note(f"qcompile: {output} goes on after step {len(training.losses)} of {training.options.steps}")
    return asdict(training.run(progress))


def _device(name: str) -> str:
    """torch's name of a device. Raises ResourceError if there is no GPU that torch can use."""
    import torch

    there = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")  # a head is trained for bfloat16: tensor cores are exact enough
    if name == "gpu" and not there:
        raise ResourceError("--device gpu: torch finds no GPU")
    return "cuda" if there and name != "cpu" else "cpu"
