"""The torch engine: batching never changes an answer, and what is wrong with one row stays with that row."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaybatch.engines import Engine, EngineCompletion, EngineRequest, ModelSettings, Sampling, load

Make = Callable[..., Path]
Answer = Callable[..., list[EngineCompletion]]

TEXT = "the relay takes every baton round this long track until nobody runs any more and then it ends"
PROMPTS = [" ".join(TEXT.split()[:n]) for n in (1, 2, 3, 5, 8, 13, 16, 18)]
LIMITS = [30, 1, 12, 24, 2, 25, 7, 18]


def key(completion: EngineCompletion) -> tuple[Any, ...]:
    """What must not depend on the batch."""
    return completion.row, completion.text, completion.output_tokens, completion.finish_reason


def by_generate(
    folder: Path, prompts: list[str], limits: list[int], ends: tuple[int, ...] = (2,)
) -> list[tuple[list[int], str]]:
    """Each prompt alone through transformers' own `generate`: its new tokens, and their text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt, limit in zip(prompts, limits, strict=True):
        ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        out = model.generate(**ids, max_new_tokens=limit, do_sample=False, pad_token_id=0, eos_token_id=[*ends])
        new = out[0, ids["input_ids"].shape[1] :].tolist()
        found.append((new, tokenizer.decode(new, skip_special_tokens=True)))
    return found


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("order", [list(range(8)), [7, 6, 5, 4, 3, 2, 1, 0], [3, 7, 0, 5, 1, 6, 2, 4]])
def test_batch_size_and_order_change_nothing(engine: Engine, answer: Answer, batch: int, order: list[int]) -> None:
    alone = answer(engine, PROMPTS, LIMITS, batch=1)
    together = answer(engine, PROMPTS, LIMITS, batch=batch, order=order)
    assert [key(c) for c in together] == [key(c) for c in alone]
    for one, other in zip(alone, together, strict=True):
        assert one.logprob_mean == pytest.approx(other.logprob_mean, abs=1e-4)
        assert one.logprob_min == pytest.approx(other.logprob_min, abs=1e-4)
        assert one.entropy_mean == pytest.approx(other.entropy_mean, abs=1e-4)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "bloom", "mamba"])
def test_answers_are_those_of_generate(make: Make, answer: Answer, kind: str) -> None:
    folder = make(kind, template=None)
    engine = load("torch", ModelSettings(str(folder), dtype="float32", device="cpu"))
    expected = by_generate(folder, PROMPTS, LIMITS)
    found = answer(engine, PROMPTS, LIMITS)
    assert [c.text for c in found] == [text for _, text in expected]
    assert [c.output_tokens for c in found] == [len(new) for new, _ in expected]


def test_padding_token_that_is_the_end_token(make: Make, answer: Answer) -> None:
    folder = make(pad="</s>", pad_token_id=2, template=None)
    engine = load("torch", ModelSettings(str(folder), dtype="float32", device="cpu"))
    assert engine.facts.vocabulary == 264
    assert [c.text for c in answer(engine, PROMPTS)] == [text for _, text in by_generate(folder, PROMPTS, [24] * 8)]


def test_many_rows_leave_at_different_times(engine: Engine, answer: Answer) -> None:
    rng = np.random.default_rng(1)
    prompts = ["".join(rng.choice(list("abcdefgh "), n)) for n in rng.integers(1, 60, 40)]
    limits = rng.integers(1, 60, 40).tolist()
    alone = answer(engine, prompts, limits, batch=1)
    assert [key(c) for c in answer(engine, prompts, limits)] == [key(c) for c in alone]
    assert {c.finish_reason for c in alone} == {"stop", "length"}


