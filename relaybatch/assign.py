"""The optimum over the job: one tier for every row, by Lagrangian relaxation, with a bound on what is lost.

Pure functions of arrays: N rows, T tiers. With multipliers fixed the choice is an argmax a row, so one vectorised
pass; multipliers are found by bisection, one constraint after the other; the last rows are repaired greedily.
Sources: Fisher (1981), The Lagrangian Relaxation Method for Solving Integer Programming Problems; Sinha & Zoltners
(1979), The Multiple-Choice Knapsack Problem (greedy repair).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from relaybatch.errors import InfeasibleError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Choice = NDArray[np.int32]
SLACK = 1e-9  # relative room for rounding when a constraint is checked
BISECTIONS = 40
CYCLES = 12
REPAIRS = 40
SUBSET = 20_000


@dataclass(frozen=True)
class Limits:
    """What the assignment must keep. None: no limit."""

    min_quality: float | None = None
    """Mean quality over the N rows, 0..1: asked for at the least cost."""
    budget_usd: float | None = None
    """Total USD. Without `min_quality`: most quality for this budget."""
    max_seconds: float | None = None
    """Total seconds."""
    tier_rows: tuple[int | None, ...] | None = None
    """Most rows by tier."""
    tier_usd: tuple[float | None, ...] | None = None
    """Most USD by tier."""
    tier_seconds: tuple[float | None, ...] | None = None
    """Most seconds by tier."""


@dataclass(frozen=True)
class Assignment:
    """A tier for every row."""

    tier: Choice
    """(N,) index of the tier."""
    cost_usd: float
    """Total."""
    quality: float
    """Mean over the rows."""
    seconds: float
    """Total."""
    bound: float
    """No assignment within the limits has a better objective: USD (least cost) or summed quality (most quality)."""
    gap: float
    """Distance of the objective to `bound`, as a share of the objective."""
    multipliers: dict[str, float] = field(default_factory=dict)
    """By limit: what one unit more of it is worth in units of the objective."""


@dataclass(frozen=True)
class _Constraint:
    """Summed use of the chosen options may not exceed `limit`; `column` restricts it to one tier."""

    name: str
    use: Floats  # (N, T), or (N,) of `column`
    limit: float
    column: int | None = None

    def total(self, choice: Choice) -> float:
        return float(self.of(choice).sum())

    def of(self, choice: Choice) -> Floats:
        if self.column is None:
            return np.asarray(self.use[np.arange(len(choice)), choice])
        return np.where(choice == self.column, self.use, 0.0)

    def to(self, tier: int) -> Floats:
        """Use (N,) of every row on `tier`."""
        if self.column is None:
            return self.use[:, tier]
        return self.use if tier == self.column else np.zeros(len(self.use))

    def charge(self, score: Floats, price: float) -> None:
        """Subtract the use at a price from a score (N, T), in place."""
        if self.column is None:
            score -= price * self.use
        else:
            score[:, self.column] -= price * self.use

    @property
    def room(self) -> float:
        return self.limit + SLACK * max(1.0, abs(self.limit))


def assign(
    quality: NDArray[np.floating],
    cost_usd: NDArray[np.floating],
    limits: Limits,
    *,
    allowed: Bools | None = None,
    seconds: NDArray[np.floating] | None = None,
) -> Assignment:
    """Choose one allowed tier for every row, optimal for the job as a whole.

    quality (N, T; 0..1), cost_usd and seconds (N, T). With `min_quality`: least cost that keeps it and the other
    limits; else most quality within the limits, and of equal quality the cheaper. Where
    `allowed` (N, T) is False, the option is never chosen.
    Raises InfeasibleError: no assignment keeps the limits (or none was found); carries the nearest figure that can be
    met. ValueError: a row without an allowed tier.
    """  # fmt: skip
    # by columns: every pass goes tier by tier
    q = np.asfortranarray(quality, dtype=np.float64)
    c = np.asfortranarray(cost_usd, dtype=np.float64)
    s = np.zeros_like(c) if seconds is None else np.asfortranarray(seconds, dtype=np.float64)
    rows = len(q)
    if allowed is not None and not allowed.any(axis=1).all():
        raise ValueError(f"row {int(np.flatnonzero(~allowed.any(axis=1))[0])} has no allowed tier")
    if rows == 0:
        return Assignment(np.empty(0, np.int32), 0.0, 0.0, 0.0, 0.0, 0.0)
    least_cost = limits.min_quality is not None
    constraints = _constraints(q, c, s, limits, rows)
    objective = -c if least_cost else q.copy()
    # of options alike in the objective, the cheaper one; too small to matter for any other choice
    tie = q if least_cost else -c
    objective = objective + tie * (1e-10 * max(float(np.ptp(objective)), 1e-30) / max(float(np.abs(tie).max()), 1e-30))
    barred = None if allowed is None else np.asfortranarray(~allowed)
    for one in constraints:
        _require_possible(one, barred, limits, rows)
    choice, prices = _dual(objective, constraints, barred)
    choice = _repair(objective, constraints, barred, choice, prices)
    broken = [one for one in constraints if one.total(choice) > one.room]
    if broken:
        _raise_infeasible(broken, choice, q, c, s, limits, allowed)
    score = _score(objective, constraints, prices, barred)
    dual = float(score.max(axis=1).sum()) + sum(p * one.limit for p, one in zip(prices, constraints, strict=True))
    at = np.arange(rows)
    primal = float(objective[at, choice].sum())
    gap = max(dual - primal, 0.0) / max(abs(primal), 1e-12) if dual - primal > SLACK * abs(primal) else 0.0
    return Assignment(
        choice, float(c[at, choice].sum()), float(q[at, choice].mean()), float(s[at, choice].sum()),
        -dual if least_cost else dual, gap,
        {one.name: float(p) for one, p in zip(constraints, prices, strict=True)},
    )  # fmt: skip


def _constraints(q: Floats, c: Floats, s: Floats, limits: Limits, rows: int) -> list[_Constraint]:
    found = []
    if limits.min_quality is not None:
        found.append(_Constraint("min_quality", -q, -limits.min_quality * rows))
    if limits.budget_usd is not None:
        found.append(_Constraint("budget_usd", c, limits.budget_usd))
    if limits.max_seconds is not None:
        found.append(_Constraint("max_seconds", s, limits.max_seconds))
    ones = np.ones(rows)
    for name, caps, use in (("tier_rows", limits.tier_rows, None), ("tier_usd", limits.tier_usd, c),
                            ("tier_seconds", limits.tier_seconds, s)):  # fmt: skip
        for t, cap in enumerate(caps or ()):
            if cap is not None:
                found.append(_Constraint(f"{name}.{t}", ones if use is None else use[:, t], float(cap), t))
    return found


def _score(objective: Floats, constraints: list[_Constraint], prices: Floats, barred: Bools | None) -> Floats:
    score = objective.copy(order="F")
    for one, price in zip(constraints, prices, strict=True):
        if price:
            one.charge(score, float(price))
    if barred is not None:
        score[barred] = -np.inf
    return score


def _argmax(score: Floats) -> Choice:
    """The first best tier (N,) of a score (N, T): column by column, several times faster than NumPy's over a short axis."""
    best, choice = score[:, 0].copy(), np.zeros(len(score), np.int32)
    for t in range(1, score.shape[1]):
        better = score[:, t] > best
        np.copyto(best, score[:, t], where=better)
        choice[better] = t
    return choice


