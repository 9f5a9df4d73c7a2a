"""The exceptions a person sees, each with the exit code the command ends with.

RelaybatchError                    1  a fault of relaybatch's own
├── SpecError                      2  the job file or an option is wrong
├── InputError                     2  the input's shape is wrong
├── ModelError                     2  a tier's model cannot be used
├── PolicyError                    2  a saved policy cannot be used
├── OutputError                    1  results cannot be written (full disk, no permission)
├── JournalError                   1  the record of finished work cannot be read
├── FailedRowsError                3  more rows failed than `max_failed` allows
├── InfeasibleError                4  the budget or the quality target cannot be met
├── LockedError                   75  another run holds the lock
└── InterruptedRunError      130/143  stopped by SIGINT or SIGTERM; finished rows are kept
"""

from __future__ import annotations


class RelaybatchError(Exception):
    """A fault with a message for people: what is wrong, where, and what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return plain(f"{self.message}\n  → {self.hint}" if self.hint else self.message)


def plain(text: str) -> str:
    """Text whose control and direction characters cannot steer a terminal; newlines stay."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


class SpecError(RelaybatchError):
    """The job file or an option is wrong; `problems` holds every fault found, each with its place."""

    exit_code = 2

    def __init__(self, problems: list[str] | str, *, hint: str | None = None) -> None:
        self.problems = [problems] if isinstance(problems, str) else problems
        super().__init__("\n".join(self.problems), hint=hint)


class InputError(RelaybatchError):
    """The input is missing, unreadable or of the wrong shape."""

    exit_code = 2


class ModelError(RelaybatchError):
    """A tier's model is missing, broken or cannot do what the job asks of it."""

    exit_code = 2


class PolicyError(RelaybatchError):
    """A saved policy is damaged or was made for other features or tiers."""

    exit_code = 2


class OutputError(RelaybatchError):
    """A file of the run folder could not be written; names the path and the system's reason."""


class JournalError(RelaybatchError):
    """The journal of a run folder is damaged or of another version."""


class FailedRowsError(RelaybatchError):
    """The run finished, but more rows failed than `max_failed` allows."""

    exit_code = 3


class InfeasibleError(RelaybatchError):
    """No plan meets the limits; `nearest` is the closest figure of `limit` that can be met, in that limit's unit."""

    exit_code = 4

    def __init__(self, message: str, *, nearest: float | None = None, limit: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.nearest = nearest
        self.limit = limit


class LockedError(RelaybatchError):
    """Another run holds the lock of this run folder."""

    exit_code = 75


class InterruptedRunError(RelaybatchError):
    """The run was stopped by a signal (130 SIGINT, 143 SIGTERM); the same command resumes it."""

    def __init__(self, message: str, *, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum
