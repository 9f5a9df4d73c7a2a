"""Forecasts: they match what happens on rows not seen, use evidence, and never fall over on a poor sample."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from relaybatch.errors import PolicyError
from relaybatch.forecast import EVIDENCE_NAMES, Forecaster, Prediction, Sample

TIERS = ("small", "medium", "large")
COST = np.array([1.0, 3.0, 10.0])
LOGPROB, LENGTH, AGREES = (EVIDENCE_NAMES.index(name) for name in ("logprob_mean", "output_tokens", "agrees"))


def world(n: int, seed: int) -> Sample:
    """Three tiers of rising skill on 12 kinds of rising difficulty; confidence is a noisy sign of being right."""
    rng = np.random.default_rng(seed)
    kind, hard = rng.integers(0, 12, n), rng.integers(1, 6, n)
    ease = np.linspace(1.2, -1.2, 12)[kind] - 1.2 * (hard - 3)
    luck = rng.logistic(size=n) * 0.7
    right = np.stack([skill + ease + luck + rng.logistic(size=n) * 0.5 > 0 for skill in (0.0, 2.0, 3.5)], axis=1)
    answer = np.where(right, 0, rng.integers(1, 6, (n, 3)))
    evidence = np.full((n, 3, len(EVIDENCE_NAMES)), np.nan, np.float32)
    confidence = (right - 0.5) * 1.6 + 0.4 * ease[:, None] + rng.normal(0, 1.2, (n, 3))
    evidence[:, :, LOGPROB] = -np.log1p(np.exp(-confidence - 1))
    tokens = 4 + 3 * hard[:, None] + rng.poisson(2, (n, 3)) + 4 * rng.integers(0, 2, n)[:, None]
    evidence[:, :, LENGTH] = tokens
    evidence[:, 1:, AGREES] = answer[:, 1:] == answer[:, :-1]
    noise = rng.normal(size=(n, 8))
    features = np.column_stack([hard * 10 + rng.normal(0, 6, n), kind, noise]).astype(np.float32)
    names = ("length", "kind", *(f"noise{i}" for i in range(8)))
    groups = np.array([f"k{k:02d}" for k in kind])
    return Sample(features, names, groups, np.arange(n), right.astype(np.float32), tokens.astype(np.float32), evidence)


@pytest.fixture(scope="module")
def sample() -> Sample:
    return world(300, 0)


@pytest.fixture(scope="module")
def unseen() -> Sample:
    return world(4000, 1)


@pytest.fixture(scope="module")
def forecaster(sample: Sample) -> Forecaster:
    return Forecaster.train(sample, TIERS)


def predict(forecaster: Forecaster, rows: Sample, ran: NDArray[np.bool_] | None = None) -> Prediction:
    evidence = None if ran is None else np.where(ran[:, :, None], rows.evidence, np.nan).astype(np.float32)
    return forecaster.predict(rows.features, rows.feature_names, rows.groups, evidence, ran)


def answered(n: int, *tiers: int) -> NDArray[np.bool_]:
    ran = np.zeros((n, len(TIERS)), dtype=bool)
    ran[:, list(tiers)] = True
    return ran


def cheapest(quality: NDArray[np.floating], cost: NDArray[np.floating], target: float) -> NDArray[np.intp]:
    """The tier of each row at least cost with mean quality of at least the target (one multiplier, bisected)."""
    low, high = 0.0, 1e5
    for _ in range(60):
        middle = np.sqrt(max(low, 1e-4) * high)
        tier = np.argmax(middle * quality - cost, axis=1)
        met = quality[np.arange(len(tier)), tier].mean() >= target
        low, high = (low, middle) if met else (middle, high)
    return np.asarray(np.argmax(high * quality - cost, axis=1))


def error(forecast: NDArray[np.floating], scores: NDArray[np.floating]) -> float:
    return float(np.mean((forecast - scores) ** 2))


def test_forecasts_are_probabilities_and_lengths(forecaster: Forecaster, unseen: Sample) -> None:
    for ran in (None, answered(4000, 0), answered(4000, 0, 1), answered(4000, 1)):
        forecast = predict(forecaster, unseen, ran)
        for values in (forecast.quality, forecast.quality_low, forecast.output_tokens):
            assert values.shape == (4000, 3)
            assert values.dtype == np.float32
            assert np.isfinite(values).all()
        assert (forecast.quality >= 0.005).all()
        assert (forecast.quality <= 0.995).all()
        assert (forecast.quality_low <= forecast.quality).all()
        assert (forecast.quality_low >= 0).all()
        assert (forecast.output_tokens >= 1).all()


def test_mean_forecast_over_the_sample_is_the_mean_score(forecaster: Forecaster, sample: Sample) -> None:
    for ran in (None, answered(300, 0), answered(300, 0, 1), answered(300, 0, 1, 2)):
        forecast = predict(forecaster, sample, ran)
        np.testing.assert_allclose(forecast.quality.mean(axis=0), sample.scores.mean(axis=0), atol=0.02)


def test_forecasts_beat_the_mean_and_evidence_beats_them(forecaster: Forecaster, unseen: Sample) -> None:
    before, after = predict(forecaster, unseen), predict(forecaster, unseen, answered(4000, 0))
    agreed = predict(forecaster, unseen, answered(4000, 0, 1))
    for tier in range(3):
        score = unseen.scores[:, tier]
        assert error(before.quality[:, tier], score) < 0.93 * score.var()
    assert error(after.quality[:, 0], unseen.scores[:, 0]) < 0.8 * error(before.quality[:, 0], unseen.scores[:, 0])
    assert error(agreed.quality[:, 1], unseen.scores[:, 1]) < 0.8 * error(after.quality[:, 1], unseen.scores[:, 1])
    same = unseen.evidence[:, 1, AGREES] == 1
    assert agreed.quality[same, 1].mean() > agreed.quality[~same, 1].mean() + 0.2


@pytest.fixture(scope="module")
def more_forecasters() -> list[Forecaster]:
    return [Forecaster.train(world(300, seed), TIERS) for seed in range(10, 14)]


@pytest.mark.parametrize("ran", [None, (0,)])
def test_a_plan_achieves_what_it_forecast(more_forecasters: list[Forecaster], ran: tuple[int, ...] | None) -> None:
    """The choice among noisy forecasts picks overrated ones; over 4 samples the plan must not fall short."""
    short, unchosen = [], []
    rows = world(4000, 99)
    for forecaster in more_forecasters:
        forecast = predict(forecaster, rows, None if ran is None else answered(4000, *ran))
        cost = np.tile(COST, (4000, 1))
        cost[:, list(ran or ())] = 0
        quality = forecast.quality.astype(np.float64)
        tier = cheapest(quality, cost, 0.98 * quality[:, 2].mean())
        each = np.arange(4000)
        short.append(quality[each, tier].mean() - rows.scores[each, tier].mean())
        # what the sample's own luck in the tiers' means puts in, whatever is chosen
        unchosen.append(np.bincount(tier, minlength=3) / 4000 @ (quality.mean(axis=0) - rows.scores.mean(axis=0)))
        assert COST[tier].mean() < 0.9 * COST[2]
    assert abs(np.mean(short) - np.mean(unchosen)) < 0.012


def test_the_lower_limit_lies_under_what_happens(forecaster: Forecaster, unseen: Sample) -> None:
    forecast = predict(forecaster, unseen)
    for tier in range(3):
        bins = np.array_split(np.argsort(forecast.quality[:, tier]), 10)
        under = [forecast.quality_low[b, tier].mean() <= unseen.scores[b, tier].mean() for b in bins]
        assert np.mean(under) >= 0.9


def test_lengths_follow_the_prompt_and_the_first_answer(forecaster: Forecaster, unseen: Sample) -> None:
    before, after = predict(forecaster, unseen), predict(forecaster, unseen, answered(4000, 0))
    actual = unseen.output_tokens
    assert before.output_tokens.mean(axis=0) == pytest.approx(actual.mean(axis=0), rel=0.05)
    assert error(before.output_tokens[:, 2], actual[:, 2]) < 0.9 * actual[:, 2].var()
    assert error(after.output_tokens[:, 2], actual[:, 2]) < 0.8 * error(before.output_tokens[:, 2], actual[:, 2])
    np.testing.assert_array_equal(after.output_tokens[:, 0], actual[:, 0])


def test_each_row_is_forecast_by_its_own_answers(forecaster: Forecaster, unseen: Sample) -> None:
    ran = answered(4000)
    ran[1000:2000, 0] = True
    ran[2000:3000, :2] = True
    mixed = predict(forecaster, unseen, ran)
    for part, tiers in ((slice(0, 1000), ()), (slice(1000, 2000), (0,)), (slice(2000, 3000), (0, 1))):
        alone = predict(forecaster, unseen, answered(4000, *tiers))
        np.testing.assert_array_equal(mixed.quality[part], alone.quality[part])
        np.testing.assert_array_equal(mixed.output_tokens[part], alone.output_tokens[part])


def test_the_summary_says_how_good_the_forecasts_are(forecaster: Forecaster, sample: Sample) -> None:
    summary = forecaster.summary
    assert (summary.rows, summary.prompts, summary.groups) == (300, 300, 12)
    for tier, mean in zip(summary.tiers, sample.scores.mean(axis=0), strict=True):
        assert tier.mean_score == pytest.approx(float(mean))
        assert tier.before is not None
        assert tier.after is not None
        assert tier.before.brier < tier.before.brier_constant
        assert tier.before.auc is not None
        assert tier.after.auc is not None
        assert tier.after.auc > max(0.8, tier.before.auc)
        assert tier.after.calibration_error < 0.15
        assert tier.tokens_r2 is not None
        assert tier.tokens_r2 > 0.1
    assert [(g.from_tier, g.to_tier) for g in summary.gains] == [("small", "medium"), ("medium", "large")]
    assert summary.gains[0].top_half_after > summary.gains[0].mean


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Forecaster.train(world(100, 0), TIERS, seed=3).save(tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    assert not [p for p in (tmp_path / "a").iterdir() if p.suffix in (".pkl", ".pickle", ".joblib")]


def test_other_features_are_refused_by_name(forecaster: Forecaster, unseen: Sample) -> None:
    names = unseen.feature_names
    with pytest.raises(PolicyError, match=r"without noise7.*with unknown words"):
        forecaster.predict(unseen.features, (*names[:-1], "words"), unseen.groups)
    with pytest.raises(PolicyError, match="in another order"):
        forecaster.predict(unseen.features, names[::-1], unseen.groups)
    with pytest.raises(PolicyError, match="without noise7"):
        forecaster.predict(unseen.features[:, :-1], names[:-1], unseen.groups)


def test_infinite_and_missing_features_are_missing(forecaster: Forecaster, unseen: Sample) -> None:
    missing, infinite = unseen.features[:20].copy(), unseen.features[:20].copy()
    missing[:, 0], infinite[:, 0] = np.nan, np.inf
    a, b = (forecaster.predict(x, unseen.feature_names, unseen.groups[:20]) for x in (missing, infinite))
    np.testing.assert_array_equal(a.quality, b.quality)


def test_an_unknown_group_gets_the_mean_of_all(forecaster: Forecaster, unseen: Sample) -> None:
    few = replace(unseen, features=unseen.features[:50], groups=np.full(50, "never seen"))
    assert np.isfinite(forecaster.predict(few.features, few.feature_names, few.groups).quality).all()
    assert forecaster.predict(few.features[:0], few.feature_names, few.groups[:0]).quality.shape == (0, 3)


@pytest.mark.parametrize(
    "poor",
    [
        "one class",
        "few graded",
        "none graded",
        "one prompt",
        "one group",
        "constant features",
        "tier never ran",
        "tiny",
    ],
)
def test_a_poor_sample_gives_means_and_no_crash(unseen: Sample, poor: str) -> None:
    sample = world(100, 0)
    scores, features = sample.scores.copy(), sample.features.copy()
    tokens, evidence = sample.output_tokens.copy(), sample.evidence.copy()
    keys, groups = sample.prompt_keys, sample.groups
    if poor == "one class":
        scores[:, 2] = 1
    elif poor == "few graded":
        scores[12:, 1] = np.nan
    elif poor == "none graded":
        scores[:] = np.nan
    elif poor == "one prompt":
        keys = np.zeros(100, dtype=int)
    elif poor == "one group":
        groups = np.full(100, "all")
    elif poor == "constant features":
        features[:] = 1
    elif poor == "tier never ran":
        scores[:, 2], tokens[:, 2], evidence[:, 2] = np.nan, np.nan, np.nan
    poorer = Sample(features, sample.feature_names, groups, keys, scores, tokens, evidence)
    if poor == "tiny":
        poorer = Sample(features[:3], sample.feature_names, groups[:3], keys[:3], scores[:3], tokens[:3], evidence[:3])
    forecaster = Forecaster.train(poorer, TIERS)
    for ran in (None, answered(4000, 0), answered(4000, 0, 2)):
        forecast = predict(forecaster, unseen, ran)
        assert np.isfinite(forecast.quality).all()
        assert np.isfinite(forecast.quality_low).all()
        assert np.isfinite(forecast.output_tokens).all()
    if poor == "one class":
        assert predict(forecaster, unseen).quality[:, 2].min() > 0.95
    if poor == "few graded":
        assert predict(forecaster, unseen).quality[:, 1].mean() == pytest.approx(scores[:12, 1].mean(), abs=0.1)


def test_partial_scores_are_learned_as_they_are(sample: Sample, unseen: Sample) -> None:
    half = replace(sample, scores=(sample.scores * 0.5 + 0.25).astype(np.float32))
    forecast = predict(Forecaster.train(half, TIERS), unseen)
    assert forecast.quality.mean(axis=0) == pytest.approx(half.scores.mean(axis=0), abs=0.05)
    assert forecast.quality.min() > 0.1


def test_equal_prompts_are_never_split_over_folds(sample: Sample) -> None:
    """With pure noise to learn, copies of a prompt in both parts would look like skill."""
    rng = np.random.default_rng(0)
    copy = np.repeat(np.arange(75), 4)
    noise = Sample(
        rng.normal(size=(75, 10)).astype(np.float32)[copy],
        sample.feature_names,
        np.full(300, "all"),
        copy,
        rng.integers(0, 2, (75, 3)).astype(np.float32)[copy],
        sample.output_tokens,
        np.full((300, 3, len(EVIDENCE_NAMES)), np.nan, np.float32),
    )
    for tier in Forecaster.train(noise, TIERS).summary.tiers:
        assert tier.before is not None
        assert tier.before.brier > 0.9 * tier.before.brier_constant
