"""The models of the comparison: the same weights as an artifact of ours and as GGUF files.

Everything lies in the cache under `peers/models`. Q4_0 and Q4_K_M are made by llama.cpp's
llama-quantize; the Gemma checkpoint is a Q4_K_M file itself and is used as it is.
"""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))

import make_llama1b  # noqa: E402
import peer_build  # noqa: E402

import demo  # noqa: E402
import fetch  # noqa: E402
from gemrun.format.reader import read_artifact  # noqa: E402
from gemrun.format.spec import Role  # noqa: E402

FORMS = ("Q4_0", "Q4_K_M")
CONTEXTS = {"gemma3-270m": 8704, "smollm2-135m": 1024, "llama-1b": 8704}  # compiled
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Model:
    """One model. `checkpoint` is what gemmake compiles, `base` what llama-quantize starts from."""

    name: str
    title: str
    source: Callable[[], tuple[Path, Path]]  # checkpoint, base; made where missing
    effort: str = "full"
    ready: str = ""  # the form that the base has already


def folder() -> Path:
    """Where the converted models lie."""
    return peer_build.folder() / "models"


def _fetched(name: str) -> tuple[Path, Path]:
    path = fetch.ensure(name) / demo.DEMOS[name].file
    return path, path


def _random_1b() -> tuple[Path, Path]:
    checkpoint, base = folder() / "llama-1b", folder() / "llama-1b-BF16.gguf"
    if not (checkpoint / "config.json").is_file():
        make_llama1b.write(checkpoint, 16, fetch.ensure("tokenizer-llama3"))
    if not base.is_file():
        write_gguf(checkpoint, base)
    return checkpoint, base


MODELS = {
    "gemma3-270m": Model(
        "gemma3-270m", "Gemma 3 270M", lambda: _fetched("gemma3-270m"), ready="Q4_K_M"
    ),
    "smollm2-135m": Model("smollm2-135m", "SmolLM2 135M", lambda: _fetched("smollm2-135m")),
    "llama-1b": Model("llama-1b", "Llama 3.2 1B shape, random", _random_1b, effort="fast"),
}


# ---- what is measured ----
def artifact(model: Model, fresh: bool) -> Path:
    """Our artifact, compiled if it is not there; `fresh`: compiled anyway."""
    path = folder() / f"{model.name}.gembin"
    if path.is_file() and not fresh:
        return path
    checkpoint, _ = model.source()
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gemmake.cli", "--model", str(checkpoint)]
    target = demo.TARGETS[platform.machine()]
    command += ["--target", target, "--quantization", "int4", "--effort", model.effort]
    command += ["--kv-cache-size", str(CONTEXTS[model.name]), "--output", str(path)]
    print(f"peers: compiling {model.title}", file=sys.stderr, flush=True)
    peer_build.run(command, f"{model.name}: gemmake", "see its message")
    return path


def gguf(model: Model, form: str, quantize: Path) -> Path:
    """The GGUF file of a form, made by llama-quantize if it is not there."""
    path = folder() / f"{model.name}-{form}.gguf"
    if path.is_file():
        return path
    _, base = model.source()
    if form == model.ready:
        return base
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    pure = ["--pure"] if form == "Q4_0" else []
    command = [str(quantize), "--allow-requantize", *pure, str(base), str(part), form]
    print(f"peers: {model.title} as {form}", file=sys.stderr, flush=True)
    peer_build.run(command, f"{model.name}: {form}", "see its message")
    return part.rename(path)


def artifact_bytes(path: Path, two_plane: bool) -> int:
    """Weights that a token has to touch: all but an untied embedding, of which it takes a row.

    With `two_plane` the head's low plane is left out, but for the few rows that are scored again.
    """
    total = 0
    with read_artifact(path, verify="structure") as found:
        for index, tensor in enumerate(found.tensors):
            head = index == found.conf.tens_head
            if tensor.role != Role.EMBED or head:
                total += tensor.size + (0 if head and two_plane else tensor.second_size)
    return total


def gguf_bytes(path: Path) -> int:
    """The same of a GGUF file, as it lies in the file."""
    from gguf import GGUFReader

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(path).tensors}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    return sum(sizes.values())


# ---- a GGUF file of the random checkpoint ----
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor of a Llama checkpoint."""
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def permuted(values: Array, heads: int) -> Array:
    """Rows of q or k in GGUF's order: pairs of a rotation lie side by side."""
    rows, cols = values.shape
    pairs = values.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2)
    return np.ascontiguousarray(pairs).reshape(rows, cols)


def rope_factors(config: dict[str, Any]) -> Array:
    """What each rotation's frequency is divided by (llama3 scaling): float32 [head_dim / 2]."""
    scaling, half = config["rope_scaling"], config["head_dim"] // 2
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for i in range(half):
        turns = scaling["original_max_position_embeddings"] / (
            2 * math.pi * config["rope_theta"] ** (i / half)
        )
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - share) / scaling["factor"] + share))
    return np.array(factors, dtype=np.float32)


def checkpoint_tensors(checkpoint: Path) -> Iterator[tuple[str, Array]]:
    """Name and bfloat16 bits [rows, cols] or [cols] of every tensor, mapped from the shards."""
    for shard in sorted(checkpoint.glob("*.safetensors")):
        data = np.memmap(shard, dtype=np.uint8, mode="r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        for name, entry in json.loads(data[8 : 8 + size].tobytes()).items():
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            yield name, data[start:end].view("<u2").reshape(entry["shape"])


def write_gguf(checkpoint: Path, path: Path) -> None:
    """The random checkpoint as a BF16 GGUF file with its own tokenizer."""
    from gguf import GGMLQuantizationType, GGUFWriter

    print(f"peers: writing {path.name}", file=sys.stderr, flush=True)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    part = path.with_suffix(".part")
    writer = GGUFWriter(part, "llama")
    _write_sizes(writer, config)
    _write_vocabulary(writer, json.loads((checkpoint / "tokenizer.json").read_bytes()))
    writer.add_tensor("rope_freqs.weight", rope_factors(config))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, bits in checkpoint_tensors(checkpoint):
        known = gguf_name(name)
        if bits.ndim == 1:
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(known, values)
            continue
        kind = known.split(".")[-2]
        ordered = permuted(bits, heads[kind]) if kind in heads else bits
        writer.add_tensor(known, ordered.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)


def _write_sizes(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write_vocabulary(writer: Any, tokenizer: dict[str, Any]) -> None:
    from gguf import TokenType

    model, added = tokenizer["model"], tokenizer["added_tokens"]
    texts = {index: text for text, index in model["vocab"].items()}
    texts |= {token["id"]: token["content"] for token in added}
    special = {token["id"] for token in added}
    kinds = [TokenType.CONTROL if i in special else TokenType.NORMAL for i in range(len(texts))]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([texts[i] for i in range(len(texts))])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(make_llama1b.CONFIG["bos_token_id"])
    writer.add_eos_token_id(128001)