def test_every_end_token_ends_an_answer(engine: Engine, llama: Path, answer: Answer) -> None:
    ends = engine.facts.eos_token_ids
    assert ends == (2, 3, 77, 78)  # by config.json, the template, generation_config.json
    rng = np.random.default_rng(2)
    prompts = ["".join(rng.choice(list("abcdefgh "), 6)) for _ in range(12)]
    expected = by_generate(llama, prompts, [60] * 12, ends)
    found = answer(engine, prompts, 60)
    ended = [new[-1] in ends for new, _ in expected]
    assert any(ended)
    assert [c.finish_reason == "stop" for c in found] == ended
    assert [c.output_tokens for c in found] == [len(new) for new, _ in expected]


def test_the_turn_end_of_the_template_ends_an_answer(make: Make) -> None:
    engine = load("torch", ModelSettings(str(make()), device="cpu"))
    assert engine.facts.eos_token_ids == (2, 3)  # </s> by the configuration, <|end|> by the template


def test_a_stop_text_ends_only_its_own_row(engine: Engine, answer: Answer) -> None:
    free = [c.text or "" for c in answer(engine, PROMPTS)]
    stop = next(
        text[i : i + 2] for text in free for i in range(len(text) - 2) if sum(text[i : i + 2] in t for t in free) == 1
    )
    found = answer(engine, PROMPTS, sampling=Sampling(stop=(stop, "never said")))
    for text, completion in zip(free, found, strict=True):
        assert completion.text == text.partition(stop)[0]
        if stop in text:
            assert completion.finish_reason == "stop"
            assert completion.output_tokens < 24 or text.find(stop) >= len(text) - 2
    assert [key(c) for c in found] == [
        key(c) for c in answer(engine, PROMPTS, sampling=Sampling(stop=(stop, "never said")), batch=1)
    ]


def test_a_special_token_may_be_a_stop_text(make: Make, answer: Answer) -> None:
    folder = make(template=None)
    engine = load("torch", ModelSettings(str(folder), dtype="float32", device="cpu"))
    prompts = [f"{a}{b}" for a in "abcdefgh" for b in "ijklmnop"]
    free, stopped = answer(engine, prompts, 60), answer(engine, prompts, 60, Sampling(stop=("<|end|>",)))
    shorter = [s for f, s in zip(free, stopped, strict=True) if s.output_tokens < f.output_tokens]
    assert shorter
    assert all(c.finish_reason == "stop" for c in shorter)


def test_limits_by_row(engine: Engine, answer: Answer) -> None:
    for limit, completion in zip(LIMITS, answer(engine, PROMPTS, LIMITS), strict=True):
        assert completion.output_tokens <= limit
        assert (completion.output_tokens == limit) or completion.finish_reason == "stop"


def test_too_long_and_empty_rows_fail_alone(engine: Engine, answer: Answer) -> None:
    prompts = ["short", "x" * 5000, "", "y" * 128, "also short"]
    short, huge, empty, full, last = answer(engine, prompts)
    assert (short.error_code, last.error_code) == (None, None)
    assert [short.text, last.text] == [c.text for c in answer(engine, ["short", "also short"], batch=1)]
    assert (huge.error_code, empty.error_code, full.error_code) == ("overlength", "empty_prompt", "overlength")
    assert "5,000" in str(huge.error)
    assert "128" in str(huge.error)
    assert (huge.text, huge.finish_reason, huge.input_tokens, huge.output_tokens) == (None, "error", 5000, 0)


def test_the_context_cuts_the_limit(engine: Engine, answer: Answer) -> None:
    (completion,) = answer(engine, ["z" * 126], 50, Sampling(temperature=1.0, top_k=3))
    assert completion.output_tokens <= 2
    assert completion.finish_reason in ("length", "stop")


def test_numbers_that_are_none_fail_alone(make: Make, answer: Answer) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = make()
    weights = load_file(folder / "model.safetensors")
    poisoned = int(_engine_tokens(folder, "#")[0])
    weights["model.embed_tokens.weight"][poisoned] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = load("torch", ModelSettings(str(folder), dtype="float32", device="cpu"))
    prompts = ["a long and healthy prompt", "#", "ill # in the middle of it all", "fine"]
    found = answer(engine, prompts)
    assert [c.error_code for c in found] == [None, "nan_logits", "nan_logits", None]
    healthy = answer(engine, [prompts[0], prompts[3]], batch=1)
    assert [found[0].text, found[3].text] == [c.text for c in healthy]


