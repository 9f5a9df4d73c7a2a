"""The bill's numbers, derived from the journal and the results alone, so that a resume never counts twice."""

from __future__ import annotations

from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from relaybatch.spec import JobSpec


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class TierBill(_Record):
    """What one tier did and cost."""

    name: str
    """The tier's name in the job."""
    rows_run: int
    """Rows this tier tried to answer, the calibration sample among them."""
    rows_answered: int
    """Rows whose answer in the results is this tier's."""
    rows_failed: int
    """Rows this tier tried and could not answer."""
    input_tokens: int
    """Prompt tokens of the rows it ran, chat template included."""
    output_tokens: int
    """Tokens it generated, end tokens included, whatever became of the answer."""
    batches: int
    """Batches it ran."""
    seconds: float
    """Wall seconds of its batches."""
    load_seconds: float
    """Wall seconds of loading its model, over all loads of the run."""
    cost_usd: float
    """USD of its batches."""
    load_usd: float
    """USD of its device while the model loaded."""
    forecast_usd: float
    """USD that were forecast for its batches when they started."""
    padding_share: float
    """Padding among all tokens that its batches computed, 0..1."""
    quality: float | None
    """Mean grade (0..1) of the rows whose answer is this tier's; null without references."""
    truncated: int
    """Answers cut off at the token limit."""


class QualityBill(_Record):
    """Quality: forecast and, where rows have references, measured. Never a reference was used to route its own row."""

    graded_rows: int
    """Rows with a reference; a failed row counts as 0."""
    measured: float | None
    """Mean grade of the results over `graded_rows`."""
    forecast: float | None
    """Mean forecast quality of the standing answers, 0..1, failed rows as 0; null where nothing was learned."""
    top_forecast: float | None
    """Mean forecast quality of all rows on the top tier."""
    retained_forecast: float | None
    """`forecast` over `top_forecast`."""
    sample_rows: int
    """Rows of the calibration sample that this policy learned from."""
    sample_top: float | None
    """Mean grade of the top tier on that sample."""


class SavingBill(_Record):
    """The saving against every row on the top tier."""

    baseline_usd: float
    """USD of all rows on the top tier: actual where it ran, forecast elsewhere, and one load of its model."""
    baseline_rows_measured: int
    """Rows of the baseline with actual cost."""
    saved_usd: float
    """`baseline_usd` less what the run cost."""
    saved_share: float | None
    """`saved_usd` over `baseline_usd`."""


class LegBill(_Record):
    """How one leg was planned."""

    leg: str
    """`calibrate/<tier>` or `relay/<tier>`."""
    tier: str
    """The tier that ran."""
    rows: int
    """Rows the plan sent to it."""
    gap: float | None
    """Bound on the distance of the plan to the optimum, as a share of the objective."""
    target: float | None
    """Mean forecast quality that was asked for."""
    quality: float | None
    """Mean forecast quality of the whole plan."""
    cost_usd: float | None
    """USD that the whole rest of the plan was forecast to cost, later escalations included."""
    note: str
    """Anything a person should know, or empty."""


class Report(_Record):
    """The bill of a run, as in report.json."""

    version: Literal[1] = 1
    """Version of this form."""
    run_id: str
    """The run's id, also in every result."""
    job: str
    """The job's name."""
    state: Literal["finished"]
    """Whether the run is finished."""
    exit_code: int
    """The exit code of the command that finished it."""
    started_at: str
    """UTC time at which the run began (its first process)."""
    finished_at: str
    """UTC time at which it finished."""
    processes: int
    """Processes it took: 1 and every resume."""
    rows: int
    """Rows read."""
    rejects: int
    """Lines that could not be read, in rejects.jsonl."""
    ok: int
    """Rows answered."""
    failed: int
    """Rows without an answer."""
    errors: dict[str, int]
    """Failed rows by error code."""
    max_new_tokens: int
    """The limit on generated tokens in force where neither row nor tier sets one."""
    tiers: tuple[TierBill, ...]
    """One bill a tier, in the ladder's order."""
    cost_usd: float
    """USD of the run: batches and loads."""
    forecast_usd: float | None
    """USD that the first plan expected for the rows outside the calibration sample, later escalations included."""
    forecast_actual_usd: float | None
    """USD that those rows did cost."""
    saving: SavingBill
    """Saving against all-on-top-tier."""
    quality: QualityBill
    """Quality, forecast and measured."""
    legs: tuple[LegBill, ...]
    """The plan of every leg."""
    policy: str | None
    """Version of the policy that routed the run."""
    policy_learned: bool
    """Whether this run learned it."""
    inference_seconds: float
    """Wall seconds in batches."""
    routing_seconds: float
    """Wall seconds of reading, features, forecasts, assignment and batch planning."""
    routing_share: float | None
    """`routing_seconds` over `inference_seconds`."""
    learning_seconds: float
    """Wall seconds of training the policy; 0 where one was there."""
    padding_share: float
    """Padding among all computed tokens."""
    warnings: tuple[str, ...]
    """What a person should look at."""


