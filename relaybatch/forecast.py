"""Forecasts: how well each tier would answer each row and at what length, before and after cheaper answers.

Owns which models there are, and their files. How a model is fitted is crossfit's; how its scores become quality is
calibration's; seconds and USD are profile's.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaybatch.accuracy import ForecastSummary, summarise
from relaybatch.calibration import Array, Calibration, fit_calibration, group_means, logit
from relaybatch.crossfit import (
    FOLDS,
    MIN_ROWS,
    Codes,
    CrossFit,
    Floats,
    Rows,
    draw_folds,
    fit_length,
    fit_quality,
    learnable,
)
from relaybatch.errors import PolicyError

EVIDENCE_NAMES: tuple[str, ...] = (
    "logprob_mean",
    "logprob_min",
    "entropy_mean",
    "output_tokens",
    "cut_off",
    "parses",
    "agrees",
)
"""What an answer shows, per tier that answered; `agrees`: same normalised answer as the next-cheaper tier that
answered, NaN if none did."""

CHUNK = 100_000
FORMAT = 1
RELEARN = "learn a new policy: remove or rename its folder and run again"
MODELS_FILE = "models.zip"
CARD_FILE = "forecast.json"
HELD_FILE = "held_out.safetensors"


@dataclass(frozen=True)
class Sample:
    """What calibration saw: n rows, T tiers, F features, E = len(EVIDENCE_NAMES)."""

    features: Floats
    """(n, F)."""
    feature_names: tuple[str, ...]
    groups: NDArray[Any]
    """(n,) str: a coarse kind."""
    prompt_keys: NDArray[Any]
    """(n,): equal prompts share a key, so that folds never split them."""
    scores: Floats
    """(n, T), 0..1; NaN where not run or not graded."""
    output_tokens: Floats
    """(n, T); NaN where not run."""
    evidence: Floats
    """(n, T, E); NaN where not run or not known."""
    input_tokens: Floats | None = None
    """(n, T): prompt tokens by tier, to price the sample's rows; None: their prompts count as free."""


@dataclass(frozen=True)
class HeldOut:
    """The sample as forecast by models that did not see it: what planning ahead learns from."""

    quality: Floats
    """(T + 1, n, T): before any answer, and after the answers of the tiers up to each."""
    scores: Floats
    """(n, T); NaN where not run or not graded."""
    input_tokens: Floats
    """(n, T)."""
    output_tokens: Floats
    """(n, T); NaN where not run."""


@dataclass(frozen=True)
class Prediction:
    """Quality and output tokens of N rows on T tiers, each (N, T) float32."""

    quality: Floats
    """0..1; for a tier that has answered: the quality of the answer given."""
    quality_low: Floats
    """Lower 90% limit of `quality` by the calibration's uncertainty."""
    output_tokens: Floats

    def priced(self, seconds: Array, cost_usd: Array) -> Forecast:
        """The forecast with each row's seconds and cost on each tier, (N, T)."""
        return Forecast(self.quality, self.quality_low, self.output_tokens, cost_usd, seconds)


@dataclass(frozen=True)
class Forecast(Prediction):
    """Everything that assignment needs to know of N rows on T tiers, each (N, T)."""

    cost_usd: Array
    seconds: Array


@dataclass(frozen=True)
class _Stage:
    """What is known of a row by its latest answer: T quality models and their calibration."""

    fits: tuple[CrossFit, ...]
    calibration: Calibration

    def quality(self, x: Floats, group_logits: Array, codes: Codes) -> Array:
        """Quality (m, T); group_logits (K, G + 1, T): logits of group means; codes (m,).

        The mean of the K calibrated forecasts, not of their scores: each is right on average on rows it did not
        see, so their mean is.
        """
        raw = np.stack([fit.margins(x) for fit in self.fits], axis=2)
        forecasts = (
            self.calibration.quality(r, self.calibration.by_group(logits)[codes])
            for r, logits in zip(raw, group_logits, strict=True)
        )
        return np.asarray(sum(forecasts, np.zeros((len(x), len(self.fits)))) / len(raw))


