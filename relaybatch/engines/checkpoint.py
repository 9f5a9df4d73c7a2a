"""Model files: where a model lies, whether it is whole, and what its configuration says.

Owns `resolve_model` and `inspect`. Loads no weights and imports no torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relaybatch.batching import MemoryModel
from relaybatch.engines.base import ModelFacts, ModelSettings, PromptFormat
from relaybatch.engines.gguf import read_header
from relaybatch.errors import ModelError

WHOLE_HASH_BYTES = 64 * 2**20  # files up to this are hashed whole
UNLIMITED_CONTEXT = 2**31 - 1
_HUB_ID = re.compile(r"[A-Za-z0-9_\-.]+/[A-Za-z0-9_\-.]+")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED = {
    "F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "bfloat16",
    "F8_E5M2": "bfloat16",
}  # fmt: skip
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "tekken.json", "vocab.json")
_HASHED = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.safetensors", "*.bin")


def resolve_model(text: str, base: Path) -> str:
    """What `ModelSettings.model` takes, from what a job file says; relative paths are relative to `base`.

    `text` is a local folder, a .gguf file, a hub id (org/name), or `package:<module>/<file>`: a file (glob allowed)
    inside an installed Python package.

    Raises ModelError: nothing is there; names the package to install.
    """
    if text.startswith("package:"):
        return str(_in_package(text.removeprefix("package:"), text))
    path = (base / Path(text).expanduser()).resolve()
    if path.exists():
        return str(path)
    looks_local = text.startswith((".", "/", "~")) or text.endswith(".gguf") or (base / text).parent.is_dir()
    if looks_local or not _HUB_ID.fullmatch(text):
        raise ModelError(
            f"model `{text}`: there is no {path}",
            hint="give a folder, a .gguf file, a hub id (org/name) or package:<module>/<file>",
        )
    return text


def model_path(settings: ModelSettings) -> Path:
    """The model's folder or .gguf file on disk; a hub model comes from the cache, else it is fetched.

    Raises ModelError: nothing is there.
    """
    path = Path(settings.model)
    if path.exists():
        return path
    if path.is_absolute() or not _HUB_ID.fullmatch(settings.model):
        raise ModelError(f"model {settings.model}: no such folder or file", hint="check the tier's `model`")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = [*_HASHED[:5], "*.safetensors", *(["*.bin"] if settings.allow_pickle else [])]
    try:
        return Path(snapshot_download(settings.model, revision=settings.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    except ValueError as error:
        raise ModelError(f"model {settings.model}: {error}", hint="check the tier's `model`") from None
    try:
        return Path(snapshot_download(settings.model, revision=settings.revision, allow_patterns=wanted))
    except Exception as error:  # whatever the network raised, the person needs the same advice
        raise ModelError(
            f"model {settings.model}: not a folder here, not in the hub's cache, and it could not be fetched "
            f"({type(error).__name__})",
            hint="check the name, fetch it where there is a network, or give a local folder",
        ) from None


def inspect(settings: ModelSettings, *, prompt_format: PromptFormat = "plain") -> ModelFacts:
    """What the model's files say, with the weights left on disk.

    Raises ModelError: a file is missing, cut short or of a kind that may not be loaded; and with `prompt_format`
    "chat", when there is no chat template.
    """
    path = model_path(settings)
    facts = _gguf_facts(path, settings) if path.is_file() else _folder_facts(path, settings)
    if prompt_format == "chat" and not facts.has_chat_template:
        raise ModelError(
            f"{path}: the model has no chat template, so it cannot take messages or chat prompts",
            hint="give the tier a `chat_template` (text, or the path of a .jinja file), or set `prompt_format: plain`",
        )
    return facts


def template_text(settings: ModelSettings) -> str | None:
    """The chat template that the settings give in place of the model's own.

    Raises ModelError: it names a file that is not there.
    """
    given = settings.chat_template
    if given is None or "{" in given or "\n" in given:
        return given
    if not Path(given).is_file():
        raise ModelError(f"chat template {given}: no such file", hint="give the template's text or its file's path")
    return Path(given).read_text(encoding="utf-8")


def _in_package(place: str, text: str) -> Path:
    module, _, file = place.partition("/")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    roots = list(spec.submodule_search_locations or []) if spec else []
    if not roots:
        raise ModelError(
            f"model `{text}`: the Python package `{module}` is not installed",
            hint=f"pip install {module.replace('_', '-')}",
        )
    found = sorted(match for root in roots for match in Path(root).glob(file or "*.gguf"))
    if not found:
        raise ModelError(f"model `{text}`: `{module}` holds no {file}", hint=f"look into {roots[0]}")
    return found[0]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise ModelError(f"{path}: not readable as JSON ({error})", hint="fetch the model again") from None
    return value if isinstance(value, dict) else {}


def _folder_facts(folder: Path, settings: ModelSettings) -> ModelFacts:
    if not (folder / "config.json").exists():
        raise ModelError(f"{folder}: no config.json, so this is no model folder", hint="give the folder that has one")
    config = _json(folder / "config.json")
    _check_code(folder, config, settings)
    if not any((folder / name).exists() for name in _TOKENIZERS):
        raise ModelError(
            f"{folder}: the tokenizer is missing (no {', '.join(_TOKENIZERS[:2])} or the like)",
            hint="copy the tokenizer's files beside config.json",
        )
    parameters, stored_bytes, stored = _weights(folder, settings)
    tokenizer = _json(folder / "tokenizer_config.json")
    templates = [*folder.glob("chat_template.*"), *folder.glob("additional_chat_templates/*")]
    text = config.get("text_config") or config
    shape = _Shape(
        layers=_first(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers") or 1,
        heads=_first(text, "num_attention_heads", "n_head", "n_heads") or 1,
        kv_heads=1 if text.get("multi_query") else _first(text, "num_key_value_heads", "n_head_kv"),
        hidden=_first(text, "hidden_size", "n_embd", "d_model") or 1,
        head_dim=_first(text, "head_dim"),
        inner=_first(text, "intermediate_size", "n_inner", "ffn_dim", "d_inner"),
        vocabulary=_first(text, "vocab_size") or 1,
        context=_first(text, "max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len"),
    )
    named = str(config.get("dtype") or config.get("torch_dtype") or stored)
    dtype = settings.dtype if settings.dtype != "auto" else (named if named in _BYTES else stored)
    quantized = "quantization_config" in config
    return shape.facts(
        architecture=(config.get("architectures") or [config.get("model_type", "unknown")])[0],
        parameters=parameters,
        weight_bytes=stored_bytes if quantized else parameters * _BYTES[dtype],
        dtype=dtype,
        has_template=bool(settings.chat_template or tokenizer.get("chat_template") or templates),
        eos=_end_ids(folder, config, tokenizer),
        fingerprint=_fingerprint(folder, settings),
    )


def _gguf_facts(path: Path, settings: ModelSettings) -> ModelFacts:
    header = read_header(path)
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"{path}: reading GGUF needs the package `gguf`", hint="pip install gguf")
    heads = header.get("attention.head_count", 1)
    kv_heads = header.get("attention.head_count_kv", heads)
    tokens = header.metadata.get("tokenizer.ggml.tokens", 1)
    shape = _Shape(
        layers=header.get("block_count", 1),
        heads=max(heads) if isinstance(heads, list) else heads,
        kv_heads=max(kv_heads) if isinstance(kv_heads, list) else kv_heads,
        hidden=header.get("embedding_length", 1),
        head_dim=header.get("attention.key_length"),
        inner=header.get("feed_forward_length"),
        vocabulary=header.get("vocab_size") or tokens,
        context=header.get("context_length"),
    )
    dtype = settings.dtype if settings.dtype != "auto" else "float32"
    parameters = sum(header.tensors.values())
    eos = header.metadata.get("tokenizer.ggml.eos_token_id")
    turn = header.metadata.get("tokenizer.ggml.eot_token_id")
    return shape.facts(
        architecture=header.architecture,
        parameters=parameters,
        weight_bytes=parameters * _BYTES[dtype],
        dtype=dtype,
        has_template=bool(settings.chat_template or header.metadata.get("tokenizer.chat_template")),
        eos=tuple(sorted({i for i in (eos, turn) if i is not None})),
        fingerprint=_fingerprint(path, settings),
    )


def _first(values: dict[str, Any], *names: str) -> int | None:
    """The first of the names that has a whole number."""
    for name in names:
        value = values.get(name)
        if isinstance(value, list) and value:
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


class _Shape:
    """The sizes that decide memory."""

    def __init__(
        self, *, layers: int, heads: int, kv_heads: int | None, hidden: int, head_dim: int | None, inner: int | None,
        vocabulary: int, context: int | None,
    ) -> None:  # fmt: skip
        self.layers, self.heads, self.hidden, self.vocabulary = layers, heads, hidden, vocabulary
        self.kv_heads = kv_heads or heads
        self.head_dim = head_dim or max(hidden // heads, 1)
        self.inner = inner or 4 * hidden
        self.context = context or UNLIMITED_CONTEXT

    def facts(
        self, *, architecture: str, parameters: int, weight_bytes: int, dtype: str, has_template: bool,
        eos: tuple[int, ...], fingerprint: str,
    ) -> ModelFacts:  # fmt: skip
        size = _BYTES[dtype]
        kv = 2 * self.layers * self.kv_heads * self.head_dim * size
        # one layer at a time: a few copies of the hidden state, queries, repeated keys and values, the inner layer
        activations = (8 * self.hidden + 4 * self.heads * self.head_dim + 3 * self.inner) * max(size, 4)
        memory = MemoryModel(
            weight_bytes=weight_bytes,
            kv_bytes_per_token=kv,
            activation_bytes_per_token=activations,
            row_bytes=self.vocabulary * (size + 3 * 4),
            mask_bytes=size,
        )
        return ModelFacts(
            architecture=architecture,
            parameters=parameters,
            dtype=dtype,
            weight_bytes=weight_bytes,
            kv_bytes_per_token=kv,
            context_tokens=self.context,
            vocabulary=self.vocabulary,
            has_chat_template=has_template,
            eos_token_ids=eos,
            fingerprint=fingerprint,
            memory=memory,
        )


def _check_code(folder: Path, config: dict[str, Any], settings: ModelSettings) -> None:
    """Raises ModelError: the model needs its own code, and the settings do not allow that."""
    if "auto_map" not in config or settings.trust_remote_code:
        return
    from transformers.models.auto import configuration_auto

    if config.get("model_type") not in vars(configuration_auto)["CONFIG_MAPPING_NAMES"]:
        raise ModelError(
            f"{folder}: the model brings its own Python code, which is not run unasked",
            hint="read that code, then set `trust_remote_code: true` for this tier",
        )


def _weights(folder: Path, settings: ModelSettings) -> tuple[int, int, str]:
    """Number of parameters, bytes stored, and the number format of most of them."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise ModelError(
                f"{folder}: {len(missing)} of {len(names)} weight files are missing, the first is {missing[0]}",
                hint="fetch the model again",
            )
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if files:
        parameters, stored_bytes, by_format = 0, 0, dict.fromkeys(_STORED, 0)
        for file in files:
            for name, shape, size in _safetensors(file):
                elements = math.prod(shape)
                parameters += elements
                stored_bytes += size
                by_format[name] = by_format.get(name, 0) + elements
        most = max(by_format, key=lambda name: by_format[name])
        return parameters, stored_bytes, _STORED.get(most, "float32")
    pickled = sorted(folder.glob("*.bin"))
    if not pickled:
        raise ModelError(f"{folder}: no weights (*.safetensors)", hint="fetch the model again")
    if not settings.allow_pickle:
        raise ModelError(
            f"{folder}: the weights are pickled ({pickled[0].name}), and reading those can run code",
            hint="convert them to safetensors; or set `allow_pickle: true` if you made them yourself",
        )
    size = sum(file.stat().st_size for file in pickled)
    return size // 4, size, "float32"


