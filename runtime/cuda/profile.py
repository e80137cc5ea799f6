"""Measures how long each launch of a step takes on the GPU, with graphs that record an event after each launch."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from qcompile.runtime.cuda.driver import Driver, LaunchCall

Ready = Sequence[tuple[str, LaunchCall]]
_MAX_GRAPHS = 64


class _Timed(NamedTuple):
    graph: ctypes.c_void_p
    events: list[ctypes.c_void_p]
    names: list[str]


class LaunchTimes:
    """Sums over the profiled steps: `found` has the seconds and the number of runs of each launch, in launch order.

    Steps run as graphs, because launching from the host takes longer than a kernel of a few microseconds. Unlike in
    other steps, no launch starts before the previous one has ended (PDL is off), so the sum exceeds the time of such a
    step. The time that recording an event takes is measured too and subtracted.
    """

    def __init__(self, driver: Driver) -> None:
        self.times: dict[str, tuple[float, int]] = {}
        self._driver = driver
        self._graphs: dict[Hashable, _Timed] = {}

    def run(self, key: Hashable, prepare: Callable[[], Ready]) -> None:
        """Run the step that `prepare` returns (equal keys mean equal steps), and add up the times of its launches."""
        if key not in self._graphs:
            ready = prepare()  # first: it may free memory that the graphs point to
            if len(self._graphs) >= _MAX_GRAPHS:
                self.forget()
            self._graphs[key] = self._capture(ready)
        graph, events, names = self._graphs[key]
        self._driver.replay(graph)
        self._driver.synchronize()
        times = [self._driver.seconds_between(*pair) for pair in itertools.pairwise(events)]
        for name, taken in zip(names, times[1:], strict=True):
            seconds, runs = self.times.get(name, (0.0, 0))
            self.times[name] = (seconds + max(0.0, taken - times[0]), runs + 1)

    def _capture(self, ready: Ready) -> _Timed:
        """A graph of these launches, with two events at the start (which time recording) and one after each launch."""
        events = [self._driver.event() for _ in range(len(ready) + 2)]
        with self._driver.captured() as result:
            for event in events[:2]:
                self._driver.record(event, in_graph=True)
            for (_, call), event in zip(ready, events[2:], strict=True):
                call.wait_for_all()
                call.run()
                self._driver.record(event, in_graph=True)
        return _Timed(result[0], events, [name for name, _ in ready])

    def forget(self) -> None:
        """Drop all graphs, as memory that they point to is freed."""
        for timed in self._graphs.values():
            self._driver.drop(timed.graph)
            for event in timed.events:
                self._driver.drop_event(event)
        self._graphs.clear()
