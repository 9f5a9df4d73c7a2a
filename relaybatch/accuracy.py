"""Accuracy: figures on how good a sample's out-of-fold forecasts were, for the report and the policy card."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from relaybatch.calibration import Array


class Accuracy(BaseModel):
    """How good out-of-fold quality forecasts were."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    rows: int
    """Graded rows."""
    auc: float | None
    """Area under the ROC curve of good (score ≥ 0.5) against bad answers; null with one class only."""
    brier: float
    """Mean squared error of the forecast."""
    brier_constant: float
    """Mean squared error of forecasting the mean score for every row."""
    calibration_error: float
    """Expected calibration error over ten bins of equal size: mean distance of forecast and score."""


class TierSummary(BaseModel):
    """What the sample says of a tier, and how well it can be foreseen."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    tier: str
    """The tier's name."""
    mean_score: float | None
    """Mean score of its graded rows; null with none."""
    before: Accuracy | None
    """Quality forecast from the prompt alone; null with too few rows for a model."""
    after: Accuracy | None
    """Quality forecast of its answer, with that answer's evidence and that of all cheaper tiers."""
    tokens_mean: float | None
    """Mean output tokens."""
    tokens_r2: float | None
    """Share of the variance of output tokens that the forecast explains out of fold."""
    tokens_mae: float | None
    """Mean absolute error of forecast output tokens, out of fold."""


class GainSummary(BaseModel):
    """How well the gain from a tier to the next is foreseen, out of fold."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    from_tier: str
    """The cheaper tier."""
    to_tier: str
    """The next tier of the ladder."""
    mean: float
    """Mean score gained."""
    top_half_before: float
    """Mean score gained on the half of rows with the largest forecast gain, from the prompt alone."""
    top_half_after: float
    """The same, with the evidence of the cheaper answer."""


class ForecastSummary(BaseModel):
    """How good the learned forecasts are, all out of fold: no row was forecast by a model that saw it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    rows: int
    """Rows of the sample."""
    prompts: int
    """Distinct prompts among them."""
    groups: int
    """Groups (coarse kinds) among them."""
    tiers: tuple[TierSummary, ...]
    """Tier by tier, cheapest first."""
    gains: tuple[GainSummary, ...]
    """Step by step up the ladder."""


def summarise(
    tiers: tuple[str, ...],
    prompt_keys: NDArray[Any],
    groups: NDArray[Any],
    scores: Array,
    output_tokens: Array,
    quality: Array,
    lengths: Array,
) -> ForecastSummary:
    """The figures of out-of-fold forecasts of n rows.

    scores, output_tokens (n, T): what happened, NaN where unknown; quality (T + 1, n, T): forecasts before any
    answer, then by the latest tier that answered; lengths (n, T): forecast output tokens.
    """
    summaries = []
    for j, tier in enumerate(tiers):
        graded = np.isfinite(scores[:, j])
        counted = np.isfinite(output_tokens[:, j])
        actual, forecast = output_tokens[counted, j], lengths[counted, j]
        variance = float(np.var(actual)) if counted.any() else 0.0
        summaries.append(
            TierSummary(
                tier=tier,
                mean_score=float(scores[graded, j].mean()) if graded.any() else None,
                before=_accuracy(quality[0, :, j], scores[:, j]),
                after=_accuracy(quality[j + 1, :, j], scores[:, j]),
                tokens_mean=float(actual.mean()) if counted.any() else None,
                tokens_r2=1 - float(np.mean((actual - forecast) ** 2)) / variance if variance > 0 else None,
                tokens_mae=float(np.mean(np.abs(actual - forecast))) if counted.any() else None,
            )
        )
    gains = []
    for j in range(len(tiers) - 1):
        gain = scores[:, j + 1] - scores[:, j]
        halves = []
        for state in (0, j + 1):
            foreseen = quality[state, :, j + 1] - quality[state, :, j]
            known = np.isfinite(gain) & np.isfinite(foreseen)
            order = np.argsort(-foreseen[known], kind="stable")
            halves.append(gain[known][order[: max(1, known.sum() // 2)]])
        if len(halves[0]) and len(halves[1]):
            gains.append(
                GainSummary(
                    from_tier=tiers[j],
                    to_tier=tiers[j + 1],
                    mean=float(np.nanmean(gain)),
                    top_half_before=float(halves[0].mean()),
                    top_half_after=float(halves[1].mean()),
                )
            )
    return ForecastSummary(
        rows=len(scores),
        prompts=len(np.unique(prompt_keys)),
        groups=len(np.unique(np.asarray(groups, dtype=str))),
        tiers=tuple(summaries),
        gains=tuple(gains),
    )


def _accuracy(forecast: Array, scores: Array) -> Accuracy | None:
    from sklearn.metrics import roc_auc_score

    known = np.isfinite(forecast) & np.isfinite(scores)
    if not known.any():
        return None
    p, y = forecast[known], scores[known]
    good = y >= 0.5
    bins = np.array_split(np.argsort(p, kind="stable"), min(10, len(p)))
    return Accuracy(
        rows=len(y),
        auc=float(roc_auc_score(good, p)) if 0 < good.sum() < len(good) else None,
        brier=float(np.mean((p - y) ** 2)),
        brier_constant=float(np.var(y)),
        calibration_error=float(sum(len(b) * abs(p[b].mean() - y[b].mean()) for b in bins) / len(p)),
    )
