"""Cross-fitted XGBoost: one quantity learned by K models, each blind to one fold of prompts.

Owns the size of the models, their training and their out-of-fold forecasts. What is forecast is forecast's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaybatch.calibration import Array, expit, log_loss, logit

FOLDS = 5
MIN_ROWS = 20
"""Rows with an outcome below which means stand in for a model."""
MAX_ROUNDS = 40
THREADED_ROWS = 10_000
Floats = NDArray[np.float32]
Codes = NDArray[np.int64]
PARAMS: dict[str, Any] = {
    "max_depth": 2,
    "eta": 0.16,
    "min_child_weight": 4.0,
    "lambda": 6.0,
    "subsample": 0.8,
    "colsample_bytree": 0.6,
    "tree_method": "hist",
    "max_bin": 64,
    "nthread": 1,
}


@dataclass(frozen=True)
class Rows:
    """The training rows of one quantity, m of them."""

    x: Floats
    """(m, F)."""
    names: tuple[str, ...]
    """(F,)."""
    y: Array
    """(m,): outcome, NaN where unknown."""
    folds: Codes
    """(m,): fold, equal for equal prompts."""
    weights: Array
    """(m,): copies of a row share a weight of 1."""


@dataclass(frozen=True)
class CrossFit:
    """One quantity: K models, each over a fixed offset."""

    offsets: Array
    """(K,) on the link scale."""
    boosters: tuple[Any, ...] = ()
    """K boosters, or none where the offsets are all there is."""

    def margins(self, x: Floats) -> Array:
        """The outputs (K, m) of the fold models on the link scale."""
        if not self.boosters:
            return np.repeat(self.offsets[:, None], len(x), axis=1)
        outputs = []
        for booster in self.boosters:
            # a second thread costs more than it saves on a small matrix, above all on a busy machine
            booster.set_param({"nthread": 2 if len(x) >= THREADED_ROWS else 1})
            outputs.append(booster.inplace_predict(x, predict_type="margin"))
        return np.asarray(outputs, dtype=np.float64) + self.offsets[:, None]


def draw_folds(prompt_keys: NDArray[Any], codes: Codes, seed: int) -> Codes:
    """A fold 0..K-1 for each row (n,): equal prompts together, every group spread over the folds."""
    _, first, key = np.unique(prompt_keys, return_index=True, return_inverse=True)
    order = np.lexsort((np.random.default_rng(seed).random(len(first)), codes[first]))
    fold = np.empty(len(first), dtype=np.int64)
    fold[order] = np.arange(len(first)) % FOLDS
    return fold[key]


def fit_quality(rows: Rows, seed: int) -> tuple[CrossFit, Array]:
    """A model of outcomes 0..1 and its raw out-of-fold forecasts (m,) as logits; rows without outcome have some too.

    Under MIN_ROWS outcomes, or with all of them equal, it is their shrunken mean.
    """
    known = np.isfinite(rows.y)
    offsets = np.array([_shrunken_logit(rows.y[known & (rows.folds != k)]) for k in range(FOLDS)])
    if not learnable(rows):
        return CrossFit(offsets), offsets[rows.folds]
    return _boost(rows, offsets, "binary:logistic", "logloss", seed)


def fit_length(rows: Rows, seed: int) -> tuple[CrossFit, Array]:
    """One model (K = 1) of log(1 + tokens), and out-of-fold forecasts (m,) of models like it, as logarithms."""
    import xgboost as xgb

    known = np.isfinite(rows.y)
    seen = [rows.y[known & (rows.folds != k)] for k in range(FOLDS)]
    offsets = np.array([y.mean() if len(y) else 0.0 for y in seen])
    whole = np.array([rows.y[known].mean() if known.any() else 0.0])
    if not learnable(rows):
        return CrossFit(whole), offsets[rows.folds]
    fit, held = _boost(rows, offsets, "reg:squarederror", "rmse", seed)
    if not fit.boosters:
        return CrossFit(whole), held
    params = PARAMS | {"objective": "reg:squarederror", "seed": seed, "base_score": 0.0}
    booster = xgb.train(params, _matrix(rows, known, whole[0]), fit.boosters[0].num_boosted_rounds())
    return CrossFit(whole, (_named(booster, rows.names),)), held


def learnable(rows: Rows) -> bool:
    """Whether there are enough different outcomes, over all folds, to learn from."""
    known = np.isfinite(rows.y)
    y, folds = rows.y[known], rows.folds[known]
    return bool(
        rows.weights[known].sum() >= MIN_ROWS - 1e-6
        and len(np.unique(folds)) == FOLDS
        and all(np.ptp(y[folds != k]) > 0 for k in range(FOLDS))
    )


def _shrunken_logit(y: Array) -> float:
    return float(logit(np.array([(y.sum() + 0.5) / (len(y) + 1)]))[0])


def _boost(rows: Rows, offsets: Array, objective: str, metric: str, seed: int) -> tuple[CrossFit, Array]:
    """K boosters of the number of rounds that is best over all folds, and the out-of-fold margins (m,)."""
    import xgboost as xgb

    # a base score that is nothing on the link scale: `CrossFit` adds the offset itself
    neutral = 0.5 if objective == "binary:logistic" else 0.0
    params = PARAMS | {"objective": objective, "eval_metric": metric, "seed": seed, "base_score": neutral}
    known = np.isfinite(rows.y)
    boosters, losses = [], np.zeros(MAX_ROUNDS + 1)
    for k in range(FOLDS):
        out = known & (rows.folds == k)
        test = _matrix(rows, out, offsets[k])
        history: dict[str, Any] = {}
        booster = xgb.train(
            params,
            _matrix(rows, known & (rows.folds != k), offsets[k]),
            MAX_ROUNDS,
            evals=[(test, "held")],
            evals_result=history,
            verbose_eval=False,
        )
        held = np.asarray(history["held"][metric])
        start = _start_loss(metric, offsets[k], rows.y[out], rows.weights[out])
        losses += rows.weights[out].sum() * np.concatenate([[start], held**2 if metric == "rmse" else held])
        boosters.append(booster)
    best = int(np.argmin(losses))
    if best == 0:
        return CrossFit(offsets), offsets[rows.folds]
    fit = CrossFit(offsets, tuple(_named(booster[:best], rows.names) for booster in boosters))
    return fit, fit.margins(rows.x)[rows.folds, np.arange(len(rows.y))]


def _named(booster: Any, names: tuple[str, ...]) -> Any:
    """The booster with its features named: named matrices cost a third of the training time of small models."""
    booster.feature_names = list(names)
    return booster


def _start_loss(metric: str, offset: float, y: Array, weights: Array) -> float:
    if metric == "rmse":
        return float(np.average((offset - y) ** 2, weights=weights))
    return log_loss(np.full(len(y), expit(np.array([offset]))[0]), y, weights)


def _matrix(rows: Rows, chosen: NDArray[np.bool_], offset: float) -> Any:
    import xgboost as xgb

    return xgb.DMatrix(
        rows.x[chosen],
        label=rows.y[chosen],
        weight=rows.weights[chosen],
        base_margin=np.full(int(chosen.sum()), offset),
        nthread=1,
    )
