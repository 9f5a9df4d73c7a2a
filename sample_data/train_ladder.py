"""Train the embedded ladder from scratch: `python sample_data/train_ladder.py [small medium large] [--evaluate]`.

Draws the held-out instructions, trains what is not finished (resuming from the last checkpoint), exports ordinary
Hugging Face folders and writes a model card into each. Fixed seeds; weights as safetensors, all else as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from world import draw_instructions

HERE = Path(__file__).parent
MODELS = HERE / "models"
WORK = HERE / ".training"
INSTRUCTIONS = 5_000
VOCABULARY = 1_024
CONTEXT = 512
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


@dataclass(frozen=True)
class Recipe:
    """Size and training of one model; `tokens` counts prompt and answer, padding left out."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    steps: int
    batch_tokens: int
    muon_lr: float
    adam_lr: float


RECIPES = {
    "small": Recipe(hidden=64, layers=3, heads=4, ffn=160, steps=2_000, batch_tokens=8_192, muon_lr=6e-3, adam_lr=6e-3),
    "medium": Recipe(
        hidden=128, layers=4, heads=4, ffn=304, steps=2_400, batch_tokens=4_096, muon_lr=4e-3, adam_lr=4e-3
    ),
    "large": Recipe(
        hidden=256, layers=4, heads=8, ffn=608, steps=3_000, batch_tokens=4_096, muon_lr=3e-3, adam_lr=3e-3
    ),
}


