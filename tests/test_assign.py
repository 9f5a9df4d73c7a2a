"""Assignment: limits and pins are kept, the bound holds, and HiGHS on small jobs finds nothing much better."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from relaybatch.assign import Assignment, Limits, assign
from relaybatch.errors import InfeasibleError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Job:
    """A random job of rows × tiers, and limits of the named kinds that may or may not be possible together."""

    def __init__(self, seed: int, rows: int, tiers: int, kinds: str) -> None:
        rng = np.random.default_rng(seed)
        self.quality = rng.random((rows, tiers))
        if rng.random() < 0.7:
            self.quality = np.sort(self.quality, axis=1) * 0.6 + 0.4 * rng.random((rows, 1))
        if rng.random() < 0.3:
            self.quality = np.round(self.quality * 4) / 4
        self.cost = np.cumprod(1 + 3 * rng.random(tiers)) * 1e-3 * (0.5 + rng.random((rows, 1)))
        if rng.random() < 0.3:
            self.cost = np.tile(self.cost[:1], (rows, 1))
        self.seconds = self.cost * rng.random((rows, tiers)) * 1000
        self.allowed = rng.random((rows, tiers)) < 0.8
        self.allowed[np.arange(rows), rng.integers(0, tiers, rows)] = True

        def between(values: Floats, total: bool) -> float:
            shown = np.where(self.allowed, values, np.nan)
            low, high = np.nanmin(shown, axis=1), np.nanmax(shown, axis=1)
            least, most = (float(x.sum() if total else x.mean()) for x in (low, high))
            return least + (most - least) * rng.random()

        def caps(top: float) -> tuple[float | None, ...]:
            return tuple(None if rng.random() < 0.5 else float(rng.random() * top) for _ in range(tiers))

        self.limits = Limits(
            min_quality=between(self.quality, total=False) if "quality" in kinds else None,
            budget_usd=between(self.cost, total=True) if "budget" in kinds else None,
            max_seconds=between(self.seconds, total=True) if "seconds" in kinds else None,
            tier_rows=tuple(None if x is None else int(x) for x in caps(rows)) if "rows" in kinds else None,
            tier_usd=caps(self.cost.max(axis=1).sum() / 2) if "usd" in kinds else None,
            tier_seconds=caps(self.seconds.max(axis=1).sum() / 2) if "time" in kinds else None,
        )

    def solve(self, **other: Any) -> Assignment:
        limits = Limits(**{**self.limits.__dict__, **other})
        return assign(self.quality, self.cost, limits, allowed=self.allowed, seconds=self.seconds)

    def require_kept(self, found: Assignment, limits: Limits) -> None:
        rows, tiers = self.quality.shape
        at, tier = np.arange(rows), found.tier
        assert tier.dtype == np.int32
        assert self.allowed[at, tier].all()
        assert found.quality == pytest.approx(self.quality[at, tier].mean())
        assert found.cost_usd == pytest.approx(self.cost[at, tier].sum())
        assert found.seconds == pytest.approx(self.seconds[at, tier].sum())
        if limits.min_quality is not None:
            assert found.quality >= limits.min_quality - 1e-9
        for most, used in ((limits.budget_usd, found.cost_usd), (limits.max_seconds, found.seconds)):
            assert most is None or used <= most + 1e-8 * max(1, most)
        for caps, use in ((limits.tier_rows, np.ones((rows, tiers))), (limits.tier_usd, self.cost),
                          (limits.tier_seconds, self.seconds)):  # fmt: skip
            for t, cap in enumerate(caps or ()):
                assert cap is None or use[tier == t, t].sum() <= cap + 1e-8 * max(1, cap)
        assert found.gap >= 0
        assert all(price >= 0 for price in found.multipliers.values())

    def optimum(self, minimise: Floats | None = None, leave_out: str = "") -> float | None:
        """The least summed `minimise` (N, T), or the job's own objective, by mixed-integer programming; None: none."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        rows, tiers = self.quality.shape
        limits = self.limits
        total: list[tuple[str, Floats, float | None]] = [
            ("min_quality", -self.quality / rows, None if limits.min_quality is None else -limits.min_quality),
            ("budget_usd", self.cost, limits.budget_usd), ("max_seconds", self.seconds, limits.max_seconds),
        ]  # fmt: skip
        for name, caps, use in (("tier_rows", limits.tier_rows, np.ones((rows, tiers))), ("tier_usd", limits.tier_usd, self.cost),
                                ("tier_seconds", limits.tier_seconds, self.seconds)):  # fmt: skip
            for t, cap in enumerate(caps or ()):
                total.append((name, np.where(np.arange(tiers) == t, use, 0.0), cap))
        constraints = [LinearConstraint(np.kron(np.eye(rows), np.ones(tiers)), 1, 1)]
        for name, use, most in total:
            if most is not None and name != leave_out:
                scale = max(abs(most), 1e-9)
                constraints.append(LinearConstraint((use / scale).ravel()[None, :], -np.inf, most / scale))
        if minimise is None:
            minimise = self.cost if limits.min_quality is not None else -self.quality
        found = milp(
            minimise.ravel(), constraints=constraints, integrality=np.ones(rows * tiers),
            bounds=Bounds(0, self.allowed.ravel().astype(float)),
        )  # fmt: skip
        return float(found.fun) if found.success else None


