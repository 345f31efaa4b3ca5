"""Ctrl-C and SIGTERM as a request to stop at the next good moment; the second one ends the program at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """A context in which the first signal sets ``number`` and calls ``tell``, and the next has its usual effect.

    In a thread that is not the main one signals are left alone.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self.number: int | None = None
        self._tell = tell
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """What a shell expects of a program that a signal ended: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + (self.number or 0)

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self._tell()