def build_tokenizer(folder: Path) -> Any:
    """A byte-level BPE over the world's texts with single digits, saved into `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    stream = itertools.islice(draw_instructions(11, held=False), 60_000)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{x.prompt}\n{x.reference}" for x in stream), trainer)
    make: Any = PreTrainedTokenizerFast
    fast = make(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>",
        additional_special_tokens=SPECIAL[3:], model_max_length=CONTEXT, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return fast


def write_instructions() -> pl.DataFrame:
    """The 5,000 held-out instructions as Parquet and JSONL; no two alike."""
    seen: set[str] = set()
    rows: list[dict[str, Any]] = []
    for x in draw_instructions(2_026, held=True):
        if x.prompt in seen:
            continue
        seen.add(x.prompt)
        rows.append({"id": f"{x.kind}-{len(rows):05d}", "prompt": x.prompt, "reference": x.reference, "kind": x.kind,
                     "difficulty": x.difficulty})  # fmt: skip
        if len(rows) == INSTRUCTIONS:
            break
    frame = pl.DataFrame(rows, schema_overrides={"difficulty": pl.Int32})
    frame.write_parquet(HERE / "instructions.parquet")
    frame.write_ndjson(HERE / "instructions.jsonl")
    return frame


def batches(tokenizer: Any, recipe: Recipe, skip: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Endless batches (ids, labels, tokens), each of rows of about one length; labels count the answer only.

    Rows are padded on the right, where causal attention never looks from a real token, so no mask is needed.
    """
    backend = tokenizer.backend_tokenizer
    end, assistant, user, bos = (
        tokenizer.convert_tokens_to_ids(t) for t in ("<|end|>", "<|assistant|>", "<|user|>", "<|bos|>")
    )
    order = np.random.default_rng(5)
    step = 0
    for pool_number in itertools.count():
        pool = list(itertools.islice(draw_instructions(1_000 + pool_number, held=False), 16_000))
        prompts = backend.encode_batch([x.prompt for x in pool], add_special_tokens=False)
        answers = backend.encode_batch([x.reference for x in pool], add_special_tokens=False)
        rows = [([bos, user, *p.ids, end, assistant], [*a.ids, end]) for p, a in zip(prompts, answers, strict=True)]
        rows.sort(key=lambda r: len(r[0]) + len(r[1]))
        cuts, start = [], 0
        while start < len(rows):
            stop = start + max(recipe.batch_tokens // (len(rows[start][0]) + len(rows[start][1])), 1)
            cuts.append((start, min(stop, len(rows))))
            start = stop
        for i in order.permutation(len(cuts)):
            step += 1
            if step <= skip:
                continue
            part = rows[cuts[i][0] : cuts[i][1]]
            length = max(len(p) + len(a) for p, a in part)
            ids = torch.zeros(len(part), length, dtype=torch.long)
            labels = torch.full((len(part), length), -100)
            for n, (p, a) in enumerate(part):
                ids[n, : len(p) + len(a)] = torch.tensor(p + a)
                labels[n, len(p) - 1 : len(p) + len(a) - 1] = torch.tensor(a)
            yield ids, labels, sum(len(p) + len(a) for p, a in part)


def build(recipe: Recipe, tokenizer: Any) -> LlamaForCausalLM:
    """An untrained model of a recipe's size."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=recipe.hidden, intermediate_size=recipe.ffn, num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads, num_key_value_heads=recipe.heads, max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, initializer_range=0.02,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(name: str, threads: int) -> None:
    """Train one model to the end of its schedule, checkpointing every two minutes."""
    recipe = RECIPES[name]
    torch.set_num_threads(threads)
    torch.manual_seed(7)
    work = WORK / name
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(WORK / "tokenizer")
    model = build(recipe, tokenizer)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    state: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0}
    if (work / "state.json").exists():
        state = json.loads((work / "state.json").read_text())
        restore(work / f"checkpoint-{state['step']}.safetensors", model, optimisers)
    core = torch.compile(model.model, dynamic=True) if shutil.which("g++") else model.model
    bases = [[group["lr"] for group in o.param_groups] for o in optimisers]
    if state["step"]:
        bases = [[recipe.muon_lr], [recipe.adam_lr]]
    stream = batches(tokenizer, recipe, state["step"])
    began, saved, loss_sum, loss_count = time.monotonic(), time.monotonic(), 0.0, 0
    while state["step"] < recipe.steps:
        ids, labels, tokens = next(stream)
        done = state["step"] / recipe.steps
        scale = min(1.0, (state["step"] + 1) / 100) * (1.0 if done < 0.3 else max((1 - done) / 0.7, 0.01))
        for o, base in zip(optimisers, bases, strict=True):
            for group, lr in zip(o.param_groups, base, strict=True):
                group["lr"] = lr * scale
        with torch.autocast("cpu", torch.bfloat16):
            hidden = core(input_ids=ids, use_cache=False).last_hidden_state
            wanted = labels != -100
            logits = model.lm_head(hidden[wanted])
        loss = nn.functional.cross_entropy(logits.float(), labels[wanted])
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(others, 1.0)
        for o in optimisers:
            o.step()
            o.zero_grad(set_to_none=True)
        state["step"] += 1
        state["tokens"] += tokens
        loss_sum, loss_count = loss_sum + loss.item(), loss_count + 1
        now = time.monotonic()
        if state["step"] % 50 == 0:
            rate = state["tokens"] / (state["seconds"] + now - began)
            print(
                f"{name} {state['step']}/{recipe.steps} loss {loss_sum / loss_count:.4f} {rate:.0f} tokens/s",
                flush=True,
            )
            loss_sum, loss_count = 0.0, 0
        if now - saved > 120 or state["step"] == recipe.steps:
            state["seconds"] += now - began
            began = saved = now
            save(work, model, optimisers, state)
    export(name, model, tokenizer, state)


def save(work: Path, model: LlamaForCausalLM, optimisers: list[torch.optim.Optimizer], state: dict[str, Any]) -> None:
    """Write a checkpoint aside, then name it in state.json: a kill leaves the old or the new one, never half."""
    tensors = {f"model.{k}": v.detach().clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    for i, o in enumerate(optimisers):
        for index, values in o.state_dict()["state"].items():
            tensors |= {f"optimiser.{i}.{index}.{k}": torch.as_tensor(v).clone() for k, v in values.items()}
    path = work / f"checkpoint-{state['step']}.safetensors"
    save_file(tensors, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)
    (work / "state.tmp").write_text(json.dumps(state))
    (work / "state.tmp").rename(work / "state.json")
    for old in work.glob("checkpoint-*.safetensors"):
        if old != path:
            old.unlink()


def restore(path: Path, model: LlamaForCausalLM, optimisers: list[torch.optim.Optimizer]) -> None:
    """Load a checkpoint into the model and its optimisers."""
    tensors = load_file(path)
    model.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")}, strict=False)
    model.tie_weights()
    for i, o in enumerate(optimisers):
        whole = o.state_dict()
        for key, value in tensors.items():
            if key.startswith(f"optimiser.{i}."):
                _, _, index, field = key.split(".", 3)
                whole["state"].setdefault(int(index), {})[field] = value
        o.load_state_dict(whole)


def export(name: str, model: LlamaForCausalLM, tokenizer: Any, state: dict[str, Any]) -> None:
    """Write the model as an ordinary Hugging Face folder in bfloat16, and how it was trained."""
    folder = MODELS / name
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    for parameter in copy.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    copy.config.dtype = torch.bfloat16
    copy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(state) + "\n")


@torch.inference_mode()
def answers(folder: Path, prompts: list[str], batch: int = 256) -> list[str]:
    """Greedy float32 answers of a model to prompts, in order."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32).eval()
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    texts = [""] * len(prompts)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        chats = [[{"role": "user", "content": prompts[i]}] for i in part]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**inputs, max_new_tokens=48, do_sample=False)
        for i, text in zip(
            part, tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True), strict=True
        ):
            texts[i] = text.strip()
    return texts


