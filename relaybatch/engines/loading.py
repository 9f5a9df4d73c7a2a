"""Loading weights: device, number format, transformers' model, and what its forward pass understands.

Owns turning `ModelSettings` into a model on a device. Runs no batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from relaybatch.engines.base import ModelSettings
from relaybatch.engines.quickgguf import quick_reading
from relaybatch.errors import ModelError


@dataclass(frozen=True)
class ForwardNames:
    """How a model's forward pass names what it takes; differs between releases and architectures."""

    cache: str
    positions: bool
    logits_to_keep: bool

    @staticmethod
    def of(model: Any) -> ForwardNames:
        taken = signature(model.forward).parameters
        return ForwardNames(
            cache="cache" if "cache" in taken else "past_key_values",
            positions="position_ids" in taken,
            logits_to_keep="logits_to_keep" in taken,
        )


def pick_device(name: str) -> torch.device:
    """The device for a tier's `device`.

    Raises ModelError: there is no such device here.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda:0")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"device `{name}`: unknown", hint="use auto, cpu, cuda:0 or mps") from None
    missing = {
        "cuda": not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count(),
        "mps": not torch.backends.mps.is_available(),
    }
    if missing.get(device.type, device.type != "cpu"):
        raise ModelError(f"device `{name}`: not on this machine", hint="use auto or cpu")
    return device


def pick_dtype(name: str, stored: str, device: torch.device) -> torch.dtype:
    """The number format for a tier's `dtype`; `stored` is the checkpoint's own."""
    if name != "auto":
        return _DTYPES[name]
    if device.type != "cpu":
        return _DTYPES[stored]
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if stored == "bfloat16" and fast else torch.float32


def load_model(path: Path, settings: ModelSettings, stored: str, device: torch.device) -> Any:
    """The model, ready to run, on its device.

    Raises ModelError: the library cannot load it.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging

    arguments: dict[str, Any] = {
        "dtype": pick_dtype(settings.dtype, stored, device),
        "local_files_only": True,
        "trust_remote_code": settings.trust_remote_code,
    }
    if device.type != "cpu":
        arguments["device_map"] = {"": device}  # accelerate reads each weight straight onto its device
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        if path.is_file():
            from transformers import GgufConfig

            unpacked = GgufConfig(dequantize=True)  # packed weights need kernels that are not published for CPUs
            with quick_reading():
                model: Any = AutoModelForCausalLM.from_pretrained(
                    path.parent, gguf_file=path.name, quantization_config=unpacked, **arguments
                )
        else:
            arguments["use_safetensors"] = False if _only_pickled(path) else None
            model = AutoModelForCausalLM.from_pretrained(path, **arguments)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(
            f"{path}: the weights do not fit into the memory of {device} ({error})",
            hint="use a smaller dtype, a smaller model or another device",
        ) from None
    except Exception as error:  # the library raises whatever its readers raise
        raise ModelError(
            f"{path}: the model cannot be loaded ({type(error).__name__}: {error})",
            hint="check that its files belong together, and that this transformers knows the architecture",
        ) from error
    finally:
        if bars:
            logging.enable_progress_bar()
    ready: Any = model
    return ready.eval().requires_grad_(False)


def _only_pickled(folder: Path) -> bool:
    return not any(folder.glob("*.safetensors"))


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
