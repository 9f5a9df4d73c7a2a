"""The legs of a run: learn from a sample if there is no policy, then plan a leg, run it, record it, look again.

Owns the order of things. What a row is worth is forecast's, where it goes is planning's, how it is answered is an
engine's, what is finished is the journal's. The same journal always leads to the same next step, so a killed run
goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from relaybatch import features as feature_room
from relaybatch import policy as policies
from relaybatch.batching import plan_batches
from relaybatch.engines import free_bytes, load
from relaybatch.engines.base import BatchResult, Engine, EngineRequest, ModelFacts, ModelSettings, Sampling
from relaybatch.forecast import EVIDENCE_NAMES, Forecaster, Prediction, Sample
from relaybatch.grading import GradingOptions, agreement, grade, parses
from relaybatch.journal import BatchRecord, Journal
from relaybatch.lookahead import MIN_ROWS, Lookahead
from relaybatch.planning import FREE, Goal, Known, best_answer, plan_leg
from relaybatch.policy import Policy, PolicyCard, TierCard
from relaybatch.profile import Price, TierProfile, cost_usd, fit_profile, seconds
from relaybatch.progress import Progress, Stop
from relaybatch.spec import Job, TierSpec

WINDOW = 8_192  # rows tokenised together, while the window before them runs
SMALLEST_SAMPLE = 20
SAMPLE_SHARE = 0.25  # of the rows at most: a sample must leave something to save on
ENOUGH_BATCHES = 5  # that a tier must have run for a profile of this run
BUDGET_SLACK = 0.02  # of a budget kept back for forecasts that are too low
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """The N rows of a run as the relay needs them."""

    requests: pl.DataFrame
    """Request frame, in row order."""
    features: NDArray[np.float32]
    """(N, F)."""
    groups: NDArray[np.object_]
    """(N,) str."""
    tokens_estimated: Floats
    """(N,): prompt tokens as the features estimate them."""
    fixed: NDArray[np.int32]
    """(N,): the tier a pin or a rule sends the row to; FREE for none."""
    pinned: NDArray[np.bool_]
    """(N,): fixed by a pin, not by a rule."""


@dataclass(frozen=True)
class Outcome:
    """How the rows stand when all legs are run."""

    answers: pl.DataFrame
    """`row` and the fixed result columns (without id and run_id), in row order."""
    top_quality: Floats | None
    """(N,) forecast quality on the top tier."""
    top_usd: Floats
    """(N,) USD on the top tier: actual where it ran, forecast elsewhere."""
    top_ran: NDArray[np.bool_]
    sampled: NDArray[np.bool_]
    """(N,): rows of the calibration sample."""
    policy: Policy | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class FirstPlan:
    """What a run would begin with; None where nothing was learned yet."""

    policy: str | None
    sample_rows: int
    choice: NDArray[np.int32]
    """(N,): the tier that would run first; FREE for unanswerable rows."""
    usd: Floats | None
    """(N, T) forecast."""
    seconds: Floats | None
    """(N, T) forecast."""
    cost_usd: float | None
    """Of the whole run, later escalations included."""
    baseline_usd: float | None
    quality: float | None
    top_quality: float | None
    gap: float | None


def price_of(tier: TierSpec) -> Price:
    """A tier's price in the terms of the cost forecast."""
    tokens = tier.price.usd_per_million_tokens
    if tokens is None:
        return Price(usd_per_hour=tier.price.usd_per_hour)
    return Price(usd_per_million_input_tokens=tokens.input, usd_per_million_output_tokens=tokens.output)


def grading_of(job: Job) -> GradingOptions:
    """The job's grading in the terms of the graders."""
    return GradingOptions(**job.spec.grading.model_dump())


def sampling_of(job: Job) -> Sampling:
    """The job's sampling in the terms of the engines."""
    g = job.spec.generation
    return Sampling(temperature=g.temperature, top_p=g.top_p, top_k=g.top_k, seed=g.seed, stop=g.stop)


