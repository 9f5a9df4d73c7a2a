"""Forward passes over a cache of slots: rows stand left-padded in one block of memory, and finished rows make room.

Owns the fast path, for models whose layers all attend to everything before them. Each layer's keys and values lie in
one block that is written in place; a step reads a view of it, and a row that leaves is overwritten by the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from relaybatch.engines.base import Tokens

Places = NDArray[np.int64]

GROWTH = 128  # columns for answers that are allocated at first; doubled when they are full


@dataclass
class _Window:
    """The part of the block that a forward pass writes and reads; shared by all layers."""

    rows: int
    columns: int
    reading: bool = True
    first: int = 0
    last: int = 0
    column: int = 0
    left: int = 0


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, each (rows, heads, columns, size)."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, window: _Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        w = self.window
        # zeros, since what a mask hides must still be a number
        self.keys = key_states.new_zeros((w.rows, key_states.shape[1], w.columns, key_states.shape[3]))
        self.values = value_states.new_zeros((w.rows, value_states.shape[1], w.columns, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        w = self.window
        end = w.column + key_states.shape[2]
        self.keys[w.first : w.last, :, w.column : end] = key_states
        self.values[w.first : w.last, :, w.column : end] = value_states
        if w.reading:
            return key_states, value_states
        return self.keys[: w.last, :, w.left : end], self.values[: w.last, :, w.left : end]

    def move(self, to: Tensor, source: Tensor) -> None:
        w = self.window
        for block in (self.keys, self.values):
            block[to, :, w.left : w.column + 1] = block[source, :, w.left : w.column + 1]

    def grow(self, rows: int, columns: int, used: int) -> None:
        """Reallocate for `rows` rows, dropping what stands left of the window."""
        left = self.window.left
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty((rows, old.shape[1], columns, old.shape[3]))
            new[:, :, : used - left] = old[:rows, :, left:used]
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self.window.reading else self.window.column - self.window.left

    def get_max_length(self) -> int:
        return -1


class SlotForward:
    """The forward passes of one batch.

    `call` runs the model: (input_ids, attention_mask, position_ids, cache) → logits of the last position.
    """

    def __init__(self, call: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, prefill: int) -> None:
        self.call, self.device, self.dtype, self.prefill_tokens = call, device, dtype, prefill
        self.computed_tokens = 0

    def read(self, prompts: Sequence[Tokens], most_new: int) -> Tensor:
        """Logits after each prompt, (rows, vocabulary); prompts come longest first."""
        lengths = np.array([len(prompt) for prompt in prompts])
        width = int(lengths[0])
        self.pads = width - lengths
        self.end = width + most_new - 1
        self.window = _Window(rows=len(prompts), columns=min(self.end, width + GROWTH))
        self.cache = Cache(layer_class_to_replicate=cast(Any, partial(_Layer, self.window)))
        logits = []
        for first, last in self._groups(lengths):
            span = int(lengths[first])
            self.window.first, self.window.last = first, last
            self.window.column = width - span
            pads = torch.as_tensor(span - lengths[first:last], device=self.device)
            ids = np.empty((last - first, span), dtype=np.int64)
            for i, prompt in enumerate(prompts[first:last]):
                ids[i, : span - len(prompt)] = prompt[0]  # padding of the row's own: no other token touches it
                ids[i, span - len(prompt) :] = prompt
            positions = (torch.arange(span, device=self.device) - pads[:, None]).clamp_(min=0)
            mask = None if lengths[last - 1] == span else self._causal(pads, span)
            logits.append(self.call(torch.as_tensor(ids, device=self.device), mask, positions, self.cache))
            self.computed_tokens += ids.size
        self.window.reading, self.window.first = False, 0
        self.window.column = width - 1
        self.window.last = len(prompts)
        self.positions = torch.as_tensor(lengths, device=self.device)[:, None]
        self.mask = self._padding_mask(len(prompts))
        self._see()
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def step(self, tokens: Tensor) -> Tensor:
        """Logits after one more token for each row."""
        w = self.window
        w.column += 1
        if w.column == w.columns:
            self._grow(w.last)
        mask = self.mask[:, :, :, w.left : w.column + 1]
        logits = self.call(tokens[:, None], mask, self.positions, self.cache)
        self.positions += 1
        self.computed_tokens += w.last
        return logits

    def drop(self, to: Places, source: Places, rows: int) -> None:
        """Put the rows `source` into the places `to`, then keep the first `rows`."""
        if len(to):
            self.pads[to] = self.pads[source]
            to_, source_ = (
                torch.as_tensor(to, device=self.device),
                torch.as_tensor(source, device=self.device),
            )
            for layer in self._layers:
                layer.move(to_, source_)
            self.positions[to_] = self.positions[source_]
            self.mask[to_] = self.mask[source_]
        self.positions, self.mask, self.pads = self.positions[:rows], self.mask[:rows], self.pads[:rows]
        self.window.last = rows
        self._see()

    @property
    def _layers(self) -> list[_Layer]:
        return cast(list[_Layer], self.cache.layers)

    def _groups(self, lengths: Any) -> list[tuple[int, int]]:
        """Rows that are read at once: neighbours up to `prefill_tokens`, or with a whole prompt beyond that."""
        groups, first = [], 0
        while first < len(lengths):
            last = min(first + max(self.prefill_tokens // int(lengths[first]), 1), len(lengths))
            groups.append((first, last))
            first = last
        return groups

    def _causal(self, pads: Tensor, span: int) -> Tensor:
        """Additive mask (rows, 1, span, span). A padding slot sees itself, so that no row is without numbers."""
        column = torch.arange(span, device=self.device)
        seen = (column <= column[:, None]) & (column >= pads[:, None, None])
        seen |= column == column[:, None]
        return torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, -torch.inf)[:, None]

    def _padding_mask(self, rows: int) -> Tensor:
        """Additive mask (rows, 1, 1, columns) that hides the padding of each row."""
        column = torch.arange(self.window.columns, device=self.device)
        hidden = column < torch.as_tensor(self.pads, device=self.device)[:, None]
        mask = torch.zeros((rows, self.window.columns), dtype=self.dtype, device=self.device)
        return mask.masked_fill_(hidden, -torch.inf)[:, None, None]

    def _see(self) -> None:
        """Move the window's left edge to the longest row that is left; by 8, as fast kernels want it."""
        if len(self.pads):
            self.window.left = int(self.pads.min()) // 8 * 8

    def _grow(self, rows: int) -> None:
        w = self.window
        used = w.column
        self.end -= w.left
        columns = min((used - w.left) + max(GROWTH, used - w.left), self.end)
        for layer in self._layers:
            layer.grow(rows, columns, used)
        self.pads = self.pads - w.left
        w.rows, w.columns, w.column, w.left = rows, columns, used - w.left, 0
        self.mask = self._padding_mask(rows)
