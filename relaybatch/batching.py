"""Batches: rows of like length together, sized by a memory model within a tier's bounds.

Owns the decision which rows run together and in which order. Pure functions of arrays: no device, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Index = NDArray[np.int64]

PADDING = 0.05  # most padding of a plan, as a share of the tokens it computes, where the bounds allow
_TOLERANCES = (1.0, 0.5, 0.3, 0.2, 0.15, 0.1, 0.075, PADDING)


@dataclass(frozen=True)
class MemoryModel:
    """What a batch takes on top of the weights, in bytes."""

    weight_bytes: int
    """The weights, resident as long as the model is loaded; no part of `batch_bytes`."""
    kv_bytes_per_token: int
    """Keys and values of one token over all layers."""
    activation_bytes_per_token: int
    """Passing results of one token while prompts are read."""
    row_bytes: int
    """One row's logits and their statistics."""
    mask_bytes: int = 4
    """One entry of an attention mask."""
    prefill_tokens: int = 1024
    """Prompt tokens that are read at once; a longer prompt is read whole."""

    def batch_bytes(self, rows: int, prompt_tokens: int, new_tokens: int) -> int:
        """Peak bytes of `rows` rows that are padded to `prompt_tokens` and grow by `new_tokens`."""
        return rows * self.row_bytes_of(prompt_tokens, new_tokens) + self.fixed_bytes(prompt_tokens)

    @property
    def slot_bytes(self) -> int:
        """Bytes that a row takes for each token of its length."""
        return self.kv_bytes_per_token + self.mask_bytes

    def row_bytes_of(self, prompt_tokens: int, new_tokens: int) -> int:
        """Bytes that a row of this length takes."""
        return self.row_bytes + (prompt_tokens + new_tokens) * self.slot_bytes

    def fixed_bytes(self, prompt_tokens: int) -> int:
        """Bytes that a batch takes whatever its rows: the prompts read at once."""
        at_once = max(prompt_tokens, self.prefill_tokens)
        return at_once * (self.activation_bytes_per_token + self.mask_bytes * prompt_tokens)


def plan_batches(
    prompt_tokens: ArrayLike,
    new_tokens: ArrayLike,
    *,
    bounds: tuple[int, int],
    memory: MemoryModel,
    free_bytes: int,
) -> list[Index]:
    """The rows' indices cut into batches, longest prompts first; each index stands in exactly one batch.

    `prompt_tokens` and `new_tokens` (forecast) have shape (N,). Rows are sorted by prompt length, then by
    forecast answer length. A batch never has more rows than `bounds[1]`, and fewer than `bounds[0]` only where
    memory forces it or rows run out. Padding stays within 5% of all tokens computed where `bounds[0]` allows,
    with as few batches as that takes. A row that does not fit into `free_bytes` gets a batch of its own.
    """
    least, most = bounds
    if not 1 <= least <= most:
        raise ValueError(f"batch bounds must be 1 <= min <= max, not {bounds}")
    prompt = np.asarray(prompt_tokens, dtype=np.int64)
    new = np.asarray(new_tokens, dtype=np.int64)
    if prompt.shape != new.shape or prompt.ndim != 1:
        raise ValueError(f"prompt_tokens and new_tokens must be vectors of one length, not {prompt.shape}, {new.shape}")
    if not len(prompt):
        return []
    order = np.lexsort((_falling(new), _falling(prompt)))
    cutter = _Cutter(prompt[order], new[order], least, most, memory, free_bytes)
    for tolerance in _TOLERANCES:
        cuts = cutter.cut(tolerance)
        if cutter.padding(cuts) <= PADDING * (cutter.padding(cuts) + cutter.useful):
            break
    return [order[a:b] for a, b in pairwise(cuts)]


def padding_share(batches: Sequence[Index], prompt_tokens: ArrayLike, new_tokens: ArrayLike = 0) -> float:
    """Padding as a share (0..1) of the tokens computed, when each batch is padded to its longest prompt.

    Without `new_tokens` (scalar, or shape (N,)) only prompts count as computed.
    """
    prompt = np.asarray(prompt_tokens, dtype=np.int64)
    new = np.broadcast_to(np.asarray(new_tokens, dtype=np.int64), prompt.shape)
    slots = sum(int(prompt[batch].max()) * len(batch) for batch in batches)
    used = sum(int(prompt[batch].sum()) for batch in batches)
    computed = slots + sum(int(new[batch].sum()) for batch in batches)
    return (slots - used) / computed if computed else 0.0


