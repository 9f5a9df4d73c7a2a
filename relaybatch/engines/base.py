"""What every engine promises: its settings, requests, completions, measurements, and one small protocol.

Owns the records that pass between a leg and an engine. Imports no engine and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from relaybatch.batching import MemoryModel

Tokens = NDArray[np.int32]
Prompt = str | Sequence[Mapping[str, str]]
PromptFormat = Literal["chat", "plain"]
FinishReason = Literal["stop", "length", "error"]
ErrorCode = Literal["empty_prompt", "overlength", "unknown_token", "nan_logits", "out_of_memory"]


@dataclass(frozen=True)
class ModelSettings:
    """Which model, and how to load it."""

    model: str
    """Local folder, .gguf file or hub id (org/name); `resolve_model` makes it from what a job file says."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format. `auto`: the checkpoint's own, but on a CPU never float16, and bfloat16 only where it is fast."""
    device: str = "auto"
    """`auto` (cuda, mps or cpu, whichever is there), `cpu`, `cuda:0`, `mps`."""
    trust_remote_code: bool = False
    """Run Python code that lies beside the weights."""
    chat_template: str | None = None
    """Jinja template, or the path of a file with one; replaces the model's own."""
    revision: str | None = None
    """Revision of a hub model."""
    allow_pickle: bool = False
    """Load pickled weights (.bin), which can run code. Otherwise only safetensors and GGUF."""
    max_batch_bytes: int | None = None
    """Most memory of one batch by the memory model, in bytes; a larger batch is split as if memory had run out."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. A row's draws depend on (seed, row) only, not on its batch."""

    temperature: float = 0.0
    """0 takes the most probable token each time (greedy)."""
    top_p: float = 1.0
    """Sample from the fewest tokens whose probability reaches this."""
    top_k: int = 0
    """Sample from the k most probable tokens; 0: no limit."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Texts that end an answer; the answer is what stands before the first of them."""


@dataclass(frozen=True)
class EngineRequest:
    """One row for a batch. The same `row` gives the same draws in every batch."""

    row: int
    token_ids: Tokens
    max_new_tokens: int


@dataclass(frozen=True)
class EngineCompletion:
    """One row's answer. With `finish_reason` "error" there is no text, and `error_code` and `error` say why.

    `output_tokens` counts every token generated, the end-of-text token too. The log-probabilities (natural
    logarithm, of the chosen tokens) and the entropy (nats) are of the model's own distribution, before temperature
    and cuts, over those same tokens; None when there are none.
    """

    row: int
    text: str | None
    input_tokens: int
    output_tokens: int
    finish_reason: FinishReason
    logprob_mean: float | None = None
    logprob_min: float | None = None
    entropy_mean: float | None = None
    error_code: ErrorCode | None = None
    error: str | None = None


@dataclass(frozen=True)
class BatchStats:
    """What a batch took. computed = prompt + padding + output - (rows answered), when no split was needed.

    An answer's first token comes out of reading the prompt, so n tokens take n - 1 steps.
    """

    seconds: float
    """Wall time of `generate`."""
    rows: int
    """Rows given, failed ones too."""
    prompt_tokens: int
    """Prompt tokens of the rows that were run."""
    padding_tokens: int
    """Computed slots that held no token of any answer: prompt padding, and steps of rows already finished."""
    computed_tokens: int
    """All token slots that went through the model."""
    output_tokens: int
    """Tokens generated."""
    splits: int
    """How often a batch was halved because memory ran out."""


@dataclass(frozen=True)
class BatchResult:
    """Completions in the order of the requests, one each."""

    completions: tuple[EngineCompletion, ...]
    stats: BatchStats


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before its weights are loaded."""

    architecture: str
    parameters: int
    dtype: str
    """Number format of the weights by the files and the settings; GGUF counts as float32."""
    weight_bytes: int
    """Bytes of the weights in the number format they are run in."""
    kv_bytes_per_token: int
    """Keys and values of one token over all layers, in bytes."""
    context_tokens: int
    """Longest prompt and answer together."""
    vocabulary: int
    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
    """Every token that ends an answer."""
    fingerprint: str
    """BLAKE2b of the configuration, the tokenizer, the template and the weights' content (sampled above 64 MB)."""
    memory: MemoryModel


class Engine(Protocol):
    """A loaded model. One thread generates; `tokenize` may run in another meanwhile."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def memory(self) -> MemoryModel: ...

    @property
    def load_seconds(self) -> float: ...

    def tokenize(
        self, prompts: Sequence[Prompt], *, prompt_format: PromptFormat = "chat", system: str | None = None
    ) -> list[Tokens]:
        """Token ids for each prompt: a text, or a list of messages {role, content}.

        `chat` applies the chat template to the messages, a text being one message of the user's; `plain` takes the
        text as it is. `system` is put before every prompt that has no system message. A conversation that the
        template refuses (roles out of turn, say) gives no tokens, and `generate` then answers `empty_prompt`.
        """
        ...

    def generate(self, batch: Sequence[EngineRequest], sampling: Sampling) -> BatchResult:
        """One completion for each request, in their order. A bad row fails alone and never raises."""
        ...

    def close(self) -> None:
        """Let the weights go."""
        ...
