"""Calibration: raw scores of all tiers into quality that holds, with lower limits; group means.

Owns small-sample statistics on arrays. Does not know tiers, prompts or XGBoost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

FLOOR, CEILING = 0.005, 0.995
LOW_Z = 1.2816  # one-sided 90%
BIN_ROWS = 30
Array = NDArray[np.float64]


def logit(p: NDArray[np.floating]) -> Array:
    clipped = np.clip(np.asarray(p, dtype=np.float64), 1e-6, 1 - 1e-6)
    return np.asarray(np.log(clipped / (1 - clipped)))


def expit(z: NDArray[np.floating]) -> Array:
    return np.asarray(1 / (1 + np.exp(-np.clip(np.asarray(z, dtype=np.float64), -30, 30))))


def log_loss(p: Array, y: Array, weights: Array) -> float:
    """Weighted mean log loss of forecasts p (0..1) of outcomes y (0..1)."""
    clipped = np.clip(p, FLOOR, CEILING)
    return float(np.average(-(y * np.log(clipped) + (1 - y) * np.log(1 - clipped)), weights=weights))


class Calibration(BaseModel):
    """A map from the raw scores of all T tiers to the calibrated quality of each, and the rows behind it.

    Each tier is calibrated on the scores of all tiers together, not on its own: the gap between two tiers is then
    right too, where two forecasts with errors of their own overrate the gain of the row that a plan picks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    centre: list[float]
    """(2T) means of the inputs: T raw scores, then T group means, all as logits."""
    weights: list[list[float]]
    """(2T, T) of the centred inputs."""
    shifts: list[float]
    """(T) quality at the centre, as a logit."""
    steps: list[tuple[list[float], list[float]] | None]
    """(T) a rising map (from, to) put after the logistic one where isotonic regression is better, else null."""
    edges: list[list[float]]
    """(T) inner edges of the bins of quality that `lower` counts rows in."""
    counts: list[list[float]]
    """(T) rows in each bin, one more than edges."""

    def by_group(self, group: Array) -> Array:
        """What group means (G, T), as logits, add to the logit of quality: (G, T), shift and centring included."""
        tiers = len(self.shifts)
        centre, weights = np.asarray(self.centre), np.asarray(self.weights)
        return np.asarray((group - centre[tiers:]) @ weights[tiers:] - centre[:tiers] @ weights[:tiers] + self.shifts)

    def quality(self, raw: Array, added: Array) -> Array:
        """Quality (m, T) within [0.005, 0.995] from raw scores as logits and what `by_group` adds, (m, T) each."""
        p = raw @ np.asarray(self.weights)[: len(self.shifts)]
        p += added
        # in place: a million rows pass here five times
        np.exp(np.negative(p, out=p), out=p)
        p += 1
        np.reciprocal(p, out=p)
        for j, steps in enumerate(self.steps):
            if steps is not None:
                p[:, j] = np.interp(p[:, j], *steps)
        return np.asarray(np.clip(p, FLOOR, CEILING, out=p))

    def lower(self, quality: Array, group_rows: Array) -> Array:
        """The lower 90% limit (one-sided) of quality (m, T), given the sample's rows of each row's group (m,).

        The Wilson limit of `quality` at an effective number of rows: half the harmonic mean of the calibration
        bin's rows and of the group's (plus 10 for what all groups share), as both have to hold.
        Source: Wilson (1927), Probable Inference, the Law of Succession, and Statistical Inference.
        """
        low = np.empty_like(quality)
        for j, (edges, counts) in enumerate(zip(self.edges, self.counts, strict=True)):
            rows = np.maximum(np.asarray(counts)[np.searchsorted(edges, quality[:, j], side="right")], 1.0)
            low[:, j] = wilson_lower(quality[:, j], 1 / (1 / rows + 1 / (group_rows + 10.0)))
        return np.minimum(low, quality)


def wilson_lower(p: Array, rows: Array) -> Array:
    """The lower limit of a share p seen in a number of rows, at LOW_Z."""
    z2 = LOW_Z**2
    spread = LOW_Z * np.sqrt(p * (1 - p) / rows + z2 / (4 * rows**2))
    return np.asarray(np.clip((p + z2 / (2 * rows) - spread) / (1 + z2 / rows), 0.0, 1.0))


def fit_calibration(
    raw: Array, group: Array, scores: Array, weights: Array, folds: NDArray[np.int64], modelled: NDArray[np.bool_]
) -> tuple[Calibration, Array]:
    """The calibration of out-of-fold scores and the forecasts (m, T) it gives them; their mean is that of scores.

    raw, group (m, T): logits; scores (m, T): outcomes 0..1, NaN where unknown; weights, folds (m,);
    modelled (T,): tiers with enough outcomes, the others keep their group means.
    Ridge logistic regression (Platt scaling with several inputs), followed by isotonic regression where that has
    the better cross-validated log loss.
    Sources: Platt (1999), Probabilistic Outputs for SVMs; Zadrozny & Elkan (2002), Transforming Scores.
    """
    tiers = scores.shape[1]
    inputs = np.concatenate([raw, group], axis=1)
    centre = np.average(inputs, axis=0, weights=weights)
    centred = inputs - centre
    slopes = np.zeros((2 * tiers, tiers))
    shifts = np.empty(tiers)
    steps: list[Steps | None] = []
    edges, counts = [], []
    forecast = np.empty(scores.shape)
    for j in range(tiers):
        known = np.isfinite(scores[:, j])
        x, y, w, fold = centred[known], scores[known, j], weights[known], folds[known]
        step = None
        if modelled[j]:
            slopes[:, j], shifts[j] = _logistic(x, y, w, j)
            step = _steps_if_better(x, y, w, fold, j, slopes[:, j], float(shifts[j]))
        else:
            slopes[tiers + j, j], shifts[j] = 1.0, centre[tiers + j]
        p = expit(centred @ slopes[:, j] + shifts[j])
        forecast[:, j] = np.clip(p if step is None else np.interp(p, *step), FLOOR, CEILING)
        steps.append(step)
        edge, count = _bins(forecast[known, j], w)
        edges.append(edge)
        counts.append(count)
    calibration = Calibration(
        centre=centre.tolist(),
        weights=slopes.tolist(),
        shifts=shifts.tolist(),
        steps=steps,
        edges=edges,
        counts=counts,
    )
    return calibration, forecast