@dataclass(frozen=True)
class _LengthLinks:
    """How the length of the latest answer moves the forecast length of the others."""

    slope: Array
    """(T, T): by latest tier; log tokens of each tier for one of surprise at the latest."""
    scale: Array
    """(T + 1, T): factor that makes mean forecast tokens those of the sample, before and by latest tier."""


class Forecaster:
    """Forecasts learned from a calibration sample; `summary` says how good they are."""

    def __init__(
        self,
        tiers: tuple[str, ...],
        feature_names: tuple[str, ...],
        groups: tuple[str, ...],
        group_rows: Array,
        group_logits: Array,
        stages: tuple[_Stage, ...],
        lengths: tuple[CrossFit, ...],
        links: _LengthLinks,
        summary: ForecastSummary,
        held_out: HeldOut,
    ) -> None:
        self.tiers = tiers
        self.feature_names = feature_names
        self.groups = groups
        self.summary = summary
        self.held_out = held_out
        self._group_rows = np.append(group_rows, 0.0)
        self._group_logits = group_logits
        self._stages = stages
        self._lengths = lengths
        self._links = links

    @classmethod
    def train(cls, sample: Sample, tiers: tuple[str, ...], *, seed: int = 0) -> Forecaster:
        """The forecaster of a sample; the same sample and seed give the same forecaster.

        Cross-fitted: K models a quantity, each blind to a fold of prompts, calibrated on the rows it did not see;
        the forecast is the mean of the K calibrated ones. A tier with under 20 graded rows gets shrunken means.
        Source: Chernozhukov et al. (2018), Double/Debiased Machine Learning (cross-fitting).
        """
        features = _clean(sample.features)
        groups, codes = np.unique(np.asarray(sample.groups, dtype=str), return_inverse=True)
        folds = draw_folds(sample.prompt_keys, codes, seed)
        scores = sample.scores.astype(np.float64)
        means = _group_logits(scores, codes, folds, len(groups))
        stages, held = [], []
        for latest in range(-1, len(tiers)):
            x, names, row, weights = _with_evidence(sample, features, tiers, latest)
            y = scores[row]
            if latest >= 0:
                y = np.where(np.isfinite(sample.output_tokens[row, latest])[:, None], y, np.nan)
            rows = [Rows(x, names, y[:, j], folds[row], weights) for j in range(len(tiers))]
            fits, raw = zip(*(fit_quality(r, seed) for r in rows), strict=True)
            modelled = np.array([learnable(r) for r in rows])
            group = means[folds[row], codes[row]]
            calibration, forecast = fit_calibration(np.stack(raw, axis=1), group, y, weights, folds[row], modelled)
            stages.append(_Stage(tuple(fits), calibration))
            # a row's first copy carries all of the evidence
            held.append(np.where(np.isfinite(y[: len(scores)]), forecast[: len(scores)], np.nan))
        lengths, links, length_forecast = _lengths(sample, features, folds, seed)
        return cls(
            tiers,
            sample.feature_names,
            tuple(str(g) for g in groups),
            np.bincount(codes, minlength=len(groups)).astype(np.float64),
            means,
            tuple(stages),
            lengths,
            links,
            summarise(
                tiers,
                sample.prompt_keys,
                sample.groups,
                scores,
                sample.output_tokens.astype(np.float64),
                np.stack(held),
                length_forecast,
            ),
            HeldOut(
                np.stack(held).astype(np.float32),
                sample.scores.astype(np.float32),
                np.zeros_like(sample.scores) if sample.input_tokens is None else sample.input_tokens,
                sample.output_tokens.astype(np.float32),
            ),
        )

    def predict(
        self,
        features: Floats,
        feature_names: Sequence[str],
        groups: NDArray[Any],
        evidence: Floats | None = None,
        ran: NDArray[np.bool_] | None = None,
    ) -> Prediction:
        """Quality and output tokens (N, T) of N rows.

        features (N, F); groups (N,) str; evidence (N, T, E) and ran (N, T): what the tiers that answered showed.
        A row is forecast from the evidence of all its answers. Raises PolicyError: other features.
        """
        _require_names(tuple(feature_names), self.feature_names)
        rows, tiers = len(features), len(self.tiers)
        quality, low, tokens = (np.empty((rows, tiers), np.float32) for _ in range(3))
        index = {name: i for i, name in enumerate(self.groups)}
        known, codes = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
        codes = np.array([index.get(str(g), len(index)) for g in known], dtype=np.int64)[codes]
        if ran is None or evidence is None:
            ran = np.zeros((rows, tiers), dtype=bool)
            evidence = np.empty((rows, tiers, 0), dtype=np.float32)
        latest = np.where(ran.any(axis=1), tiers - 1 - np.argmax(ran[:, ::-1], axis=1), -1)
        for state in np.unique(latest).tolist():
            chosen = np.flatnonzero(latest == state)
            for start in range(0, len(chosen), CHUNK):
                part = chosen[start : start + CHUNK]
                x = _clean(features[part])
                tokens[part] = self._tokens(x, state, ran[part], evidence[part])
                if state >= 0:
                    shown = np.where(ran[part, : state + 1, None], evidence[part, : state + 1], np.nan)
                    x = np.concatenate([x, _clean(shown).reshape(len(part), -1)], axis=1)
                p = self._stages[state + 1].quality(x, self._group_logits, codes[part])
                quality[part] = p
                low[part] = self._stages[state + 1].calibration.lower(p, self._group_rows[codes[part]])
        return Prediction(quality, low, tokens)

    def _tokens(self, x: Floats, latest: int, ran: NDArray[np.bool_], evidence: Floats) -> Array:
        """Output tokens (m, T): those of the answers given, and forecasts for the rest.

        The latest answer's length corrects the forecasts of the others where they tend to be long together.
        """
        logs = np.stack([fit.margins(x).mean(axis=0) for fit in self._lengths], axis=1)
        if latest < 0:
            return np.asarray(np.maximum(np.expm1(logs) * self._links.scale[0], 1.0))
        given = evidence[:, :, EVIDENCE_NAMES.index("output_tokens")].astype(np.float64)
        surprise = np.nan_to_num(np.log1p(given[:, latest]) - logs[:, latest])
        logs += surprise[:, None] * self._links.slope[latest]
        tokens = np.maximum(np.expm1(logs) * self._links.scale[latest + 1], 1.0)
        return np.asarray(np.where(ran & np.isfinite(given), given, tokens))

    def save(self, folder: Path) -> None:
        """Write the forecaster into a folder: boosters (UBJ) in models.zip, the sample's held-out forecasts in
        held_out.safetensors, all else in forecast.json.
        """
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        fits = self._fits()
        card = {
            "format": FORMAT,
            "tiers": self.tiers,
            "feature_names": self.feature_names,
            "evidence_names": EVIDENCE_NAMES,
            "groups": self.groups,
            "group_rows": self._group_rows[:-1].tolist(),
            "group_logits": self._group_logits.tolist(),
            "calibrations": [stage.calibration.model_dump() for stage in self._stages],
            "length_slope": self._links.slope.tolist(),
            "length_scale": self._links.scale.tolist(),
            "offsets": {key: fit.offsets.tolist() for key, fit in fits.items()},
            "boosters": {key: len(fit.boosters) for key, fit in fits.items()},
            "summary": self.summary.model_dump(),
        }
        text = json.dumps(card, ensure_ascii=False, allow_nan=False, indent=1)
        (folder / CARD_FILE).write_text(text, encoding="utf-8")
        held = {name: np.ascontiguousarray(value) for name, value in vars(self.held_out).items()}
        save_file(held, folder / HELD_FILE)
        with zipfile.ZipFile(folder / MODELS_FILE, "w") as archive:
            for key, fit in fits.items():
                for k, booster in enumerate(fit.boosters):
                    # a fixed time, so that equal models make equal files
                    entry = zipfile.ZipInfo(f"{key}-{k}.ubj", (1980, 1, 1, 0, 0, 0))
                    archive.writestr(entry, bytes(booster.save_raw("ubj")), zipfile.ZIP_DEFLATED)

    def _fits(self) -> dict[str, CrossFit]:
        """Every model by its name in the files."""
        quality = {
            f"quality-{latest}-{j}": fit
            for latest, stage in enumerate(self._stages)
            for j, fit in enumerate(stage.fits)
        }
        return quality | {f"tokens-{j}": fit for j, fit in enumerate(self._lengths)}

    @classmethod
    def load(cls, folder: Path) -> Forecaster:
        """The forecaster saved in a folder. Raises PolicyError: a file is missing, damaged or of another version."""
        import xgboost as xgb
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = folder / CARD_FILE
        try:
            card = json.loads(path.read_text(encoding="utf-8"))
            if card["format"] != FORMAT or tuple(card["evidence_names"]) != EVIDENCE_NAMES:
                raise PolicyError(f"{path}: made by another version of relaybatch", hint=RELEARN)
            calibrations = [Calibration.model_validate(c) for c in card["calibrations"]]
            summary = ForecastSummary.model_validate(card["summary"])
            tiers = tuple(card["tiers"])
            path = folder / HELD_FILE
            held_out = HeldOut(**load_file(path))
            path = folder / MODELS_FILE
            fits = {}
            with zipfile.ZipFile(path) as archive:
                for key, offsets in card["offsets"].items():
                    boosters = []
                    for k in range(card["boosters"][key]):
                        booster = xgb.Booster({"nthread": 2})
                        booster.load_model(bytearray(archive.read(f"{key}-{k}.ubj")))
                        boosters.append(booster)
                    fits[key] = CrossFit(np.array(offsets), tuple(boosters))
            stages = [
                _Stage(tuple(fits[f"quality-{latest}-{j}"] for j in range(len(tiers))), calibration)
                for latest, calibration in enumerate(calibrations)
            ]
            return cls(
                tiers,
                tuple(card["feature_names"]),
                tuple(card["groups"]),
                np.array(card["group_rows"]),
                np.array(card["group_logits"]),
                tuple(stages),
                tuple(fits[f"tokens-{j}"] for j in range(len(tiers))),
                _LengthLinks(np.array(card["length_slope"]), np.array(card["length_scale"])),
                summary,
                held_out,
            )
        except (
            OSError,
            KeyError,
            TypeError,
            ValueError,
            SafetensorError,
            zipfile.BadZipFile,
            xgb.core.XGBoostError,
        ) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise PolicyError(f"{path}: cannot be read: {reason}", hint=RELEARN) from None


