"""Loading: GGUF files, files that do not belong together, devices, number formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaybatch.engines import EngineCompletion, EngineRequest, ModelSettings, Sampling, inspect, load
from relaybatch.errors import ModelError

Make = Callable[..., Path]
Answer = Callable[..., list[EngineCompletion]]


def write_gguf(path: Path) -> Path:
    """A whole Llama with a tokenizer of single bytes, in one GGUF file."""
    import gguf
    from tokenizers import pre_tokenizers

    rng = np.random.default_rng(0)
    writer: Any = gguf.GGUFWriter(path, "llama")
    tokens = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * 257])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    shapes = {
        "token_embd": (len(tokens), 32), "output": (len(tokens), 32), "output_norm": (32,), "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (48, 32), "blk.0.ffn_up": (48, 32), "blk.0.ffn_down": (32, 48),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(0, 0.4, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_answers_as_in_transformers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    file = write_gguf(tmp_path / "tiny.gguf")
    settings = ModelSettings(str(file), dtype="float32", device="cpu")
    facts = inspect(settings, prompt_format="chat")
    capfd.readouterr()
    engine = load("torch", settings)
    assert "it/s" not in capfd.readouterr().err
    assert engine.facts.parameters == facts.parameters
    assert engine.facts.vocabulary == facts.vocabulary == 260
    tokens = engine.tokenize(["hello", "a longer prompt", "abc"])
    found = engine.generate([EngineRequest(i, ids, 12) for i, ids in enumerate(tokens)], Sampling()).completions
    config: Any = GgufConfig(dequantize=True)
    peer: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, quantization_config=config, dtype=torch.float32
    )
    for ids, completion in zip(tokens, found, strict=True):
        given = torch.tensor(ids[None].astype(np.int64))
        out = peer.generate(given, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=2)
        assert completion.output_tokens == out.shape[1] - len(ids)
        prompting: Any = engine
        assert completion.text == prompting.prompting.texts([out[0, len(ids) :].tolist()])[0]


def test_weights_that_do_not_belong_to_the_configuration(make: Make) -> None:
    folder = make()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 48}))
    with pytest.raises(ModelError, match=str(folder)):
        load("torch", ModelSettings(str(folder), device="cpu"))


@pytest.mark.parametrize("device", ["cuda:99", "toaster"])
def test_a_device_that_is_not_there(llama: Path, device: str) -> None:
    with pytest.raises(ModelError, match=device):
        load("torch", ModelSettings(str(llama), device=device))


def test_half_the_bytes_answer_too(llama: Path, answer: Answer) -> None:
    whole = load("torch", ModelSettings(str(llama), dtype="float32", device="cpu"))
    half = load("torch", ModelSettings(str(llama), dtype="bfloat16", device="cpu"))
    assert half.facts.weight_bytes < 0.6 * whole.facts.weight_bytes
    assert half.memory.kv_bytes_per_token * 2 == whole.memory.kv_bytes_per_token
    assert [c.error_code for c in answer(half, ["one", "two words", "three words now"])] == [None] * 3


def test_a_closed_engine_has_let_go(llama: Path) -> None:
    import weakref

    engine: Any = load("torch", ModelSettings(str(llama), dtype="float32", device="cpu"))
    held = weakref.ref(engine.model)
    engine.close()
    assert held() is None