def _engine_tokens(folder: Path, text: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return tokenizer(text)["input_ids"]


def test_a_token_the_model_does_not_know_fails_alone(engine: Engine) -> None:
    rows = [np.array([5, 6], dtype=np.int32), np.array([5, 9000], dtype=np.int32)]
    result = engine.generate([EngineRequest(i, ids, 4) for i, ids in enumerate(rows)], Sampling())
    assert [c.error_code for c in result.completions] == [None, "unknown_token"]


def test_a_batch_without_a_row(engine: Engine) -> None:
    result = engine.generate([], Sampling())
    assert result.completions == ()
    assert (result.stats.rows, result.stats.computed_tokens) == (0, 0)


def _tight(folder: Path, rows: int, error: Callable[[], BaseException]) -> tuple[Engine, list[Any]]:
    """An engine whose forward pass fails for more than `rows` rows, and what those passes held."""
    from relaybatch.engines.torch import TorchEngine

    held: list[Any] = []

    class Tight(TorchEngine):
        def _call(self, ids: Any, mask: Any, positions: Any, cache: Any) -> Any:
            if hasattr(self, "load_seconds"):
                assert all(ref() is None for ref in held), "the failed batch still holds its memory"
                if len(ids) > rows:
                    held.append(weakref.ref(cache))
                    raise error()
            return super()._call(ids, mask, positions, cache)

    return Tight(ModelSettings(str(folder), dtype="float32", device="cpu")), held


@pytest.mark.parametrize(
    "error",
    [
        lambda: RuntimeError("CUDA error: out of memory"),
        lambda: RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError,
    ],
)
def test_a_batch_too_large_is_halved(
    llama: Path, engine: Engine, answer: Answer, error: Callable[[], BaseException]
) -> None:
    tight, held = _tight(llama, 4, error)
    prompts = (PROMPTS * 2)[:10]
    tokens = tight.tokenize(prompts, prompt_format="plain")
    result = tight.generate([EngineRequest(i, ids, 9) for i, ids in enumerate(tokens)], Sampling())
    assert [key(c) for c in result.completions] == [key(c) for c in answer(engine, prompts, 9)]
    assert result.stats.splits == len(held) > 0


def test_a_row_that_never_fits_fails_alone(llama: Path, engine: Engine, answer: Answer) -> None:
    facts = engine.facts
    settings = ModelSettings(
        str(llama), dtype="float32", device="cpu", max_batch_bytes=facts.memory.batch_bytes(2, 90, 8)
    )
    tight = load("torch", settings)
    prompts = ["a", "b" * 119, "c", "d" * 60, "e"]
    found = answer(tight, prompts, 8)
    assert [c.error_code for c in found] == [None, "out_of_memory", None, None, None]
    assert found[1].text is None
    assert [c.text for c in (found[0], *found[2:])] == [c.text for c in answer(engine, ["a", "c", "d" * 60, "e"], 8)]


def test_other_faults_are_raised(llama: Path, answer: Answer) -> None:
    broken, _ = _tight(llama, 0, lambda: RuntimeError("a size does not match"))
    with pytest.raises(RuntimeError, match="does not match"):
        answer(broken, ["a"])


def test_sampling_depends_on_seed_and_row_only(engine: Engine, answer: Answer) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, top_k=50, seed=3)
    alone = answer(engine, PROMPTS, sampling=sampling, batch=1)
    assert [key(c) for c in answer(engine, PROMPTS, sampling=sampling, batch=8)] == [key(c) for c in alone]
    other = answer(engine, PROMPTS, sampling=Sampling(temperature=1.0, top_p=0.9, top_k=50, seed=4))
    assert [c.text for c in other] != [c.text for c in alone]


