"""Reading GGUF files through transformers in a fraction of its time.

Owns replacements that hold while a file is loaded: the `gguf` package steps through a vocabulary with memory-mapped
arrays (seconds a pass, three passes a load), and transformers takes each value apart byte by byte and builds the table
of tensor names anew for each module.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np


@contextmanager
def quick_reading() -> Iterator[None]:
    """Within this context `gguf.GGUFReader` is quick, reads each file once, and transformers draws no bar for it."""
    import gguf

    library: Any = gguf

    class Reader(gguf.GGUFReader):
        """The same fields and tensors, with arrays of texts found in one pass over the bytes."""

        @property
        def data(self) -> Any:
            return self._bytes

        @data.setter
        def data(self, mapped: Any) -> None:
            self._bytes = mapped.view(np.ndarray)  # slicing a memmap costs ten times as much

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            kind = gguf.GGUFValueType
            head = self._bytes[orig_offs : orig_offs + 12].tobytes()
            if raw_type != kind.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            inner, count = struct.unpack("<IQ", head)
            parts: list[Any] = [self._bytes[orig_offs : orig_offs + 4].view(np.uint32)]
            parts.append(self._bytes[orig_offs + 4 : orig_offs + 12].view(np.uint64))
            at = orig_offs + 12
            if inner == kind.STRING:
                unpack = struct.Struct("<Q").unpack_from
                for _ in range(count):
                    start = at + 8
                    at = start + unpack(self._bytes, at)[0]
                    parts.append(self._bytes[start:at])
            elif (scalar := self.gguf_scalar_to_np.get(kind(inner))) is not None:
                start, at = at, at + count * np.dtype(scalar).itemsize
                parts.extend(self._bytes[start:at].view(scalar).reshape(-1, 1))
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            return at - orig_offs, parts, list(range(2, 2 + count)), [kind.ARRAY, kind(inner)]

    loader: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    parse: Any = getattr(loader, "_gguf_parse_value", None)

    @cache
    def opened(path: str) -> Reader:
        return Reader(path)

    def parsed(value: Any, types: Any) -> Any:
        kind = types[-1] if isinstance(types, list) else types
        if kind == gguf.GGUFValueType.STRING:
            return value.tobytes().decode()
        return value[0].item() if kind != gguf.GGUFValueType.ARRAY else parse(value, types)

    replaced = [
        (library, "GGUFReader", lambda path, *_: opened(str(path))),
        (library, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        (loader, "_gguf_parse_value", parsed),
        (loader, "tqdm", lambda items, **_: items),  # its bar draws even where there is no terminal
    ]
    replaced = [each for each in replaced if hasattr(each[0], each[1])]  # names differ between releases
    originals = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    try:
        for module, name, quick in replaced:
            setattr(module, name, quick)
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
