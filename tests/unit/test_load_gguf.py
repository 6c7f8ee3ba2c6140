"""GGUF: the real files' facts, every tensor type, conversion facts, tiny models of all families."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import load_files
import tiny
from gemmake.errors import CheckpointError, UsageError
from gemmake.load import load_checkpoint
from gemmake.load.gguf import read_gguf
from gemmake.model import NORM_ROLES, Model, Role, RopeSpec

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def facts(model: Model) -> dict[str, Any]:
    spec, layer = model.spec, model.spec.layers[0]
    return {
        "tensors": len(model.tensors),
        "values": sum(r.rows * r.cols for r in model.tensors.values()),
        "layers": len(spec.layers),
        "hidden": spec.hidden,
        "ffn": layer.ffn,
        "heads": (layer.heads, layer.kv_heads, layer.head_dim),
        "rows": spec.vocab_rows,
        "context": spec.trained_context,
        "eps": np.float32(spec.norm_eps),
        "tied": spec.tied,
        "types": dict(Counter(r.dtype for r in model.tensors.values())),
        "ids": (spec.generation.bos_id, spec.generation.pad_id, spec.generation.add_bos),
    }


def test_gemma3_270m_facts(gemma3_gguf: Path) -> None:
    model = load_checkpoint(gemma3_gguf)
    assert facts(model) == {
        "tensors": 236,
        "values": 268_098_176,
        "layers": 18,
        "hidden": 640,
        "ffn": 2048,
        "heads": (4, 1, 256),
        "rows": 262_144,
        "context": 32768,
        "eps": np.float32(1e-6),
        "tied": True,
        "types": {"F32": 109, "Q5_0": 81, "Q4_K": 27, "Q8_0": 10, "Q6_K": 9},
        "ids": (2, 0, True),
    }
    spec = model.spec
    assert [i + 1 for i, layer in enumerate(spec.layers) if not layer.window] == [6, 12, 18]
    assert {layer.window for layer in spec.layers} == {0, 512}
    assert spec.ropes[spec.layers[0].rope] == RopeSpec(10_000.0, 256)
    assert spec.ropes[spec.layers[5].rope] == RopeSpec(1_000_000.0, 256)
    assert {layer.score_scale for layer in spec.layers} == {256**-0.5}
    assert 1 in spec.generation.stop_ids
    assert (spec.name, spec.licence) == ("Gemma-3-270m", "gemma")
    assert model.tokenizer.chat_template is None
    assert {r.norm_offset for r in model.tensors.values()} == {0.0}
    assert model.inputs[0].sha256.startswith("a5fd3b62")


def test_smollm2_135m_facts(smollm2_gguf: Path) -> None:
    model = load_checkpoint(smollm2_gguf)
    assert facts(model) == {
        "tensors": 272,
        "values": 134_515_008,
        "layers": 30,
        "hidden": 576,
        "ffn": 1536,
        "heads": (9, 3, 64),
        "rows": 49_152,
        "context": 8192,
        "eps": np.float32(1e-5),
        "tied": True,
        "types": {"Q4_1": 210, "F32": 61, "Q8_0": 1},
        "ids": (1, 2, False),
    }
    assert model.spec.ropes == (RopeSpec(100_000.0, 64),)
    assert model.spec.generation.stop_ids == (2,)
    assert "<|im_start|>" in (model.tokenizer.chat_template or "")
    assert model.inputs[0].sha256.startswith("b179c952")


def test_smollm2_values_equal_transformers(smollm2_gguf: Path) -> None:
    """All 272 tensors of the real file, q and k put back in order, equal transformers' own reading
    of GGUF bit for bit."""
    import torch
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    parameters = dict(reference.named_parameters())
    for (layer, role), ref in load_checkpoint(smollm2_gguf).tensors.items():
        wanted = parameters[load_files.attribute(role, layer, sandwich=False)].detach().numpy()
        assert np.array_equal(ref.read(0, ref.rows), wanted.reshape(ref.rows, ref.cols)), ref.name


def test_gemma3_values_equal_the_dequantiser(gemma3_gguf: Path) -> None:
    """Every fifth tensor of the real file against the gguf package's own reader."""
    reader = {t.name: t for t in gguf.GGUFReader(gemma3_gguf).tensors}
    refs = list(load_checkpoint(gemma3_gguf).tensors.values())
    for ref in refs[1::5]:
        tensor = reader[ref.name]
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ref.read(0, ref.rows), wanted.reshape(ref.rows, ref.cols))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_tiny_gguf_equals_its_folder(
    family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """F32 GGUF of every family: same spec, same matrices, effective norms, implied facts."""
    folder = tiny_checkpoint(family)
    wanted = load_checkpoint(folder)
    got = load_checkpoint(load_files.to_gguf(folder, tmp_path / "m.gguf"))
    same = {"name": "", "licence": "", "norm_eps": 1.0, "generation": wanted.spec.generation}
    layers = got.spec.layers
    if family.startswith("gemma3") or family == "gemma2":  # query_pre_attn_scalar is not stored
        layers = tuple(replace(x, score_scale=24**-0.5) for x in layers)
    assert replace(got.spec, **same, layers=layers) == replace(wanted.spec, **same)
    assert np.float32(got.spec.norm_eps) == np.float32(wanted.spec.norm_eps)
    assert got.spec.generation.stop_ids == wanted.spec.generation.stop_ids[-1:] or (
        got.spec.generation.stop_ids == wanted.spec.generation.stop_ids
    )
    assert got.tensors.keys() == wanted.tensors.keys()
    for key, ref in wanted.tensors.items():
        values = ref.read(0, ref.rows)
        if key[1] in NORM_ROLES:
            values = values + np.float32(ref.norm_offset)
        assert got.tensors[key].norm_offset == 0.0
        assert np.array_equal(got.tensors[key].read(0, ref.rows), values), ref.name


@pytest.mark.parametrize("qtype", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("family", ["llama3", "gemma3"])
def test_tiny_gguf_quantised(
    family: str, qtype: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The gguf package quantises, the loader reads: equal to its own dequantiser, q and k too."""
    folder = tiny_checkpoint(family)
    model = load_checkpoint(load_files.to_gguf(folder, tmp_path / "m.gguf", qtype))
    kind = gguf.GGMLQuantizationType[qtype]
    values = {n.removeprefix("model."): t.numpy() for n, t in load_files.state(folder).items()}
    for role, name in ((Role.Q, "q_proj"), (Role.K, "k_proj"), (Role.DOWN, "down_proj")):
        part = "mlp" if role is Role.DOWN else "self_attn"
        source = values[f"layers.1.{part}.{name}.weight"]
        wanted = gguf.quants.dequantize(gguf.quants.quantize(source, kind), kind)
        ref = model.tensors[1, role]
        assert ref.dtype == qtype
        assert np.array_equal(ref.read(0, ref.rows), wanted)


def _one_layer(tmp_path: Path, qtype: str, seed: int = 5) -> tuple[Path, dict[str, Any]]:
    """A one-layer model of hidden size 256 with random blocks; returns its raw tensors."""
    kind = gguf.GGMLQuantizationType[qtype]
    block, size = gguf.constants.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_block_count(1)
    writer.add_feed_forward_length(512)
    writer.add_head_count(8)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([chr(0x21 + i) for i in range(94)])
    writer.add_token_types([1] * 94)
    writer.add_token_merges(["! #"])
    raw = {}
    shapes = {"attn_q": (256, 256), "attn_k": (64, 256), "attn_v": (64, 256)}
    shapes |= {"attn_output": (256, 256), "ffn_gate": (512, 256), "ffn_up": (512, 256)}
    shapes |= {"ffn_down": (256, 512)}
    table = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    for name, (rows, cols) in {"token_embd.weight": (94, 256), **table}.items():
        blocks = _random_blocks(rng, qtype, rows * cols // block, size)
        raw[name] = blocks.reshape(rows, cols // block * size)
        writer.add_tensor(name, raw[name], raw_dtype=kind)
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(256, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "one.gguf", raw


def _random_blocks(rng: np.random.Generator, qtype: str, count: int, size: int) -> Any:
    """Any bytes are a valid block as long as its floats are finite."""
    if qtype in ("F32", "F16", "BF16"):
        values = rng.normal(size=count).astype(np.float32)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[qtype]).view(np.uint8)
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    places = {"Q6_K": [208], "Q4_0": [0], "Q5_0": [0], "Q8_0": [0]}.get(qtype, [0, 2])
    for place in places:
        scales = rng.normal(size=count).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks


@pytest.mark.parametrize("qtype", TYPES)
def test_every_type(qtype: str, tmp_path: Path) -> None:
    """11 types, random blocks, read whole and in odd pieces; q and k come back in order."""
    path, raw = _one_layer(tmp_path, qtype)
    model = load_checkpoint(path)
    kind = gguf.GGMLQuantizationType[qtype]
    for ref in model.tensors.values():
        if ref.name not in raw:
            continue
        wanted = gguf.quants.dequantize(raw[ref.name], kind).reshape(ref.rows, ref.cols)
        heads = {Role.Q: 8, Role.K: 2}.get(ref.role)
        if heads:
            shaped = wanted.reshape(heads, ref.rows // heads // 2, 2, ref.cols)
            wanted = shaped.swapaxes(1, 2).reshape(ref.rows, ref.cols)
        assert np.array_equal(ref.read(0, ref.rows), wanted)
        odd = [ref.read(i, min(13, ref.rows - i)) for i in range(0, ref.rows, 13)]
        assert np.array_equal(np.concatenate(odd), wanted)


def test_config_option_is_refused(tmp_path: Path) -> None:
    path, _ = _one_layer(tmp_path, "F32")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="GGUF"):
        load_checkpoint(path, tmp_path / "config.json")


def _with_keys(tmp_path: Path, keys: dict[str, bytes]) -> Path:
    """The one-layer file with more metadata keys in front."""
    path, _ = _one_layer(tmp_path, "F32")
    data = path.read_bytes()
    count = struct.unpack_from("<Q", data, 16)[0]
    extra = b"".join(load_files.gguf_string(k) + v for k, v in keys.items())
    start = gguf.GGUFReader(path).data_offset
    infos = _info_end(data)
    head = data[:16] + struct.pack("<Q", count + len(keys)) + extra + data[24:infos]
    path.write_bytes(head + bytes(-len(head) % 32) + data[start:])
    return path


def _info_end(data: bytes) -> int:
    """Where the tensor infos end: the offset of the last field of the last tensor."""
    name = b"output_norm.weight"
    at = data.rindex(name) + len(name)
    return at + 4 + 8 + 4 + 8


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("llama.expert_count", load_files.gguf_value(4, 8), "expert_count"),
        ("llama.attention.clamp_kqv", load_files.gguf_value(6, 1.0), "clamp_kqv"),
        ("llama.logit_scale", load_files.gguf_value(6, 2.0), "logit_scale"),
        ("llama.rope.scaling.type", load_files.gguf_value(8, "yarn"), "yarn"),
        ("llama.rope.dimension_count", load_files.gguf_value(4, 16), "dimension_count"),
        ("llama.attention.sliding_window", load_files.gguf_value(4, 16), "sliding_window"),
        ("llama.attention.value_length", load_files.gguf_value(4, 16), "value_length"),
        ("llama.rope.freq_base", load_files.gguf_value(6, float("nan")), "freq_base"),
        ("llama.rope.freq_base", load_files.gguf_value(4, 10000), "freq_base"),
        ("split.count", load_files.gguf_value(4, 3), "split"),
        ("tokenizer.ggml.add_bos_token", load_files.gguf_value(7, True), "bos"),
    ],
)
def test_keys_that_are_refused(key: str, value: bytes, word: str, tmp_path: Path) -> None:
    """11 metadata values that change the result or make no sense, refused by name."""
    with pytest.raises(CheckpointError, match=word):
        load_checkpoint(_with_keys(tmp_path, {key: value}))


def test_linear_scaling_and_vocab_note(tmp_path: Path) -> None:
    keys = {
        "llama.rope.scaling.type": load_files.gguf_value(8, "linear"),
        "llama.rope.scaling.factor": load_files.gguf_value(6, 4.0),
        "llama.vocab_size": load_files.gguf_value(4, 99),
    }
    model = load_checkpoint(_with_keys(tmp_path, keys))
    assert model.spec.ropes == (RopeSpec(10000.0, 32, "linear", 4.0),)
    assert any("99" in note for note in model.notes)


def test_per_layer_arrays(tmp_path: Path) -> None:
    """head_count_kv as an array with one entry per layer."""
    path, _ = _one_layer(tmp_path, "F32")
    data = path.read_bytes()
    key = load_files.gguf_string("llama.attention.head_count_kv")
    old = key + load_files.gguf_value(4, 2)
    assert data.count(old) == 1
    start, infos = gguf.GGUFReader(path).data_offset, _info_end(data)
    head = data[:infos].replace(old, key + load_files.gguf_array(4, [2]))
    path.write_bytes(head + bytes(-len(head) % 32) + data[start:])
    assert read_gguf(path).arch.layers[0].kv_heads == 2


def test_hash_is_that_of_the_file(tmp_path: Path) -> None:
    path, _ = _one_layer(tmp_path, "F32")
    entry = load_checkpoint(path).inputs[0]
    assert entry.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
