"""The next token of each row, greedy or sampled, with its log-probability and the entropy it was drawn from.

Owns the arithmetic on logits. A row's draw is a function of (seed, row, step), so it does not depend on its batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from relaybatch.engines.base import Sampling

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed number


class Choice(NamedTuple):
    """Each of shape (rows,). Log-probability and entropy (nats) are NaN where the logits are no numbers."""

    tokens: Tensor
    logprobs: Tensor
    entropies: Tensor


def choose(logits: Tensor, sampling: Sampling, keys: Tensor, step: int) -> Choice:
    """The next tokens for `logits` (rows, vocabulary); `keys` (rows,) come from `row_keys`."""
    values = logits.float()
    scores = torch.log_softmax(values, -1)
    tokens = values.argmax(-1) if sampling.temperature == 0 else _draw(values, sampling, keys, step)
    logprobs = scores.gather(1, tokens[:, None]).squeeze(1)
    return Choice(tokens, logprobs, torch.special.entr(scores.exp_()).sum(-1))


def row_keys(rows: Tensor, seed: int) -> Tensor:
    """A key for each row number (int64), from which its draws follow."""
    return _mixed(rows * _GOLDEN + _mixed(torch.full_like(rows, seed)))


def _draw(values: Tensor, sampling: Sampling, keys: Tensor, step: int) -> Tensor:
    scaled = values / sampling.temperature
    order = None
    if sampling.top_k or sampling.top_p < 1:
        most = min(sampling.top_k or values.shape[-1], values.shape[-1])
        scaled, order = torch.topk(scaled, most) if sampling.top_k else torch.sort(scaled, dim=-1, descending=True)
    mass = torch.softmax(scaled, -1)
    if sampling.top_p < 1:
        mass = mass.masked_fill(mass.cumsum(-1) - mass >= sampling.top_p, 0)
    reach = mass.cumsum(-1)
    target = _uniform(keys, step)[:, None] * reach[:, -1:]
    at = torch.searchsorted(reach, target, right=True).clamp_(max=reach.shape[-1] - 1)
    return (at if order is None else order.gather(1, at)).squeeze(1)


def _uniform(keys: Tensor, step: int) -> Tensor:
    """A number in (0, 1) for each key at this step."""
    strides = torch.full_like(keys, step) * _GOLDEN  # a tensor, whose product wraps around as it should
    return (((_mixed(keys + strides) >> 40) & 0xFFFFFF).float() + 0.5) / 2**24


def _mixed(x: Tensor) -> Tensor:
    """Well-spread bits of int64 numbers. Source: Steele et al. (2014), SplitMix64."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & (2**33 - 1))