def _logistic(x: Array, y: Array, weights: Array, j: int) -> tuple[Array, float]:
    """Weights (2T,) and shift of tier j's quality from the centred logits of all tiers, by Newton's method.

    Four slopes: the mean of all tiers' scores (how hard a row is, drawn to 1), tier j's own distance from that
    mean, and the same two of the group means (drawn to 0).
    """
    tiers = x.shape[1] // 2
    mean, own = np.full(tiers, 1 / tiers), np.eye(tiers)[j] - 1 / tiers
    basis = np.zeros((2 * tiers, 4))
    basis[:tiers, 0], basis[:tiers, 1] = mean, own
    basis[tiers:, 2], basis[tiers:, 3] = mean, own
    prior, pull = np.array([1.0, 0.0, 0.0, 0.0, 0.0]), np.array([1.0, 3.0, 3.0, 6.0, 0.0])
    design = np.concatenate([x @ basis, np.ones((len(x), 1))], axis=1)
    beta = prior.copy()
    beta[4] = logit(np.array([np.average(y, weights=weights)]))[0]
    for _ in range(60):
        p = expit(design @ beta)
        curvature = weights * p * (1 - p) + 1e-9
        gradient = design.T @ (weights * (y - p)) - pull * (beta - prior)
        hessian = (design * curvature[:, None]).T @ design + np.diag(pull)
        step = np.clip(np.linalg.solve(hessian, gradient), -2.0, 2.0)
        beta = beta + step
        if np.abs(step).max() < 1e-9:
            break
    return basis @ beta[:4], float(beta[4])


Steps = tuple[list[float], list[float]]


def _steps_if_better(
    x: Array, y: Array, weights: Array, folds: NDArray[np.int64], j: int, slopes: Array, shift: float
) -> Steps | None:
    logistic, isotonic = np.empty(len(y)), np.empty(len(y))
    if len(np.unique(folds)) < 2:
        return None
    for k in np.unique(folds):
        out = folds == k
        slope, base = _logistic(x[~out], y[~out], weights[~out], j)
        p = expit(x @ slope + base)
        logistic[out] = p[out]
        isotonic[out] = np.interp(p[out], *_isotonic(p[~out], y[~out], weights[~out]))
    # isotonic regression has many steps to spend on a small sample: it must earn them
    better = log_loss(isotonic, y, weights) < log_loss(logistic, y, weights) - 0.002
    return _isotonic(expit(x @ slopes + shift), y, weights) if better else None


def _isotonic(p: Array, y: Array, weights: Array) -> Steps:
    from sklearn.isotonic import IsotonicRegression

    # a pseudo-row of the mean at each end keeps the ends off 0 and 1
    mean = float(np.average(y, weights=weights))
    model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
    model.fit(
        np.concatenate([[p.min()], p, [p.max()]]),
        np.concatenate([[mean], y, [mean]]),
        np.concatenate([[1.0], weights, [1.0]]),
    )
    return [float(v) for v in model.X_thresholds_], [float(v) for v in model.y_thresholds_]


def _bins(p: Array, weights: Array) -> tuple[list[float], list[float]]:
    """Inner edges and rows of bins of equal size, of at least BIN_ROWS rows and at most ten."""
    if len(p) == 0:
        return [], [0.0]
    order = np.argsort(p, kind="stable")
    position = np.cumsum(weights[order]) / weights.sum()
    bins = max(1, min(10, int(weights.sum() // BIN_ROWS)))
    edges = sorted({float(p[order][np.searchsorted(position, b / bins)]) for b in range(1, bins)})
    inside = np.searchsorted(edges, p, side="right")
    return edges, np.bincount(inside, weights=weights, minlength=len(edges) + 1).tolist()


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
    if len(y) == 0:
        return GroupMeans(mean=mean, strength=1.0, means=[mean] * groups, rows=[0.0] * groups)
    seen = rows > 0
    own = np.where(seen, total / np.maximum(rows, 1), mean)
    within = max(float(np.sum((y - own[codes]) ** 2) / max(len(y) - seen.sum(), 1)), 1e-6)
    n0 = (len(y) - np.sum(rows**2) / len(y)) / max(seen.sum() - 1, 1)
    spread = float(np.sum(rows * (own - y.mean()) ** 2) / max(seen.sum() - 1, 1))
    between = (spread - within) / n0 if n0 > 0 else 0.0
    strength = float(np.clip(within / between, 1.0, 1e6)) if between > 0 else 1e6
    shrunk = (total + strength * mean) / (rows + strength)
    return GroupMeans(mean=mean, strength=strength, means=shrunk.tolist(), rows=rows.tolist())