KINDS = ("quality", "budget", "seconds", "quality budget", "budget seconds", "rows", "quality rows", "budget rows",
         "quality budget rows", "budget usd", "time", "quality budget seconds rows usd time")  # fmt: skip


@pytest.mark.parametrize("kinds", KINDS)
def test_against_mixed_integer_programming(kinds: str) -> None:
    lost = []
    for seed in range(16):
        job = Job(seed, rows=8 + 2 * seed, tiers=2 + seed % 3, kinds=kinds)
        best = job.optimum()
        try:
            found = job.solve()
        except InfeasibleError:
            assert best is None
            continue
        job.require_kept(found, job.limits)
        # the solver keeps limits to within a millionth only
        if best is None:
            continue
        least_cost = job.limits.min_quality is not None
        mine, bound = (found.cost_usd, found.bound) if least_cost else (-found.quality * len(found.tier), -found.bound)
        assert bound <= best + 1e-5 * abs(best)
        assert mine - best <= (found.gap + 1e-5) * max(abs(mine), abs(bound))
        lost.append(mine / best - 1 if least_cost else 1 - mine / best)
    assert lost
    assert np.mean(lost) < 0.02


jobs = st.builds(Job, st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 5), st.sampled_from(KINDS))


@given(jobs)
@settings(deadline=None, max_examples=60)
def test_limits_and_pins_are_kept_or_refused(job: Job) -> None:
    try:
        found = job.solve()
    except InfeasibleError as refused:
        found, nearest = None, refused.nearest
    if found is None:
        assert nearest is not None
        assert np.isfinite(nearest)
        return
    job.require_kept(found, job.limits)
    objective = found.cost_usd if job.limits.min_quality is not None else found.quality * len(found.tier)
    sign = 1 if job.limits.min_quality is not None else -1
    largest = max(abs(objective), abs(found.bound))
    assert found.gap <= 1
    assert sign * (objective - found.bound) >= -1e-6 * largest
    assert abs(objective - found.bound) <= found.gap * largest + 1e-6 * largest + 1e-12


