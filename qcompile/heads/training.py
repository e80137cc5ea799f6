"""Training of a draft head on a text, as EAGLE-3 does: beyond depth 1 it reads hidden states of its own."""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from qcompile.clock import Progress, silent
from qcompile.errors import ResourceError, UsageError
from qcompile.heads.continuation import WRITTEN
from qcompile.heads.layout import CONFIG, WEIGHTS, HeadShape
from qcompile.heads.model import DraftHead
from qcompile.heads.target import HeadTarget

STATE = "training.safetensors"
"""The file in the output folder that holds an unfinished training."""
_HEAD, _MOMENTS, _LOSSES = "head.", "optimizer.", "losses"
"""How the names of its tensors begin: weights, the optimizer's moments by the number of the weight, and losses."""
SAVE_SECONDS = 60.0
_DECAY = 0.8
"""Weight of the loss at each depth, in multiples of the depth before it."""
_WARM_UP = 0.03
_LEAST_RATE = 0.05
_LARGEST_GRADIENT = 0.5
_HELD_BACK = 50
"""One window in this number of them is held back: it measures the head, and does not train it."""


@dataclass(frozen=True)
class TrainingOptions:
    """`depth` is the number of tokens drafted in a row; `steps` 0 stands for one pass over the text.

    `vocabulary` is the number of tokens that the head can propose: the most frequent of the text.
    """

    steps: int = 0
    batch: int = 4
    depth: int = 4
    layers: tuple[int, ...] = ()
    vocabulary: int = 32_000
    learning_rate: float = 5e-4
    seed: int = 0


@dataclass(frozen=True)
class Trained:
    """The result: mean loss of the last steps, and for each depth the share of tokens at which the head's draft is the
    target's choice, on windows that were held back and after the text's own tokens."""

    steps: int
    tokens: int
    loss: float
    agreement: list[float]


def frequent_tokens(windows: Tensor, size: int, vocabulary: int) -> Tensor:
    """The `size` most frequent tokens of the `windows`, int64 [size] in rising order; ties go to the lower token."""
    counts = torch.bincount(windows.flatten(), minlength=vocabulary)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


