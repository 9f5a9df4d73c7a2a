"""What starting a row on a tier leads to: the quality and cost after the escalations that its answer may call for.

Owns the value of an option that can be revised. A plain forecast values a cheap tier by its own answer; but its
answer also shows whether a dearer tier is needed, so a cheap start is worth more than its answer alone. The
decisions of a whole relay are simulated on the calibration sample, from the last tier down, and what they led to
is regressed on what was known before.
Source: Longstaff & Schwartz (2001), Valuing American Options by Simulation: A Simple Least-Squares Approach.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MIN_ROWS = 60  # fewer sample rows say too little for a regression over the ladder
RIDGE = 2.0  # in rows: pulls the coefficients of a small sample to its mean


@dataclass(frozen=True)
class Lookahead:
    """The calibration sample as the planner needs it: n rows, T tiers.

    staged: (T + 1, n, T) out-of-fold quality forecasts; [0] before any answer, [t + 1] after tier t's.
    scores: (n, T) measured quality. cost_usd: (n, T) by the tiers' profiles.
    """

    staged: NDArray[np.float32]
    scores: NDArray[np.float32]
    cost_usd: Floats

    def options(
        self, stage: NDArray[np.int32], quality: Floats, cost_usd: Floats, usd_per_quality: float
    ) -> tuple[Floats, Floats]:
        """Expected final quality and expected total USD (N, T) of going on to each tier, then deciding again.

        stage: (N,) last tier that answered, -1 for none. quality, cost_usd: (N, T) forecasts at that stage.
        usd_per_quality: what one row's full quality is worth; it prices the later decisions.
        """
        on_quality, on_cost = self._train(usd_per_quality)
        final, total = quality.copy(), cost_usd.copy()
        tiers = quality.shape[1]
        for s in range(-1, tiers - 1):
            at = np.flatnonzero(stage == s)
            if not len(at):
                continue
            basis = _basis(quality[at])
            # the top tier has nothing after it: its own forecast stands
            for u in range(s + 1, tiers - 1):
                final[at, u] = np.clip(basis @ on_quality[s + 1, u], 0.0, 1.0)
                total[at, u] += np.maximum(basis @ on_cost[s + 1, u], 0.0)
        return final, total

    def _train(self, usd_per_quality: float) -> tuple[Floats, Floats]:
        """Coefficients (T, T, B), by stage and next tier, of the final quality and of the cost that follows."""
        tiers, n = self.scores.shape[1], self.scores.shape[0]
        bases = [_basis(self.staged[s].astype(np.float64)) for s in range(tiers)]
        on_quality = np.zeros((tiers, tiers, bases[0].shape[1]))
        on_cost = np.zeros_like(on_quality)
        rows = np.arange(n)
        # what each row came to when it was started on tier u and the decisions after that were taken
        came_quality = np.zeros((n, tiers))
        came_cost = np.zeros((n, tiers))
        for u in range(tiers - 1, -1, -1):
            worth = np.full((n, tiers), -np.inf)
            worth[:, u] = usd_per_quality * self.staged[u + 1][:, u]
            for v in range(u + 1, tiers):
                expected = self.staged[u + 1][:, v] if v == tiers - 1 else bases[u + 1] @ on_quality[u + 1, v]
                follow = 0.0 if v == tiers - 1 else np.maximum(bases[u + 1] @ on_cost[u + 1, v], 0.0)
                worth[:, v] = usd_per_quality * expected - self.cost_usd[:, v] - follow
            choice = worth.argmax(axis=1)
            stays = choice == u
            came_quality[:, u] = np.where(stays, self.scores[:, u], came_quality[rows, choice])
            came_cost[:, u] = np.where(stays, 0.0, self.cost_usd[rows, choice] + came_cost[rows, choice])
            for s in range(u + 1):
                on_quality[s, u] = _ridge(bases[s], came_quality[:, u])
                on_cost[s, u] = _ridge(bases[s], came_cost[:, u])
        return on_quality, on_cost


def _basis(quality: Floats) -> Floats:
    """1, the forecasts, and their squares: (N, 1 + 2T)."""
    return np.concatenate([np.ones((len(quality), 1)), quality, quality**2], axis=1)


def _ridge(basis: Floats, target: Floats) -> Floats:
    scale = basis[:, 1:].std(axis=0) + 1e-9
    centre, mean = basis[:, 1:].mean(axis=0), target.mean()
    x = (basis[:, 1:] - centre) / scale
    weights = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ (target - mean)) / scale
    return np.concatenate([[mean - centre @ weights], weights])