class Relay:
    """One run of a job over its rows. `run` carries it to the end, from wherever the journal stands."""

    def __init__(
        self, job: Job, rows: Rows, settings: tuple[ModelSettings, ...], facts: tuple[ModelFacts, ...],
        journal: Journal, progress: Progress, stop: Stop,
    ) -> None:  # fmt: skip
        self.job, self.rows, self.settings, self.facts = job, rows, settings, facts
        self.journal, self.progress, self.stop = journal, progress, stop
        self.spec = job.spec
        self.tiers = job.spec.tiers
        self.grading = grading_of(job)
        self.prices = [price_of(tier) for tier in self.tiers]
        self.policy: Policy | None = None
        self.routing_seconds = 0.0
        self.warnings: list[str] = []
        self._engine: tuple[int, Engine] | None = None
        n, t = rows.requests.height, len(self.tiers)
        self.unanswerable = rows.requests["error_code"].is_not_null().to_numpy()
        self.answered = np.zeros((n, t), dtype=bool)
        self.tried = np.zeros((n, t), dtype=bool)
        self.evidence = np.full((n, t, len(EVIDENCE_NAMES)), np.nan, dtype=np.float32)
        self.sampled = np.zeros(n, dtype=bool)
        self.refused = np.zeros(n, dtype=bool)
        self.texts: list[pl.Series | None] = [None] * t

    def run(self) -> Outcome:
        """Run every leg that is not finished, cheapest tier first."""
        try:
            self.learn()
            for tier in range(len(self.tiers)):
                chosen = self.plan(tier)
                self.leg(f"relay/{self.tiers[tier].name}", tier, chosen)
                self._absorb(tier)
            self.rescue()
            return self.outcome()
        finally:
            self._release()

    # -- learning -----------------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Use the run's policy, or the active one, or learn one from a sample sent through every tier."""
        version = self.journal.get("policy")
        if version is None and len(self.tiers) > 1 and policies.exists(self.job.policy_root):
            version = policies.load(self.job.policy_root).card.version
            self._require(policies.load(self.job.policy_root, version))
            self.journal.put(policy=version, learned="no")
        if version is None and len(self.tiers) > 1:
            version = self._calibrate()
        if version:
            self.policy = policies.load(self.job.policy_root, version)
            self._require(self.policy)
        for tier in range(len(self.tiers)):
            sample = self.journal.plan(self._sample_leg(tier))
            if sample is not None:
                self._absorb(tier)
                self.sampled[sample["row"].to_numpy().astype(np.int64)] = True

    def _calibrate(self) -> str | None:
        """Send a sample through every tier, top tier first, and learn a policy from it; None: too few rows."""
        rows = self._draw_sample()
        if len(rows) < SMALLEST_SAMPLE:
            self._warn(
                f"too few rows to learn from ({len(rows)} free rows, {SMALLEST_SAMPLE} are needed in a sample of at"
                f" most {SAMPLE_SHARE:.0%}): every free row goes to the top tier"
            )
            self.journal.put(policy="", learned="no")
            return None
        for tier in reversed(range(len(self.tiers))):
            leg = self._sample_leg(tier)
            if self.journal.plan(leg) is None:
                self._record_plan(leg, tier, rows, {})
            self.leg(leg, tier, rows)
        # cheapest first, whatever order they ran in: an answer is compared with the cheaper ones
        for tier in range(len(self.tiers)):
            self._absorb(tier)
        began = time.monotonic()
        self.progress.say(f"learning a policy from {len(rows):,} rows", level=1)
        card, forecaster = self._train(rows)
        version = policies.save(self.job.policy_root, card, forecaster)
        self.journal.record_event("learn", seconds=time.monotonic() - began)
        self.journal.put(policy=version, learned="yes")
        return version

    def _sample_leg(self, tier: int) -> str:
        return f"calibrate/{self.tiers[tier].name}"

    def _draw_sample(self) -> NDArray[np.int64]:
        """Rows of the calibration sample: every k-th free row in an order by group, then at random (stratified)."""
        free = np.flatnonzero((self.rows.fixed == FREE) & ~self.unanswerable)
        if self.rows.requests["reference"].null_count() < self.rows.requests.height:
            graded = free[self.rows.requests["reference"].is_not_null().to_numpy()[free]]
            free = graded if len(graded) >= SMALLEST_SAMPLE / SAMPLE_SHARE else free
        size = min(self.spec.calibration.rows, int(len(free) * SAMPLE_SHARE))
        if size < SMALLEST_SAMPLE:
            return free[:0] if size <= 0 else free[:size]
        draw = np.random.default_rng(self.spec.calibration.seed).random(len(free))
        order = np.lexsort((draw, self.rows.groups[free].astype(str)))
        return np.sort(free[order[((np.arange(size) + 0.5) * len(free) / size).astype(np.int64)]])

    def _train(self, rows: NDArray[np.int64]) -> tuple[PolicyCard, Forecaster]:
        taken = [self.journal.completions(tier).filter(pl.col("row").is_in(rows)) for tier in range(len(self.tiers))]
        sample = Sample(
            features=self.rows.features[rows],
            feature_names=feature_room.FEATURE_NAMES,
            groups=self.rows.groups[rows].astype(str),
            prompt_keys=self.rows.requests["prompt"].gather(rows).hash().to_numpy(),
            scores=self._scores(rows),
            output_tokens=np.stack([t["output_tokens"].to_numpy().astype(np.float32) for t in taken], axis=1),
            input_tokens=np.stack([t["input_tokens"].to_numpy().astype(np.float32) for t in taken], axis=1),
            evidence=self.evidence[rows],
        )
        names = tuple(tier.name for tier in self.tiers)
        forecaster = Forecaster.train(sample, names, seed=self.spec.calibration.seed)
        batches = self.journal.batches()
        cards = []
        for t, tier in enumerate(self.tiers):
            done = batches.filter((pl.col("tier") == t) & pl.col("leg").str.starts_with("calibrate/"))
            profile = fit_profile(done["seconds"], done["prompt_tokens"], done["output_tokens"], done["rows"])
            base, slope = _line(
                self.rows.tokens_estimated[rows], taken[t]["input_tokens"].to_numpy().astype(np.float64)
            )
            cards.append(TierCard(
                name=tier.name, model=tier.model, fingerprint=self._fingerprint(t), profile=profile,
                template_tokens=base, tokens_per_estimate=slope,
            ))  # fmt: skip
        card = PolicyCard(
            created=policies.utc_now(), features_version=feature_room.FEATURES_VERSION,
            feature_names=feature_room.FEATURE_NAMES, grading=self._grading_text(), tiers=tuple(cards),
            sample_rows=len(rows), summary=forecaster.summary,
        )  # fmt: skip
        return card, forecaster

    def _scores(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Grades (n, T) of the sample; without references the top tier's answer is the reference."""
        references = self.rows.requests["reference"].gather(rows)
        if references.null_count() == len(references) and self.grading.method not in ("json", "regex"):
            self._warn("no references: quality is measured as agreement with the top tier's answer")
            references = self._texts(len(self.tiers) - 1).gather(rows)
        scores = np.stack(
            [grade(self._texts(t).gather(rows), references, self.grading) for t in range(len(self.tiers))], axis=1
        )
        return np.where(self.tried[rows] & ~self.answered[rows], np.float32(0), scores)

    def _require(self, policy: Policy) -> None:
        policy.require(
            tiers=[tier.name for tier in self.tiers],
            fingerprints=[self._fingerprint(t) for t in range(len(self.tiers))],
            features_version=feature_room.FEATURES_VERSION, feature_names=feature_room.FEATURE_NAMES,
            grading=self._grading_text(),
        )  # fmt: skip

    def _fingerprint(self, tier: int) -> str:
        """Hash of the model's content and of the settings that change its answers."""
        t = self.tiers[tier]
        settings = json.dumps([
            self.facts[tier].fingerprint, t.dtype, t.prompt_format, t.chat_template, t.max_new_tokens,
            self.spec.generation.model_dump(mode="json"),
        ])  # fmt: skip
        return hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()

    def _grading_text(self) -> str:
        return self.spec.grading.model_dump_json()

    # -- planning -----------------------------------------------------------------------------------------------

    def plan(self, tier: int) -> NDArray[np.int64]:
        """The rows that go to this tier now; the plan that the journal holds, or a new one."""
        leg = f"relay/{self.tiers[tier].name}"
        kept = self.journal.plan(leg)
        if kept is None:
            with self._routing():
                self._plan_anew(leg, tier)
            kept = self.journal.plan(leg)
            assert kept is not None
        chosen = kept["row"].to_numpy().astype(np.int64)
        return chosen[~self.tried[chosen, tier]] if not self.journal.finished(leg) else chosen

    def _plan_anew(self, leg: str, tier: int) -> None:
        tiers = self.answered.shape[1]
        known = Known(self.answered, self.tried, self.rows.fixed, self.sampled | self.unanswerable | self.refused)
        prediction = self._predict()
        if prediction is None:
            # nothing was learned: free rows go to the top tier, and one tier higher where that is not possible
            last = tiers - 1
            go = np.where(self.rows.fixed == FREE, last, self.rows.fixed) == tier
            rows = np.flatnonzero(go & ~known.closed & ~self.tried[:, tier] & ~self.answered.any(axis=1))
            self._record_plan(leg, tier, rows, {})
            return
        usd, wall = self._cost(prediction)
        quality = prediction.quality.astype(np.float64)
        plan = plan_leg(
            tier, quality, usd, wall, known, self._goal(), escalate=self.spec.escalate,
            lookahead=self._lookahead(), strict=not self.answered.any(where=~self.sampled[:, None]),
        )  # fmt: skip
        rows = np.flatnonzero((plan.choice == tier) & ~self.tried[:, tier] & ~known.closed)
        detail = {
            "gap": plan.gap, "target": plan.target, "quality": float(plan.quality[~self.unanswerable].mean()),
            "cost_usd": float(plan.cost_usd.sum()), "note": plan.note,
        }  # fmt: skip
        if plan.note:
            self._warn(f"leg {self.tiers[tier].name}: {plan.note}")
        self._record_plan(leg, tier, rows, detail, usd[rows, tier])

    def _record_plan(
        self, leg: str, tier: int, rows: NDArray[np.int64], detail: Mapping[str, object], usd: Floats | None = None
    ) -> None:
        forecast = np.zeros(len(rows)) if usd is None else usd
        plan = pl.DataFrame({"row": rows.astype(np.uint64), "forecast_usd": forecast})
        self.journal.record_plan(leg, tier, plan, dict(detail))

    def _goal(self) -> Goal:
        spec, n = self.spec, self.rows.requests.height
        quality = spec.quality
        retain = quality.retain if quality else (None if spec.budget_usd is not None else 0.98)
        caps = []
        for t, tier in enumerate(self.tiers):
            most = [tier.max_rows, None if tier.max_share is None else int(tier.max_share * n)]
            limit = min((m for m in most if m is not None), default=None)
            # rows it has answered count against its cap
            caps.append(None if limit is None else max(limit - int(self.answered[:, t].sum()), 0))
        batches = self.journal.batches()
        spent = [batches.filter(pl.col("tier") == t) for t in range(len(self.tiers))]
        left = None
        if spec.budget_usd is not None:
            left = spec.budget_usd * (1 - BUDGET_SLACK) - self.journal.spent_usd()
        return Goal(
            retain=retain, target=quality.target if quality else None, budget_usd=left,
            tier_rows=tuple(caps),
            tier_usd=tuple(
                None if t.max_usd is None else max(t.max_usd - float(s["cost_usd"].sum()), 0.0)
                for t, s in zip(self.tiers, spent, strict=True)
            ),
            tier_seconds=tuple(
                None if t.max_seconds is None else max(t.max_seconds - float(s["seconds"].sum()), 0.0)
                for t, s in zip(self.tiers, spent, strict=True)
            ),
        )  # fmt: skip

    def _predict(self) -> Prediction | None:
        if self.policy is None:
            return None
        return self.policy.forecaster.predict(
            self.rows.features, feature_room.FEATURE_NAMES, self.rows.groups, self.evidence, self.answered
        )

    def _cost(self, prediction: Prediction, profiles: list[TierProfile] | None = None) -> tuple[Floats, Floats]:
        """USD and seconds (N, T) by the tiers' profiles, the policy's unless others are given."""
        profiles = profiles or self._profiles()
        length = prediction.output_tokens
        assert self.policy is not None
        cards = self.policy.card.tiers
        prompt = np.stack(
            [c.template_tokens + c.tokens_per_estimate * self.rows.tokens_estimated for c in cards], axis=1
        )
        wall = seconds(prompt, length, profiles)
        return cost_usd(prompt, length, wall, self.prices), wall

    def _profiles(self) -> list[TierProfile]:
        assert self.policy is not None
        return [tier.profile for tier in self.policy.card.tiers]

    def _measured_profiles(self) -> list[TierProfile]:
        """The tiers' profiles by this run's own batches; the policy's where a tier ran too few."""
        batches = self.journal.batches()
        found = []
        for t, known in enumerate(self._profiles()):
            ran = batches.filter(pl.col("tier") == t)
            enough = ran.height >= ENOUGH_BATCHES
            found.append(
                fit_profile(ran["seconds"], ran["prompt_tokens"], ran["output_tokens"], ran["rows"])
                if enough
                else known
            )
        return found

    def _lookahead(self) -> Lookahead | None:
        assert self.policy is not None
        held = self.policy.forecaster.held_out
        whole = np.isfinite(held.scores).all(axis=1) & np.isfinite(held.quality).all(axis=(0, 2))
        if whole.sum() < MIN_ROWS:
            return None
        wall = seconds(held.input_tokens[whole], held.output_tokens[whole], self._profiles())
        usd = cost_usd(held.input_tokens[whole], held.output_tokens[whole], wall, self.prices)
        return Lookahead(held.quality[:, whole], held.scores[whole], usd)

    def first_plan(self) -> FirstPlan:
        """What the first leg would decide, with nothing run: by the active policy, or the sample to learn from."""
        version = policies.load(self.job.policy_root).card.version if policies.exists(self.job.policy_root) else None
        if version is not None and len(self.tiers) > 1:
            self.policy = policies.load(self.job.policy_root, version)
            self._require(self.policy)
        open_rows = ~self.unanswerable
        prediction = self._predict()
        if prediction is None:
            choice = np.where(self.rows.fixed == FREE, len(self.tiers) - 1, self.rows.fixed)
            choice[self.unanswerable] = FREE
            sample = len(self._draw_sample()) if len(self.tiers) > 1 else 0
            return FirstPlan(
                None, sample if sample >= SMALLEST_SAMPLE else 0, choice, None, None, None, None, None, None, None
            )
        usd, wall = self._cost(prediction)
        quality = prediction.quality.astype(np.float64)
        known = Known(self.answered, self.tried, self.rows.fixed, self.unanswerable)
        plan = plan_leg(
            0, quality, usd, wall, known, self._goal(), escalate=self.spec.escalate, lookahead=self._lookahead(),
            strict=True,
        )  # fmt: skip
        usd[self.unanswerable] = wall[self.unanswerable] = quality[self.unanswerable] = 0.0
        return FirstPlan(
            version, 0, plan.choice, usd, wall, float(plan.cost_usd.sum()), float(usd[:, -1].sum()),
            float(np.where(open_rows, plan.quality, 0.0).mean()), float(quality[:, -1].mean()), plan.gap,
        )  # fmt: skip

    # -- running ------------------------------------------------------------------------------------------------

    def leg(self, leg: str, tier: int, rows: NDArray[np.int64]) -> None:
        """Run rows through a tier in batches, each recorded when it is finished."""
        if not self.journal.finished(leg):
            if len(rows):
                self._run_leg(leg, tier, rows)
            self.journal.record_event("routing", seconds=self.routing_seconds, detail=leg)
            self.routing_seconds = 0.0
            self.journal.finish_leg(leg)

    def _run_leg(self, leg: str, tier: int, rows: NDArray[np.int64]) -> None:
        plan = self.journal.plan(leg)
        assert plan is not None
        # batches are made of the whole plan, so that they are the same ones after a kill
        planned = plan["row"].to_numpy().astype(np.int64)
        forecast = np.zeros(self.rows.requests.height)
        forecast[planned] = plan["forecast_usd"].to_numpy()
        done = self.journal.batch_positions(leg)
        finished = int(sum(b["rows"] for b in self.journal.batches().filter(pl.col("leg") == leg).to_dicts()))
        if finished == len(planned):
            return
        least = self._least_usd()
        engine = self._use(tier)
        self.progress.start(leg, len(planned), finished)
        try:
            for position, requests in self._batches(engine, leg, tier, planned):
                index = np.array([r.row for r in requests])
                least[index] = 0.0
                if position in done:
                    continue
                self.stop.check()
                expected = float(forecast[index].sum())
                if not self._affordable(expected, float(least.sum())):
                    self._warn(
                        f"leg {self.tiers[tier].name}: the budget was reached; rows left without an answer go to the cheapest tier as far as it lasts"
                    )
                    break
                result = engine.generate(requests, sampling_of(self.job))
                self._record(leg, position, tier, result, expected)
                self.progress.advance(len(requests))
        finally:
            self.progress.finish()

    def _batches(
        self, engine: Engine, leg: str, tier: int, rows: NDArray[np.int64]
    ) -> Iterator[tuple[int, list[EngineRequest]]]:
        """The leg's batches in order with their positions; a window is tokenised while the one before it runs."""
        free = self._room(leg, tier)
        priority = self.rows.requests["priority"].fill_null(0).to_numpy()[rows]
        order = rows[np.lexsort((rows, -self.rows.tokens_estimated[rows], -priority))]
        windows = [order[start : start + WINDOW] for start in range(0, len(order), WINDOW)]
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise") as pool:
            coming = pool.submit(self._tokenise, engine, tier, windows[0])
            for w, window in enumerate(windows):
                tokens = coming.result()
                if w + 1 < len(windows):
                    coming = pool.submit(self._tokenise, engine, tier, windows[w + 1])
                with self._routing():
                    limit = self._limits(tier, window)
                    lengths = np.array([len(t) for t in tokens], dtype=np.int64)
                    rank = self.rows.requests["priority"].fill_null(0).to_numpy()[window]
                    bounds = (self.tiers[tier].batch.min, self.tiers[tier].batch.max)
                    batches = []
                    for level in np.unique(rank)[::-1]:
                        part = np.flatnonzero(rank == level)
                        batches += [part[b] for b in plan_batches(
                            lengths[part], limit[part], bounds=bounds, memory=engine.memory, free_bytes=free,
                        )]  # fmt: skip
                for k, batch in enumerate(batches):
                    yield w * WINDOW + k, [EngineRequest(int(window[i]), tokens[i], int(limit[i])) for i in batch]

    def _room(self, leg: str, tier: int) -> int:
        """Bytes that a batch of the leg may take; as first measured, so that a resumed leg makes the same batches."""
        kept = self.journal.get(f"free_bytes {leg}")
        if kept is None:
            device = self.settings[tier].device
            kept = str(free_bytes("cuda:0" if device == "auto" and _has_cuda() else device.replace("auto", "cpu")))
            self.journal.put(**{f"free_bytes {leg}": kept})
        return int(kept)

    def _tokenise(self, engine: Engine, tier: int, rows: NDArray[np.int64]) -> list[NDArray[np.int32]]:
        part = self.rows.requests[rows]
        messages = part["messages"].to_list() if part["messages"].null_count() < part.height else [None] * part.height
        prompts = [m if m is not None else p for m, p in zip(messages, part["prompt"].to_list(), strict=True)]
        spec = self.tiers[tier]
        tokens = engine.tokenize(prompts, prompt_format=spec.prompt_format, system=self.spec.generation.system)
        if self.spec.overlength == "truncate":
            room = self.facts[tier].context_tokens - 1
            # the ends hold the instruction and the template: the middle is cut out
            tokens = [
                t if len(t) <= room else np.concatenate([t[: room - room // 2], t[-(room // 2) :]]) for t in tokens
            ]
        return tokens

    def _limits(self, tier: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Most new tokens of each row."""
        most = self.tiers[tier].max_new_tokens or self.spec.generation.max_new_tokens
        return self.rows.requests["max_new_tokens"][rows].fill_null(most).to_numpy().astype(np.int64)

    def _record(self, leg: str, position: int, tier: int, result: BatchResult, expected: float) -> None:
        stats, price = result.stats, self.prices[tier]
        tokens = np.array([c.input_tokens + c.output_tokens for c in result.completions], dtype=np.float64)
        share = tokens / tokens.sum() if tokens.sum() else np.full(len(tokens), 1 / len(tokens))
        if price.usd_per_hour is not None:
            usd = share * stats.seconds * price.usd_per_hour / 3600
        else:
            into = np.array([c.input_tokens if c.output_tokens else 0 for c in result.completions])
            out = np.array([c.output_tokens for c in result.completions])
            usd = (into * price.usd_per_million_input_tokens + out * price.usd_per_million_output_tokens) / 1e6
        record = BatchRecord(
            leg, position, tier, len(result.completions), stats.seconds, stats.prompt_tokens, stats.padding_tokens,
            stats.computed_tokens, stats.output_tokens, stats.splits, float(usd.sum()), expected,
        )  # fmt: skip
        self.journal.record_batch(record, [
            (c.row, tier, leg, c.text, c.input_tokens, c.output_tokens, c.finish_reason, c.logprob_mean, c.logprob_min,
             c.entropy_mean, float(stats.seconds * s), float(u), c.error_code, c.error)
            for c, s, u in zip(result.completions, share, usd, strict=True)
        ])  # fmt: skip

    def _affordable(self, expected: float, reserve: float) -> bool:
        """Whether a batch can start without breaking the budget, by its forecast and how forecasts have held so far.

        `reserve`: USD that the cheapest tier would take for the rows still without an answer.
        """
        budget = self.spec.budget_usd
        if budget is None:
            return True
        batches = self.journal.batches()
        known = batches.filter(pl.col("forecast_usd") > 0)
        forecast = float(known["forecast_usd"].sum())
        factor = max(float(known["cost_usd"].sum()) / forecast, 1.0) if forecast > 0 else 1.0
        if expected == 0 and batches.height:
            expected = float(batches["cost_usd"].tail(5).max())  # type: ignore[arg-type]
        return self.journal.spent_usd() + (expected + reserve) * factor <= budget

    def _least_usd(self) -> Floats:
        """USD (N,) by forecast of the cheapest tier's answer for rows that have none; 0 where nothing was learned."""
        least = np.zeros(self.rows.requests.height)
        prediction = self._predict() if self.spec.budget_usd is not None else None
        if prediction is not None:
            open_rows = ~self.answered.any(axis=1) & ~self.unanswerable & ~self.refused
            least[open_rows] = self._cost(prediction)[0][open_rows, 0]
        return least

    def rescue(self) -> None:
        """When a budget left rows without any answer, give them to the cheapest tier as far as it goes."""
        leg = f"rescue/{self.tiers[0].name}"
        open_rows = ~self.answered.any(axis=1) & ~self.unanswerable & ~self.tried[:, 0]
        open_rows &= (self.rows.fixed == FREE) | (self.rows.fixed == 0)
        if self.spec.budget_usd is None or (self.journal.plan(leg) is None and not open_rows.any()):
            return
        if self.journal.plan(leg) is None:
            prediction = self._predict()
            rows = np.flatnonzero(open_rows)
            usd = None if prediction is None else self._cost(prediction)[0][rows, 0]
            self._record_plan(leg, 0, rows, {"note": "rows that the budget did not reach"}, usd)
        plan = self.journal.plan(leg)
        assert plan is not None
        self.leg(leg, 0, plan["row"].to_numpy().astype(np.int64))
        self._absorb(0)

    def _use(self, tier: int) -> Engine:
        """The tier's engine; the one in use is let go first unless it is the same."""
        if self._engine is not None and self._engine[0] == tier:
            return self._engine[1]
        self._release()
        self.stop.check()
        self.progress.say(f"loading {self.tiers[tier].name} ({self.tiers[tier].model})", level=1)
        engine = load(self.tiers[tier].engine, self.settings[tier])
        per_hour = self.prices[tier].usd_per_hour or 0.0
        took = engine.load_seconds
        self.journal.record_event("load", tier=tier, seconds=took, cost_usd=took * per_hour / 3600)
        self._engine = (tier, engine)
        return engine

    def _release(self) -> None:
        if self._engine is not None:
            self._engine[1].close()
            self._engine = None

    @contextmanager
    def _routing(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.routing_seconds += time.monotonic() - began

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            self.progress.say(f"warning: {text}")

    # -- what the answers show ----------------------------------------------------------------------------------

    def _texts(self, tier: int) -> pl.Series:
        found = self.texts[tier]
        return found if found is not None else pl.Series("text", [None] * self.rows.requests.height, dtype=pl.String)

    def _absorb(self, tier: int) -> None:
        """Take a tier's completions from the journal: what was tried, what was answered, what the answers show."""
        done = self.journal.completions(tier)
        if done.height == int(self.tried[:, tier].sum()):
            return
        at = done["row"].to_numpy().astype(np.int64)
        good = (done["finish_reason"] != "error").to_numpy()
        self.tried[at, tier] = True
        self.answered[at, tier] = good
        if self.spec.overlength == "error":
            self.refused[at] |= (done["error_code"] == "overlength").fill_null(False).to_numpy()
        whole = pl.DataFrame({"row": np.arange(self.rows.requests.height, dtype=np.uint64)})
        text = whole.join(done.select("row", "text"), on="row", how="left", maintain_order="left")["text"]
        self.texts[tier] = text
        seen = np.full((done.height, len(EVIDENCE_NAMES)), np.nan, dtype=np.float32)
        values: dict[str, pl.Series | NDArray[np.float32]] = {
            "logprob_mean": done["logprob_mean"], "logprob_min": done["logprob_min"],
            "entropy_mean": done["entropy_mean"], "output_tokens": done["output_tokens"],
            "cut_off": done["finish_reason"] == "length",
            "parses": parses(done["text"], self.grading).astype(np.float32),
            "agrees": self._agreement(tier, at),
        }  # fmt: skip
        for k, name in enumerate(EVIDENCE_NAMES):
            value = values[name]
            seen[:, k] = value.cast(pl.Float32).to_numpy() if isinstance(value, pl.Series) else value
        seen[~good] = np.nan
        self.evidence[at, tier] = seen

    def _agreement(self, tier: int, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Whether the answer equals that of the next-cheaper tier that answered, (n,); NaN where none did."""
        agrees = np.full(len(rows), np.nan, dtype=np.float32)
        mine = self._texts(tier).gather(rows)
        for cheaper in range(tier - 1, -1, -1):
            if self.texts[cheaper] is None:
                continue
            theirs = agreement(mine, self._texts(cheaper).gather(rows), self.grading)
            agrees = np.where(np.isnan(agrees), theirs, agrees)
        return agrees

    # -- the end ------------------------------------------------------------------------------------------------

    def outcome(self) -> Outcome:
        """The best answer of every row, with what it cost over all its attempts."""
        n, tiers = self.answered.shape
        rows = np.arange(n)
        prediction = self._predict()
        quality = None if prediction is None else prediction.quality.astype(np.float64)
        best = best_answer(self.answered, quality if quality is not None else np.tile(np.arange(tiers) / tiers, (n, 1)))
        # a sample row was learned from, so its own forecast would know its grade: the top tier's answer stands
        top = tiers - 1
        best = np.where(self.sampled & self.answered[:, top], top, best)
        before = None
        if self.policy is not None:
            before = self.policy.forecaster.predict(
                self.rows.features, feature_room.FEATURE_NAMES, self.rows.groups
            ).quality.astype(np.float64)
        done = self.journal.completions()
        names = [tier.name for tier in self.tiers]
        per_row = done.group_by("row").agg(
            pl.col("cost_usd").sum(), pl.col("tier").sort().alias("tiers"),
            pl.col("error_code").drop_nulls().last().alias("last_code"), pl.col("error").drop_nulls().last().alias("last_error"),
        )  # fmt: skip
        base = pl.DataFrame({"row": rows.astype(np.uint64), "best": best.astype(np.int32)})
        standing = base.join(
            done.select("row", "tier", "text", "input_tokens", "output_tokens", "finish_reason"),
            left_on=["row", "best"], right_on=["row", "tier"], how="left", maintain_order="left",
        ).join(per_row, on="row", how="left", maintain_order="left")  # fmt: skip
        ok = best != FREE
        at = np.maximum(best, 0)
        tried_names = pl.Series(names).gather
        codes = self.rows.requests["error_code"].fill_null(standing["last_code"])
        errors = self.rows.requests["error"].fill_null(standing["last_error"])
        if self.spec.budget_usd is not None:
            codes = codes.fill_null("budget_exhausted")
            errors = errors.fill_null("the budget was spent before this row could be run")
        codes, errors = codes.fill_null("not_run"), errors.fill_null("no tier was left that could answer this row")
        okay = pl.Series("ok", ok)
        nothing = pl.lit(None)
        answers = pl.DataFrame({
            "row": base["row"], "response": standing["text"],
            "status": okay.replace_strict({True: "ok", False: "failed"}, return_dtype=pl.String),
            "tier": tried_names(at), "tiers_tried": standing["tiers"].fill_null([]),
            "quality_forecast": np.full(n, np.nan) if before is None else before[rows, at],
            "confidence": np.full(n, np.nan) if quality is None else quality[rows, at],
            "input_tokens": standing["input_tokens"], "output_tokens": standing["output_tokens"],
            "cost_usd": standing["cost_usd"].fill_null(0.0), "finish_reason": standing["finish_reason"],
            "error_code": codes, "error": errors, "ok": okay,
        }).with_columns(
            pl.col("tiers_tried").list.eval(pl.element().replace_strict(dict(enumerate(names)), return_dtype=pl.String)),
            *(pl.when("ok").then(pl.col(c)).otherwise(nothing).alias(c)
              for c in ("response", "tier", "quality_forecast", "confidence")),
            *(pl.when("ok").then(nothing).otherwise(pl.col(c)).alias(c) for c in ("error_code", "error")),
        ).with_columns(pl.col("quality_forecast", "confidence").fill_nan(None)).drop("ok")  # fmt: skip
        usd = np.zeros(n)
        top_done = done.filter(pl.col("tier") == top)
        if prediction is not None:
            usd = self._cost(prediction, self._measured_profiles())[0][:, top]
        usd[self.unanswerable] = 0.0
        usd[top_done["row"].to_numpy().astype(np.int64)] = top_done["cost_usd"].to_numpy()
        return Outcome(
            answers, None if quality is None else quality[:, top], usd, self.tried[:, top], self.sampled, self.policy,
            tuple(self.warnings),
        )  # fmt: skip


def _line(x: Floats, y: Floats) -> tuple[float, float]:
    """Intercept and slope, neither negative, of y over x; the line keeps the mean of y."""
    spread = float(np.var(x))
    slope = max(float(np.cov(x, y, bias=True)[0, 1]) / spread, 0.0) if spread > 0 else 0.0
    base = float(y.mean()) - slope * float(x.mean())
    return (base, slope) if base >= 0 else (0.0, float(y.mean()) / max(float(x.mean()), 1e-9))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
