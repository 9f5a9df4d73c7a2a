"""Cross-fitted XGBoost: one quantity learned by K models, each blind to one fold of prompts.

Owns the size of the models, their training and their out-of-fold forecasts. What is forecast is forecast's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaybatch.calibration import Array, Curve, expit, fit_curve, group_means, logit

FOLDS = 5
MIN_ROWS = 20
"""Rows with an outcome below which group means stand in for a model."""
MAX_ROUNDS = 80
Floats = NDArray[np.float32]
Codes = NDArray[np.int64]
PARAMS: dict[str, Any] = {
    "max_depth": 3,
    "eta": 0.08,
    "min_child_weight": 4.0,
    "lambda": 6.0,
    "subsample": 0.8,
    "colsample_bytree": 0.6,
    "tree_method": "hist",
    "max_bin": 64,
    "nthread": 2,
}


@dataclass(frozen=True)
class Rows:
    """The training rows of one quantity, m of them."""

    x: Floats
    """(m, F)."""
    names: tuple[str, ...]
    """(F,)."""
    y: Array
    """(m,): outcome."""
    codes: Codes
    """(m,): group."""
    folds: Codes
    """(m,): fold, equal for equal prompts."""
    weights: Array
    """(m,): copies of a row share a weight of 1."""


@dataclass(frozen=True)
class CrossFit:
    """One quantity: K models over margins by group, and the curve that calibrates each of them."""

    offsets: Array
    """(K, G + 1) on the link scale; the last column is for unknown groups."""
    curve: Curve
    boosters: tuple[Any, ...] = ()
    """K boosters, or none where the offsets are all there is."""

    def margins(self, x: Floats, codes: Codes) -> list[Array]:
        """The output of each fold's model on the link scale, K arrays (m,)."""
        if not self.boosters:
            return [offset[codes] for offset in self.offsets]
        return [
            np.asarray(
                booster.inplace_predict(x, base_margin=offset[codes].astype(np.float32), predict_type="margin"),
                dtype=np.float64,
            )
            for booster, offset in zip(self.boosters, self.offsets, strict=True)
        ]

    def quality(self, x: Floats, codes: Codes) -> Array:
        """Calibrated quality (m,): the mean over the K models, so that its mean is that of the outcomes."""
        return np.asarray(np.mean([self.curve(expit(m)) for m in self.margins(x, codes)], axis=0))

    def length(self, x: Floats, codes: Codes) -> Array:
        """The mean (m,) of a quantity learned on the scale of log(1 + y)."""
        return np.asarray(np.mean([np.expm1(m) for m in self.margins(x, codes)], axis=0))


def draw_folds(prompt_keys: NDArray[Any], codes: Codes, seed: int) -> Codes:
    """A fold 0..K-1 for each row (n,): equal prompts together, every group spread over the folds."""
    _, first, key = np.unique(prompt_keys, return_index=True, return_inverse=True)
    order = np.lexsort((np.random.default_rng(seed).random(len(first)), codes[first]))
    fold = np.empty(len(first), dtype=np.int64)
    fold[order] = np.arange(len(first)) % FOLDS
    return fold[key]


def fit_quality(rows: Rows, groups: int, seed: int) -> tuple[CrossFit, Array]:
    """A model of outcomes 0..1 and its calibrated out-of-fold forecasts (m,)."""
    if len(np.unique(rows.folds)) < 2 or rows.weights.sum() < MIN_ROWS or np.ptp(rows.y) == 0:
        return _means_only(rows, groups)
    offsets, own = _offsets(rows, groups, logit)
    boosters, margins = _boost(rows, offsets, own, "binary:logistic", "logloss", seed)
    raw = expit(margins)
    curve = fit_curve(raw, rows.y, rows.weights, rows.folds)
    return CrossFit(offsets, curve, boosters), curve(raw)


