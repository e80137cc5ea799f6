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

    def rows(self, drafts: Sequence[Sequence[int]] = ()) -> list[Rows]:
        """The rows of the step, with `drafts[i]` after the last token of `requests[i]`.

        A row gives logits if it is a request's last token, a draft, or a token of a prompt before one that is to be
        reported. A token that a pending step will give as its output i appears as -1 - i.
        """
        rows: list[Rows] = []
        for index, (request, count) in enumerate(zip(self.requests, self.counts, strict=True)):
            sequence, report = request.sequence, request.prompt_report
            start, end = sequence.scheduled, sequence.scheduled + count
            tokens = sequence.tokens[start:end] or [-1 - sequence.pending_output]
            known = max(0, min(end, report.prompt_length - 1) - report.scored)
            outputs = known + int(end == sequence.length)
            if drafts and drafts[index]:
                tokens += drafts[index]
                outputs += len(drafts[index])
            certain = end if drafts and drafts[index] else EVERYTHING
            embeds = sequence.embeds_from(start)
            given = None if embeds is None else embeds[:count]
            rows.append(Rows(tokens, start, sequence.pages, outputs, known, sequence.slot, certain, given))
        return rows
