"""One batch from prompts to answers: read, then step by step, each row leaving when it is finished.

Owns the loop and the bookkeeping of rows. The forward passes are `slots`' or `padded`'s, the choice of tokens is
`choosing`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relaybatch.engines.base import Sampling, Tokens
from relaybatch.engines.choosing import choose, row_keys
from relaybatch.engines.slots import Places


class Forward(Protocol):
    """Forward passes of one batch over a cache that they keep."""

    computed_tokens: int

    def read(self, prompts: Sequence[Tokens], most_new: int) -> Tensor: ...
    def step(self, tokens: Tensor) -> Tensor: ...
    def drop(self, to: Places, source: Places, rows: int) -> None: ...


@dataclass(frozen=True)
class Line:
    """A row to be answered; `place` is its position among the requests of the batch."""

    place: int
    row: int
    prompt: Tokens
    limit: int


@dataclass(frozen=True)
class Answer:
    """A row's tokens, and for each its log-probability and the entropy it was chosen from."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32]
    ended: bool
    """An end token or a stop text was reached, not the limit."""
    broken: bool = False
    """The model gave logits that are no numbers."""


@dataclass(frozen=True)
class Ends:
    """What ends an answer besides its limit."""

    tokens: NDArray[np.bool_]
    """For each token id, whether it ends an answer."""
    candidates: NDArray[np.bool_] | None
    """For each token id, whether a stop text can end within it; None without stop texts."""
    stopped: Callable[[NDArray[np.int64]], bool]
    """Whether a row's tokens so far contain a stop text."""


class Decoding:
    """A batch on its way. `answers` fills as rows finish, so what is done outlives a later fault.

    `look_every`: steps between looks at what was generated; looking makes the host wait for the device.
    """

    def __init__(
        self, forward: Forward, sampling: Sampling, ends: Ends, device: torch.device, look_every: int = 1
    ) -> None:
        self.forward, self.sampling, self.ends = forward, sampling, ends
        self.device, self.look_every = device, look_every

    def run(self, lines: Sequence[Line], answers: dict[int, Answer]) -> None:
        """Answer all lines into `answers`, by place."""
        lines = sorted(lines, key=lambda line: (-len(line.prompt), line.place))
        rows, most = len(lines), max(line.limit for line in lines)
        self.places = np.array([line.place for line in lines])
        self.limits = np.array([line.limit for line in lines])
        self.keys = row_keys(torch.tensor([line.row for line in lines], device=self.device), self.sampling.seed)
        self.tokens = torch.zeros((rows, most), dtype=torch.int64, device=self.device)
        self.scores = torch.zeros((2, rows, most), dtype=torch.float32, device=self.device)
        logits = self.forward.read([line.prompt for line in lines], most)
        looked, done = 0, 0
        next_limit = int(self.limits.min())
        while True:
            last = self._record(logits, rows, done)
            done += 1
            if done - looked == self.look_every or done >= next_limit:
                kept = self._harvest(rows, looked, done, answers)
                looked = done
                if kept < rows:
                    if not kept:
                        return
                    rows, next_limit = kept, int(self.limits.min())
                    last = self.tokens[:rows, done - 1]
            logits = self.forward.step(last)

    def _record(self, logits: Tensor, rows: int, step: int) -> Tensor:
        choice = choose(logits, self.sampling, self.keys, step)
        self.tokens[:rows, step] = choice.tokens
        self.scores[0, :rows, step] = choice.logprobs
        self.scores[1, :rows, step] = choice.entropies
        return choice.tokens

    def _harvest(self, rows: int, looked: int, done: int, answers: dict[int, Answer]) -> int:
        """Take out the rows that ended in steps looked … done; how many are left."""
        fresh = self.tokens[:rows, looked:done].cpu().numpy()
        ended = self.ends.tokens[fresh]
        broken = np.isnan(self.scores[0, :rows, looked:done].cpu().numpy())
        over = ended | broken
        if self.ends.candidates is not None:
            for i, step in np.argwhere(self.ends.candidates[fresh] & ~over):
                if not over[i, :step].any() and self.ends.stopped(self._row(int(i), looked + int(step) + 1)):
                    ended[i, step] = over[i, step] = True
        finished = over.any(1) | (self.limits <= done)
        if not finished.any():
            return rows
        scores = self.scores[:, :rows].cpu().numpy()
        for i in np.flatnonzero(finished):
            at = int(over[i].argmax())
            count = looked + at + 1 if over[i].any() else int(self.limits[i])
            answers[int(self.places[i])] = Answer(
                tokens=self._row(int(i), count),
                logprobs=scores[0, i, :count].copy(),
                entropies=scores[1, i, :count].copy(),
                ended=bool(ended[i, at]),
                broken=bool(broken[i].any() and broken[i, at]),
            )
        return self._drop(finished, rows, done)

    def _row(self, i: int, count: int) -> NDArray[np.int64]:
        row: NDArray[np.int64] = self.tokens[i, :count].cpu().numpy().copy()
        return row

    def _drop(self, finished: NDArray[np.bool_], rows: int, done: int) -> int:
        """Fill the places of finished rows with the last that go on: few rows move, and nothing is left between."""
        kept = int((~finished).sum())
        to = np.flatnonzero(finished[:kept])
        source = kept + np.flatnonzero(~finished[kept:])
        if not kept:
            return 0
        if len(to):
            to_, source_ = (
                torch.as_tensor(to, device=self.device),
                torch.as_tensor(source, device=self.device),
            )
            self.tokens[to_, :done] = self.tokens[source_, :done]
            self.scores[:, to_, :done] = self.scores[:, source_, :done]
            self.keys[to_] = self.keys[source_]
            self.places[to], self.limits[to] = self.places[source], self.limits[source]
        self.places, self.limits, self.keys = self.places[:kept], self.limits[:kept], self.keys[:kept]
        self.forward.drop(to, source, kept)
        return kept
