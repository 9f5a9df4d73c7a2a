"""What a leg decides: from forecasts and what has been answered, where every row that is still open goes.

Pure functions of arrays. N rows, T tiers; the leg's own tier and the dearer ones can still be run, an answer that
stands can be kept at no cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaybatch.assign import Limits, assign
from relaybatch.errors import InfeasibleError
from relaybatch.lookahead import Lookahead

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
FREE = -1
RELAXED = 5  # limits that may turn out unreachable one after the other
ROUNDS = 6  # of the fixed point between the price of quality and the value of later decisions


@dataclass(frozen=True)
class Known:
    """What N rows and T tiers have shown so far."""

    answered: Bools
    """(N, T): the tier gave an answer."""
    tried: Bools
    """(N, T): the tier was run, whatever came of it."""
    fixed: NDArray[np.int32]
    """(N,): the only tier the row may go to (pinned, or by rule); FREE for none."""
    closed: Bools
    """(N,): rows with nothing left to decide."""


@dataclass(frozen=True)
class Goal:
    """What the plan must keep; `retain` is relative to the forecast of all rows on the top tier."""

    retain: float | None
    target: float | None
    budget_usd: float | None
    tier_rows: tuple[int | None, ...] | None = None
    tier_usd: tuple[float | None, ...] | None = None
    tier_seconds: tuple[float | None, ...] | None = None


@dataclass(frozen=True)
class LegPlan:
    """Where each row goes: `choice` (N,) is a tier to run or an answer to keep, FREE where none is left."""

    choice: NDArray[np.int32]
    quality: Floats
    """(N,): expected quality of the row when all is done."""
    cost_usd: Floats
    """(N,): expected USD still to be spent on the row."""
    target: float | None
    """Mean quality over the rows that was asked for."""
    gap: float
    note: str
    """What could not be met, or empty."""


def best_answer(answered: Bools, quality: Floats) -> NDArray[np.int32]:
    """The answered tier (N,) of the highest forecast quality; FREE where none has answered."""
    best = np.where(answered, quality, -np.inf).argmax(axis=1).astype(np.int32)
    return np.where(answered.any(axis=1), best, FREE).astype(np.int32)


def open_tiers(leg: int, known: Known, *, escalate: bool, best: NDArray[np.int32]) -> Bools:
    """Options (N, T) of every row at a leg: tiers still to run, and the best answer so far."""
    tiers = known.answered.shape[1]
    later = np.arange(tiers) >= leg
    allowed = later[None, :] & ~known.tried
    allowed &= (known.fixed[:, None] == FREE) | (known.fixed[:, None] == np.arange(tiers))
    has_answer = best != FREE
    if not escalate:
        allowed &= ~has_answer[:, None]
    # a pinned row that has its answer is done
    allowed[has_answer & (known.fixed != FREE)] = False
    allowed[np.flatnonzero(has_answer), best[has_answer]] = True
    return allowed


def plan_leg(
    leg: int,
    quality: Floats,
    cost_usd: Floats,
    seconds: Floats,
    known: Known,
    goal: Goal,
    *,
    escalate: bool,
    lookahead: Lookahead | None,
    strict: bool,
) -> LegPlan:
    """Choose for every open row: keep its best answer, or run this leg's tier or a dearer one.

    quality, cost_usd, seconds: (N, T) forecasts; an answered tier's quality is that of the answer given.
    Raises InfeasibleError when `strict`: the limits cannot be met; else the nearest plan is made and noted.
    """
    rows = len(quality)
    best = best_answer(known.answered, quality)
    allowed = open_tiers(leg, known, escalate=escalate, best=best)
    free = np.flatnonzero(~known.closed & allowed.any(axis=1))
    choice = np.where(known.closed, best, FREE).astype(np.int32)
    standing = np.where(best != FREE, quality[np.arange(rows), np.maximum(best, 0)], 0.0)
    expected, spend = standing.copy(), np.zeros(rows)
    if not len(free):
        return LegPlan(choice, expected, spend, None, 0.0, "")
    allowed, q, tried = allowed[free], quality[free], known.tried[free]
    cost = np.where(tried, 0.0, cost_usd[free])
    time = np.where(tried, 0.0, seconds[free])
    wanted = goal.target
    if goal.retain is not None:
        # a row that cannot go to the top tier counts alike on both sides
        fixed = quality[np.arange(rows), np.where(known.fixed == FREE, quality.shape[1] - 1, known.fixed)]
        wanted = goal.retain * float(np.where(known.closed, standing, fixed).mean())
    settled = np.ones(rows, dtype=bool)
    settled[free] = False
    target = None if wanted is None else (wanted * rows - float(standing[settled].sum())) / len(free)
    limits = Limits(
        min_quality=target, budget_usd=goal.budget_usd, tier_rows=goal.tier_rows, tier_usd=goal.tier_usd,
        tier_seconds=goal.tier_seconds,
    )  # fmt: skip
    note = ""
    stage = _latest(known.answered[free])
    worth: float | None = None
    options, price = q, cost
    for _ in range(ROUNDS if lookahead is not None and escalate else 1):
        if worth is not None and lookahead is not None:
            options, price = lookahead.options(stage, q, cost, worth)
            options, price = np.where(tried, q, options), np.where(tried, 0.0, price)
        for _ in range(RELAXED):
            try:
                found = assign(options, price, limits, allowed=allowed, seconds=time)
                break
            except InfeasibleError as error:
                if strict or error.nearest is None:
                    raise
                note = f"{error.message}; the nearest plan was made"
                limits = _relaxed(limits, error.limit, error.nearest)
        else:
            found = assign(options, price, Limits(), allowed=allowed, seconds=time)
        previous, worth = worth, _usd_per_quality(found.multipliers, goal)
        if worth is None or (previous is not None and abs(worth - previous) <= 0.02 * previous):
            break
        if previous is not None:
            worth = float(np.sqrt(worth * previous)) if worth > 0 and previous > 0 else worth
    choice[free] = found.tier
    at = np.arange(len(free))
    expected[free] = options[at, found.tier]
    spend[free] = price[at, found.tier]
    return LegPlan(choice, expected, spend, wanted, found.gap, note)


def _latest(answered: Bools) -> NDArray[np.int32]:
    """The last tier (N,) that answered, -1 for none."""
    last = answered.shape[1] - 1 - answered[:, ::-1].argmax(axis=1)
    return np.where(answered.any(axis=1), last, FREE).astype(np.int32)


def _usd_per_quality(multipliers: dict[str, float], goal: Goal) -> float | None:
    """What one row's full quality is worth in USD at the optimum; None where nothing prices it."""
    if "min_quality" in multipliers:
        return multipliers["min_quality"]
    price = multipliers.get("budget_usd", 0.0)
    return 1.0 / price if price > 0 else None


def _relaxed(limits: Limits, name: str, nearest: float) -> Limits:
    """The same limits with the one that cannot be met set to what can."""
    kind, _, tier = name.partition(".")
    room = 1e-9 * max(abs(nearest), 1.0)
    if kind == "min_quality":
        return replace(limits, min_quality=nearest - room)
    if not tier:
        change: dict[str, Any] = {kind: nearest + room}
    else:
        caps = list(getattr(limits, kind))
        caps[int(tier)] = nearest + room
        change = {kind: tuple(caps)}
    return replace(limits, **change)