def _safetensors(file: Path) -> Iterator[tuple[str, list[int], int]]:
    """Format, shape and bytes of each tensor. Raises ModelError: the file is not whole."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        (length,) = struct.unpack("<Q", head) if len(head) == 8 else (size,)
        try:
            header = json.loads(stream.read(length)) if 8 + length <= size else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise ModelError(f"{file}: damaged: its header cannot be read", hint="fetch the model again")
    header.pop("__metadata__", None)
    whole = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if whole != size:
        raise ModelError(f"{file}: damaged: {size:,} bytes, {whole:,} expected", hint="fetch the model again")
    for entry in header.values():
        yield entry["dtype"], entry["shape"], entry["data_offsets"][1] - entry["data_offsets"][0]


def _end_ids(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer by config.json, generation_config.json and the tokenizer's end token."""
    ids: set[int] = set()
    for source in (config, config.get("text_config") or {}, _json(folder / "generation_config.json")):
        found = source.get("eos_token_id")
        ids.update(found if isinstance(found, list) else [] if found is None else [found])
    token = tokenizer.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    added = _json(folder / "tokenizer.json").get("added_tokens") or [] if content else []
    ids.update(entry["id"] for entry in added if entry.get("content") == content)
    return tuple(sorted(ids))


def _fingerprint(path: Path, settings: ModelSettings) -> str:
    """BLAKE2b over names and contents of what decides a model's answers."""
    digest = hashlib.blake2b(digest_size=20)
    files = {path} if path.is_file() else {file for pattern in _HASHED for file in path.glob(pattern)}
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            if size <= WHOLE_HASH_BYTES:
                digest.update(stream.read())
            else:  # 64 evenly spread samples; the first holds the header
                for i in range(64):
                    stream.seek(i * (size - 2**16) // 63)
                    digest.update(stream.read(2**16))
    digest.update((template_text(settings) or "").encode())
    return digest.hexdigest()
