"""Tier profiles: rates found from few batches, totals kept, one slow batch borne."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaybatch.profile import Price, TierProfile, cost_usd, fit_profile, seconds

batch = st.tuples(st.floats(0, 1e4), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 500))


def total(profile: TierProfile, prompt: list[int], output: list[int]) -> float:
    per_token = profile.seconds_per_prompt_token * sum(prompt) + profile.seconds_per_output_token * sum(output)
    return per_token + profile.seconds_per_batch * len(prompt) + profile.warmup_seconds


@settings(deadline=None)
@given(st.lists(batch, min_size=1, max_size=12))
def test_the_fit_adds_up_to_what_was_measured(batches: list[tuple[float, int, int, int]]) -> None:
    taken, prompt, output, rows = (list(column) for column in zip(*batches, strict=True))
    profile = fit_profile(taken, prompt, output, rows)
    assert total(profile, prompt, output) == pytest.approx(sum(taken), rel=1e-6, abs=1e-9)
    assert profile.rows == sum(rows)


@pytest.mark.parametrize("first_is_slow", [False, True])
def test_rates_are_found_from_few_batches(first_is_slow: bool) -> None:
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(500, 2000, 8), rng.integers(100, 900, 8)
    taken = (prompt * 2e-4 + output * 2e-3) * rng.lognormal(0, 0.03, 8)
    measured = taken.copy()
    if first_is_slow:
        measured[0] += 5
    profile = fit_profile(measured, prompt, output, np.full(8, 32))
    fitted = profile.seconds_per_prompt_token * prompt + profile.seconds_per_output_token * output
    np.testing.assert_allclose(fitted + profile.seconds_per_batch, taken, rtol=0.15)
    assert profile.warmup_seconds == pytest.approx(5 if first_is_slow else 0, abs=0.3)


def test_rows_share_a_batch_by_tokens() -> None:
    profile = fit_profile([2.0], [1000], [190], [10])
    rows = seconds(np.full(10, 100), np.full((10, 1), 19), [profile])
    assert rows.shape == (10, 1)
    assert rows.sum() == pytest.approx(2.0)
    assert seconds(np.full((10, 1), 100), np.full((10, 1), 38), [profile])[0, 0] > rows[0, 0]


def test_no_batches_cost_nothing() -> None:
    profile = fit_profile([], [], [], [])
    assert seconds(np.array([10]), np.array([[5]]), [profile]).tolist() == [[0.0]]


def test_prices_by_the_hour_and_by_token() -> None:
    prices = [Price(usd_per_hour=3.6), Price(usd_per_million_input_tokens=2, usd_per_million_output_tokens=10)]
    usd = cost_usd(np.array([1000, 0]), np.array([[5, 100], [5, 0]]), np.array([[2.0, 9.0], [0.0, 9.0]]), prices)
    np.testing.assert_allclose(usd, [[0.002, 0.003], [0.0, 0.0]])
