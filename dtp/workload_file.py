"""Reading and writing of workload files (safetensors): bytes, metadata and their faults."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as safetensors_bytes

from dtp.errors import DtpError
from dtp.workload_fields import (
    FILE_TYPES,
    FILE_VERSION,
    KEYS,
    SCALES,
    TENSOR_RULES,
    Activation,
    TransportKind,
    parse_mode,
    parse_word,
)
from dtp.workload_fields import workload_must as _must


def read_tensors(place: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Tensors, frozen, and metadata of a file; a ``DtpError`` without the path for every fault."""
    if not place.exists():
        raise DtpError("no such file")
    if not place.is_file():
        raise DtpError("a folder, not a workload file")
    tensors: dict[str, NDArray[Any]] = {}
    try:
        with safe_open(place, framework="numpy") as file:
            for name in file.keys():
                if name not in TENSOR_RULES:
                    raise _must("tensor", f"one of {', '.join(TENSOR_RULES)}", name)
                stored, wanted = file.get_slice(name).get_dtype(), FILE_TYPES[TENSOR_RULES[name].kind]
                if stored != wanted:
                    raise _must(name, f"of type {wanted} in the file", stored)
                array = file.get_tensor(name)
                array.setflags(write=False)
                tensors[name] = array
            metadata = dict(file.metadata() or {})
    except SafetensorError as error:
        raise DtpError(f"not a whole safetensors file ({' '.join(str(error).split())})") from None
    except OSError as error:
        raise DtpError(f"cannot be read ({error.strerror or error})") from None
    return tensors, metadata


def write_tensors(place: Path, tensors: dict[str, NDArray[Any]], metadata: dict[str, str]) -> None:
    """Write a file in one step; a ``DtpError`` when the folder does not exist or cannot be written."""
    data = with_sorted_header(safetensors_bytes(tensors, metadata))
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as stream:
            stream.write(data)
        os.replace(partial, place)
    except OSError as error:
        raise DtpError(f"{place}: the workload cannot be written ({error.strerror})") from None
    finally:
        partial.unlink(missing_ok=True)


def with_sorted_header(data: bytes) -> bytes:
    """A safetensors file's bytes with the names of its header in order: equal contents then give equal files."""
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def options_of(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Options of a workload from a file's metadata."""
    for key in metadata:
        if key not in KEYS:
            raise _must("metadata key", f"one of {', '.join(KEYS)}", key)
    for key in ("mode", "causal"):
        if key not in metadata:
            raise _must(f"metadata {key}", "present in the file", None)
    version = metadata.get("version", FILE_VERSION)
    if version != FILE_VERSION:
        raise _must("version", f"{FILE_VERSION}", version)
    options: dict[str, Any] = {
        "mode": parse_mode(metadata["mode"]),
        "causal": _flag("causal", metadata["causal"]),
        "allow_empty_rows": _flag("allow_empty_rows", metadata.get("allow_empty_rows", "false")),
        "source": metadata.get("source", ""),
    }
    for key in ("temperature", "blend", "torsion_gate", "norm_epsilon"):
        if key in metadata:
            options[key] = _number(key, metadata[key])
    for key in ("valid_length", "block"):
        if key in metadata:
            options[key] = _integer(key, metadata[key])
    for key in SCALES:
        if key in metadata:
            options[key] = tuple(_number(key, part) for part in metadata[key].split(","))
    if "transport" in metadata:
        options["transport"] = parse_word(TransportKind, "transport", metadata["transport"])
    if "activation" in metadata:
        options["activation"] = parse_word(Activation, "activation", metadata["activation"])
    return options


def _flag(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise _must(key, "true or false", text)
    return text == "true"


def _number(key: str, text: str) -> float:
    try:
        return float(_plain(text))
    except ValueError:
        raise _must(key, "a number", text) from None


def _integer(key: str, text: str) -> int:
    try:
        return int(_plain(text))
    except ValueError:
        raise _must(key, "an integer", text) from None


def _plain(text: str) -> str:
    """A number's text, if it has no ``_``, which Python alone takes for a part of a number."""
    if "_" in text:
        raise ValueError(text)
    return text