def _dual(objective: Floats, constraints: list[_Constraint], barred: Bools | None) -> tuple[Choice, Floats]:
    """Multipliers that meet the constraints, each the least that does with the others fixed, and their choice."""
    prices = np.zeros(len(constraints))
    choice = _argmax(_score(objective, constraints, prices, barred))
    for _ in range(CYCLES):
        before = prices.copy()
        for k, one in enumerate(constraints):
            if prices[k] == 0 and one.total(choice) <= one.room:
                continue
            others = prices.copy()
            others[k] = 0.0
            base = _score(objective, constraints, others, barred)
            prices[k], choice = _bisect(base, one, start=float(prices[k]))
        if len(constraints) == 1 or np.allclose(prices, before, rtol=1e-4, atol=0):
            break
    return choice, prices


def _bisect(base: Floats, one: _Constraint, start: float) -> tuple[float, Choice]:
    """The least price of a constraint at which the argmax keeps it, and that choice."""

    def choose(price: float) -> Choice:
        score = base.copy(order="F")
        if price:
            one.charge(score, price)
        return _argmax(score)

    choice = choose(0.0)
    if one.total(choice) <= one.room:
        return 0.0, choice
    low, high, factor = 0.0, start or 1.0, 4.0
    if len(base) > SUBSET * 5:
        # a sample finds the price to within some per cent, so few passes over all rows are left
        stride = len(base) // SUBSET
        part = base[::stride]
        sample = _Constraint(one.name, one.use[::stride], one.limit * len(part) / len(base), one.column)
        guess = _bisect(part, sample, start)[0]
        if guess > 0 and one.total(choose(guess * 0.97)) > one.room:
            low, high, factor = guess * 0.97, guess * 1.03, 1.1
    for _ in range(200):
        choice = choose(high)
        if one.total(choice) <= one.room:
            break
        low, high = high, high * factor
    else:
        return high, choice
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        tried = choose(middle)
        total = one.total(tried)
        if total <= one.room:
            high, choice = middle, tried
            # close enough that greedy repair has nothing left to gain
            if one.room - total <= 1e-5 * max(abs(one.limit), 1e-12):
                break
        else:
            low = middle
        if high - low <= 1e-7 * high:
            break
    return high, choice


