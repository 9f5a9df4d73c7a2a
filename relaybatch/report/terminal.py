"""The bill on a terminal: the figures of `bill.Report` as a table and a few lines, for people."""

from __future__ import annotations

from functools import partial
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relaybatch.errors import plain
from relaybatch.report.bill import Plan, Report


def usd(value: float) -> str:
    """USD with enough digits for small sums."""
    return f"${value:,.2f}" if abs(value) >= 10 else f"${value:.4f}" if abs(value) >= 0.01 else f"${value:.6f}"


def share(value: float | None) -> str:
    """A share as per cent."""
    return "–" if value is None else f"{100 * value:.1f}%"


def number(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def _console(file: IO[str]) -> Console:
    # files and pipes have no width: wide enough for every column
    return Console(file=file, highlight=False, width=None if file.isatty() else 120)


def print_bill(report: Report, folder: str, file: IO[str]) -> None:
    """Write the bill; `folder` is the run folder shown as the place of the results."""
    console = _console(file)
    table = Table(title=Text(f"{report.job} · run {report.run_id}"), title_justify="left")
    for name in ("tier", "answers", "ran", "failed", "tokens in", "out", "seconds", "cost", "quality", "padding"):
        table.add_column(name, justify="left" if name == "tier" else "right")
    for tier in report.tiers:
        table.add_row(
            Text(tier.name), f"{tier.rows_answered:,}", f"{tier.rows_run:,}", f"{tier.rows_failed:,}",
            f"{tier.input_tokens:,}", f"{tier.output_tokens:,}", f"{tier.seconds:.1f}",
            usd(tier.cost_usd + tier.load_usd), number(tier.quality), share(tier.padding_share),
        )  # fmt: skip
    table.add_section()
    quality, saving = report.quality, report.saving
    table.add_row(
        "all", f"{report.ok:,}", f"{sum(t.rows_run for t in report.tiers):,}", f"{report.failed:,}",
        f"{sum(t.input_tokens for t in report.tiers):,}", f"{sum(t.output_tokens for t in report.tiers):,}",
        f"{report.inference_seconds:.1f}", usd(report.cost_usd), number(quality.measured), share(report.padding_share),
    )  # fmt: skip
    console.print(table)
    line = partial(console.print, soft_wrap=True)
    line(
        f"cost      {usd(report.cost_usd)}, all on {plain(report.tiers[-1].name)} {usd(saving.baseline_usd)}"
        f" ({saving.baseline_rows_measured:,} rows measured, the rest forecast): saved {share(saving.saved_share)}",
        markup=False,
    )
    if report.forecast_usd is not None and report.forecast_actual_usd is not None:
        line(
            f"forecast  {usd(report.forecast_usd)} for the rows routed, actual {usd(report.forecast_actual_usd)}",
            markup=False,
        )
    measured = f"measured {number(quality.measured)} on {quality.graded_rows:,} rows" if quality.graded_rows else ""
    if quality.forecast is not None:
        line(
            f"quality   forecast {number(quality.forecast)}{', ' * bool(measured)}{measured}; all on top forecast"
            f" {number(quality.top_forecast)}, retained {share(quality.retained_forecast)}",
            markup=False,
        )
    elif measured:
        line(f"quality   {measured}", markup=False)
    learned = "learned in this run" if report.policy_learned else "from an earlier run"
    line(
        f"routing   {report.routing_seconds:.2f} s, {share(report.routing_share)} of inference;"
        f" policy {report.policy or 'none'} {learned if report.policy else ''}".rstrip(),
        markup=False,
    )
    if report.failed or report.rejects:
        codes = ", ".join(f"{code} {count:,}" for code, count in report.errors.items())
        shown = f" ({codes})" if codes else ""
        line(f"failed    {report.failed:,} rows{shown}, {report.rejects:,} lines rejected", markup=False)
    for warning in report.warnings:
        line(f"warning   {plain(warning)}", markup=False)
    line(f"results   {plain(folder)}", markup=False)


def print_plan(plan: Plan, file: IO[str]) -> None:
    """Write what a run would do."""
    console = _console(file)
    table = Table(title=Text(f"{plan.job} · plan"), title_justify="left")
    for name in ("tier", "rows", "batches", "cost", "seconds"):
        table.add_column(name, justify="left" if name == "tier" else "right")
    for tier in plan.tiers:
        cost = "–" if tier.cost_usd is None else usd(tier.cost_usd)
        table.add_row(Text(tier.tier), f"{tier.rows:,}", f"{tier.batches:,}", cost, number(tier.seconds, 1))
    console.print(table)
    rows = f"rows      {plan.rows:,} read, {plan.rejects:,} lines rejected, {plan.unanswerable:,} unanswerable"
    console.print(rows, markup=False, soft_wrap=True)
    if plan.policy is None:
        learn = f"a sample of {plan.sample_rows:,} rows through every tier" if plan.sample_rows else "nothing"
        console.print(f"policy    none yet: the run begins by learning from {learn}", markup=False, soft_wrap=True)
        return
    assert plan.cost_usd is not None
    assert plan.baseline_usd is not None
    saved = 1 - plan.cost_usd / plan.baseline_usd if plan.baseline_usd else None
    console.print(
        f"cost      {usd(plan.cost_usd)} with later escalations, all on top {usd(plan.baseline_usd)}: saves {share(saved)}",
        markup=False,
        soft_wrap=True,
    )
    console.print(
        f"quality   forecast {number(plan.quality)}, all on top {number(plan.top_quality)}; policy {plan.policy},"
        f" gap to the optimum {share(plan.gap)}",
        markup=False,
    )
