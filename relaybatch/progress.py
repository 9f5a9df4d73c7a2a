"""Progress for people: a bar with rate and time left on a terminal, a quiet line a leg where there is none."""

from __future__ import annotations

import sys
import time
from typing import IO, Any


class Progress:
    """Shows how far a leg is, on standard error. `level`: -1 nothing, 0 legs, 1 details."""

    def __init__(self, *, level: int = 0, file: IO[str] | None = None) -> None:
        self.level = level
        self._file = file or sys.stderr
        self._terminal = self._file.isatty()
        self._bar: Any = None
        self._began = 0.0
        self._label = ""
        self._rows = 0

    def say(self, text: str, *, level: int = 0) -> None:
        """Write a line, if the level asks for it."""
        if self.level >= level:
            print(text, file=self._file, flush=True)

    def start(self, label: str, rows: int, done: int = 0) -> None:
        """Begin a leg of `rows` rows, `done` of them finished by an earlier process."""
        self._label, self._rows, self._began = label, rows, time.monotonic()
        if self._terminal and self.level >= 0:
            from tqdm import tqdm

            self._bar = tqdm(total=rows, initial=done, desc=label, unit="row", file=self._file, leave=True)

    def advance(self, rows: int) -> None:
        """Count rows as finished."""
        if self._bar is not None:
            self._bar.update(rows)

    def finish(self) -> None:
        """End the leg."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif self._label:
            self.say(f"{self._label}: {self._rows:,} rows in {time.monotonic() - self._began:.1f} s")
        self._label = ""


class Stop:
    """Whether the run was asked to stop: SIGINT and SIGTERM let the batch in flight finish, for up to GRACE seconds."""

    GRACE = 25  # schedulers kill after 60 s; the batch in flight is dropped before that

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        import signal
        import threading

        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._asked)
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._overdue)
        return self

    def __exit__(self, *_: object) -> None:
        import signal

        if self._before:
            signal.alarm(0)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def check(self) -> None:
        """Raise InterruptedRunError if a stop was asked for."""
        if self.signum is not None:
            raise self._error()

    def _asked(self, signum: int, _frame: object) -> None:
        import signal

        if self.signum is not None:
            raise self._error()
        self.signum = signum
        signal.alarm(self.GRACE)

    def _overdue(self, _signum: int, _frame: object) -> None:
        raise self._error()

    def _error(self) -> Exception:
        from relaybatch.errors import InterruptedRunError

        assert self.signum is not None
        name = {2: "SIGINT", 15: "SIGTERM"}.get(self.signum, str(self.signum))
        return InterruptedRunError(
            f"stopped by {name}: finished rows are kept; run the same command again to go on", signum=self.signum
        )
