"""The next token of each row, greedy or sampled, with its log-probability and the entropy it was drawn from.

Owns the arithmetic on logits. A row's draw is a function of (seed, row, step), so it does not depend on its batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from relaybatch.engines.base import Sampling

HEAD = 1024
CACHED = 2**18  # logits that stay in a core's cache while they are gone over
LEAST = -1e30  # in place of minus infinity, so that nothing times it is nothing
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed number


class Choice(NamedTuple):
    """Each of shape (rows,). Log-probability and entropy (nats) are NaN where the logits are no numbers."""

    tokens: Tensor
    logprobs: Tensor
    entropies: Tensor


def choose(logits: Tensor, sampling: Sampling, keys: Tensor, step: int) -> Choice:
    """The next tokens for `logits` (rows, vocabulary); `keys` (rows,) come from `row_keys`."""
    rows, vocabulary = logits.shape
    at_once = rows if logits.device.type != "cpu" else max(CACHED // vocabulary, 1)
    if rows <= at_once:
        return _choose(logits, sampling, keys, step)
    parts = zip(torch.split(logits, at_once), torch.split(keys, at_once), strict=True)
    return Choice(*map(torch.cat, zip(*(_choose(part, sampling, k, step) for part, k in parts), strict=True)))


def _choose(logits: Tensor, sampling: Sampling, keys: Tensor, step: int) -> Choice:
    values = logits.float().clamp(min=LEAST)
    probabilities = torch.softmax(values, -1)
    top = values.argmax(-1, keepdim=True)
    # from the largest, whose probability cannot vanish: log p of any token is its value less this
    normalizer = (values.gather(1, top) - probabilities.gather(1, top).log()).squeeze(1)
    tokens = top.squeeze(1) if sampling.temperature == 0 else _draw(values, sampling, keys, step)
    logprobs = values.gather(1, tokens[:, None]).squeeze(1) - normalizer
    entropies = normalizer - torch.linalg.vecdot(probabilities, values)
    return Choice(tokens, logprobs.clamp_(max=0), entropies.clamp_(min=0))


def row_keys(rows: Tensor, seed: int) -> Tensor:
    """A key for each row number (int64), from which its draws follow."""
    return _mixed(rows * _GOLDEN + _mixed(torch.full_like(rows, seed)))


def _draw(values: Tensor, sampling: Sampling, keys: Tensor, step: int) -> Tensor:
    scaled, order = values / sampling.temperature, None
    if sampling.top_k:
        scaled, order = torch.topk(scaled, min(sampling.top_k, scaled.shape[-1]))
    mass = torch.softmax(scaled, -1)
    if sampling.top_p < 1:
        if order is None:
            mass, order = _largest(mass, sampling.top_p)
        mass = mass.masked_fill(mass.cumsum(-1) - mass >= sampling.top_p, 0)
    reach = mass.cumsum(-1)
    target = _uniform(keys, step)[:, None] * reach[:, -1:]
    at = torch.searchsorted(reach, target, right=True).clamp_(max=reach.shape[-1] - 1)
    return (at if order is None else order.gather(1, at)).squeeze(1)


def _largest(mass: Tensor, wanted: float) -> tuple[Tensor, Tensor]:
    """Probabilities and their tokens, largest first, at least as many as reach `wanted`.

    Sorting a whole vocabulary takes twenty times as long as its head, which nearly always suffices.
    """
    if mass.shape[-1] > HEAD:
        head, order = torch.topk(mass, HEAD)
        if bool((head.sum(-1) >= wanted).all()):
            return head, order
    return torch.sort(mass, dim=-1, descending=True)


def _uniform(keys: Tensor, step: int) -> Tensor:
    """A number in (0, 1) for each key at this step."""
    strides = torch.full_like(keys, step) * _GOLDEN  # a tensor, whose product wraps around as it should
    return (((_mixed(keys + strides) >> 40) & 0xFFFFFF).float() + 0.5) / 2**24


def _mixed(x: Tensor) -> Tensor:
    """Well-spread bits of int64 numbers. Source: Steele et al. (2014), SplitMix64."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & (2**33 - 1))