def _falling(values: Index) -> NDArray[Any]:
    """Keys whose rising order is the values' falling order; in 16 bits if they fit: those sort in linear time."""
    top = int(values.max())
    return (top - values).astype(np.uint16) if int(values.min()) >= 0 and top < 2**16 else top - values


class _Cutter:
    """Greedy cuts over rows that are sorted by falling prompt length."""

    def __init__(self, prompt: Index, new: Index, least: int, most: int, memory: MemoryModel, free_bytes: int) -> None:
        self.prompt, self.least, self.most = prompt, least, most
        self.memory, self.free_bytes = memory, free_bytes
        self.useful = int(prompt.sum() + new.sum())
        self.roomy = memory.batch_bytes(most, int(prompt[0]), int(new.max())) <= free_bytes
        self.lengths: list[int] = prompt.tolist()
        self.new: list[int] = new.tolist()
        self.total: list[int] = np.concatenate([[0], np.cumsum(prompt)]).tolist()

    def cut(self, tolerance: float) -> list[int]:
        """Cut points 0 … N; a batch takes the most rows whose padding share of prompts is within `tolerance`."""
        rows, most = len(self.lengths), self.most
        if self.roomy and tolerance >= 1:
            return self._balance_tail([*range(0, rows, most), rows])
        cuts, start = [0], 0
        while start < rows:
            room = min(most, rows - start)
            if not self.roomy:
                room = self._fitting(start, room)
            start += self._within(start, room, tolerance)
            cuts.append(start)
        return self._balance_tail(cuts)

    def padding(self, cuts: list[int]) -> int:
        """Padding tokens of the cuts."""
        points = np.asarray(cuts)
        return int((self.prompt[points[:-1]] * np.diff(points)).sum()) - self.total[-1]

    def _within(self, start: int, room: int, tolerance: float) -> int:
        """The most rows from `start`, between `least` and `room`, whose padding share is within `tolerance`.

        The share only grows with rows, since lengths fall: so halving finds the last that fits.
        """
        total, longest = self.total, self.lengths[start] * (1 - tolerance)
        if room <= self.least or total[start + room] - total[start] >= longest * room:
            return room
        low, high = self.least, room
        while high - low > 1:
            middle = (low + high) // 2
            if total[start + middle] - total[start] >= longest * middle:
                low = middle
            else:
                high = middle
        return low

    def _fitting(self, start: int, room: int) -> int:
        """The most rows from `start`, at least 1 and at most `room`, that fit into memory.

        Looks at each row of the batch once, so all batches together cost one pass over the rows.
        """
        prompt = self.lengths[start]
        spare, new, most_new = self.free_bytes - self.memory.fixed_bytes(prompt), self.new, 0
        fixed, slope = self.memory.row_bytes_of(prompt, 0), self.memory.slot_bytes
        for rows in range(1, room + 1):
            most_new = max(most_new, new[start + rows - 1])
            if rows * (fixed + slope * most_new) > spare:
                return max(rows - 1, 1)
        return room

    def _fits(self, start: int, stop: int) -> bool:
        new = max(self.new[start:stop])
        return self.memory.batch_bytes(stop - start, self.lengths[start], new) <= self.free_bytes

    def _balance_tail(self, cuts: list[int]) -> list[int]:
        """Put the last two batches together when the last is too small, if that fits; else share in halves."""
        if len(cuts) < 3 or cuts[-1] - cuts[-2] >= max(self.least, 2):
            return cuts
        start, stop = cuts[-3], cuts[-1]
        if stop - start <= self.most:
            joined = [*cuts[:-2], stop]
            padding = self.padding(joined)
            wanted = stop - cuts[-2] < self.least or padding <= PADDING * (padding + self.useful)
            return joined if wanted and self._fits(start, stop) else cuts
        middle = start + (stop - start + 1) // 2
        enough = stop - middle >= max(self.least, 2)
        return [*cuts[:-2], middle, stop] if enough and self._fits(middle, stop) else cuts