def _repair(
    objective: Floats, constraints: list[_Constraint], barred: Bools | None, choice: Choice, prices: Floats
) -> Choice:
    """First undo what breaks a constraint, then spend the room that is left; whole batches of moves a pass."""
    rows, tiers = objective.shape
    at = np.arange(rows)
    choice = choice.copy()
    skip = np.zeros(rows, dtype=bool)
    for _ in range(REPAIRS):
        use = [one.of(choice) for one in constraints]
        room = np.array([one.room - float(u.sum()) for one, u in zip(constraints, use, strict=True)])
        broken = room < 0
        now = objective[at, choice]
        best, to, moved = np.full(rows, -np.inf), choice.copy(), np.zeros((len(constraints), rows))
        for t in range(tiers):
            gain = objective[:, t] - now
            step = [one.to(t) - u for one, u in zip(constraints, use, strict=True)]
            weight = sum((max(float(p), 1e-12) * d for p, d in zip(prices, step, strict=True)), np.zeros(rows))
            fine = (choice != t) & ~skip
            if barred is not None:
                fine &= ~barred[:, t]
            if broken.any():
                # moves that lessen the broken constraints and harm no other: least objective lost for it
                relief = -sum((d for d, b in zip(step, broken, strict=True) if b), np.zeros(rows))
                for d, b, r in zip(step, broken, room, strict=True):
                    fine &= d <= (0.0 if b else max(r, 0.0))
                fine &= relief > 0
                worth = np.where(fine, np.minimum(gain, 0.0) / np.where(relief > 0, relief, 1.0), -np.inf)
            else:
                fine &= gain > 0
                for d, r in zip(step, room, strict=True):
                    fine &= d <= r
                worth = np.where(fine, gain / np.maximum(weight, 1e-15), -np.inf)
            better = worth > best
            best[better], to[better] = worth[better], t
            for m, d in zip(moved, step, strict=True):
                m[better] = d[better]
        candidates = np.flatnonzero(np.isfinite(best))
        if not len(candidates):
            break
        order = candidates[np.argsort(-best[candidates], kind="stable")]
        accept = np.ones(len(order), dtype=bool)
        for m, r, b in zip(moved, room, broken, strict=True):
            summed = np.cumsum(m[order])
            if b:
                # stop after the move that mends it
                accept &= np.concatenate([[True], summed[:-1] > r])
            else:
                accept &= summed <= r
        stop = int(np.argmin(accept)) if not accept.all() else len(order)
        if stop == 0:
            skip[order[0]] = True
            continue
        chosen = order[:stop]
        choice[chosen] = to[chosen]
    return choice


def _require_possible(one: _Constraint, barred: Bools | None, limits: Limits, rows: int) -> None:
    """Raise when even the choice that uses least of a constraint breaks it."""
    use = one.use
    if one.column is not None:
        # a row can leave the tier unless the tier is all it may have
        if barred is None:
            least = 0.0 if limits.tier_rows is None or len(limits.tier_rows) > 1 else float(use.sum())
        else:
            least = float(use[barred.sum(axis=1) == barred.shape[1] - 1][
                ~barred[barred.sum(axis=1) == barred.shape[1] - 1, one.column]].sum())  # fmt: skip
    else:
        least = float((use if barred is None else np.where(barred, np.inf, use)).min(axis=1).sum())
    if least > one.room:
        raise _infeasible(one, least, rows)


def _raise_infeasible(
    broken: list[_Constraint], choice: Choice, q: Floats, c: Floats, s: Floats, limits: Limits, allowed: Bools | None
) -> None:
    rows = len(choice)
    if limits.min_quality is not None:
        others = Limits(
            None, limits.budget_usd, limits.max_seconds, limits.tier_rows, limits.tier_usd, limits.tier_seconds
        )
        most = assign(q, c, others, allowed=allowed, seconds=s)
        if most.quality < limits.min_quality:
            raise _infeasible(_constraints(q, c, s, limits, rows)[0], -most.quality * rows, rows)
    raise _infeasible(broken[0], broken[0].total(choice), rows)


def _infeasible(one: _Constraint, nearest: float, rows: int) -> InfeasibleError:
    name, _, tier = one.name.partition(".")
    if name == "min_quality":
        asked, can = -one.limit / rows, -nearest / rows
        return InfeasibleError(
            f"a mean quality of {asked:.4f} cannot be reached: the most within the limits is {can:.4f}"
            f" ({asked - can:.4f} short)",
            nearest=can, hint="lower the quality target, or raise the budget and the tiers' caps",
        )  # fmt: skip
    unit = {"budget_usd": "USD", "max_seconds": "seconds", "tier_rows": "rows", "tier_usd": "USD"}.get(name, "seconds")
    of = f"{name} of tier {tier}" if tier else name
    return InfeasibleError(
        f"{of}: {one.limit:.6g} {unit} is not enough, the least is {nearest:.6g} {unit} ({nearest - one.limit:.6g} over)",
        nearest=nearest, hint="raise this limit, or lower what is asked for",
    )  # fmt: skip
