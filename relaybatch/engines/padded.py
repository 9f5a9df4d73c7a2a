"""Forward passes for models that need a cache and masks of their own: sliding windows, state spaces, hybrids.

Owns the general path: transformers' own cache, a two-dimensional mask, rows left-padded in one batch. Slower than
`slots`, and right for whatever the library supports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from relaybatch.engines.base import Tokens
from relaybatch.engines.slots import Places


class PaddedForward:
    """The forward passes of one batch; the same calls as `SlotForward`.

    `masks_steps`: the mask goes along with each step, not with the prompts alone, as models with a state want it.
    """

    def __init__(
        self, call: Callable[..., Tensor], device: torch.device, config: PreTrainedConfig, *, masks_steps: bool
    ) -> None:
        self.call, self.device, self.masks_steps = call, device, masks_steps
        self.cache = DynamicCache(config=config)
        self.computed_tokens = 0

    def read(self, prompts: Sequence[Tokens], most_new: int) -> Tensor:
        """Logits after each prompt, (rows, vocabulary); prompts come longest first."""
        width = len(prompts[0])
        ids = np.empty((len(prompts), width), dtype=np.int64)
        mask = np.zeros((len(prompts), width), dtype=np.int64)
        for i, prompt in enumerate(prompts):
            ids[i, : width - len(prompt)] = prompt[0]
            ids[i, width - len(prompt) :] = prompt
            mask[i, width - len(prompt) :] = 1
        self.mask = torch.as_tensor(mask, device=self.device)
        positions = (self.mask.cumsum(-1) - 1).clamp_(min=0)
        self.positions = positions[:, -1:] + 1
        self.computed_tokens += ids.size
        return self.call(torch.as_tensor(ids, device=self.device), self.mask, positions, self.cache)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits after one more token for each row."""
        self.mask = torch.cat([self.mask, self.mask.new_ones((len(self.mask), 1))], 1)
        mask = self.mask if self.masks_steps else None
        logits = self.call(tokens[:, None], mask, self.positions, self.cache)
        self.positions = self.positions + 1
        self.computed_tokens += len(self.mask)
        return logits

    def drop(self, to: Places, source: Places, rows: int) -> None:
        """Put the rows `source` into the places `to`, then keep the first `rows`."""
        kept = np.arange(rows)
        kept[to] = source
        order = torch.as_tensor(kept, device=self.device)
        self.cache.reorder_cache(cast(torch.LongTensor, order))
        self.mask, self.positions = self.mask[order], self.positions[order]