class TierPlan(_Record):
    """What a plan sends to a tier."""

    tier: str
    """The tier's name."""
    rows: int
    """Rows whose first answer this tier gives; for a plan without a policy, rows of the calibration sample."""
    batches: int
    """Batches of these rows, by estimated tokens."""
    cost_usd: float | None
    """USD of these rows' first answers by forecast."""
    seconds: float | None
    """Seconds of these rows' first answers by forecast."""


class Plan(_Record):
    """What a run would do, with no model loaded."""

    job: str
    """The job's name."""
    rows: int
    """Rows read."""
    rejects: int
    """Lines that could not be read."""
    unanswerable: int
    """Rows that no model will see, such as empty prompts."""
    policy: str | None
    """The policy that would route; null: the run would first learn one."""
    sample_rows: int
    """Rows of the calibration sample that a run would start with."""
    tiers: tuple[TierPlan, ...]
    """The first leg's assignment, cheapest tier first."""
    cost_usd: float | None
    """USD of the whole run by forecast, later escalations included; null before anything was learned."""
    baseline_usd: float | None
    """USD of every row on the top tier by forecast."""
    quality: float | None
    """Mean forecast quality of the plan, 0..1."""
    top_quality: float | None
    """Mean forecast quality of every row on the top tier."""
    gap: float | None
    """Bound on the plan's distance to the optimum."""
    routing_seconds: float
    """Seconds that reading, features, forecast and assignment took."""


def tier_bills(
    spec: JobSpec,
    completions: pl.DataFrame,
    batches: pl.DataFrame,
    events: pl.DataFrame,
    answers: pl.DataFrame,
    grades: NDArray[np.float32],
) -> tuple[TierBill, ...]:
    """One bill a tier from the journal's frames, the results' `answers` (row order) and their `grades` (NaN: none)."""
    loads = events.filter(pl.col("kind") == "load")
    graded = answers.select("tier", "status").with_columns(pl.Series("grade", grades))
    bills = []
    for t, tier in enumerate(spec.tiers):
        ran = completions.filter(pl.col("tier") == t)
        done = batches.filter(pl.col("tier") == t)
        load = loads.filter(pl.col("tier") == t)
        mine = graded.filter((pl.col("tier") == tier.name) & (pl.col("status") == "ok"))
        known = mine["grade"].to_numpy()
        known = known[~np.isnan(known)]
        bills.append(
            TierBill(
                name=tier.name,
                rows_run=ran.height,
                rows_answered=mine.height,
                rows_failed=int((ran["finish_reason"] == "error").sum()),
                input_tokens=int(ran["input_tokens"].sum()),
                output_tokens=int(ran["output_tokens"].sum()),
                batches=done.height,
                seconds=float(done["seconds"].sum()),
                load_seconds=float(load["seconds"].sum()),
                cost_usd=float(done["cost_usd"].sum()),
                load_usd=float(load["cost_usd"].sum()),
                forecast_usd=float(done["forecast_usd"].sum()),
                padding_share=padding_share(done),
                quality=float(known.mean()) if len(known) else None,
                truncated=int((ran["finish_reason"] == "length").sum()),
            )
        )
    return tuple(bills)


def padding_share(batches: pl.DataFrame) -> float:
    """Padding among all computed tokens of these batches, 0..1."""
    computed = int(batches["computed_tokens"].sum())
    return int(batches["padding_tokens"].sum()) / computed if computed else 0.0
