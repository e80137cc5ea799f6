"""The plan of a step: which rows of which requests it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qcompile.runtime.request import Request
from qcompile.runtime.step import EVERYTHING, Rows


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One call of the executor: `counts[i]` rows of `requests[i]`.

    With `steps` > 1 it is a multi-step decode: `steps` steps of one row a request, each with the tokens of the step
    before.
    """

    requests: list[Request]
    counts: list[int]
    steps: int

    @property
    def decoding(self) -> bool:
        """Whether every request has only its last token to compute."""
        return all(request.sequence.decodes for request in self.requests)

    @property
    def outputs(self) -> int:
        """Rows with logits of a step, without those of drafts."""
        pairs = zip(self.requests, self.counts, strict=True)
        return sum(output_rows(request, count)[1] for request, count in pairs)

    def rows(self, drafts: Sequence[Sequence[int]] = ()) -> list[Rows]:
        """The rows of the step, with `drafts[i]` after the last token of `requests[i]`.

        A row gives logits if it is a request's last token, a draft, or a token of a prompt before one that is to be
        reported. A token that a pending step will give as its output i appears as -1 - i.
        """
        rows: list[Rows] = []
        for index, (request, count) in enumerate(zip(self.requests, self.counts, strict=True)):
            sequence = request.sequence
            start = sequence.computed + sequence.pending_rows
            end = start + count
            tokens = sequence.tokens[start:end] or [-1 - sequence.pending_output]
            known, outputs = output_rows(request, count)
            certain = EVERYTHING
            if drafts and drafts[index]:
                tokens += drafts[index]
                outputs += len(drafts[index])
                certain = end
            given = None
            if sequence.embeds is not None and (embeds := sequence.embeds_from(start)) is not None:
                given = embeds[:count]
            rows.append(Rows(tokens, start, sequence.pages, outputs, known, sequence.slot, certain, given))
        return rows


def output_rows(request: Request, count: int) -> tuple[int, int]:
    """Two numbers of the next `count` rows of a request: rows before a token of the prompt that is to be reported, and
    all rows with logits."""
    report, sequence = request.prompt_report, request.sequence
    last = int(count == sequence.uncomputed)
    if report.complete:
        return 0, last
    known = max(0, min(sequence.scheduled + count, report.prompt_length - 1) - report.scored)
    return known, known + last


@dataclass(slots=True)
class StepRoom:
    """What a step still has room for: rows, and rows with logits."""

    rows: int
    outputs: int

    def append(self, plan: StepPlan, request: Request) -> None:
        """Put as many of the request's uncomputed tokens into the step as fit."""
        sequence = request.sequence
        left = sequence.uncomputed
        # What follows gives the same: most requests of most steps decode, and each step asks for each.
        if left == 1 and request.prompt_report.complete and self.rows and self.outputs and not sequence.state_ends:
            plan.requests.append(request)
            plan.counts.append(1)
            self.rows -= 1
            self.outputs -= 1
            return
        count = min(left, self.rows)
        if sequence.state_ends:
            ends = [end - sequence.scheduled for end in sequence.state_ends]
            count = min([count, *(rows for rows in ends if rows > 0)])
        outputs = output_rows(request, count)[1]
        if outputs > self.outputs:  # rows with logits are a request's last ones
            count -= outputs - self.outputs
            outputs = output_rows(request, count)[1]
        if count > 0:
            plan.requests.append(request)
            plan.counts.append(count)
            self.rows -= count
            self.outputs -= outputs