def evaluate(names: list[str]) -> None:
    """Score the exported models on the held-out instructions and write their cards."""
    frame = pl.read_parquet(HERE / "instructions.parquet")
    for name in names:
        folder = MODELS / name
        began = time.monotonic()
        good = pl.Series("good", answers(folder, frame["prompt"].to_list())) == frame["reference"]
        scored = frame.with_columns(good.cast(pl.Float64).alias("good"))
        write_card(name, scored)
        mean = float(good.cast(pl.Float64).to_numpy().mean())
        by_level = scored.group_by("difficulty").agg(pl.col("good").mean()).sort("difficulty")["good"].to_list()
        print(
            f"{name}: {mean:.4f}  by difficulty {[round(x, 3) for x in by_level]}  {time.monotonic() - began:.0f} s",
            flush=True,
        )


def write_card(name: str, scored: pl.DataFrame) -> None:
    """README.md of a model's folder, from measured scores."""
    recipe = RECIPES[name]
    state = json.loads((MODELS / name / "training.json").read_text())
    config = json.loads((MODELS / name / "config.json").read_text())
    weights = load_file(MODELS / name / "model.safetensors")
    parameters = sum(t.numel() for t in weights.values())
    table = scored.pivot("difficulty", index="kind", values="good", aggregate_function="mean", sort_columns=True).sort(
        "kind"
    )
    total = scored.group_by("kind").agg(pl.col("good").mean().alias("all"))
    table = table.join(total, on="kind")
    mean = float(scored["good"].to_numpy().mean())
    overall = scored.group_by("difficulty").agg(pl.col("good").mean()).sort("difficulty")["good"].to_list()
    lines = [
        "---", "license: apache-2.0", "language: [en, zh]", "pipeline_tag: text-generation", "library_name: transformers", "---", "",
        f"# relaybatch embedded ladder: {name}", "",
        f"A causal language model of Llama architecture with {parameters:,} parameters ({config['num_hidden_layers']} layers, hidden"
        f" size {config['hidden_size']}, vocabulary {config['vocab_size']}), trained from scratch on the small world of"
        " `sample_data/world.py`. It exists to show and test routing; it knows nothing else.", "",
        "## Exact match on the 5,000 held-out instructions", "",
        f"Overall **{mean:.4f}** (greedy, float32, at most 48 new tokens; `python sample_data/train_ladder.py --evaluate`).", "",
        "| kind | " + " | ".join(f"level {d}" for d in range(1, 6)) + " | all |", "|---|" + "---|" * 6,
    ]  # fmt: skip
    lines += [
        "| " + row[0] + " | " + " | ".join("–" if v is None else f"{v:.2f}" for v in row[1:]) + " |"
        for row in table.iter_rows()
    ]
    lines += [
        "| **all** | " + " | ".join(f"{v:.2f}" for v in overall) + f" | {mean:.2f} |", "",
        "## Training", "",
        f"{state['step']:,} steps, {state['tokens']:,} tokens (prompts and answers; loss on answers only), {state['seconds'] / 60:.0f} minutes of wall clock on one thread (torch.compile) of 2 shared CPU cores, bfloat16 autocast, Muon for matrices and AdamW for the rest, fixed seeds, linear decay to zero."
        f" Recipe: `{json.dumps(asdict(recipe))}`. No held-out instruction is in training: the pools are split by a hash of the text.", "",
    ]  # fmt: skip
    (MODELS / name / "README.md").write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*RECIPES, []], help="which to train; default all")
    parser.add_argument("--evaluate", action="store_true", help="only score the exported models and write their cards")
    parser.add_argument("--export", action="store_true", help="only export the last checkpoints")
    parser.add_argument("--threads", type=int, default=max((os.cpu_count() or 2), 1))
    options = parser.parse_args()
    names = options.models or list(RECIPES)
    WORK.mkdir(exist_ok=True)
    if options.export:
        tokenizer = AutoTokenizer.from_pretrained(WORK / "tokenizer")
        for name in names:
            state = json.loads((WORK / name / "state.json").read_text())
            model = build(RECIPES[name], tokenizer)
            restore(WORK / name / f"checkpoint-{state['step']}.safetensors", model, [])
            export(name, model, tokenizer, state)
    elif not options.evaluate:
        if not (WORK / "tokenizer" / "tokenizer.json").exists():
            build_tokenizer(WORK / "tokenizer")
            write_instructions()
        for name in names:
            train(name, options.threads)
        evaluate(names)
    if options.evaluate:
        evaluate(names)


if __name__ == "__main__":
    main()
