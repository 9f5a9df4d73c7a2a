"""Model files: found where a job says, looked into without loading, refused with what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from relaybatch.engines import ModelSettings, free_bytes, inspect, load, resolve_model
from relaybatch.engines.gguf import read_header
from relaybatch.errors import ModelError

Make = Callable[..., Path]


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def test_facts_of_a_folder_are_those_of_the_loaded_model(llama: Path) -> None:
    facts = inspect(ModelSettings(str(llama), dtype="float32", device="cpu"), prompt_format="chat")
    engine = load("torch", ModelSettings(str(llama), dtype="float32", device="cpu"))
    assert facts.architecture == "LlamaForCausalLM"
    assert facts.parameters == sum(p.numel() for p in engine.model.parameters())  # type: ignore[attr-defined]
    assert facts.kv_bytes_per_token == engine.facts.kv_bytes_per_token
    assert facts.context_tokens == engine.facts.context_tokens == 128
    assert facts.fingerprint == engine.facts.fingerprint
    assert set(facts.eos_token_ids) <= set(engine.facts.eos_token_ids)
    assert facts.memory.batch_bytes(8, 100, 20) == pytest.approx(engine.memory.batch_bytes(8, 100, 20), rel=0.1)


def test_fewer_bytes_in_bfloat16(llama: Path) -> None:
    wide, narrow = (inspect(ModelSettings(str(llama), dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert narrow.weight_bytes * 2 == wide.weight_bytes
    assert narrow.kv_bytes_per_token * 2 == wide.kv_bytes_per_token


def test_the_fingerprint_follows_contents_not_times(llama: Path, copy: Path) -> None:
    assert inspect(ModelSettings(str(copy))).fingerprint == inspect(ModelSettings(str(llama))).fingerprint
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert inspect(ModelSettings(str(copy))).fingerprint != inspect(ModelSettings(str(llama))).fingerprint
    template = ModelSettings(str(llama), chat_template="{{ messages[0]['content'] }}")
    assert inspect(template).fingerprint != inspect(ModelSettings(str(llama))).fingerprint


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "tokenizer is missing"),
    ],
)
def test_a_missing_file_is_named(copy: Path, lost: str, said: str) -> None:
    (copy / lost).unlink()
    with pytest.raises(ModelError, match=said) as caught:
        inspect(ModelSettings(str(copy)))
    assert str(copy) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("keep", [0, 5, 100, -10])
def test_weights_cut_short_are_refused(copy: Path, keep: int) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match="damaged") as caught:
        inspect(ModelSettings(str(copy)))
    assert str(file) in caught.value.message


def test_a_missing_shard_is_named(copy: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"1 of 2 weight files are missing.*model-00002"):
        inspect(ModelSettings(str(copy)))


def test_pickled_weights_are_refused_unless_allowed(copy: Path) -> None:
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="pickled") as caught:
        inspect(ModelSettings(str(copy)))
    assert "allow_pickle" in (caught.value.hint or "")
    settings = ModelSettings(str(copy), allow_pickle=True, dtype="float32", device="cpu")
    assert inspect(settings).weight_bytes > 0
    assert load("torch", settings).facts.parameters > 0


def test_a_template_is_asked_for_where_chat_is(make: Make) -> None:
    bare = make("llama", template=None)
    assert not inspect(ModelSettings(str(bare))).has_chat_template
    with pytest.raises(ModelError, match="no chat template") as caught:
        inspect(ModelSettings(str(bare)), prompt_format="chat")
    assert "chat_template" in (caught.value.hint or "")
    given = ModelSettings(str(bare), chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert inspect(given, prompt_format="chat").has_chat_template


def test_a_template_file_that_is_not_there(llama: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        inspect(ModelSettings(str(llama), chat_template="nowhere.jinja"))


def test_a_models_own_code_is_not_run_unasked(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "modeling.py").write_text("raise SystemExit('was run')")
    with pytest.raises(ModelError, match="own Python code"):
        inspect(ModelSettings(str(copy)))


def test_a_hub_model_that_is_not_here(tmp_path: Path) -> None:
    code = (
        "from relaybatch.engines import ModelSettings, inspect\n"
        "from relaybatch.errors import ModelError\n"
        "try: inspect(ModelSettings('nobody/nothing'))\n"
        "except ModelError as error: print(error)"
    )
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert "nobody/nothing" in out
    assert "could not be fetched" in out


def test_places_a_job_may_name(llama: Path, tmp_path: Path) -> None:
    assert resolve_model(llama.name, llama.parent) == str(llama)
    assert resolve_model("org/name", tmp_path) == "org/name"
    package = Path(pytest.__file__).parent
    assert resolve_model("package:pytest/__init__.p*", tmp_path) == str(package / "__init__.py")
    with pytest.raises(ModelError, match="not installed") as caught:
        resolve_model("package:no_such_models/*.gguf", tmp_path)
    assert "pip install no-such-models" in (caught.value.hint or "")
    with pytest.raises(ModelError, match="holds no"):
        resolve_model("package:pytest/*.gguf", tmp_path)
    for missing in ("./models/small", "models/small.gguf", "/nowhere", "a b"):
        with pytest.raises(ModelError, match="there is no"):
            resolve_model(missing, tmp_path)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "ä", "\u2028"])
    writer.add_token_types([3, 3, 1, 1])
    writer.add_eos_token_id(1)
    writer.add_tensor("token_embd.weight", np.arange(32, dtype=np.float32).reshape(4, 8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_facts_of_a_gguf_file(gguf_file: Path) -> None:
    facts = inspect(ModelSettings(str(gguf_file)))
    assert (facts.parameters, facts.context_tokens, facts.vocabulary) == (32, 64, 4)
    assert facts.kv_bytes_per_token == 2 * 2 * 1 * 4 * 4
    assert facts.eos_token_ids == (1,)
    assert read_header(gguf_file).tensors == {"token_embd.weight": 32}


@pytest.mark.parametrize("keep", [3, 20, 200, -1])
def test_a_gguf_file_cut_short(gguf_file: Path, keep: int) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"damaged or cut short|no GGUF file"):
        inspect(ModelSettings(str(gguf_file)))


def test_quick_reading_reads_what_the_package_reads(gguf_file: Path) -> None:
    import gguf

    from relaybatch.engines.quickgguf import quick_reading

    slow = gguf.GGUFReader(gguf_file)
    with quick_reading():
        quick = gguf.GGUFReader(gguf_file)
    assert type(quick) is not type(slow)
    assert gguf.GGUFReader is type(slow)
    assert list(quick.fields) == list(slow.fields)
    for name, field in slow.fields.items():
        assert quick.fields[name].contents() == field.contents()
        assert quick.fields[name].types == field.types
    assert [t.name for t in quick.tensors] == [t.name for t in slow.tensors]
    assert np.array_equal(quick.tensors[0].data, slow.tensors[0].data)


def test_free_memory_is_a_number_of_this_machine() -> None:
    assert 0 < free_bytes("cpu") < 2**50


def test_looking_into_a_model_imports_no_torch(llama: Path) -> None:
    code = (
        "import sys\nfrom relaybatch.engines import ModelSettings, inspect\n"
        f"inspect(ModelSettings({str(llama)!r}))\nprint('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == [
        "False"
    ]
