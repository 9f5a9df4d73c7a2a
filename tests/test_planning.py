"""Planning a leg: pins kept, answers kept when they will do, the target met, later decisions valued."""

from __future__ import annotations

import numpy as np
import pytest

from relaybatch.errors import InfeasibleError
from relaybatch.lookahead import Lookahead
from relaybatch.planning import FREE, Goal, Known, best_answer, plan_leg


def fresh(rows: int, tiers: int) -> Known:
    nothing = np.zeros((rows, tiers), dtype=bool)
    return Known(nothing, nothing.copy(), np.full(rows, FREE, dtype=np.int32), np.zeros(rows, dtype=bool))


def forecasts(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    hard = draw.random((rows, 1))
    quality = np.clip(1 - hard * np.array([1.0, 0.6, 0.2]), 0.01, 0.99)
    return quality, np.tile([1.0, 3.0, 10.0], (rows, 1))


def test_the_cheapest_tiers_that_meet_the_target_are_taken() -> None:
    quality, usd = forecasts(2000)
    plan = plan_leg(
        0, quality, usd, usd, fresh(2000, 3), Goal(0.98, None, None), escalate=True, lookahead=None, strict=True
    )
    assert plan.quality.mean() >= 0.98 * quality[:, 2].mean() - 1e-9
    assert plan.cost_usd.sum() < usd[:, 2].sum()
    assert plan.gap < 0.001


def test_pins_and_closed_rows_are_left_alone() -> None:
    quality, usd = forecasts(100)
    known = fresh(100, 3)
    known.fixed[:10] = 2
    known.fixed[10:20] = 0
    known.closed[20:30] = True
    plan = plan_leg(0, quality, usd, usd, known, Goal(None, 0.6, None), escalate=True, lookahead=None, strict=True)
    assert (plan.choice[:10] == 2).all()
    assert (plan.choice[10:20] == 0).all()
    assert (plan.choice[20:30] == FREE).all()


def test_a_good_answer_is_kept_and_a_bad_one_goes_up() -> None:
    quality = np.array([[0.99, 0.99, 0.99], [0.05, 0.5, 0.99]])
    usd = np.tile([1.0, 3.0, 10.0], (2, 1))
    known = fresh(2, 3)
    known.answered[:, 0] = known.tried[:, 0] = True
    plan = plan_leg(1, quality, usd, usd, known, Goal(None, 0.98, None), escalate=True, lookahead=None, strict=True)
    assert plan.choice.tolist() == [0, 2]
    assert plan.cost_usd.tolist() == [0.0, 10.0]
    kept = plan_leg(1, quality, usd, usd, known, Goal(None, 0.98, None), escalate=False, lookahead=None, strict=False)
    assert kept.choice.tolist() == [0, 0]


def test_a_failed_answer_is_no_option() -> None:
    quality, usd = forecasts(5)
    known = fresh(5, 3)
    known.tried[:, 0] = True
    plan = plan_leg(1, quality, usd, usd, known, Goal(None, 0.01, None), escalate=True, lookahead=None, strict=True)
    assert (plan.choice == 1).all()
    known.tried[:] = True
    plan = plan_leg(2, quality, usd, usd, known, Goal(None, 0.01, None), escalate=True, lookahead=None, strict=True)
    assert (plan.choice == FREE).all()
    assert best_answer(known.answered, quality).tolist() == [FREE] * 5


def test_what_cannot_be_met_is_refused_first_and_noted_later() -> None:
    quality, usd = forecasts(50)
    ask = Goal(None, 0.999, None)
    with pytest.raises(InfeasibleError) as caught:
        plan_leg(0, quality, usd, usd, fresh(50, 3), ask, escalate=True, lookahead=None, strict=True)
    assert caught.value.nearest == pytest.approx(quality.max(axis=1).mean())
    plan = plan_leg(0, quality, usd, usd, fresh(50, 3), ask, escalate=True, lookahead=None, strict=False)
    assert "nearest plan" in plan.note


def test_limits_that_exclude_each_other_are_relaxed_by_name() -> None:
    quality, usd = forecasts(50)
    ask = Goal(None, 0.8, 25.0, tier_rows=(10, 10, 10))
    plan = plan_leg(0, quality, usd, usd, fresh(50, 3), ask, escalate=True, lookahead=None, strict=False)
    assert "nearest plan" in plan.note
    assert (plan.choice != FREE).all()


def test_a_budget_is_kept() -> None:
    quality, usd = forecasts(500)
    plan = plan_leg(
        0, quality, usd, usd, fresh(500, 3), Goal(None, None, 1500.0), escalate=True, lookahead=None, strict=True
    )
    assert plan.cost_usd.sum() <= 1500.0 + 1e-6
    assert plan.quality.mean() > quality[:, 0].mean()


def test_looking_ahead_starts_low_when_cheap_answers_show_whether_they_are_right() -> None:
    draw = np.random.default_rng(1)
    n = 400
    good = draw.random(n) < 0.5
    scores = np.stack([good, np.ones(n, dtype=bool)], axis=1).astype(np.float32)
    blind = np.tile(np.array([0.5, 1.0], dtype=np.float32), (n, 1))
    shown = np.stack([np.where(good, 0.98, 0.02), np.ones(n)], axis=1).astype(np.float32)
    usd = np.tile([1.0, 10.0], (n, 1))
    ahead = Lookahead(np.stack([blind, shown, shown]), scores, usd)
    goal = Goal(0.98, None, None)
    known = fresh(n, 2)
    plain = plan_leg(0, blind.astype(float), usd, usd, known, goal, escalate=True, lookahead=None, strict=True)
    wise = plan_leg(0, blind.astype(float), usd, usd, known, goal, escalate=True, lookahead=ahead, strict=True)
    assert (plain.choice == 1).mean() > 0.9
    assert (wise.choice == 0).mean() > 0.9
    assert wise.cost_usd.sum() == pytest.approx(n * (1 + 0.5 * 10), rel=0.1)