def fit_length(rows: Rows, groups: int, seed: int) -> tuple[CrossFit, Array]:
    """A model of counts ≥ 0 on the scale of log(1 + y) and its out-of-fold forecasts (m,), not yet scaled."""
    logged = Rows(rows.x, rows.names, np.log1p(rows.y), rows.codes, rows.folds, rows.weights)
    identity = Curve(kind="platt")
    if len(rows.y) == 0:
        return CrossFit(np.zeros((1, groups + 1)), identity), np.empty(0)
    if len(np.unique(rows.folds)) < 2 or len(rows.y) < MIN_ROWS or np.ptp(rows.y) == 0:
        means = group_means(logged.y, rows.codes, groups)
        offsets = np.array([[*means.means, means.mean]])
        return CrossFit(offsets, identity), np.expm1(offsets[0][rows.codes])
    offsets, own = _offsets(logged, groups, np.asarray)
    boosters, margins = _boost(logged, offsets, own, "reg:squarederror", "rmse", seed)
    return CrossFit(offsets, identity, boosters), np.expm1(margins)


def _means_only(rows: Rows, groups: int) -> tuple[CrossFit, Array]:
    if len(rows.y) == 0:
        half = Curve(kind="platt", counts=[0.0])
        return CrossFit(np.zeros((1, groups + 1)), half), np.empty(0)
    means = group_means(rows.y, rows.codes, groups)
    offsets = logit(np.array([[*means.means, means.mean]]))
    curve = Curve(kind="platt", counts=[float(rows.weights.sum())])
    return CrossFit(offsets, curve), curve(expit(offsets[0][rows.codes]))


def _offsets(rows: Rows, groups: int, link: Any) -> tuple[Array, Array]:
    """Group means on the link scale: by fold (K, G + 1), and for each row without the row itself (K, m)."""
    offsets = np.empty((FOLDS, groups + 1))
    own = np.empty((FOLDS, len(rows.y)))
    for k in range(FOLDS):
        seen = rows.folds != k
        means = group_means(rows.y[seen], rows.codes[seen], groups)
        offsets[k] = link(np.array([*means.means, means.mean]))
        size = np.asarray(means.rows)[rows.codes] + means.strength
        without = (np.asarray(means.means)[rows.codes] * size - rows.y) / np.maximum(size - 1, 1e-9)
        own[k] = np.where(seen, link(np.clip(without, 0.0, None)), offsets[k][rows.codes])
    return offsets, own


def _boost(
    rows: Rows, offsets: Array, own: Array, objective: str, metric: str, seed: int
) -> tuple[tuple[Any, ...], Array]:
    """K boosters of the number of rounds that is best over all folds, and the out-of-fold margins (m,)."""
    import xgboost as xgb

    params = PARAMS | {"objective": objective, "eval_metric": metric, "seed": seed, "base_score": 0.5}
    boosters, losses, held = [], np.zeros(MAX_ROUNDS + 1), []
    for k in range(FOLDS):
        seen, out = rows.folds != k, rows.folds == k
        train = _matrix(rows, seen, own[k])
        test = _matrix(rows, out, own[k])
        history: dict[str, Any] = {}
        booster = xgb.train(params, train, MAX_ROUNDS, evals=[(test, "held")], evals_result=history, verbose_eval=False)
        weight = rows.weights[out].sum()
        curve = np.asarray(history["held"][metric])
        start = _start_loss(metric, own[k][out], rows.y[out], rows.weights[out])
        losses += weight * np.concatenate([[start], curve**2 if metric == "rmse" else curve])
        boosters.append(booster)
        held.append((out, test))
    best = int(np.argmin(losses))
    margins = np.empty(len(rows.y))
    for k, (out, test) in enumerate(held):
        if best == 0:
            margins[out] = own[k][out]
        else:
            margins[out] = boosters[k].predict(test, output_margin=True, iteration_range=(0, best))
    return tuple(b[:best] for b in boosters) if best else (), margins


def _start_loss(metric: str, margin: Array, y: Array, weights: Array) -> float:
    if metric == "rmse":
        return float(np.average((margin - y) ** 2, weights=weights))
    p = np.clip(expit(margin), 1e-7, 1 - 1e-7)
    return float(np.average(-(y * np.log(p) + (1 - y) * np.log(1 - p)), weights=weights))


def _matrix(rows: Rows, chosen: NDArray[np.bool_], margin: Array) -> Any:
    import xgboost as xgb

    return xgb.DMatrix(
        rows.x[chosen],
        label=rows.y[chosen],
        weight=rows.weights[chosen],
        base_margin=margin[chosen],
        feature_names=list(rows.names),
        nthread=2,
    )
