"""A job from its file to its bill: `run`, `plan` and `check`, as the command and as Python functions.

Owns the order of the rooms and the run folder. Each step's work is its own room's.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaybatch import __version__, spec
from relaybatch.errors import InputError, LockedError, ModelError, PolicyError, SpecError
from relaybatch.progress import Progress, Stop
from relaybatch.report.bill import Plan, Report, TierPlan

if TYPE_CHECKING:
    from relaybatch.engines.base import ModelFacts, ModelSettings
    from relaybatch.journal import Journal
    from relaybatch.relay import Outcome, Rows
    from relaybatch.source import InputOptions, Instructions


@dataclass(frozen=True)
class RunResult:
    """What `run` came to."""

    report: Report
    folder: Path
    results: Path
    exit_code: int
    """0, or 3 when more rows failed than `max_failed` allows."""
    nothing_to_do: bool
    """The run was finished before; nothing was touched."""


def run(
    file: str | Path, *, variables: Mapping[str, str] | None = None, changes: Sequence[str] = (), fresh: bool = False,
    progress: Progress | None = None,
) -> RunResult:  # fmt: skip
    """Run a job to its end, or go on with it where an earlier process stopped.

    `changes` are `key.path=value`; `fresh` drops what an earlier run left in the folder.
    Raises RelaybatchError: see its subclasses for what and with which exit code.
    """
    job = spec.load(file, variables=variables, changes=changes)
    show = progress or Progress(level=-1)
    began = time.monotonic()
    with Stop() as stop, _locked(job):
        finished = None if fresh else _finished(job)
        instructions = _read(job)
        if finished is not None:
            _same_run(job, finished, instructions.fingerprint)
            show.say(f"{job.spec.name}: finished already, nothing to do ({job.output})")
            report = finished["report"]
            return RunResult(report, job.output, _results_path(job), report.exit_code, True)
        settings, facts = _models(job)
        rows, routing = _describe(job, instructions, began)
        return _go(job, rows, routing, instructions, settings, facts, fresh, show, stop)


def _go(
    job: spec.Job, rows: Rows, routing: float, instructions: Instructions, settings: tuple[ModelSettings, ...],
    facts: tuple[ModelFacts, ...], fresh: bool, show: Progress, stop: Stop,
) -> RunResult:  # fmt: skip
    from relaybatch import sink
    from relaybatch.journal import Journal
    from relaybatch.relay import Relay

    folder = job.output
    inner = folder / ".relay"
    if fresh:
        _clear(job)
    sink.clean_aside(folder)
    journal = Journal(inner / "journal.sqlite")
    try:
        run_id = _begin(job, journal, instructions.fingerprint)
        _write_run_json(job, journal, facts, instructions, "running")
        show.say(f"{job.spec.name}: {rows.requests.height:,} rows, {len(instructions.rejects):,} rejects, run {run_id}")
        journal.record_event("routing", seconds=routing, detail="read and features")
        relay = Relay(job, rows, settings, facts, journal, show, stop)
        outcome = relay.run()
        report = _publish(job, journal, instructions, rows, outcome, run_id)
        journal.put(state="finished")
        _write_run_json(job, journal, facts, instructions, "finished")
    finally:
        journal.close()
    return RunResult(report, folder, _results_path(job), report.exit_code, False)


def plan(file: str | Path, *, variables: Mapping[str, str] | None = None, changes: Sequence[str] = ()) -> Plan:
    """What `run` would do: everything but inference. Loads no weights and writes nothing.

    Raises RelaybatchError as `run` does; InfeasibleError when the quality or the budget cannot be met.
    """
    import tempfile

    import numpy as np

    from relaybatch.journal import Journal
    from relaybatch.relay import Relay

    began = time.monotonic()
    job = spec.load(file, variables=variables, changes=changes)
    instructions = _read(job)
    settings, facts = _models(job)
    rows, _ = _describe(job, instructions, began)
    with tempfile.TemporaryDirectory(prefix="relaybatch-plan-") as scratch:
        journal = Journal(Path(scratch) / "journal.sqlite")
        try:
            relay = Relay(job, rows, settings, facts, journal, Progress(level=-1), Stop())
            first = relay.first_plan()
        finally:
            journal.close()
    at = [np.flatnonzero(first.choice == t) for t in range(len(job.spec.tiers))]
    tiers = tuple(
        TierPlan(
            tier=tier.name, rows=len(rows_of), batches=-(-len(rows_of) // tier.batch.max),
            cost_usd=None if first.usd is None else float(first.usd[rows_of, t].sum()),
            seconds=None if first.seconds is None else float(first.seconds[rows_of, t].sum()),
        )
        for t, (tier, rows_of) in enumerate(zip(job.spec.tiers, at, strict=True))
    )  # fmt: skip
    return Plan(
        job=job.spec.name, rows=rows.requests.height, rejects=len(instructions.rejects),
        unanswerable=int(rows.requests["error_code"].is_not_null().sum()), policy=first.policy,
        sample_rows=first.sample_rows, tiers=tiers, cost_usd=first.cost_usd, baseline_usd=first.baseline_usd,
        quality=first.quality, top_quality=first.top_quality, gap=first.gap,
        routing_seconds=time.monotonic() - began,
    )  # fmt: skip


def check(file: str | Path, *, variables: Mapping[str, str] | None = None, changes: Sequence[str] = ()) -> list[str]:
    """Every problem of a job: its file, the input's columns, the models, memory, the policy, the output folder.

    Loads no weights and reads only the head of the input. An empty list: the job can run.
    """
    try:
        job = spec.load(file, variables=variables, changes=changes)
    except SpecError as error:
        return error.problems
    problems = _check_input(job) + _check_output(job)
    facts = []
    for t in range(len(job.spec.tiers)):
        try:
            facts.append(_model(job, t)[1])
        except ModelError as error:
            problems.append(f"{job.at('tiers', t, 'model')}: tier `{job.spec.tiers[t].name}`: {error}")
    if len(facts) == len(job.spec.tiers):
        problems += _check_memory(job, facts) + _check_policy(job)
    return problems


# -- what a job needs before it can run ---------------------------------------------------------------------------


def _input_options(job: spec.Job) -> InputOptions:
    from relaybatch.source import InputOptions

    given = job.spec.input
    prompt = given.prompt or (None if given.messages or given.template else "prompt")
    return InputOptions(
        paths=job.input_paths, format=given.format, prompt=prompt, messages=given.messages, template=given.template,
        id=given.id, reference=given.reference, tier=given.tier, max_new_tokens=given.max_new_tokens,
        conversation=given.conversation, priority=given.priority, on_error=job.spec.on_error,
        duplicates=given.duplicates,
    )  # fmt: skip


def _read(job: spec.Job) -> Instructions:
    from relaybatch.source import read

    found = read(_input_options(job))
    if any(Path(file).parent == job.output for file in found.files):
        raise SpecError(
            f"{job.at('output', 'path')}: {job.output} holds the input's files, so results would mix with them",
            hint="give the run a folder of its own",
        )
    return found


def _model(job: spec.Job, tier: int) -> tuple[ModelSettings, ModelFacts]:
    from relaybatch.engines import ModelSettings, inspect, resolve_model

    t = job.spec.tiers[tier]
    template = t.chat_template
    if template is not None and "{" not in template:
        template = job.resolve(template)
    settings = ModelSettings(
        model=resolve_model(t.model, job.folder), dtype=t.dtype, device=t.device, trust_remote_code=t.trust_remote_code,
        chat_template=template, revision=t.revision, allow_pickle=t.allow_pickle,
    )  # fmt: skip
    needs_chat = t.prompt_format == "chat" or job.spec.input.messages is not None
    return settings, inspect(settings, prompt_format="chat" if needs_chat else "plain")


def _models(job: spec.Job) -> tuple[tuple[ModelSettings, ...], tuple[ModelFacts, ...]]:
    found = []
    for t, tier in enumerate(job.spec.tiers):
        try:
            found.append(_model(job, t))
        except ModelError as error:
            message = f"{job.at('tiers', t, 'model')}: tier `{tier.name}`: {error.message}"
            raise ModelError(message, hint=error.hint) from None
    return tuple(s for s, _ in found), tuple(f for _, f in found)


def _describe(job: spec.Job, instructions: Instructions, began: float) -> tuple[Rows, float]:
    """The rows with features, groups and fixed tiers; and the seconds since `began`, imports left out."""
    import numpy as np
    import polars as pl

    from relaybatch import features
    from relaybatch.planning import FREE
    from relaybatch.relay import Rows

    requests = instructions.requests
    names = [tier.name for tier in job.spec.tiers]
    unknown = requests.filter(pl.col("tier").is_not_null() & ~pl.col("tier").is_in(names))
    if unknown.height:
        first = unknown.row(0, named=True)
        raise InputError(
            f"{job.at('input', 'tier')}: row `{first['id']}` is pinned to tier `{first['tier']}`, which is not in the"
            f" ladder ({', '.join(names)}); {unknown.height:,} rows name an unknown tier",
            hint="name a tier of the job, or leave the column null",
        )
    frame, labelled = features.describe(requests)
    index = {name: t for t, name in enumerate(names)}
    pins = requests["tier"].replace_strict(index, default=None, return_dtype=pl.Int32)
    if job.spec.rules:
        from relaybatch import rules

        # a user's own column counts before a label of the same name
        own = labelled.select(c for c in labelled.columns if c not in instructions.carried.columns)
        both = pl.concat([own, instructions.carried], how="horizontal")
        try:
            by_rule = rules.apply_rules(both, [(rule.when, rule.tier) for rule in job.spec.rules])
        except SpecError as error:
            raise SpecError([f"{job.at('rules')}: {p}" for p in error.problems], hint=error.hint) from None
        ruled = by_rule.replace_strict(index, default=None, return_dtype=pl.Int32)
    else:
        ruled = pl.Series([None] * requests.height, dtype=pl.Int32)
    rows = Rows(
        requests=requests,
        features=frame.select(features.FEATURE_NAMES).to_numpy(),
        groups=features.group_of(labelled).to_numpy(),
        tokens_estimated=labelled["tokens_estimated"].to_numpy().astype(np.float64),
        fixed=pins.fill_null(ruled).fill_null(FREE).to_numpy().astype(np.int32),
        pinned=pins.is_not_null().to_numpy(),
    )
    return rows, time.monotonic() - began


def _check_input(job: spec.Job) -> list[str]:
    from relaybatch import features
    from relaybatch.rules import compile_rule
    from relaybatch.source import REQUESTS, head

    options = _input_options(job)
    try:
        found = head(options)
        named = options.named
    except InputError as error:
        return [f"{job.at('input', 'path')}: {error}"]
    problems = []
    for key, name in named.items():
        if found.width and name not in found.columns:
            where = job.at("input", key.partition(" ")[0])
            problems.append(f"{where}: `input.{key}`: no column `{name}`{spec.nearest(name, found.columns)}")
    schema = dict(features.labels(REQUESTS.to_frame()).schema) | dict(found.schema)
    for i, rule in enumerate(job.spec.rules):
        try:
            compile_rule(rule.when, schema)
        except SpecError as error:
            problems.append(f"{job.at('rules', i, 'when')}: {error}")
    return problems


def _check_output(job: spec.Job) -> list[str]:
    folder = job.output
    if any(Path(path).parent == folder or Path(path) == folder for path in job.input_paths):
        return [f"{job.at('output', 'path')}: {folder} holds the input's files, so results would mix with them"]
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return []
    return [
        f"{job.at('output', 'path')}: `output.path`: {job.output} cannot be written ({folder} is not a writable folder)"
    ]


def _check_memory(job: spec.Job, facts: list[ModelFacts]) -> list[str]:
    from relaybatch.engines import free_bytes

    problems = []
    for t, (tier, fact) in enumerate(zip(job.spec.tiers, facts, strict=True)):
        if tier.device not in ("auto", "cpu"):
            continue
        free = free_bytes("cpu")
        most = tier.max_new_tokens or job.spec.generation.max_new_tokens
        need = fact.weight_bytes + fact.memory.batch_bytes(tier.batch.min, min(256, fact.context_tokens), most)
        if need > free:
            problems.append(
                f"{job.at('tiers', t, 'batch')}: tier `{tier.name}`: the model and its smallest batch of {tier.batch.min} rows"
                f" need about {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free → lower `batch.min` or take a smaller dtype"
            )
    return problems


def _check_policy(job: spec.Job) -> list[str]:
    from relaybatch import policy

    if not policy.exists(job.policy_root):
        return []
    try:
        policy.load(job.policy_root)
    except PolicyError as error:
        return [f"{job.at('policy', 'path')}: {error}"]
    return []


# -- the run folder -----------------------------------------------------------------------------------------------


def _results_path(job: spec.Job) -> Path:
    return job.output / f"results.{job.spec.output.format}"


@contextmanager
def _locked(job: spec.Job) -> Iterator[None]:
    """Hold the run folder's lock. Raises LockedError: another run holds it; SpecError: it cannot be written."""
    from filelock import FileLock, Timeout

    inner = job.output / ".relay"
    try:
        inner.mkdir(parents=True, exist_ok=True)
        lock = FileLock(inner / "lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise LockedError(
            f"{job.output}: another run of this job holds the lock", hint="try again when it is done"
        ) from None
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"{job.at('output', 'path')}: {job.output} cannot be written: {reason}") from None
    try:
        yield
    finally:
        lock.release()


