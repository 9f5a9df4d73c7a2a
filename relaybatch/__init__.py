"""relaybatch: offline batch routing of instructions over a ladder of language models, with a measured bill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Plan", "RelaybatchError", "Report", "RunResult", "__version__", "check", "plan", "run"]

if TYPE_CHECKING:
    from relaybatch.errors import RelaybatchError
    from relaybatch.job import RunResult, check, plan, run
    from relaybatch.report.bill import Plan, Report

_HOMES = {"RelaybatchError": "errors", "Plan": "report.bill", "Report": "report.bill"} | dict.fromkeys(
    ("RunResult", "check", "plan", "run"), "job"
)


def __getattr__(name: str) -> Any:
    """The public names, imported where they are first used: importing the package stays fast."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"relaybatch.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'relaybatch' has no attribute {name!r}")