@given(jobs, st.floats(0, 1), st.floats(1, 3))
@settings(deadline=None, max_examples=40)
def test_more_budget_never_buys_less_quality(job: Job, share: float, factor: float) -> None:
    job.limits = Limits()
    shown = np.where(job.allowed, job.cost, np.nan)
    least, most = float(np.nanmin(shown, axis=1).sum()), float(np.nanmax(shown, axis=1).sum())
    budget = least + share * (most - least)
    less, more = job.solve(budget_usd=budget), job.solve(budget_usd=budget * factor)
    # few rows are solved to within the gap
    assert more.quality >= less.quality * (1 - more.gap) - 1e-9
    assert more.bound >= less.quality * len(less.tier) * (1 - 1e-9)


@given(jobs, st.floats(0, 1))
@settings(deadline=None, max_examples=40)
def test_a_higher_target_never_costs_less(job: Job, share: float) -> None:
    job.limits = Limits()
    shown = np.where(job.allowed, job.quality, np.nan)
    most = float(np.nanmax(shown, axis=1).mean())
    low, high = job.solve(min_quality=most * share), job.solve(min_quality=most)
    assert low.bound <= high.cost_usd * (1 + 1e-9)
    assert high.quality == pytest.approx(most)
    assert low.cost_usd * (1 - low.gap) <= high.cost_usd + 1e-12


def test_without_limits_each_row_has_its_best_tier_and_of_equals_the_cheaper() -> None:
    quality = np.array([[0.5, 0.9, 0.9], [0.8, 0.1, 0.2]])
    found = assign(quality, np.array([[1.0, 3.0, 2.0]] * 2), Limits())
    assert found.tier.tolist() == [2, 0]
    assert found.gap == 0
    assert found.multipliers == {}
    assert found.bound == pytest.approx(1.7)


def test_of_equal_cost_the_better() -> None:
    found = assign(np.array([[0.5, 0.9, 0.7]]), np.ones((1, 3)), Limits(min_quality=0.1))
    assert found.tier.tolist() == [1]


def test_rows_all_alike_are_shared_out_to_the_last_dollar() -> None:
    quality, cost = np.tile([0.5, 0.9], (1000, 1)), np.tile([1.0, 3.0], (1000, 1))
    found = assign(quality, cost, Limits(budget_usd=1501.0))
    assert np.bincount(found.tier).tolist() == [750, 250]
    cheapest = assign(quality, cost, Limits(min_quality=0.6))
    assert np.bincount(cheapest.tier).tolist() == [750, 250]
    assert cheapest.multipliers["min_quality"] == pytest.approx(5.0, rel=1e-3)


def test_rows_all_alike_under_limits_that_work_against_each_other() -> None:
    quality, cost = np.tile([0.5, 0.8, 0.9], (1000, 1)), np.tile([1.0, 3.0, 9.0], (1000, 1))
    found = assign(quality, cost, Limits(min_quality=0.7, tier_rows=(None, 500, None)))
    assert np.bincount(found.tier).tolist() == [375, 500, 125]
    assert found.gap < 1e-3
    assert found.multipliers["min_quality"] == pytest.approx(20, rel=1e-2)


def test_an_infinite_limit_is_none() -> None:
    quality, cost = np.array([[0.5, 0.9]]), np.array([[1.0, 3.0]])
    found = assign(quality, cost, Limits(budget_usd=float("inf"), tier_rows=(float("inf"), None)))  # type: ignore[arg-type]
    assert found.bound == pytest.approx(0.9)
    assert found.multipliers == {}


def test_barred_options_may_hold_anything() -> None:
    nan = float("nan")
    allowed = np.array([[True, False], [True, True]])
    found = assign(np.array([[0.2, nan], [0.3, 0.9]]), np.array([[1.0, nan], [1.0, 2.0]]),
                   Limits(min_quality=0.5), allowed=allowed)  # fmt: skip
    assert found.tier.tolist() == [0, 1]
    assert found.bound <= found.cost_usd == 3.0


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="quality of row 1 is not a number"):
        assign(np.array([[0.5], [np.nan]]), np.ones((2, 1)), Limits())
    with pytest.raises(ValueError, match="cost_usd of row 0 is not a number"):
        assign(np.ones((1, 2)), np.array([[1.0, np.inf]]), Limits())
    with pytest.raises(ValueError, match="budget_usd is not a number"):
        assign(np.ones((1, 2)), np.ones((1, 2)), Limits(budget_usd=float("nan")))
    with pytest.raises(ValueError, match="row 1 has no allowed tier"):
        assign(np.ones((2, 2)), np.ones((2, 2)), Limits(), allowed=np.array([[True, True], [False, False]]))