def _finished(job: spec.Job) -> dict[str, Any] | None:
    """What run.json and report.json of a finished run say, or None if the folder holds no finished run."""
    try:
        found = json.loads((job.output / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("state") != "finished":
        return None
    try:
        found["report"] = Report.model_validate_json((job.output / "report.json").read_bytes())
    except (OSError, ValueError):
        return None
    # damaged results are written again from the journal
    return found if _result_rows(job) == found["report"].rows else None


def _result_rows(job: spec.Job) -> int | None:
    """Rows of the results by a quick look at the file; None if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = _results_path(job)
    try:
        if job.spec.output.format == "parquet":
            return int(pq.ParquetFile(path).metadata.num_rows)
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 22), b""))
    except (OSError, ValueError, pa.ArrowException):
        return None


def _same_run(job: spec.Job, found: Mapping[str, Any], fingerprint: str) -> None:
    differs = []
    if found.get("identity") != job.identity:
        differs.append("the job")
    if found.get("input_fingerprint") != fingerprint:
        differs.append("the input's content")
    if differs:
        raise SpecError(
            f"{job.output}: holds a run of another state: {' and '.join(differs)} changed since it began",
            hint="run with --fresh to drop that run, or give each run its own folder, for example output.path: runs/{date}",
        )


def _begin(job: spec.Job, journal: Journal, fingerprint: str) -> str:
    """The run's id; a new one for an empty journal, else that of the run which it resumes."""
    run_id = journal.get("run_id")
    if run_id is None:
        run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:8]}"
        journal.put(run_id=run_id, identity=job.identity, input_fingerprint=fingerprint, state="running",
                    started_at=datetime.now(UTC).isoformat(timespec="seconds"))  # fmt: skip
    else:
        known = {"identity": journal.get("identity"), "input_fingerprint": journal.get("input_fingerprint")}
        _same_run(job, known, fingerprint)
    journal.record_event("process", detail=__version__)
    return run_id


