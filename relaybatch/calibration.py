"""Calibration: turning a model's raw scores into probabilities that hold, with lower bounds; group means.

Owns small-sample statistics on arrays. Does not know tiers, prompts or XGBoost.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

FLOOR, CEILING = 0.005, 0.995
LOW_Z = 1.2816  # one-sided 90%
BIN_ROWS = 30
Array = NDArray[np.float64]


def logit(p: NDArray[np.floating]) -> Array:
    clipped = np.clip(np.asarray(p, dtype=np.float64), 1e-6, 1 - 1e-6)
    return np.asarray(np.log(clipped / (1 - clipped)))


def expit(z: NDArray[np.floating]) -> Array:
    return np.asarray(1 / (1 + np.exp(-np.clip(np.asarray(z, dtype=np.float64), -30, 30))))


def log_loss(p: Array, y: Array) -> float:
    """Mean log loss of forecasts p (0..1) of outcomes y (0..1)."""
    clipped = np.clip(p, FLOOR, CEILING)
    return float(-np.mean(y * np.log(clipped) + (1 - y) * np.log(1 - clipped)))


class Curve(BaseModel):
    """A map from raw scores (0..1) to calibrated quality, and the rows that stand behind each part of it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: Literal["platt", "isotonic"]
    """`platt`: expit(slope · logit(raw) + shift); `isotonic`: a step-wise rising map, linear between steps."""
    slope: float = 1.0
    """Of `platt`: below 1 draws forecasts to the mean."""
    shift: float = 0.0
    """Of `platt`, on the logit scale."""
    raw: list[float] = Field(default_factory=list)
    """Of `isotonic`: raw scores at the steps."""
    quality: list[float] = Field(default_factory=list)
    """Of `isotonic`: quality at the steps."""
    edges: list[float] = Field(default_factory=list)
    """Inner edges of the bins of calibrated quality that `lower` counts rows in."""
    counts: list[float] = Field(default_factory=list)
    """Rows in each bin (one more than edges)."""

    def __call__(self, raw: NDArray[np.floating]) -> Array:
        """Calibrated quality of raw scores, within [0.005, 0.995]."""
        if self.kind == "platt":
            p = expit(self.slope * logit(raw) + self.shift)
        else:
            p = np.interp(np.asarray(raw, dtype=np.float64), self.raw, self.quality)
        return np.asarray(np.clip(p, FLOOR, CEILING))

    def lower(self, quality: Array, group_rows: Array) -> Array:
        """The lower 90% limit (one-sided) of calibrated quality, given each row's rows of its group.

        Wilson limit of `quality` at an effective number of rows: the harmonic sum of the calibration bin's rows
        and the group's (plus 10 for what all groups share), since both have to hold.
        Source: Wilson (1927), Probable Inference, the Law of Succession, and Statistical Inference.
        """
        counts = np.asarray(self.counts)[np.searchsorted(self.edges, quality, side="right")]
        rows = 1 / (1 / np.maximum(counts, 1.0) + 1 / (group_rows + 10.0))
        return np.minimum(wilson_lower(quality, rows), quality)


def wilson_lower(p: Array, rows: Array) -> Array:
    """The lower limit of a share p seen in a number of rows, at LOW_Z."""
    z2 = LOW_Z**2
    spread = LOW_Z * np.sqrt(p * (1 - p) / rows + z2 / (4 * rows**2))
    return np.asarray(np.clip((p + z2 / (2 * rows) - spread) / (1 + z2 / rows), 0.0, 1.0))