class Training:
    """A training in progress in the folder `output`.

    `windows` are tokens int64 [windows, length]. `identity` names the target's weights. A training that was interrupted
    goes on where it stopped, and ends with the same weights. Raises UsageError if the folder holds something else.
    """

    def __init__(
        self, target: HeadTarget, windows: Tensor, options: TrainingOptions, output: Path, identity: str = ""
    ) -> None:
        check_output(output)
        if windows.shape[0] < 2 or windows.shape[1] < options.depth + 2:
            raise UsageError(
                f"{windows.shape[0]} windows of {windows.shape[1]} tokens are too few for drafts of {options.depth}: "
                "give more text"
            )
        if not 0 < options.learning_rate < math.inf:
            raise UsageError(f"--learning-rate {options.learning_rate}: give a number above 0")
        self.target, self.output = target, output
        shape = target.head_shape(options.layers, options.vocabulary)
        held_back = max(1, len(windows) // _HELD_BACK)
        self.windows, self.held_back = windows[:-held_back], windows[-held_back:]
        steps = options.steps or math.ceil(len(self.windows) / options.batch)
        self.options = replace(options, steps=steps, layers=shape.layers)
        self.device = target.output_weight.device
        self.drafted = frequent_tokens(self.windows, shape.drafted, shape.vocabulary).to(self.device)
        self.head = _new_head(shape, target.output_weight[self.drafted], options.seed).to(self.device)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), 1.0, (0.9, 0.95), weight_decay=0.0)
        self.key = _key(self.options, shape, windows, identity)
        self.losses: list[float] = []
        self._whole = True
        self._turn = 0
        self._order: Tensor | None = None
        self._resume()

    # ---- steps ----------------------------------------------------------------------------------------

    def run(self, progress: Progress = silent) -> Trained:
        """Train to the end and write the head. An interrupt keeps the state and is raised again."""
        saved = time.monotonic()
        try:
            while (done := len(self.losses)) < self.options.steps:
                progress("training", done, self.options.steps)
                self._step()
                if time.monotonic() - saved > SAVE_SECONDS:
                    self.save()
                    saved = time.monotonic()
            agreement = self.agreement(progress)
        except KeyboardInterrupt:
            if self._whole:  # otherwise the state kept before it is the last one that can go on
                self.save()
            raise
        self._write()
        last = self.losses[-max(1, len(self.losses) // 20) :]
        tokens = self.options.steps * self.options.batch * self.windows.shape[1]
        return Trained(self.options.steps, tokens, sum(last) / len(last), agreement)

    def _step(self) -> None:
        """One step of the optimizer. Raises UsageError if the loss is no finite number."""
        rate = _rate(len(self.losses) / self.options.steps) * self.options.learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss = self._loss(self._batch(len(self.losses)))
        loss.backward()
        slope = clip_grad_norm_(self.head.parameters(), _LARGEST_GRADIENT).item()
        if not (math.isfinite(value := loss.item()) and math.isfinite(slope)):
            step = len(self.losses) + 1
            raise UsageError(f"the loss of step {step} is {value}, its gradient {slope}: give a lower --learning-rate")
        self._whole = False
        self.optimizer.step()
        self.losses.append(value)
        self._whole = True

    def _batch(self, step: int) -> Tensor:
        """The windows of a step; each pass over the text has an order of its own."""
        places = []
        for index in range(step * self.options.batch, (step + 1) * self.options.batch):
            turn, place = divmod(index, len(self.windows))
            if self._order is None or turn != self._turn:
                generator = _generator(self.options.seed + turn)
                self._turn, self._order = turn, torch.randperm(len(self.windows), generator=generator)
            places.append(int(self._order[place]))
        return self.windows[places].to(self.device)

    def _loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the drafts with the target's distribution over the tokens that the head can propose.

        Only positions count at which the target's choice is one of these tokens.
        """
        drafts, logits = self._drafts(tokens)
        total, weight = torch.zeros((), device=self.device), 1.0
        for draft, wanted in zip(drafts, logits, strict=True):
            counted = torch.isin(wanted.argmax(-1), self.drafted)
            shares = wanted[..., self.drafted].float().softmax(-1)
            losses = -(shares * draft.float().log_softmax(-1)).sum(-1)
            total = total + weight * (losses * counted).sum() / counted.sum().clamp(min=1)
            weight *= _DECAY
        return total

    def _drafts(self, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """For each depth, logits of the head's drafts and of the target for the same token."""
        depth = self.options.depth
        features, logits = self.target.states(tokens, self.options.layers)
        positions = tokens.shape[1] - depth
        embedded = self.target.embed(tokens[:, 1:]).float()
        drafts = list(self.head.unroll(features[:, :positions].float(), embedded, depth))
        return drafts, [logits[:, 1 + at : 1 + at + positions] for at in range(depth)]

    @torch.no_grad()
    def agreement(self, progress: Progress = silent) -> list[float]:
        """For each depth, the share of tokens of the windows held back at which the draft is the target's choice."""
        right, count = torch.zeros(self.options.depth), 0
        batches = self.held_back.split(self.options.batch)
        for done, tokens in enumerate(batches):
            progress("measuring", done, len(batches))
            drafts, logits = self._drafts(tokens.to(self.device))
            for at, (draft, wanted) in enumerate(zip(drafts, logits, strict=True)):
                right[at] += (self.drafted[draft.argmax(-1)] == wanted.argmax(-1)).sum().cpu()
            count += drafts[0].shape[0] * drafts[0].shape[1]
        return [round(float(share), 4) for share in right / count]

    # ---- files ----------------------------------------------------------------------------------------

    def save(self) -> None:
        """Keep the state, atomically. Raises ResourceError if it cannot be written."""
        tensors = {f"{_HEAD}{name}": value for name, value in self.head.state_dict().items()}
        for number, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{_MOMENTS}{number}.{name}": value for name, value in moments.items()}
        tensors[_LOSSES] = torch.tensor(self.losses, dtype=torch.float64)
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            partial = self.output / f"{STATE}.partial"
            save_file({name: value.contiguous() for name, value in tensors.items()}, partial, {"key": self.key})
            partial.replace(self.output / STATE)
        except (OSError, SafetensorError) as error:
            raise ResourceError(f"cannot keep the training in {self.output}: {error}") from error

    def _resume(self) -> None:
        """Take the state of an interrupted training, if there is one.

        Raises UsageError if it is of another training, or cannot be read.
        """
        path = self.output / STATE
        if not path.is_file():
            return
        try:
            with safe_open(path, "pt") as file:
                key = (file.metadata() or {}).get("key")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{path} cannot be read: remove it to begin again") from error
        if key != self.key:
            raise UsageError(f"{path} is of a training with another model, text or options: give another folder")
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith(_MOMENTS):
                number, _, moment = name.removeprefix(_MOMENTS).partition(".")
                moments.setdefault(int(number), {})[moment] = value
        head = {name.removeprefix(_HEAD): value for name, value in tensors.items() if name.startswith(_HEAD)}
        self.head.load_state_dict(head)
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})
        self.losses = tensors[_LOSSES].tolist()

    def _write(self) -> None:
        """Write the head, its config.json last, and remove the state."""
        vocabulary = self.head.shape.vocabulary
        proposable = torch.zeros(vocabulary, dtype=torch.bool)
        drafted = self.drafted.cpu()
        proposable[drafted] = True
        tensors = {name: value.to(torch.bfloat16).cpu().contiguous() for name, value in self.head.state_dict().items()}
        tensors |= {"d2t": drafted - torch.arange(len(drafted)), "t2d": proposable}
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            partial = self.output / f"{WEIGHTS}.partial"
            partial.write_bytes(save(tensors, {"format": "pt"}))  # save_file lets the owner alone read it
            partial.replace(self.output / WEIGHTS)
            (self.output / CONFIG).write_text(json.dumps(self.head.shape.config(), indent=1) + "\n", encoding="utf-8")
            for unfinished in (STATE, WRITTEN):
                (self.output / unfinished).unlink(missing_ok=True)
        except OSError as error:
            raise ResourceError(f"cannot write the head to {self.output}: {error.strerror}") from error


