"""Reads a .pt state dict in a process of its own: weights only, never anything that runs code.

    python -m gemmake.load.pt_worker CHECKPOINT DATA

Writes the tensors to DATA, row-major and little-endian, each on 64 bytes, whatever their strides
were, and prints one JSON object: {"tensors": [{name, dtype, shape, offset}, ..]} or
{"error": "..."}. With - as DATA it writes nothing and reads no weights. There is no unsafe fallback
and no option that allows one.
"""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

ALIGNMENT = 64  # bytes
HEADERS = "-"  # in place of an output file
_CHUNK_VALUES = 4 * 1024 * 1024
_WRAPPERS = ("state_dict", "model_state_dict", "model")
_REMEDY = "save model.state_dict() in float32 or convert it to safetensors"
_NAMES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


class _Refused(Exception):
    """The checkpoint cannot be used; the text is the second part of a message."""


def main(arguments: list[str]) -> int:
    """Convert one checkpoint; returns the exit code."""
    try:
        if len(arguments) != 2:
            raise _Refused("the worker takes a checkpoint and an output file")
        checkpoint, data = Path(arguments[0]), arguments[1]
        result = _list(checkpoint) if data == HEADERS else _convert(checkpoint, Path(data))
    except _Refused as error:
        text = str(error)
        result = {"error": text if ";" in text else f"{text}; {_REMEDY}"}
    except MemoryError:
        result = {"error": "does not fit into memory"}
    except OSError as error:
        result = {"error": f"cannot be converted ({error.strerror or error})"}
    print(json.dumps(result), flush=True)
    return 3 if "error" in result else 0


def _convert(checkpoint: Path, data: Path) -> dict[str, Any]:
    state = _state_dict(_load(checkpoint))
    _check_room(state, data)
    tensors = []
    with data.open("wb") as file:
        for name in sorted(state):
            offset = -(-file.tell() // ALIGNMENT) * ALIGNMENT
            file.write(bytes(offset - file.tell()))
            tensor = state[name]
            _write(file, tensor)
            tensors.append({**_entry(name, tensor), "offset": offset})
    return {"tensors": tensors}


def _list(checkpoint: Path) -> dict[str, Any]:
    """The tensors' names, types and shapes."""
    state = _state_dict(_load(checkpoint))
    return {"tensors": [_entry(name, state[name]) for name in sorted(state)]}


def _entry(name: str, tensor: Any) -> dict[str, Any]:
    return {"name": name, "dtype": _NAMES[str(tensor.dtype)], "shape": list(tensor.shape)}


def _load(checkpoint: Path) -> Any:
    """The object in the file. Mapped where the file form allows it, so that it is not copied."""
    import torch

    mapped = True
    with checkpoint.open("rb") as file:
        mapped = file.read(4) == b"PK\x03\x04"
    try:
        return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        first = str(error).strip().splitlines()[-1] if str(error).strip() else "unpickling failed"
        hint = next((line for line in str(error).splitlines() if "GLOBAL" in line), first)
        raise _Refused(
            f"is no plain state dict and was refused ({hint.strip()[:300]}); "
            "save model.state_dict() or convert it to safetensors"
        ) from error
    except (RuntimeError, ValueError, KeyError, EOFError, TypeError, AttributeError) as error:
        text = str(error).strip().splitlines()
        raise _Refused(
            f"is damaged or no state dict ({text[0][:300] if text else type(error).__name__})"
        ) from error


def _state_dict(loaded: Any) -> Mapping[str, Any]:
    """The map of tensors, also where it lies one level down under a usual name."""
    import torch

    if isinstance(loaded, Mapping) and not any(torch.is_tensor(v) for v in loaded.values()):
        for name in _WRAPPERS:
            if isinstance(loaded.get(name), Mapping):
                loaded = loaded[name]
                break
    if not isinstance(loaded, Mapping) or not loaded:
        raise _Refused(f"holds a {type(loaded).__name__}, not a state dict")
    for name, value in loaded.items():
        if not isinstance(name, str) or not torch.is_tensor(value):
            raise _Refused(f"holds {str(name)[:80]!r} of type {type(value).__name__}, no tensor")
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise _Refused(f"tensor {name[:80]} is sparse, quantised or without data")
        if str(value.dtype) not in _NAMES and value.is_floating_point():
            raise _Refused(f"tensor {name[:80]} has type {value.dtype}; convert it to float32")
    plain = {n: t for n, t in loaded.items() if str(t.dtype) in _NAMES}
    if len(plain) != len(loaded):
        odd = sorted(set(loaded) - set(plain))
        raise _Refused(f"tensor {odd[0][:80]} has type {loaded[odd[0]].dtype}, no float type")
    return plain


def _check_room(state: Mapping[str, Any], data: Path) -> None:
    """A view with stride 0 can claim far more than the file holds: look before writing."""
    wanted = sum(t.numel() * t.element_size() + ALIGNMENT for t in state.values())
    free = shutil.disk_usage(data.parent).free
    if wanted > free:
        raise _Refused(
            f"needs {wanted} bytes of temporary space in {data.parent}, {free} bytes are free; "
            "set TMPDIR to a larger disk"
        )


def _write(file: BinaryIO, tensor: Any) -> None:
    """The values row by row, whatever the strides, in chunks of bounded size."""
    import torch

    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    rows = max(1, _CHUNK_VALUES // max(1, tensor[:1].numel()))
    for first in range(0, tensor.shape[0], rows):
        part = tensor[first : first + rows].detach().contiguous()
        file.write(part.reshape(-1).view(torch.uint8).numpy().tobytes())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
