"""Engines: what runs a batch through a model. The names here are the public ones; torch loads with `load`."""

from __future__ import annotations

from typing import Literal

from relaybatch.engines.base import (
    BatchResult,
    BatchStats,
    Engine,
    EngineCompletion,
    EngineRequest,
    ModelFacts,
    ModelSettings,
    Prompt,
    PromptFormat,
    Sampling,
    Tokens,
)
from relaybatch.engines.checkpoint import inspect, resolve_model
from relaybatch.engines.memory import free_bytes

__all__ = [
    "BatchResult",
    "BatchStats",
    "Engine",
    "EngineCompletion",
    "EngineRequest",
    "ModelFacts",
    "ModelSettings",
    "Prompt",
    "PromptFormat",
    "Sampling",
    "Tokens",
    "free_bytes",
    "inspect",
    "load",
    "resolve_model",
]


def load(kind: Literal["torch"], settings: ModelSettings) -> Engine:
    """The loaded engine.

    Raises ModelError: the model's files are missing, damaged, or cannot be loaded.
    """
    from relaybatch.engines.torch import TorchEngine

    return TorchEngine(settings)
