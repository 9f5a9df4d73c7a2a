"""Prompts: messages to text by the chat template, text to token ids, token ids back to text.

Owns the tokenizer. Knows nothing of batches and weights.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relaybatch.engines.base import ModelSettings, Prompt, PromptFormat, Tokens
from relaybatch.engines.checkpoint import template_text
from relaybatch.engines.quickgguf import quick_reading
from relaybatch.errors import ModelError

_MARK = "\u2063relaybatch\u2063"  # a text no template contains


class Prompting:
    """A model's tokenizer with its chat template.

    Raises ModelError: the tokenizer cannot be loaded.
    """

    def __init__(self, path: Path, settings: ModelSettings) -> None:
        self.path = path
        self.tokenizer = _load(path, settings)
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:  # each call would do this, and two threads at once would fail at it
            backend.no_truncation()
            backend.no_padding()
        # a longer prompt is refused by the engine, row by row; the library would only warn
        self.tokenizer.model_max_length = sys.maxsize
        template = template_text(settings)
        if template is not None:
            self.tokenizer.chat_template = template
        self.has_template = bool(self.tokenizer.chat_template)

    def tokenize(
        self, prompts: Sequence[Prompt], *, prompt_format: PromptFormat = "chat", system: str | None = None
    ) -> list[Tokens]:
        """Token ids for each prompt; see `Engine.tokenize`.

        Raises ModelError: `chat` is asked of a model without a template.
        """
        if not prompts:
            return []
        if prompt_format == "plain":
            texts = [_plain(prompt, system) for prompt in prompts]
        elif self.has_template:
            texts = [self._render(_messages(prompt, system)) for prompt in prompts]
        else:
            raise ModelError(
                f"{self.path}: the model has no chat template, so it cannot take messages or chat prompts",
                hint="give the tier a `chat_template` (text or a file's path), or set `prompt_format: plain`",
            )
        # a template writes the beginning-of-text token itself
        encoded = self.tokenizer(texts, add_special_tokens=prompt_format == "plain", return_attention_mask=False)
        return [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]

    def texts(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """The answers' text, without special tokens."""
        return [str(text) for text in self.tokenizer.batch_decode(list(answers), skip_special_tokens=True)]

    def end_of_turn(self) -> set[int]:
        """Special tokens that end an answer: the tokenizer's own, and the one the template puts after one."""
        ends = {self.tokenizer.eos_token_id} - {None}
        if self.has_template:
            turn = [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _MARK}]
            after = self._render(turn, answered=True).rpartition(_MARK)[2]
            ids = self.tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
            special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
            ends.update(ids[:1] if ids and ids[0] in special else [])
        return {int(i) for i in ends}

    def special_ids(self, texts: Sequence[str]) -> set[int]:
        """Ids of the special tokens among the texts; decoding leaves these out, so no text shows them."""
        return {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special and str(token) in texts}

    def may_finish(self, stop: Sequence[str], vocabulary: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For each token id, whether a stop text can end within it, (vocabulary,).

        A token that is only part of a character, or nothing alone, can always.
        """
        pieces = self.tokenizer.batch_decode([[i] for i in range(vocabulary)])
        last = {text[-1] for text in stop}
        spaced = any(text[-1].isspace() for text in stop)  # decoders drop a leading blank of a token alone
        return np.fromiter(
            (spaced or not piece or "\ufffd" in piece or not last.isdisjoint(piece) for piece in pieces),
            dtype=np.bool_,
            count=vocabulary,
        )

    def _render(self, messages: list[dict[str, str]], *, answered: bool = False) -> str:
        """The conversation by the template; nothing where the template refuses it."""
        from jinja2 import TemplateError

        for attempt in (messages, _system_in_user(messages)):
            try:
                return str(
                    self.tokenizer.apply_chat_template(attempt, tokenize=False, add_generation_prompt=not answered)
                )
            except TemplateError:
                continue
        return ""


def _load(path: Path, settings: ModelSettings) -> Any:
    from transformers import AutoTokenizer

    folder, file = (path.parent, path.name) if path.is_file() else (path, None)
    try:
        if file is None:
            return AutoTokenizer.from_pretrained(
                folder, trust_remote_code=settings.trust_remote_code, local_files_only=True
            )
        with quick_reading():
            return AutoTokenizer.from_pretrained(folder, gguf_file=file, local_files_only=True)
    except Exception as error:  # the library raises whatever its readers raise
        raise ModelError(
            f"{path}: the tokenizer cannot be loaded ({type(error).__name__}: {error})",
            hint="fetch the model again, or check that its tokenizer's files belong together",
        ) from error


def _plain(prompt: Prompt, system: str | None) -> str:
    text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    return f"{system}\n\n{text}" if system else text


def _messages(prompt: Prompt, system: str | None) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = [_message(message) for message in prompt]
    if system and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _message(message: Mapping[str, str]) -> dict[str, str]:
    return {"role": message["role"], "content": message["content"]}


def _system_in_user(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The same conversation for a template that knows no system role: its text goes before the user's first."""
    if len(messages) < 2 or messages[0]["role"] != "system":
        return messages
    first = {**messages[1], "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
    return [first, *messages[2:]]
