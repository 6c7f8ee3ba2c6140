"""A random checkpoint with the shape of Llama-3.2-1B, for measuring compile time and memory.

    python benchmarks/make_llama1b.py FOLDER [--layers 16] [--tokenizer FOLDER]

Writes 2.47 GB of bfloat16 safetensors in shards, a piece of a tensor at a time, so that it needs
little memory. The values are normally distributed with the spread of trained weights; the same
call gives the same bytes. The tokenizer is Llama 3.1's as `make fetch` brings it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 8192, 32, 8, 64, 128256
SHARD = 1 << 30  # bytes, about
PIECE = 1 << 22  # values made at a time
SPREAD = 0.02  # standard deviation of the weights
SEED = 20240925

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": SPREAD,
    "intermediate_size": FFN,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
}
Shape = tuple[int, ...]


def shapes(layers: int) -> Iterator[tuple[str, Shape]]:
    """Every tensor's name and shape."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (HIDDEN,)
        yield prefix + "self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield prefix + "self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield prefix + "self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield prefix + "self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield prefix + "post_attention_layernorm.weight", (HIDDEN,)
        yield prefix + "mlp.gate_proj.weight", (FFN, HIDDEN)
        yield prefix + "mlp.up_proj.weight", (FFN, HIDDEN)
        yield prefix + "mlp.down_proj.weight", (HIDDEN, FFN)
    yield "model.norm.weight", (HIDDEN,)


def shards(layers: int) -> list[list[tuple[str, Shape]]]:
    """The tensors in groups of about SHARD bytes, in order."""
    groups: list[list[tuple[str, Shape]]] = [[]]
    size = 0
    for name, shape in shapes(layers):
        wanted = 2 * count_of(shape)
        if groups[-1] and size + wanted > SHARD:
            groups.append([])
            size = 0
        groups[-1].append((name, shape))
        size += wanted
    return groups


def count_of(shape: Shape) -> int:
    """Values of a tensor."""
    return int(np.prod(shape, dtype=np.int64))


def bfloat16(values: npt.NDArray[np.float32]) -> bytes:
    """Finite values rounded to nearest even, as little-endian bytes."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return rounded.astype("<u2").tobytes()


def values_of(name: str, shape: Shape, rng: np.random.Generator) -> Iterator[bytes]:
    """A tensor's bytes, a piece at a time; norms lie around 1."""
    left = count_of(shape)
    while left:
        values = rng.standard_normal(min(left, PIECE), dtype=np.float32)
        values *= np.float32(SPREAD * (5 if "norm" in name else 1))
        if "norm" in name:
            values += np.float32(1)
        left -= values.size
        yield bfloat16(values)


def write_shard(path: Path, tensors: list[tuple[str, Shape]], rng: np.random.Generator) -> int:
    """Write one safetensors file; returns the bytes of its tensors."""
    header, at = {}, 0
    for name, shape in tensors:
        end = at + 2 * count_of(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors:
            for piece in values_of(name, shape, rng):
                file.write(piece)
    return at


def write(folder: Path, layers: int, tokenizer: Path) -> None:
    """Write the whole checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.Generator(np.random.PCG64(SEED))
    groups = shards(layers)
    weight_map, total = {}, 0
    for index, tensors in enumerate(groups, 1):
        name = f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        total += write_shard(folder / name, tensors, rng)
        weight_map.update({tensor: name for tensor, _ in tensors})
    documents = {
        "config.json": CONFIG | {"num_hidden_layers": layers},
        "generation_config.json": {
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "temperature": 0.6,
            "top_p": 0.9,
        },
        "model.safetensors.index.json": {
            "metadata": {"total_size": total},
            "weight_map": weight_map,
        },
    }
    for name, value in documents.items():
        (folder / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    print(f"{folder}: {total / 1e9:.2f} GB in {len(groups)} shards")


def default_tokenizer() -> Path:
    """Llama 3.1's tokenizer in the cache of `make fetch`."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
    import fetch

    return fetch.item_dir("tokenizer-llama3")


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="write a random Llama-3.2-1B")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokenizer", type=Path, default=None)
    arguments = parser.parse_args()
    write(arguments.folder, arguments.layers, arguments.tokenizer or default_tokenizer())
    return 0


if __name__ == "__main__":
    sys.exit(main())