def test_no_rows() -> None:
    found = assign(np.empty((0, 3)), np.empty((0, 3)), Limits(min_quality=0.9, budget_usd=1.0))
    assert len(found.tier) == 0
    assert found.cost_usd == found.gap == 0


@pytest.mark.parametrize(
    ("limits", "nearest", "message"),
    [
        (Limits(budget_usd=25.0), 30.0, "budget_usd: 25 USD is not enough, the least is 30 USD (5 over)"),
        (Limits(min_quality=0.95), 0.9, "a mean quality of 0.9500 cannot be reached: the most within the limits is 0.9000 (0.0500 short)"),
        (Limits(min_quality=0.8, budget_usd=45.0), 0.5933, "the most within the limits is 0.5933"),
        (Limits(min_quality=0.8, tier_rows=(None, 10)), 0.6333, "the most within the limits is 0.6333"),
        (Limits(max_seconds=100.0), 120.0, "max_seconds: 100 seconds is not enough, the least is 120 seconds"),
        (Limits(tier_rows=(10, 15)), 15.0, "tier_rows of tier 0: 10 rows is not enough, the least is 15 rows"),
        (Limits(budget_usd=60.0, tier_rows=(10, None)), 70.0, "the least is 70 USD (10 over)"),
        (Limits(tier_usd=(None, 5.0), tier_rows=(27, None)), 29.0, "tier_rows of tier 0: 27 rows is not enough, the least is 29 rows"),
    ],
)  # fmt: skip
def test_what_cannot_be_met_is_refused_with_the_nearest_figure(limits: Limits, nearest: float, message: str) -> None:
    rows = np.ones((30, 1))
    quality, cost, seconds = rows * [0.5, 0.9], rows * [1.0, 3.0], rows * [6.0, 4.0]
    with pytest.raises(InfeasibleError) as caught:
        assign(quality, cost, limits, seconds=seconds)
    assert caught.value.nearest == pytest.approx(nearest, abs=1e-4)
    assert message in caught.value.message
    assert caught.value.hint


def test_the_nearest_figure_can_be_met_and_is_near_the_optimum() -> None:
    refused = {}
    for seed in range(30):
        job = Job(seed, rows=25, tiers=3, kinds="quality budget rows")
        try:
            job.solve()
        except InfeasibleError as error:
            if "mean quality" in error.message and error.nearest is not None:
                refused[seed] = error.nearest
    assert len(refused) >= 3
    for seed, nearest in refused.items():
        job = Job(seed, rows=25, tiers=3, kinds="quality budget rows")
        job.require_kept(job.solve(min_quality=nearest - 1e-9), Limits())
        best = job.optimum(-job.quality, leave_out="min_quality")
        assert best is not None
        assert -best / 25 * 0.98 <= nearest <= -best / 25 + 1e-6


def test_pins_that_break_a_cap_are_named() -> None:
    allowed = np.ones((10, 2), dtype=bool)
    allowed[:4, 0] = False
    with pytest.raises(InfeasibleError, match="tier_rows of tier 1: 3 rows is not enough, the least is 4 rows"):
        assign(np.ones((10, 2)), np.ones((10, 2)), Limits(tier_rows=(None, 3)), allowed=allowed)