def check_output(output: Path) -> None:
    """Raise UsageError unless `output` is free, an empty directory, or holds an unfinished training."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UsageError(f"output {output} is a file: choose another directory")
    names = {path.name for path in output.iterdir()}
    if names and not names & {STATE, WRITTEN}:
        raise UsageError(f"output {output} holds other files: choose another directory")


def _new_head(shape: HeadShape, output_rows: Tensor, seed: int) -> DraftHead:
    """A head with random weights, except for its output and its fusion.

    The output begins as the target's. The fusion passes on the last of the hidden states, so that the head's residual
    stream has the basis that the target's output expects.
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        head = DraftHead(shape)
    with torch.no_grad():
        head.lm_head.weight.copy_(output_rows)
        head.fc.weight[:, -shape.hidden :] += torch.eye(shape.hidden)
    return head


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _rate(share: float) -> float:
    """Learning rate in multiples of its largest after a `share` of the steps: a short rise, then half a cosine."""
    if share < _WARM_UP:
        return max(share, _WARM_UP / 10) / _WARM_UP
    fall = (share - _WARM_UP) / (1 - _WARM_UP)
    return _LEAST_RATE + (1 - _LEAST_RATE) * (1 + math.cos(math.pi * fall)) / 2


def _key(options: TrainingOptions, shape: HeadShape, windows: Tensor, identity: str) -> str:
    """Hash of all that the result depends on."""
    digest = hashlib.sha256(f"{asdict(options)} {asdict(shape)} {identity} {tuple(windows.shape)}".encode())
    digest.update(windows.contiguous().numpy().tobytes())
    return digest.hexdigest()