def _clear(job: spec.Job) -> None:
    """Drop what an earlier run left; the lock stays."""
    for path in (
        job.output / n for n in ("results.parquet", "results.jsonl", "rejects.jsonl", "report.json", "run.json")
    ):
        path.unlink(missing_ok=True)
    for path in (job.output / ".relay").glob("journal.sqlite*"):
        path.unlink(missing_ok=True)


def _write_run_json(
    job: spec.Job, journal: Journal, facts: tuple[ModelFacts, ...], instructions: Instructions, state: str
) -> None:
    from relaybatch import sink

    names = [tier.name for tier in job.spec.tiers]
    record = {
        "run_id": journal.get("run_id"), "state": state, "identity": job.identity,
        "input_fingerprint": instructions.fingerprint, "input_files": list(instructions.files),
        "started_at": journal.get("started_at"), "policy": journal.get("policy") or None, "relaybatch": __version__,
        "python": sys.version.split()[0], "spec": job.spec.model_dump(mode="json", exclude_none=True),
        "models": {n: {"fingerprint": f.fingerprint, "parameters": f.parameters} for n, f in zip(names, facts, strict=True)},
    }  # fmt: skip
    sink.write_bytes(job.output / "run.json", json.dumps(record, ensure_ascii=False, indent=1).encode())


