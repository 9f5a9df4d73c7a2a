"""Tier profiles: the seconds and USD that a row takes on a tier, fitted to measured batches.

Owns speed and price arithmetic. How many tokens an answer will have is forecast's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

PROMPT_SHARE = 0.1
"""Time of a prompt token over an output token's, where the batches do not tell."""
PRIOR_BATCHES = 1.0
OUTLIER = 1.5
"""A batch that took this many times what the others foretell is set aside as warm-up."""
Array = NDArray[np.float64]


class TierProfile(BaseModel):
    """How fast a tier is, from its measured batches."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    seconds_per_prompt_token: float = Field(ge=0)
    """Seconds of batch time a prompt token takes, other rows sharing the batch."""
    seconds_per_output_token: float = Field(ge=0)
    """Seconds of batch time an output token takes, other rows sharing the batch."""
    seconds_per_batch: float = Field(ge=0)
    """Seconds that each batch takes whatever its tokens."""
    rows_per_batch: float = Field(gt=0)
    """Mean rows of a measured batch: a row's share of `seconds_per_batch` is one over this."""
    warmup_seconds: float = Field(0.0, ge=0)
    """Seconds by which a batch set aside as an outlier (often the first) exceeded the fit; no row's share."""
    rows: int = Field(ge=0)
    """Rows in the measured batches."""
    batches: int = Field(ge=0)
    """Measured batches."""


@dataclass(frozen=True)
class Price:
    """What a tier costs, in USD: by the hour of its device, or by a million tokens in and out."""

    usd_per_hour: float | None = None
    usd_per_million_input_tokens: float = 0.0
    usd_per_million_output_tokens: float = 0.0


def fit_profile(seconds: ArrayLike, prompt_tokens: ArrayLike, output_tokens: ArrayLike, rows: ArrayLike) -> TierProfile:
    """The profile of a tier from B measured batches: wall seconds, prompt and output tokens, rows; each (B,).

    Non-negative least squares on relative errors, drawn to seconds in proportion to tokens by a pseudo-batch;
    a batch far slower than the rest is set aside. The fitted seconds of the measured batches plus
    `warmup_seconds` add up to the measured seconds.
    Source: Lawson & Hanson (1974), Solving Least Squares Problems.
    """
    taken, prompt, output, count = (
        np.atleast_1d(np.asarray(a, dtype=np.float64)) for a in (seconds, prompt_tokens, output_tokens, rows)
    )
    usable = np.isfinite(taken) & (taken >= 0) & (count > 0)
    taken, prompt, output, count = taken[usable], prompt[usable], output[usable], count[usable]
    if taken.sum() <= 0:
        return TierProfile(
            seconds_per_prompt_token=0.0,
            seconds_per_output_token=0.0,
            seconds_per_batch=0.0,
            rows_per_batch=float(count.mean()) if len(count) else 1.0,
            rows=int(count.sum()),
            batches=len(taken),
        )
    design = np.stack([prompt, output, np.ones_like(taken)], axis=1)
    slow = _slow_batch(design, taken)
    keep = np.arange(len(taken)) != slow
    rates = _rates(design[keep], taken[keep])
    fitted = design @ rates
    warmup = 0.0 if slow is None else float(taken[slow] - fitted[slow])
    rates = rates * ((taken.sum() - warmup) / fitted.sum())
    return TierProfile(
        seconds_per_prompt_token=float(rates[0]),
        seconds_per_output_token=float(rates[1]),
        seconds_per_batch=float(rates[2]),
        rows_per_batch=float(count.mean()),
        warmup_seconds=warmup,
        rows=int(count.sum()),
        batches=len(taken),
    )


def _slow_batch(design: Array, taken: Array) -> int | None:
    """The batch that took over OUTLIER times what the others foretell for it, if there is one."""
    if len(taken) < 3:
        return None
    tokens = design[:, 0] * PROMPT_SHARE + design[:, 1]
    slowest = np.argsort(-taken / np.maximum(tokens, 1.0), kind="stable")[:3]
    excess = {}
    for batch in [*slowest.tolist(), 0]:
        # judged by a fit without it: a slow batch drags its own fit along
        others = np.arange(len(taken)) != batch
        if taken[others].sum() > 0:
            foretold = float(design[batch] @ _rates(design[others], taken[others]))
            if taken[batch] > OUTLIER * foretold:
                excess[batch] = float(taken[batch]) - foretold
    return max(excess, key=lambda batch: excess[batch]) if excess else None


def _rates(design: Array, taken: Array) -> Array:
    from scipy.optimize import nnls

    weighted = design[:, 0] * PROMPT_SHARE + design[:, 1]
    if weighted.sum() <= 0:
        return np.array([0.0, 0.0, taken.mean()])
    per_token = float(np.median(taken / np.where(weighted > 0, weighted, np.inf)))
    if per_token <= 0:
        per_token = taken.sum() / weighted.sum()
    prior = np.array([PROMPT_SHARE * per_token, per_token, 0.0])
    # every row and every prior is scaled to about 1: relative errors, and the same pull on each rate
    expected = np.maximum(design @ prior, 1e-12)
    typical = expected.mean()
    pull = np.sqrt(PRIOR_BATCHES) * np.diag(design.mean(axis=0) / typical)
    system = np.concatenate([design / expected[:, None], pull])
    target = np.concatenate([taken / expected, pull @ prior])
    rates, _ = nnls(system, target)
    if rates.sum() <= 0:
        return prior
    return np.asarray(rates, dtype=np.float64)


def seconds(
    prompt_tokens: NDArray[np.integer | np.floating],
    output_tokens: NDArray[np.integer | np.floating],
    profiles: Sequence[TierProfile],
) -> Array:
    """Seconds (N, T) that each row takes on each tier: its tokens' and its share of a batch.

    prompt_tokens: (N,) for all tiers or (N, T); output_tokens: (N, T).
    """
    prompt = np.asarray(prompt_tokens, dtype=np.float64)
    prompt = prompt[:, None] if prompt.ndim == 1 else prompt
    per_prompt = np.array([p.seconds_per_prompt_token for p in profiles])
    per_output = np.array([p.seconds_per_output_token for p in profiles])
    per_row = np.array([p.seconds_per_batch / p.rows_per_batch for p in profiles])
    return np.asarray(prompt * per_prompt + np.asarray(output_tokens, np.float64) * per_output + per_row)


def cost_usd(
    prompt_tokens: NDArray[np.integer | np.floating],
    output_tokens: NDArray[np.integer | np.floating],
    row_seconds: Array,
    prices: Sequence[Price],
) -> Array:
    """USD (N, T) of each row on each tier: by its seconds where a tier is paid by the hour, else by tokens.

    prompt_tokens: (N,) or (N, T); output_tokens, row_seconds: (N, T).
    """
    prompt = np.asarray(prompt_tokens, dtype=np.float64)
    prompt = prompt[:, None] if prompt.ndim == 1 else prompt
    hourly = np.array([p.usd_per_hour if p.usd_per_hour is not None else 0.0 for p in prices])
    by_token = np.array([1e-6 if p.usd_per_hour is None else 0.0 for p in prices])
    per_input = by_token * [p.usd_per_million_input_tokens for p in prices]
    per_output = by_token * [p.usd_per_million_output_tokens for p in prices]
    tokens = prompt * per_input + np.asarray(output_tokens, dtype=np.float64) * per_output
    return np.asarray(row_seconds * (hourly / 3600.0) + tokens)
