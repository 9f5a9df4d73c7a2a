"""Small random models in temporary folders: weights and a byte-level tokenizer, made with the real libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relaybatch.engines import Engine, EngineCompletion, EngineRequest, ModelSettings, Sampling, load

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<pad>", "<s>", "</s>", "<|end|>")

Make = Callable[..., Path]
Answer = Callable[..., list[EngineCompletion]]


def make_tokenizer(folder: Path, template: str | None = TEMPLATE, pad: str | None = None) -> None:
    """A tokenizer of single bytes and four special tokens, (260,)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast_kind: Any = PreTrainedTokenizerFast
    fast = fast_kind(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token=pad)
    fast.chat_template = template
    fast.save_pretrained(folder)


def make_model(
    folder: Path, kind: str = "llama", *, template: str | None = TEMPLATE, pad: str | None = None, **changes: Any
) -> Path:
    """A model folder; `changes` go into its configuration."""
    import torch
    import transformers

    config_name, model_name, sizes = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}),
        "mistral": ("MistralConfig", "MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": 8}),
        "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
        "bloom": ("BloomConfig", "BloomForCausalLM", {}),
        "mamba": ("MambaConfig", "MambaForCausalLM", {"state_size": 4, "expand": 1}),
    }[kind]
    settings: dict[str, Any] = {
        "vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "max_position_embeddings": 128, "initializer_range": 0.4, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, **sizes, **changes,
    }  # fmt: skip
    torch.manual_seed(5)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**settings))
    model.save_pretrained(folder)
    make_tokenizer(folder, template, pad)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file."""
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(value | changes))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with grouped heads that ends answers at three tokens by three different files."""
    folder = make_model(tmp_path_factory.mktemp("llama"))
    edit_json(folder / "generation_config.json", eos_token_id=[2, 77, 78])
    return folder


@pytest.fixture(scope="session")
def engine(llama: Path) -> Engine:
    """The loaded Llama, in float32 on a CPU."""
    return load("torch", ModelSettings(str(llama), dtype="float32", device="cpu"))


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a model folder, see `make_model`."""

    def made(kind: str = "llama", **changes: Any) -> Path:
        return make_model(tmp_path / kind, kind, **changes)

    return made


def answers(
    engine: Engine,
    prompts: list[str],
    limits: int | list[int] = 24,
    sampling: Sampling | None = None,
    batch: int | None = None,
    order: list[int] | None = None,
) -> list[EngineCompletion]:
    """Completions in the order of the prompts, run `batch` rows at a time in `order`."""
    tokens = engine.tokenize(prompts, prompt_format="plain")
    most = [limits] * len(prompts) if isinstance(limits, int) else limits
    order = list(range(len(prompts))) if order is None else order
    size = batch or len(prompts)
    found = {}
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        result = engine.generate([EngineRequest(i, tokens[i], most[i]) for i in rows], sampling or Sampling())
        assert [completion.row for completion in result.completions] == rows
        found.update({completion.row: completion for completion in result.completions})
    return [found[i] for i in range(len(prompts))]


@pytest.fixture
def answer() -> Answer:
    """Runs prompts, see `answers`."""
    return answers