@pytest.mark.parametrize("order", ["random", "sorted", "periodic"])
def test_many_rows(order: str) -> None:
    rng = np.random.default_rng(0)
    rows = 150_000
    quality = np.sort(rng.random((rows, 4)), axis=1) * 0.6 + 0.4 * rng.random((rows, 1))
    cost = np.array([1, 3, 8, 30]) * 1e-4 * (0.5 + rng.random((rows, 1)))
    if order == "sorted":
        quality, cost = quality[np.argsort(quality[:, 0])], np.sort(cost, axis=0)
    if order == "periodic":
        # what a sample of every n-th row sees is unlike the whole
        quality[::7] *= 0.1
        cost[::7] *= 20
    job = Job(0, 1, 1, "")
    job.quality, job.cost, job.seconds, job.allowed = quality, cost, cost, np.ones((rows, 4), np.bool_)
    asked = float(quality.mean()) * 1.1
    for limits in (Limits(min_quality=asked), Limits(budget_usd=float(cost.mean()) * rows * 0.7),
                   Limits(budget_usd=float(cost.mean()) * rows * 0.7, tier_rows=(None, rows // 5, None, rows // 10))):  # fmt: skip
        found = assign(quality, cost, limits)
        job.seconds = np.zeros_like(cost)
        job.require_kept(found, limits)
        assert found.gap < 1e-4


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("kind", ["rows", "seconds", "all"])
def test_limits_that_work_against_each_other(kind: str, share: float) -> None:
    rng = np.random.default_rng(3)
    rows = 1_000
    quality = np.sort(rng.random((rows, 4)), axis=1) * 0.6 + 0.4 * rng.random((rows, 1))
    cost = np.array([1, 3, 8, 30]) * 1e-4 * (0.5 + rng.random((rows, 1))) * (0.8 + 0.4 * rng.random((rows, 4)))
    seconds = cost * rng.random((rows, 4)) * 1000
    kinds: dict[str, dict[str, Any]] = {
        "rows": {"tier_rows": (None, rows // 3, rows // 5, rows // 10)},
        "seconds": {"max_seconds": 0.4 * float(seconds.mean()) * rows},
        "all": {
            "budget_usd": 0.5 * float(cost.mean()) * rows, "max_seconds": 0.45 * float(seconds.mean()) * rows,
            "tier_rows": (None, None, rows // 4, rows // 10), "tier_usd": (None, float(cost[:, 1].sum()) / 3, None, None),
        },
    }  # fmt: skip
    others = kinds[kind]
    most = assign(quality, cost, Limits(**others), seconds=seconds)
    assert most.gap < 1e-3
    least = float(quality[np.arange(rows), cost.argmin(axis=1)].mean())
    # up to the edge of what the other limits permit
    limits = Limits(min_quality=least + share * (most.quality - least), **others)
    found = assign(quality, cost, limits, seconds=seconds)
    job = Job(0, 1, 1, "")
    job.quality, job.cost, job.seconds, job.allowed = quality, cost, seconds, np.ones((rows, 4), np.bool_)
    job.require_kept(found, limits)
    assert found.gap < 2e-3


@given(jobs, st.floats(0, 1), st.integers(0, 10**6), st.floats(0, 1))
@settings(deadline=None, max_examples=40)
def test_what_a_row_costs_on_every_tier_changes_no_other(job: Job, share: float, row: int, more: float) -> None:
    job.limits = Limits()
    shown = np.where(job.allowed, job.cost, np.nan)
    least, most = float(np.nanmin(shown, axis=1).sum()), float(np.nanmax(shown, axis=1).sum())
    budget = least + share * (most - least)
    before = job.solve(budget_usd=budget)
    job.cost = job.cost.copy()
    job.cost[row % len(job.cost)] += more
    after = job.solve(budget_usd=budget + more)
    largest = max(abs(before.bound), 1e-12)
    assert after.bound == pytest.approx(before.bound, rel=1e-6)
    assert abs(after.quality - before.quality) * len(job.cost) <= max(before.gap, after.gap) * largest + 1e-6 * largest