def fit_curve(raw: Array, y: Array, weights: Array, folds: NDArray[np.int64]) -> Curve:
    """The better of Platt scaling and isotonic regression by cross-validated log loss; mean(curve(raw)) = mean(y).

    raw: out-of-fold scores (m,); y: outcomes 0..1; folds: fold of each row, kept whole in the cross-validation.
    Sources: Platt (1999), Probabilistic Outputs for SVMs; Zadrozny & Elkan (2002), Transforming Scores.
    """
    kinds: tuple[Literal["platt", "isotonic"], ...] = ("platt", "isotonic")
    losses = {}
    for kind in kinds:
        held = np.empty(len(y))
        for k in np.unique(folds):
            out = folds == k
            held[out] = _fit(kind, raw[~out], y[~out], weights[~out])(raw[out]) if (~out).any() else y.mean()
        losses[kind] = float(np.average(_losses(held, y), weights=weights))
    # isotonic regression has many steps to spend on a small sample: it must earn them
    kind = "isotonic" if losses["isotonic"] < losses["platt"] - 0.002 else "platt"
    curve = _fit(kind, raw, y, weights)
    p = curve(raw)
    order = np.argsort(p, kind="stable")
    total = weights.sum()
    bins = max(1, min(10, int(total // BIN_ROWS)))
    position = np.cumsum(weights[order]) / total
    edges = [float(p[order][np.searchsorted(position, b / bins)]) for b in range(1, bins)]
    edges = sorted(set(edges))
    counts = np.bincount(np.searchsorted(edges, p, side="right"), weights=weights, minlength=len(edges) + 1)
    return curve.model_copy(update={"edges": edges, "counts": counts.tolist()})


def _losses(p: Array, y: Array) -> Array:
    clipped = np.clip(p, FLOOR, CEILING)
    return np.asarray(-(y * np.log(clipped) + (1 - y) * np.log(1 - clipped)))


def _fit(kind: Literal["platt", "isotonic"], raw: Array, y: Array, weights: Array) -> Curve:
    if kind == "platt":
        slope, shift = _platt(logit(raw), y, weights)
        return Curve(kind="platt", slope=slope, shift=shift)
    from sklearn.isotonic import IsotonicRegression

    # one pseudo-row of the mean at each end keeps the ends off 0 and 1
    mean = float(np.average(y, weights=weights))
    x = np.concatenate([[raw.min()], raw, [raw.max()]])
    model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
    model.fit(x, np.concatenate([[mean], y, [mean]]), np.concatenate([[1.0], weights, [1.0]]))
    return Curve(
        kind="isotonic",
        raw=[float(v) for v in model.X_thresholds_],
        quality=[float(v) for v in model.y_thresholds_],
    )


def _platt(z: Array, y: Array, weights: Array, pull: float = 1.0) -> tuple[float, float]:
    """Slope and shift by Newton's method; the slope is drawn to 1 by `pull` pseudo-information and kept ≥ 0."""
    slope, shift = 1.0, 0.0
    for fixed in (False, True):
        for _ in range(50):
            p = expit(slope * z + shift)
            w = weights * p * (1 - p) + 1e-9
            g = np.array([np.sum(weights * (y - p) * z) - pull * (slope - 1), np.sum(weights * (y - p))])
            h = np.array([[np.sum(w * z * z) + pull, np.sum(w * z)], [np.sum(w * z), np.sum(w)]])
            step = np.array([0.0, g[1] / h[1, 1]]) if fixed else np.linalg.solve(h, g)
            step = np.clip(step, -2.0, 2.0)
            slope, shift = slope + step[0], shift + step[1]
            if np.abs(step).max() < 1e-9:
                break
        if slope >= 0 or fixed:
            break
        slope = 0.0  # scores that rank backwards are worth no more than the mean
    return float(slope), float(shift)


class GroupMeans(BaseModel):
    """Mean outcome by group, shrunk to the mean of all rows by the size of the group."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    mean: float
    """Mean outcome of all rows."""
    strength: float
    """Rows that the mean of all stands for against a group's own rows."""
    means: list[float]
    """Shrunken mean of each known group."""
    rows: list[float]
    """Rows of each known group."""


def group_means(y: Array, codes: NDArray[np.int64], groups: int) -> GroupMeans:
    """Empirical-Bayes means of `groups` groups; codes: the group of each outcome.

    Between-group variance by moments. Source: Efron & Morris (1975), Data Analysis Using Stein's Estimator.
    """
    total = np.bincount(codes, weights=y, minlength=groups)
    rows = np.bincount(codes, minlength=groups).astype(np.float64)
    mean = float((y.sum() + 0.5) / (len(y) + 1))
    seen = rows > 0
    own = np.where(seen, total / np.maximum(rows, 1), mean)
    within = max(float(np.sum((y - own[codes]) ** 2) / max(len(y) - seen.sum(), 1)), 1e-6)
    n0 = (len(y) - np.sum(rows**2) / max(len(y), 1)) / max(seen.sum() - 1, 1)
    spread = float(np.sum(rows * (own - y.mean()) ** 2) / max(seen.sum() - 1, 1))
    between = (spread - within) / n0 if n0 > 0 else 0.0
    strength = float(np.clip(within / between, 1.0, 1e6)) if between > 0 else 1e6
    shrunk = (total + strength * mean) / (rows + strength)
    return GroupMeans(mean=mean, strength=strength, means=shrunk.tolist(), rows=rows.tolist())
