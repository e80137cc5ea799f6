"""Steps that a GPU's executor has started and nobody has waited for yet."""

from __future__ import annotations

from collections.abc import Callable


class StartedSteps:
    """At most one step of each turn. The last one may lack its masks, which follow from tokens of the one before it."""

    def __init__(self) -> None:
        self._waits: dict[int, Callable[[], list[int]]] = {}
        self._rest: Callable[[], None] | None = None

    @property
    def lacks_masks(self) -> bool:
        """Whether the last step lacks its masks, so that launches of it are not queued yet."""
        return self._rest is not None

    @property
    def turns(self) -> list[int]:
        """The turns of these steps, in ascending order."""
        return sorted(self._waits)

    def add(
        self, turn: int, rest: Callable[[], None] | None, fetch: Callable[[], Callable[[], list[int]]]
    ) -> Callable[[], list[int]]:
        """Note the step of a turn. Returns a function that waits for its tokens and returns them.

        rest: writes the step's masks and queues the launches that read them; None if all launches are queued. fetch:
        queues the copy of the tokens behind these, and returns a function that waits for it.
        """
        copied: Callable[[], list[int]] | None = None
        tokens: list[int] | None = None

        def finish() -> None:
            nonlocal copied
            try:
                if rest:
                    rest()
                copied = fetch()
            except BaseException:
                self._waits.pop(turn, None)
                raise

        def wait() -> list[int]:
            nonlocal tokens
            if tokens is None:
                if copied is None:  # else the last step may still lack tokens that its masks follow from
                    self.send_masks()
                assert copied is not None
                del self._waits[turn]
                tokens = copied()
            return tokens

        if rest:
            self._rest = finish
        else:
            finish()
        self._waits[turn] = wait
        return wait

    def send_masks(self) -> None:
        """Write the masks of the last step, if it lacks them, and queue what reads them."""
        rest, self._rest = self._rest, None
        if rest:
            rest()

    def wait_for(self, turn: int) -> None:
        """Wait for the step of a turn, if there is one."""
        if turn in self._waits:
            self._waits[turn]()