def _publish(
    job: spec.Job, journal: Journal, instructions: Instructions, rows: Rows, outcome: Outcome, run_id: str
) -> Report:
    """Write results, rejects and report.json; results last of the data, so that they appear only when whole."""
    import polars as pl

    from relaybatch import sink

    answers = outcome.answers.with_columns(pl.lit(run_id).alias("run_id"))
    if instructions.rejects:
        sink.write_rejects(instructions.rejects, job.output / "rejects.jsonl")
    frame, texts = sink.results_frame(instructions, answers)
    sink.write_results(frame, _results_path(job), job.spec.output.format, texts)
    report = _bill(job, journal, instructions, rows, outcome, run_id)
    sink.write_bytes(job.output / "report.json", report.model_dump_json(indent=1).encode())
    return report


def _bill(
    job: spec.Job, journal: Journal, instructions: Instructions, rows: Rows, outcome: Outcome, run_id: str
) -> Report:
    import numpy as np
    import polars as pl

    from relaybatch.grading import grade
    from relaybatch.relay import grading_of
    from relaybatch.report import bill

    answers, events, batches = outcome.answers, journal.events(), journal.batches()
    grades = grade(answers["response"], rows.requests["reference"], grading_of(job))
    failed = (answers["status"] != "ok").to_numpy()
    has_reference = rows.requests["reference"].is_not_null().to_numpy()
    grades = np.where(failed & has_reference, np.float32(0), grades).astype(np.float32)
    graded = ~np.isnan(grades)
    tiers = bill.tier_bills(job.spec, journal.completions(), batches, events, answers, grades)
    cost = journal.spent_usd()
    details = journal.details()
    legs = []
    for tier in job.spec.tiers:
        for kind in ("calibrate", "relay", "rescue"):
            key = f"{kind}/{tier.name}"
            planned, detail = journal.plan(key), details.get(key, {})
            if planned is not None and (planned.height or kind == "relay"):
                legs.append(bill.LegBill(
                    leg=key, tier=tier.name, rows=planned.height, gap=detail.get("gap"), target=detail.get("target"),
                    quality=detail.get("quality"), cost_usd=detail.get("cost_usd"), note=str(detail.get("note", "")),
                ))  # fmt: skip
    first = details.get(f"relay/{job.spec.tiers[0].name}", {})
    routed = batches.filter(~pl.col("leg").str.starts_with("calibrate/"))
    confidence = answers["confidence"].fill_null(0.0)
    known = outcome.top_quality is not None
    forecast = float(np.mean(confidence.to_numpy())) if known and len(confidence) else None
    answerable = rows.requests["error_code"].is_null().to_numpy()
    top_forecast = None
    if outcome.top_quality is not None and len(answers):
        top_forecast = float(np.where(answerable, outcome.top_quality, 0.0).mean())
    top_load = events.filter((pl.col("kind") == "load") & (pl.col("tier") == job.top))["cost_usd"]
    baseline = float(outcome.top_usd.sum()) + (float(top_load.max()) if len(top_load) else 0.0)  # type: ignore[arg-type]
    single = outcome.policy is None and len(job.spec.tiers) > 1
    inference = float(batches["seconds"].sum())
    routing = float(events.filter(pl.col("kind") == "routing")["seconds"].sum())
    n_failed = int(failed.sum())
    over = n_failed + len(instructions.rejects) > job.spec.max_failed
    codes = answers.filter(pl.col("status") != "ok")["error_code"].value_counts(sort=True)
    summary = outcome.policy.card.summary if outcome.policy else None
    return Report(
        run_id=run_id, job=job.spec.name, state="finished", exit_code=3 if over else 0,
        started_at=journal.get("started_at") or "", finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        processes=events.filter(pl.col("kind") == "process").height, rows=answers.height,
        rejects=len(instructions.rejects), ok=answers.height - n_failed, failed=n_failed,
        errors=dict(codes.iter_rows()), max_new_tokens=job.spec.generation.max_new_tokens, tiers=tiers, cost_usd=cost,
        forecast_usd=first.get("cost_usd"),
        forecast_actual_usd=float(routed["cost_usd"].sum()) if first.get("cost_usd") is not None else None,
        saving=bill.SavingBill(
            baseline_usd=baseline, baseline_rows_measured=int(outcome.top_ran.sum()), saved_usd=baseline - cost,
            saved_share=(baseline - cost) / baseline if baseline > 0 and not single else None,
        ),
        quality=bill.QualityBill(
            graded_rows=int(graded.sum()), measured=float(grades[graded].mean()) if graded.any() else None,
            forecast=forecast, top_forecast=top_forecast,
            retained_forecast=forecast / top_forecast if forecast is not None and top_forecast else None,
            sample_rows=outcome.policy.card.sample_rows if outcome.policy else 0,
            sample_top=summary.tiers[-1].mean_score if summary else None,
        ),
        legs=tuple(legs), policy=journal.get("policy") or None, policy_learned=journal.get("learned") == "yes",
        inference_seconds=inference, routing_seconds=routing,
        routing_share=routing / inference if inference > 0 else None,
        learning_seconds=float(events.filter(pl.col("kind") == "learn")["seconds"].sum()),
        padding_share=bill.padding_share(batches), warnings=outcome.warnings,
    )  # fmt: skip