def test_equal_prompts_are_sampled_apart(engine: Engine, answer: Answer) -> None:
    same = answer(engine, ["the same words"] * 6, sampling=Sampling(temperature=1.0))
    assert len({c.text for c in same}) == 6
    assert len({c.text for c in answer(engine, ["the same words"] * 6)}) == 1


def test_sampling_follows_the_distribution(engine: Engine) -> None:
    import torch

    from relaybatch.engines.choosing import choose, row_keys

    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).repeat(40_000, 1)
    keys = row_keys(torch.arange(40_000), 7)

    def shares(sampling: Sampling, step: int) -> list[float]:
        return (choose(logits, sampling, keys, step).tokens.bincount(minlength=4) / 40_000).tolist()

    for step in (0, 9, 500):
        assert shares(Sampling(temperature=1.0), step) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.01)
    assert shares(Sampling(temperature=1.0, top_k=2), 0) == pytest.approx([0.625, 0.375, 0, 0], abs=0.01)
    assert shares(Sampling(temperature=1.0, top_p=0.6), 0) == pytest.approx([0.625, 0.375, 0, 0], abs=0.01)
    squared = np.array([0.25, 0.09, 0.0225, 0.0025])
    assert shares(Sampling(temperature=0.5), 0) == pytest.approx((squared / squared.sum()).tolist(), abs=0.01)


def test_confidence_is_the_models_own(llama: Path, engine: Engine, answer: Answer) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    (completion,) = answer(engine, [PROMPTS[4]], 6)
    ((new, _),) = by_generate(llama, [PROMPTS[4]], [6], engine.facts.eos_token_ids)
    model: Any = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    ids = torch.tensor([[*_engine_tokens(llama, PROMPTS[4]), *new]])
    with torch.inference_mode():
        scores = torch.log_softmax(model(ids).logits[0, -len(new) - 1 : -1], -1)
    chosen = scores[torch.arange(len(new)), torch.tensor(new)]
    assert completion.logprob_mean == pytest.approx(chosen.mean().item(), abs=1e-4)
    assert completion.logprob_min == pytest.approx(chosen.min().item(), abs=1e-4)
    assert completion.entropy_mean == pytest.approx((-scores.exp() * scores).sum(-1).mean().item(), abs=1e-4)


def test_measurements_add_up(engine: Engine) -> None:
    tokens = engine.tokenize(PROMPTS, prompt_format="plain")
    result = engine.generate(
        [EngineRequest(i, t, n) for i, (t, n) in enumerate(zip(tokens, LIMITS, strict=True))], Sampling()
    )
    stats = result.stats
    assert stats.rows == 8
    assert stats.prompt_tokens == sum(len(t) for t in tokens) == sum(c.input_tokens for c in result.completions)
    assert stats.output_tokens == sum(c.output_tokens for c in result.completions)
    assert stats.computed_tokens == stats.prompt_tokens + stats.padding_tokens + stats.output_tokens - stats.rows
    assert stats.padding_tokens == sum(max(map(len, tokens)) - len(t) for t in tokens)
    assert stats.splits == 0


def test_prompts_are_tokenised_while_a_batch_runs(engine: Engine, answer: Answer) -> None:
    expected = [t.tolist() for t in engine.tokenize(PROMPTS)]
    faults: list[BaseException] = []

    def tokenise() -> None:
        try:
            for _ in range(60):
                assert [t.tolist() for t in engine.tokenize(PROMPTS)] == expected
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=tokenise) for _ in range(2)]
    for thread in threads:
        thread.start()
    runs = [[key(c) for c in answer(engine, PROMPTS)] for _ in range(5)]
    for thread in threads:
        thread.join()
    assert not faults
    assert all(run == runs[0] for run in runs)
