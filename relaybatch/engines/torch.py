"""The torch engine: a Hugging Face causal model on a CPU or GPU, run batch by batch with its own loop.

Owns loading, the rows that cannot be run, running out of memory, and the batch's measurements.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from relaybatch.engines.base import (
    BatchResult,
    BatchStats,
    EngineCompletion,
    EngineRequest,
    ErrorCode,
    ModelFacts,
    ModelSettings,
    Prompt,
    PromptFormat,
    Sampling,
    Tokens,
)
from relaybatch.engines.checkpoint import inspect, model_path
from relaybatch.engines.decoding import Answer, Decoding, Ends, Forward, Line
from relaybatch.engines.loading import ForwardNames, load_model, pick_device
from relaybatch.engines.padded import PaddedForward
from relaybatch.engines.prompting import Prompting
from relaybatch.engines.slots import SlotForward
from relaybatch.errors import ModelError

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


class TorchEngine:
    """A loaded model.

    Raises ModelError: its files are missing or damaged, or the library cannot load them.
    """

    def __init__(self, settings: ModelSettings) -> None:
        started = time.perf_counter()
        self.settings = settings
        facts = inspect(settings)
        path = model_path(settings)
        self.prompting = Prompting(path, settings)
        self.device = pick_device(settings.device)
        self._model = load_model(path, settings, facts.dtype, self.device)
        self._names = ForwardNames.of(self._model)
        self._embedded: int = self._model.get_input_embeddings().weight.shape[0]
        self.dtype: torch.dtype = self._model.dtype
        self.memory = facts.memory
        self._new_forward, self._together, vocabulary = self._probe()
        self.facts = self._measured(facts, vocabulary)
        self.memory = self.facts.memory
        self._may_finish: dict[tuple[str, ...], NDArray[np.bool_]] = {}
        self.load_seconds = time.perf_counter() - started

    @property
    def model(self) -> Any:
        """The loaded transformers model."""
        return self._model

    def tokenize(
        self, prompts: Sequence[Prompt], *, prompt_format: PromptFormat = "chat", system: str | None = None
    ) -> list[Tokens]:
        """Token ids for each prompt; see `Engine.tokenize`.

        Raises ModelError: `chat` is asked of a model without a template.
        """
        return self.prompting.tokenize(prompts, prompt_format=prompt_format, system=system)

    def generate(self, batch: Sequence[EngineRequest], sampling: Sampling) -> BatchResult:
        """One completion for each request, in their order.

        When memory runs out, the rows not yet finished are run again in halves; one that never fits fails alone.
        """
        started = time.perf_counter()
        completions: dict[int, EngineCompletion] = {}
        lines = []
        for place, request in enumerate(batch):
            refused = self._refused(request)
            if refused:
                completions[place] = refused
            else:
                room = self.facts.context_tokens - len(request.token_ids)
                lines.append(Line(place, request.row, request.token_ids, min(request.max_new_tokens, room)))
        answers, computed, splits, unfit = self._answers(lines, sampling)
        completions |= self._completed(batch, answers, sampling.stop)
        for place in unfit:
            tokens = len(batch[place].token_ids)
            completions[place] = _failed(
                batch[place],
                "out_of_memory",
                f"{tokens} prompt tokens do not fit into memory, not even alone",
            )
        prompt_tokens = sum(len(line.prompt) for line in lines)
        output_tokens = sum(completion.output_tokens for completion in completions.values())
        kept = sum(len(batch[i].token_ids) + len(answer.tokens) - 1 for i, answer in answers.items())
        stats = BatchStats(
            seconds=time.perf_counter() - started,
            rows=len(batch),
            prompt_tokens=prompt_tokens,
            padding_tokens=computed - kept,
            computed_tokens=computed,
            output_tokens=output_tokens,
            splits=splits,
        )
        return BatchResult(tuple(completions[place] for place in range(len(batch))), stats)

    def close(self) -> None:
        """Let the weights go; the engine is of no use afterwards."""
        self._model = None
        self._release()

    def _refused(self, request: EngineRequest) -> EngineCompletion | None:
        """A failed completion for a row that cannot be run."""
        tokens, limit = len(request.token_ids), self.facts.context_tokens
        if not tokens:
            return _failed(request, "empty_prompt", "the prompt has no tokens")
        if tokens >= limit:
            return _failed(
                request,
                "overlength",
                f"{tokens:,} prompt tokens leave no room in a context of {limit:,} tokens",
            )
        highest, known = int(request.token_ids.max()), self._embedded
        if highest >= known:
            return _failed(
                request,
                "unknown_token",
                f"token {highest} is not among the model's {known:,}; its tokenizer is another model's",
            )
        return None

    def _answers(self, lines: Sequence[Line], sampling: Sampling) -> tuple[dict[int, Answer], int, int, list[int]]:
        """Answers by place, token slots computed, splits, and the places that never fit."""
        answers: dict[int, Answer] = {}
        computed, splits, unfit = 0, 0, []
        rows_at_once = max(len(lines), 1) if self._together else 1
        waiting = [list(lines[i : i + rows_at_once]) for i in range(0, len(lines), rows_at_once)]
        while waiting:
            part = waiting.pop()
            slots, fits = self._attempt(part, sampling, answers)
            computed += slots
            if fits:
                continue
            self._release()  # after the exception and its frames are gone, or the memory stays taken
            left = [line for line in part if line.place not in answers]
            if len(left) == 1 and len(part) == 1:
                unfit.append(left[0].place)
                continue
            splits += 1
            half = (len(left) + 1) // 2
            waiting += [rest for rest in (left[half:], left[:half]) if rest]
        return answers, computed, splits, unfit

    def _attempt(self, lines: Sequence[Line], sampling: Sampling, answers: dict[int, Answer]) -> tuple[int, bool]:
        """Run the lines as one batch: token slots computed, and whether memory sufficed."""
        forward = self._new_forward()
        decoding = Decoding(forward, sampling, self._ends(sampling.stop), self.device, self._look_every)
        try:
            self._check_memory(lines)
            with torch.inference_mode():
                decoding.run(lines, answers)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            return forward.computed_tokens, False
        return forward.computed_tokens, True

    def _check_memory(self, lines: Sequence[Line]) -> None:
        most = self.settings.max_batch_bytes
        if most is None:
            return
        needed = self.memory.batch_bytes(
            len(lines), max(len(line.prompt) for line in lines), max(line.limit for line in lines)
        )
        if needed > most:
            raise MemoryError(f"{needed:,} bytes needed, {most:,} allowed")

    def _release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @cached_property
    def _look_every(self) -> int:
        return 1 if self.device.type == "cpu" else 8

    def _call(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> Tensor:
        names = self._names
        arguments: dict[str, Any] = {names.cache: cache, "attention_mask": mask, "use_cache": True}
        if names.positions:
            arguments["position_ids"] = positions
        if names.logits_to_keep:
            arguments["logits_to_keep"] = 1
        logits: Tensor = self._model(input_ids=ids, **arguments).logits
        return logits[:, -1]

    def _ends(self, stop: tuple[str, ...]) -> Ends:
        if not stop:
            return Ends(self._end_tokens, None, lambda tokens: False)
        end_tokens = self._end_tokens.copy()
        end_tokens[[i for i in self.prompting.special_ids(stop) if i < len(end_tokens)]] = True
        window = 4 * max(len(text) for text in stop) + 8  # a character is at most four tokens

        def stopped(tokens: NDArray[np.int64]) -> bool:
            return any(
                text in self.prompting.texts([tokens[-window:].tolist()])[0]
                and text in self.prompting.texts([tokens.tolist()])[0]
                for text in stop
            )

        return Ends(end_tokens, self._candidates(stop), stopped)

    @cached_property
    def _end_tokens(self) -> NDArray[np.bool_]:
        ends = np.zeros(self.facts.vocabulary, dtype=np.bool_)
        ends[[i for i in self.facts.eos_token_ids if i < len(ends)]] = True
        return ends

    def _candidates(self, stop: tuple[str, ...]) -> NDArray[np.bool_]:
        if stop not in self._may_finish:
            self._may_finish[stop] = self.prompting.may_finish(stop, self.facts.vocabulary)
        return self._may_finish[stop]

    def _completed(
        self, batch: Sequence[EngineRequest], answers: dict[int, Answer], stop: tuple[str, ...]
    ) -> dict[int, EngineCompletion]:
        texts = self.prompting.texts([answer.tokens.tolist() for answer in answers.values()])
        completions = {}
        for (place, answer), text in zip(answers.items(), texts, strict=True):
            request = batch[place]
            if answer.broken:
                completions[place] = _failed(
                    request,
                    "nan_logits",
                    "the model's logits are no numbers",
                    output_tokens=len(answer.tokens),
                )
                continue
            cuts = [at for at in (text.find(each) for each in stop) if at >= 0]
            completions[place] = EngineCompletion(
                row=request.row,
                text=text[: min(cuts)] if cuts else text,
                input_tokens=len(request.token_ids),
                output_tokens=len(answer.tokens),
                finish_reason="stop" if answer.ended else "length",
                logprob_mean=float(answer.logprobs.mean()) if len(answer.tokens) else None,
                logprob_min=float(answer.logprobs.min()) if len(answer.tokens) else None,
                entropy_mean=float(answer.entropies.mean()) if len(answer.tokens) else None,
            )
        return completions

    def _measured(self, facts: ModelFacts, vocabulary: int) -> ModelFacts:
        """The facts with what only the loaded model and tokenizer tell."""
        tensors = {id(t): t for t in (*self._model.parameters(), *self._model.buffers())}.values()
        weight_bytes = sum(t.numel() * t.element_size() for t in tensors)
        size = torch.empty(0, dtype=self.dtype).element_size()
        scale = size * facts.memory.mask_bytes**-1
        kv_bytes = int(facts.kv_bytes_per_token * scale)
        configured = self._model.generation_config.eos_token_id
        more = configured if isinstance(configured, list) else [] if configured is None else [configured]
        return replace(
            facts,
            weight_bytes=weight_bytes,
            kv_bytes_per_token=kv_bytes,
            vocabulary=vocabulary,
            eos_token_ids=tuple(sorted({*facts.eos_token_ids, *more, *self.prompting.end_of_turn()})),
            memory=replace(
                facts.memory,
                weight_bytes=weight_bytes,
                kv_bytes_per_token=kv_bytes,
                row_bytes=vocabulary * (size + 3 * 4),
                mask_bytes=size,
            ),
        )

    def _probe(self) -> tuple[Callable[[], Forward], bool, int]:
        """How to make this model's forward passes, whether rows may run together, and the vocabulary's size.

        Takes the first way under which two prompts and three more tokens, read with padding and a cache, give what
        the model gives for each text read whole.

        Raises ModelError: there is none.
        """
        rng = np.random.default_rng(0)
        texts = [rng.integers(0, self._embedded, n).astype(np.int32) for n in (10, 6)]
        with torch.inference_mode():
            whole = torch.cat(
                [self._model(input_ids=self._batch_of(text), use_cache=False).logits[:, -4:].float() for text in texts]
            )
            spread = whole.std(-1)
            noise = 1e-3 if self.dtype == torch.float32 else 0.25
            for together in (True, False):
                for way in self._ways():
                    try:
                        parts = [texts] if together else [[text] for text in texts]
                        found = torch.cat([self._stepped(way(), part) for part in parts])
                    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError):
                        continue  # masks or a cache that this architecture does not take
                    if ((found - whole).square().mean(-1).sqrt() <= noise * spread).all():
                        return way, together, whole.shape[-1]
        raise ModelError(
            f"{self.settings.model}: {type(self._model).__name__} answers differently with a cache than without one",
            hint="try another release of transformers, or another model",
        )

    def _ways(self) -> list[Callable[[], Forward]]:
        """Ways to run the model, fastest first."""
        config = self._model.config
        layers = DynamicCache(config=config).layers
        plain = all(type(layer) is DynamicLayer for layer in layers)  # no windows, chunks or states
        slots = partial(SlotForward, self._call, self.device, self.dtype, self.memory.prefill_tokens)
        padded = [partial(PaddedForward, self._call, self.device, config, masks_steps=each) for each in (True, False)]
        return [slots, *padded] if plain else [*padded]

    def _stepped(self, forward: Forward, texts: Sequence[Tokens]) -> Tensor:
        """Logits of the last four tokens of each text, (rows, 4, vocabulary), the last three read one by one."""
        found = [forward.read([text[:-3] for text in texts], 4)]
        for i in (-3, -2, -1):
            found.append(forward.step(torch.tensor([int(text[i]) for text in texts], device=self.device)))
        return torch.stack(found, 1).float()

    def _batch_of(self, text: Tokens) -> Tensor:
        return torch.as_tensor(text.astype(np.int64)[None], device=self.device)


def _failed(request: EngineRequest, code: ErrorCode, message: str, *, output_tokens: int = 0) -> EngineCompletion:
    return EngineCompletion(
        row=request.row,
        text=None,
        input_tokens=len(request.token_ids),
        output_tokens=output_tokens,
        finish_reason="error",
        error_code=code,
        error=message,
    )


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(words in str(error).lower() for words in _NO_MEMORY)
