"""The optimum over the job: one tier for every row, by Lagrangian relaxation, with a bound on what is lost.

Pure functions of arrays: N rows, T tiers. With multipliers fixed the choice is an argmax a row, so one vectorised
pass. One multiplier is found by bisection; several by Newton's method on a smoothed dual, then by bisection in turn.
The last rows are repaired greedily, then in pairs.
Sources: Fisher (1981), The Lagrangian Relaxation Method for Solving Integer Programming Problems; Sinha & Zoltners
(1979), The Multiple-Choice Knapsack Problem (greedy repair); Nesterov (2005), Smooth Minimization of Non-Smooth
Functions; Bertsekas (1982), Projected Newton Methods for Optimization Problems with Simple Constraints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaybatch.errors import InfeasibleError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Choice = NDArray[np.int32]
SLACK = 1e-9  # relative room for rounding when a constraint is checked
BISECTIONS = 100
CYCLES = 12
REPAIRS = 40
SAMPLE = 20_000  # rows that find the multipliers roughly, and rows that are repaired, of very many
PAIRED = 300  # moves of which pairs are tried: those that lose least by the multipliers
EXCHANGES = 50
ENOUGH = 1e-4  # gap at which pairs are tried no more
WIDTHS = (1.0, 0.1, 0.01, 0.001)  # of the dual's rounded kinks, one after the other, in mean ranges of a row's scores
NEWTON_STEPS = 20
HALVINGS = 20
NEAR = 0.03  # how far from the sample's a multiplier is sought first, as a share


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
    """Distance of the objective to `bound`, as a share of the larger of the two."""
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

    def cross(self, share: Floats, other: _Constraint) -> float:
        """The summed product of both uses where the options of every row have a share (N, T)."""
        tiers = range(share.shape[1]) if self.column is None else [self.column]
        return sum(float((share[:, t] * self.to(t) * other.to(t)).sum()) for t in tiers)

    def expected(self, share: Floats) -> Floats:
        """Use (N,) where the options of every row have a share (N, T)."""
        if self.column is None:
            return np.asarray(np.einsum("nt,nt->n", share, self.use))
        return share[:, self.column] * self.use

    def table(self, tiers: int) -> Floats:
        """Use (N, T) of every row on every tier."""
        return np.stack([self.to(t) for t in range(tiers)], axis=1)

    def of_rows(self, rows: Any, share: float = 1.0, used: float = 0.0) -> _Constraint:
        """The constraint on some of the rows, with a share of the limit and without what the others have used."""
        return _Constraint(self.name, self.use[rows], self.limit * share - used, self.column)

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
    limits; else most quality within the limits, and of equal quality the cheaper. Where `allowed` (N, T) is False,
    the option is never chosen and its figures are not looked at.
    Raises InfeasibleError: no assignment keeps the limits (or none was found); carries the nearest figure that can be
    met. ValueError: a row without an allowed tier, or a figure that is not finite (an infinite limit is none).
    """
    # by columns: every pass goes tier by tier
    q = np.asfortranarray(quality, dtype=np.float64)
    c = np.asfortranarray(cost_usd, dtype=np.float64)
    s = np.zeros_like(c) if seconds is None else np.asfortranarray(seconds, dtype=np.float64)
    rows = len(q)
    if rows == 0:
        return Assignment(np.empty(0, np.int32), 0.0, 0.0, 0.0, 0.0, 0.0)
    barred = None if allowed is None else np.asfortranarray(~allowed)
    if barred is not None:
        if barred.all(axis=1).any():
            raise ValueError(f"row {int(np.flatnonzero(barred.all(axis=1))[0])} has no allowed tier")
        q, c, s = (np.where(barred, 0.0, values) for values in (q, c, s))
    for name, values in (("quality", q), ("cost_usd", c), ("seconds", s)):
        if not np.isfinite(values).all():
            raise ValueError(f"{name} of row {int(np.argwhere(~np.isfinite(values))[0][0])} is not a number")
    least_cost = limits.min_quality is not None
    constraints = _constraints(q, c, s, limits, rows)
    objective = -c if least_cost else q.copy()
    # of options alike in the objective, the cheaper one; too small to matter for any other choice
    tie = q if least_cost else -c
    objective += tie * (1e-10 * float(np.abs(objective).max()) / max(float(np.abs(tie).max()), 1e-30))
    if barred is not None:
        objective[barred] = -np.inf
    choice, prices = _solve(objective, constraints)
    dual = min(_bound(objective, constraints, prices), _bound(objective, constraints, np.zeros(len(prices))))
    at = np.arange(rows)
    primal = float(objective[at, choice].sum())
    largest = max(abs(primal), abs(dual))
    gap = (dual - primal) / largest if dual - primal > SLACK * largest else 0.0
    return Assignment(
        choice, float(c[at, choice].sum()), float(q[at, choice].mean()), float(s[at, choice].sum()),
        -dual if least_cost else dual, float(gap),
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
    for one in found:
        if not one.limit > -np.inf:
            raise ValueError(f"{one.name} is not a number")
    return [one for one in found if one.limit < np.inf]


def _solve(objective: Floats, constraints: list[_Constraint]) -> tuple[Choice, Floats]:
    """A choice of most summed objective (N, T; -inf where barred) within the constraints, and the multipliers.

    Raises InfeasibleError: no choice keeps the constraints; names one and the least use of it that the others permit.
    """
    choice, prices = _dual(objective, constraints)
    if not _excluded(objective, constraints, prices):
        choice = _repair(objective, constraints, choice, prices)
        if _kept(constraints, choice):
            return choice, prices
    # the least use of the first constraint that the others permit: within its limit it is a start, else the nearest
    one = constraints[0]
    sparing = np.where(np.isneginf(objective), -np.inf, -one.table(objective.shape[1]))
    choice, _ = _solve(np.asfortranarray(sparing), constraints[1:])
    if one.total(choice) > one.room:
        raise _infeasible(one, one.total(choice), len(choice))
    return _repair(objective, constraints, choice, prices), prices


def _score(objective: Floats, constraints: list[_Constraint], prices: Floats) -> Floats:
    score = objective.copy(order="F")
    for one, price in zip(constraints, prices, strict=True):
        if price:
            one.charge(score, float(price))
    return score


def _bound(objective: Floats, constraints: list[_Constraint], prices: Floats) -> float:
    """What no choice within the constraints can exceed, by weak duality at any multipliers of 0 or more."""
    best = float(_best(_score(objective, constraints, prices)).sum())
    return best + sum(float(p) * one.limit for p, one in zip(prices, constraints, strict=True))


def _kept(constraints: list[_Constraint], choice: Choice) -> bool:
    return all(one.total(choice) <= one.room for one in constraints)


def _excluded(objective: Floats, constraints: list[_Constraint], prices: Floats) -> bool:
    """Do the multipliers prove that no choice keeps the constraints? Then the bound is below the worst of all choices."""
    rounding = sum(float(p) * (one.room - one.limit) for p, one in zip(prices, constraints, strict=True))
    return _below(_bound(objective, constraints, prices) + rounding, _worst(objective))


def _below(bound: float, worst: float) -> bool:
    return bound < worst - SLACK * max(abs(bound), abs(worst))


def _worst(objective: Floats) -> float:
    """The least summed objective of all choices."""
    return float(-_best(np.where(np.isneginf(objective), -np.inf, -objective)).sum())


def _best(score: Floats) -> Floats:
    """The best score (N,), column by column: several times faster than NumPy's own over a short axis."""
    return np.asarray(np.maximum.reduce(list(score.T)))


def _argmax(score: Floats) -> Choice:
    """The first best tier (N,)."""
    best, choice = score[:, 0].copy(), np.zeros(len(score), np.int32)
    for t in range(1, score.shape[1]):
        better = score[:, t] > best
        np.copyto(best, score[:, t], where=better)
        choice[better] = t
    return choice


def _dual(objective: Floats, constraints: list[_Constraint]) -> tuple[Choice, Floats]:
    """Multipliers that meet the constraints, each the least that does with the others fixed, and their choice."""
    rows, prices = len(objective), np.zeros(len(constraints))
    if rows > 5 * SAMPLE and constraints:
        # a sample finds the prices to within some per cent, so few passes over all rows are left
        part = np.random.default_rng(0).integers(0, rows, SAMPLE)
        fewer = [one.of_rows(part, SAMPLE / rows) for one in constraints]
        guess, prices = _dual(np.asfortranarray(objective[part]), fewer)
        if len(constraints) == 1 and fewer[0].total(guess) > fewer[0].room:
            prices[:] = 0.0
    if len(constraints) > 1:
        prices = _newton(objective, constraints, prices)
        if _excluded(objective, constraints, prices):
            return _argmax(_score(objective, constraints, prices)), prices
    choice = _argmax(_score(objective, constraints, prices))
    for _ in range(CYCLES):
        before = prices.copy()
        for k, one in enumerate(constraints):
            if prices[k] == 0 and one.total(choice) <= one.room:
                continue
            others = prices.copy()
            others[k] = 0.0
            prices[k], choice = _bisect(_score(objective, constraints, others), one, guess=float(prices[k]))
        if len(constraints) == 1 or np.allclose(prices, before, rtol=1e-4, atol=0):
            break
    return choice, prices


def _newton(objective: Floats, constraints: list[_Constraint], prices: Floats) -> Floats:
    """Multipliers near which the dual is least: Newton's method with its kinks rounded off, then less and less so.

    Where limits work against each other, moving one multiplier after the other creeps, or stops at a kink.
    """
    rows, tiers = objective.shape
    barred = np.isneginf(objective)

    def span(values: Floats) -> float:
        high, low = (np.where(barred, blank, values) for blank in (-np.inf, np.inf))
        return float((_best(high) + _best(-low)).mean())

    worth, worst = span(objective), _worst(objective)
    if not worth > 0:
        return prices
    # what a price of one is worth, so that figures in USD, seconds and rows count alike
    spans = np.array([max(span(one.table(tiers)), 1e-300) for one in constraints])
    for width in worth * np.array(WIDTHS[-1:] if prices.any() else WIDTHS):
        here = _smoothed(objective, constraints, prices, width)
        for _ in range(NEWTON_STEPS):
            value, slope, bend = here
            if _below(value, worst):
                return prices
            free = np.flatnonzero((prices > 0) | (slope < 0))
            if not len(free) or np.abs(slope[free] / spans[free]).max() <= 1e-6 * rows:
                break
            bent = bend(free) + np.diag(1e-6 * rows * spans[free] ** 2 / worth)
            step = np.zeros(len(prices))
            step[free] = np.linalg.solve(bent, -slope[free])
            for halved in range(HALVINGS):
                tried = np.maximum(prices + step / 2**halved, 0.0)
                there = _smoothed(objective, constraints, tried, width)
                if there[0] <= value + 1e-4 * float(slope @ (tried - prices)):
                    prices, here = tried, there
                    break
            else:
                break
    return prices


def _smoothed(
    objective: Floats, constraints: list[_Constraint], prices: Floats, width: float
) -> tuple[float, Floats, Callable[[NDArray[np.intp]], Floats]]:
    """The dual with logarithms of summed exponentials for maxima, its slope (K,), and its second derivatives."""
    share = _score(objective, constraints, prices)
    best = _best(share)
    for t in range(share.shape[1]):
        share[:, t] = np.exp((share[:, t] - best) / width)
    summed = share.sum(axis=1)
    limits = np.array([one.room for one in constraints])
    value = float(best.sum() + width * np.log(summed).sum() + prices @ limits)
    share /= summed[:, None]
    means = [one.expected(share) for one in constraints]

    def bend(free: NDArray[np.intp]) -> Floats:
        found = np.empty((len(free), len(free)))
        for i, a in enumerate(free):
            for j, b in enumerate(free[: i + 1]):
                cross = constraints[a].cross(share, constraints[b]) - float((means[a] * means[b]).sum())
                found[i, j] = found[j, i] = cross / width
        return found

    return value, limits - np.array([float(mean.sum()) for mean in means]), bend


def _bisect(base: Floats, one: _Constraint, guess: float) -> tuple[float, Choice]:
    """The least price of a constraint at which the argmax keeps it, and that choice; `guess` is near it or 0."""

    def choose(score: Floats, use: _Constraint, price: float) -> Choice:
        score = score.copy(order="F")
        use.charge(score, price)
        return _argmax(score)

    low, at_low = 0.0, _argmax(base)
    if one.total(at_low) <= one.room:
        return 0.0, at_low
    high, factor = (guess * (1 + NEAR), 1 + 4 * NEAR) if guess else (1.0, 4.0)
    for _ in range(8):
        at_high = choose(base, one, high)
        if one.total(at_high) <= one.room:
            break
        low, at_low, high, factor = high, at_high, high * factor, factor * factor
    else:
        return high, at_high
    factor = (1 + NEAR) / (1 - NEAR) if guess else 16.0
    for _ in range(6):
        if low > 0:
            break
        middle = high / factor
        choice = choose(base, one, middle)
        if one.total(choice) > one.room:
            low, at_low = middle, choice
        else:
            high, at_high, factor = middle, choice, factor * factor
    # a row with one choice at both ends has it in between too, since its scores are lines in the price
    choice = at_high.copy()
    rows = np.flatnonzero(at_low != at_high)
    base, use, at_low, at_high = base[rows], one.of_rows(rows), at_low[rows], at_high[rows]
    room = one.room - one.total(choice) + use.total(at_high)
    for _ in range(BISECTIONS):
        # close enough that greedy repair has nothing left to gain
        if not len(rows) or high - low <= 1e-12 * high or room - use.total(at_high) <= 1e-9 * abs(one.limit):
            break
        middle = float(np.sqrt(low) * np.sqrt(high)) if 0 < low < high / 4 else (low + high) / 2
        tried = choose(base, use, middle)
        if use.total(tried) <= room:
            high, at_high = middle, tried
            choice[rows] = tried
        else:
            low, at_low = middle, tried
        live = at_low != at_high
        if 2 * np.count_nonzero(live) < len(rows):
            room -= use.total(at_high) - use.of_rows(live).total(at_high[live])
            base, use, rows = base[live], use.of_rows(live), rows[live]
            at_low, at_high = at_low[live], at_high[live]
    return high, choice


def _repair(objective: Floats, constraints: list[_Constraint], choice: Choice, prices: Floats) -> Choice:
    """First undo what breaks a constraint, then spend the room that is left.

    In pairs as long as few moves are wanted, else greedily, then in pairs again. Of many rows only those are moved that
    lose least by the multipliers' scores, unless that mends nothing.
    """
    if not constraints:
        return choice
    choice = _exchange(objective, constraints, choice, prices)
    if len(choice) > 2 * SAMPLE:
        score = _score(objective, constraints, prices)
        chosen = score[np.arange(len(choice)), choice]
        score[np.arange(len(choice)), choice] = -np.inf
        near = np.sort(np.argpartition(chosen - _best(score), SAMPLE)[:SAMPLE])
        choice = choice.copy()
        apart = [one.of_rows(near, used=one.total(choice) - float(one.of(choice)[near].sum())) for one in constraints]
        choice[near] = _moves(objective[near], apart, choice[near], prices)
        choice = _exchange(objective, constraints, choice, prices)
        if _kept(constraints, choice):
            return choice
    return _exchange(objective, constraints, _moves(objective, constraints, choice, prices), prices)


def _exchange(objective: Floats, constraints: list[_Constraint], choice: Choice, prices: Floats) -> Choice:
    """The choice after the best pairs of moves, of two rows at once, until none helps or the gap is small enough.

    A pair helps that lessens what breaks constraints, or else gains and keeps them. Single moves stop early where one
    row is a large share of the whole, or where each move that gains by one limit loses by another.
    """
    rows, tiers = objective.shape
    at, dual = np.arange(rows), _bound(objective, constraints, prices)
    enough = dual - ENOUGH * abs(dual)
    loss = -_score(objective, constraints, prices)
    loss -= loss[at, choice][:, None]
    loss[at, choice] = np.inf
    moves = np.argpartition(loss.ravel(), min(PAIRED, loss.size - 1))[:PAIRED]
    row, tier = np.divmod(np.sort(moves[np.isfinite(loss.ravel()[moves])]), tiers)
    # to stay is a move as well, of no row, so a move alone is among the pairs
    row, tier = np.append(row, -1), np.append(tier, 0)
    apart = row[:, None] != row[None, :]
    target = [np.where(row >= 0, one.of_rows(row).of(tier), 0.0) for one in constraints]
    choice = choice.copy()
    for _ in range(EXCHANGES):
        gain = np.where(row >= 0, objective[row, tier] - objective[row, choice[row]], 0.0)
        total = float(objective[at, choice].sum())
        excess, now = np.zeros(apart.shape), 0.0
        for one, use in zip(constraints, target, strict=True):
            step = np.where(row >= 0, use - one.of_rows(row).of(choice[row]), 0.0)
            over, unit = one.total(choice) - one.room, max(float(np.abs(step).mean()), 1e-300)
            now += max(over, 0.0) / unit
            excess += np.maximum(step[:, None] + (step[None, :] + over), 0.0) / unit
        if now == 0 and total >= enough:
            break
        both = np.where(apart, gain[:, None] + gain[None, :], -np.inf)
        kept = apart & (excess == 0)
        if kept.any():
            both[~kept] = -np.inf
            if now == 0 and both.max() <= 1e-9 * float(np.abs(gain).max()):
                break
            first, second = np.unravel_index(int(np.argmax(both)), both.shape)
        else:
            excess[~apart] = np.inf
            first, second = np.unravel_index(int(np.argmin(excess)), excess.shape)
            if excess[first, second] >= now:
                break
        for move in (first, second):
            if row[move] >= 0:
                choice[row[move]] = tier[move]
    return choice


def _moves(objective: Floats, constraints: list[_Constraint], choice: Choice, prices: Floats) -> Choice:
    """The choice after whole batches of greedy moves, the best of them first."""
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
            fine = (choice != t) & ~skip & np.isfinite(gain)
            if broken.any():
                # moves that lessen the broken constraints and harm no other: least objective lost for it
                relief = -sum((d for d, b in zip(step, broken, strict=True) if b), np.zeros(rows))
                for d, b, r in zip(step, broken, room, strict=True):
                    fine &= d <= (0.0 if b else max(r, 0.0))
                fine &= relief > 0
                worth = np.where(fine, np.minimum(gain, 0.0) / np.where(relief > 0, relief, 1.0), -np.inf)
            else:
                weight = sum((max(float(p), 1e-12) * d for p, d in zip(prices, step, strict=True)), np.zeros(rows))
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


def _infeasible(one: _Constraint, nearest: float, rows: int) -> InfeasibleError:
    name, _, tier = one.name.partition(".")
    if name == "min_quality":
        asked, can = -one.limit / rows, -nearest / rows
        return InfeasibleError(
            f"a mean quality of {asked:.4f} cannot be reached: the most within the limits is {can:.4f}"
            f" ({asked - can:.4f} short)",
            nearest=can, limit=one.name, hint="lower the quality target, or raise the budget and the tiers' caps",
        )  # fmt: skip
    unit = {"budget_usd": "USD", "max_seconds": "seconds", "tier_rows": "rows", "tier_usd": "USD"}.get(name, "seconds")
    of = f"{name} of tier {tier}" if tier else name
    return InfeasibleError(
        f"{of}: {one.limit:.6g} {unit} is not enough, the least is {nearest:.6g} {unit} ({nearest - one.limit:.6g} over)",
        nearest=nearest, limit=one.name, hint="raise this limit, or lower what is asked for",
    )  # fmt: skip
