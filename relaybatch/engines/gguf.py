"""The header of a GGUF file: its metadata and its table of tensors.

Owns reading the format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Reads no weights.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaybatch.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# elements and bytes of a block by tensor type; other types are not measured
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 30: (1, 2),
}  # fmt: skip


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key (long arrays of strings as their count), and each tensor's number of elements."""

    metadata: dict[str, Any]
    tensors: dict[str, int]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value under `<architecture>.key`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_header(path: Path) -> GgufHeader:
    """The header of the file.

    Raises ModelError: not a GGUF file, or cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).header()
    except (struct.error, ValueError, UnicodeDecodeError, IndexError) as error:
        raise ModelError(
            f"{path}: the GGUF file is damaged or cut short ({error})", hint="fetch the file again"
        ) from None


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def header(self) -> GgufHeader:
        if self.data[:4] != b"GGUF":
            raise ModelError(f"{self.path}: this is no GGUF file", hint="give a .gguf file or a model folder")
        self.at = 4
        version, tensor_count, key_count = self._take("IQQ")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported", hint="convert it to version 3")
        metadata = {}
        for _ in range(key_count):
            key = self._string()
            metadata[key] = self._value(self._take("I")[0])
        tensors, ends = {}, [0]
        for _ in range(tensor_count):
            name = self._string()
            shape = self._take(f"{self._take('I')[0]}Q")
            kind, offset = self._take("IQ")
            tensors[name] = math.prod(shape)
            elements, size = _BLOCKS.get(kind, (1, 0))
            ends.append(offset + math.prod(shape) // elements * size)
        alignment = int(metadata.get("general.alignment", 32))
        needed = -(-self.at // alignment) * alignment + max(ends)
        if needed > len(self.data):
            raise ValueError(f"{len(self.data):,} bytes of {needed:,}")
        return GgufHeader(metadata, tensors)

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def _string(self) -> str:
        (length,) = self._take("Q")
        if self.at + length > len(self.data):
            raise ValueError("a text reaches past the end")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"unknown value type {kind}")
        element, count = self._take("IQ")
        if element in _SCALARS:
            return list(self._take(f"{count}{_SCALARS[element]}"))
        if element != _STRING:
            raise ValueError(f"unknown array type {element}")
        unpack, at = struct.Struct("<Q").unpack_from, self.at  # a vocabulary: only stepped over
        for _ in range(count):
            at += 8 + unpack(self.data, at)[0]
        self.at = at
        return count