def _clean(values: Floats) -> Floats:
    values = np.asarray(values, dtype=np.float32)
    return np.where(np.isfinite(values), values, np.float32(np.nan))


def _require_names(given: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    if given == wanted:
        return
    missing = [n for n in wanted if n not in given]
    extra = [n for n in given if n not in wanted]
    parts = [f"without {', '.join(missing)}"] if missing else []
    parts += [f"with unknown {', '.join(extra)}"] if extra else []
    raise PolicyError(
        f"the policy was learned from other features: this run's come {' and '.join(parts) or 'in another order'}",
        hint=RELEARN,
    )


def _group_logits(scores: Array, codes: Codes, folds: Codes, groups: int) -> Array:
    """Logits (K, G + 1, T) of shrunken group means, by fold without the fold's rows; last: unknown groups."""
    logits = np.empty((FOLDS, groups + 1, scores.shape[1]))
    for k in range(FOLDS):
        for j in range(scores.shape[1]):
            known = (folds != k) & np.isfinite(scores[:, j])
            means = group_means(scores[known, j], codes[known], groups)
            logits[k, :, j] = logit(np.array([*means.means, means.mean]))
    return logits


def _lengths(
    sample: Sample, features: Floats, folds: Codes, seed: int
) -> tuple[tuple[CrossFit, ...], _LengthLinks, Array]:
    """Models of output tokens, their links, and out-of-fold forecasts (n, T) before any answer."""
    tokens = sample.output_tokens.astype(np.float64)
    tiers = tokens.shape[1]
    actual = np.log1p(tokens)
    ones = np.ones(len(tokens))
    rows = [Rows(features, sample.feature_names, actual[:, j], folds, ones) for j in range(tiers)]
    fits, logs = zip(*(fit_length(r, seed) for r in rows), strict=True)
    held = np.stack(logs, axis=1)
    slope, scale = np.zeros((tiers, tiers)), np.ones((tiers + 1, tiers))
    for j in range(tiers):
        scale[0, j] = _ratio(tokens[:, j], np.expm1(held[:, j]))
        for latest in range(tiers):
            surprise, rest = actual[:, latest] - held[:, latest], actual[:, j] - held[:, j]
            both = np.isfinite(surprise) & np.isfinite(rest)
            if latest < j and both.sum() >= MIN_ROWS:
                # 10 pseudo-rows of no link
                spread = np.sum(surprise[both] ** 2)
                slope[latest, j] = np.sum(surprise[both] * rest[both]) / (spread * (1 + 10 / both.sum()) + 1e-9)
            linked = np.expm1(held[:, j] + slope[latest, j] * np.nan_to_num(surprise))
            scale[latest + 1, j] = _ratio(np.where(np.isfinite(surprise), tokens[:, j], np.nan), linked)
    return fits, _LengthLinks(slope, scale), np.expm1(held) * scale[0]


def _ratio(actual: Array, forecast: Array) -> float:
    known = np.isfinite(actual)
    total = float(forecast[known].sum())
    return float(actual[known].sum()) / total if total > 0 and actual[known].sum() > 0 else 1.0


def _with_evidence(
    sample: Sample, features: Floats, tiers: tuple[str, ...], latest: int
) -> tuple[Floats, tuple[str, ...], NDArray[np.int64], Array]:
    """Model inputs for rows whose latest answer is that of tier `latest`: x, names, sample row and weight.

    Every row stands with all cheaper answers first, then in copies that lack some, as rows that skipped a tier do.
    """
    n = len(features)
    if latest < 0:
        return features, sample.feature_names, np.arange(n), np.ones(n)
    evidence = _clean(sample.evidence[:, : latest + 1])
    if latest <= 2:
        masks = [[bool(bits >> t & 1) for t in range(latest)] for bits in reversed(range(2**latest))]
    else:
        masks = [[True] * latest, [False] * latest, *([t == s for t in range(latest)] for s in range(latest))]
    agrees = EVIDENCE_NAMES.index("agrees")
    copies = []
    for mask in masks:
        copy = evidence.copy()
        copy[:, :latest][:, ~np.array(mask, dtype=bool)] = np.nan
        for t in range(latest + 1):
            # the sample knows agreement with the next-cheaper tier only
            if t > 0 and not mask[t - 1]:
                copy[:, t, agrees] = np.nan
        copies.append(np.concatenate([features, copy.reshape(n, -1)], axis=1))
    names = sample.feature_names + tuple(f"{tiers[t]}.{e}" for t in range(latest + 1) for e in EVIDENCE_NAMES)
    weights = np.full(n * len(masks), 1 / len(masks))
    return np.concatenate(copies), names, np.tile(np.arange(n), len(masks)), weights
