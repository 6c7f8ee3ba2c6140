"""Damaged safetensors files, indexes and shards (field reports O5, O7, O10, O11, O14)."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import load_files
import tiny
from gemmake.errors import CheckpointError, UsageError
from gemmake.load import load_checkpoint
from gemmake.load.safetensors import MAX_HEADER, read_safetensors
from gemmake.model import MODEL_LAYER, Role

MakeTiny = Callable[..., Path]


def without(state: load_files.State, name: str) -> load_files.State:
    return {key: value for key, value in state.items() if key != name}


def entry(shape: list[Any], begin: Any, end: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ONE = {"a": entry([2], 0, 8)}
DATA = bytes(8)
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "too short"),
    "seven bytes": (bytes(7), "too short"),
    "length 2^64-1": (load_files.safetensors_bytes(ONE, DATA, length=2**64 - 1), "claims"),
    "length 2^64-8": (load_files.safetensors_bytes(ONE, DATA, length=2**64 - 8), "claims"),
    "length past the end": (load_files.safetensors_bytes(ONE, DATA, length=10_000), "claims"),
    "length one too long": (load_files.safetensors_bytes(ONE, b"", length=62), "claims|JSON"),
    "length 0": (struct.pack("<Q", 0), "JSON"),
    "not JSON": (load_files.safetensors_bytes(b"{nonsense", DATA), "JSON"),
    "not UTF-8": (load_files.safetensors_bytes(b'{"\xff": 1}', DATA), "JSON"),
    "a list": (load_files.safetensors_bytes(b"[]", b""), "object"),
    "nested 10,000 deep": (
        load_files.safetensors_bytes(b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
        "deep|JSON",
    ),
    "a name twice": (
        load_files.safetensors_bytes(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
            b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            DATA,
        ),
        "twice",
    ),
    "begin after end": (load_files.safetensors_bytes({"a": entry([2], 8, 0)}, DATA), "begin"),
    "end past the data": (load_files.safetensors_bytes({"a": entry([4], 0, 16)}, DATA), "ends at"),
    "span too long": (load_files.safetensors_bytes({"a": entry([1], 0, 8)}, DATA), "spans"),
    "span too short": (load_files.safetensors_bytes({"a": entry([3], 0, 8)}, DATA), "spans"),
    "dimensions wrap": (
        load_files.safetensors_bytes({"a": entry([2**63 - 1, 2], 0, 8)}, DATA),
        "beyond 2\\^63",
    ),
    "dimensions wrap to 8": (
        load_files.safetensors_bytes({"a": entry([2**62 + 1, 2, 2], 0, 8)}, DATA),
        "beyond 2\\^63",
    ),
    "negative dimension": (load_files.safetensors_bytes({"a": entry([-2], 0, 8)}, DATA), "shape"),
    "float dimension": (load_files.safetensors_bytes({"a": entry([2.0], 0, 8)}, DATA), "shape"),
    "true as dimension": (load_files.safetensors_bytes({"a": entry([True], 0, 4)}, DATA), "shape"),
    "negative offset": (load_files.safetensors_bytes({"a": entry([2], -8, 0)}, DATA), "begin"),
    "string offset": (load_files.safetensors_bytes({"a": entry([2], "0", 8)}, DATA), "begin"),
    "unknown type": (load_files.safetensors_bytes({"a": entry([2], 0, 8, "F33")}, DATA), "F33"),
    "entry with more": (
        load_files.safetensors_bytes({"a": {**entry([2], 0, 8), "x": 1}}, DATA),
        "exactly",
    ),
    "entry is a number": (load_files.safetensors_bytes({"a": 3}, DATA), "exactly"),
    "overlap": (
        load_files.safetensors_bytes({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
        "overlaps",
    ),
    "same bytes twice": (
        load_files.safetensors_bytes({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, DATA),
        "overlaps",
    ),
    "hole": (
        load_files.safetensors_bytes({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)),
        "hole",
    ),
    "hole at the start": (load_files.safetensors_bytes({"a": entry([1], 4, 8)}, DATA), "hole"),
    "bytes after the last": (load_files.safetensors_bytes(ONE, bytes(9)), "belong to none"),
    "metadata no map": (
        load_files.safetensors_bytes({"__metadata__": [], **ONE}, DATA),
        "metadata",
    ),
    "metadata of numbers": (
        load_files.safetensors_bytes({"__metadata__": {"a": 1}, **ONE}, DATA),
        "metadata",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file(case: str, tmp_path: Path) -> None:
    """33 files, each breaking one rule; each ends in a CheckpointError that says which."""
    data, words = BROKEN[case]
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_safetensors(path)
    assert str(caught.value).startswith("m.safetensors")


def test_broken_count() -> None:
    assert len(BROKEN) == 33


def test_header_above_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER + 1))
        file.truncate(MAX_HEADER + 100)
    with pytest.raises(CheckpointError, match="above"):
        read_safetensors(path)


def test_every_truncation(tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    """A real file cut at 60 places in its header and data: never accepted."""
    data = (tiny_checkpoint("gemma1") / "model.safetensors").read_bytes()
    path = tmp_path / "m.safetensors"
    cuts = {*range(0, 40, 2), *range(100, len(data), len(data) // 38), len(data) - 1}
    assert len(cuts) >= 59
    for cut in cuts:
        path.write_bytes(data[:cut])
        with pytest.raises(CheckpointError):
            read_safetensors(path)


def test_unaligned_data_loads(tmp_path: Path) -> None:
    """Real files exist whose data does not start on 8 bytes (llama.cpp PR 18291)."""
    values = np.arange(4, dtype=np.float32)
    header = json.dumps({"a": entry([2, 2], 0, 16)}).encode()
    for pad in range(8):
        path = tmp_path / f"{pad}.safetensors"
        path.write_bytes(load_files.safetensors_bytes(header + b" " * pad, values.tobytes()))
        got = read_safetensors(path)["a"].read(0, 2)
        assert np.array_equal(got, values.reshape(2, 2))


def test_file_that_shrinks_while_it_is_read(tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    """An error, not a bus error."""
    folder = load_files.copy(tiny_checkpoint("gemma1"), tmp_path / "m")
    model = load_checkpoint(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(4096)
    ref = model.tensors[3, Role.DOWN]
    with pytest.raises(CheckpointError, match="shorter"):
        ref.read(0, ref.rows)


@pytest.mark.parametrize(
    "name",
    [
        "../../x.safetensors",
        "/etc/passwd.safetensors",
        "a\nb.safetensors",
        "..",
        "",
        "sub/x.safetensors",
        "a\\b.safetensors",
        3,
    ],
)
def test_shard_names_that_climb_out(
    name: object, tiny_checkpoint: MakeTiny, tmp_path: Path
) -> None:
    """8 names in weight_map that are not plain base names of the folder (O7)."""
    folder = tiny.to_shards(tiny_checkpoint("gemma1"), tmp_path / "m")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        load_checkpoint(folder)


def test_link_out_of_the_folder(tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    folder = tiny.to_shards(tiny_checkpoint("gemma1"), tmp_path / "m")
    shard = folder / "model-00002-of-00003.safetensors"
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match="link"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "chat_template.jinja"])
def test_small_file_that_links_out(name: str, tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    folder = load_files.copy(tiny_checkpoint("gemma1"), tmp_path / "m")
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="link"):
        load_checkpoint(folder)


def test_link_inside_and_download_cache_are_fine(tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    """The layout of a download cache: snapshots/<revision>/ links into blobs/ beside it."""
    folder = load_files.copy(tiny_checkpoint("gemma1"), tmp_path / "plain")
    wanted = load_checkpoint(folder).spec
    (folder / "model.safetensors").rename(folder / "real.bin")
    (folder / "model.safetensors").symlink_to("real.bin")
    assert load_checkpoint(folder).spec == wanted
    repo = tmp_path / "models--a--b"
    snapshot, blobs = repo / "snapshots" / "0123", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(tiny_checkpoint("gemma1").iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    assert load_checkpoint(snapshot).spec == wanted


def test_shards_that_disagree(tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    """8 kinds of damage to a model of three shards; each message names file or tensor (O10)."""
    third = "model-00003-of-00003.safetensors"
    index_name = "model.safetensors.index.json"

    def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
        index = json.loads((folder / index_name).read_text())
        change(index["weight_map"])
        (folder / index_name).write_text(json.dumps(index))

    def duplicate(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / third)
        first = load_file(folder / "model-00001-of-00003.safetensors")
        save_file({**tensors, **dict(list(first.items())[:1])}, folder / third)

    cases: list[tuple[Callable[[Path], Any], str]] = [
        (lambda f: (f / third).unlink(), third),
        (lambda f: (f / third).rename(f / "model-9.safetensors"), third),
        (lambda f: edit_index(f, lambda m: m.pop("model.norm.weight") and None), "norm.weight"),
        (lambda f: edit_index(f, lambda m: m.update({"model.x": third})), "model.x"),
        (
            lambda f: edit_index(f, lambda m: m.update({"model.norm.weight": third})),
            "model.norm.weight",
        ),
        (lambda f: (f / "adapter.safetensors").write_bytes(b"x"), "adapter.safetensors"),
        (duplicate, "also in|not in the index|the index puts it"),
        (lambda f: edit_index(f, lambda m: m.clear()), "weight_map"),
    ]
    for number, (damage, words) in enumerate(cases):
        folder = tiny.to_shards(tiny_checkpoint("gemma1"), tmp_path / str(number))
        weight_map = json.loads((folder / index_name).read_text())["weight_map"]
        assert weight_map["model.norm.weight"] != third
        damage(folder)
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(folder)


def test_folder_without_an_index(tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    """5 folders: a complete set of shards loads, an incomplete one, two files, none, a stray."""
    source = tiny_checkpoint("gemma1")
    folder = tiny.to_shards(source, tmp_path / "a")
    (folder / "model.safetensors.index.json").unlink()
    assert load_checkpoint(folder).spec == load_checkpoint(source).spec
    (folder / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00001-of-00003"):
        load_checkpoint(folder)
    folder = load_files.copy(source, tmp_path / "b")
    (folder / "other.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"other\.safetensors"):
        load_checkpoint(folder)
    (folder / "model.safetensors").rename(folder / "another.safetensors")
    with pytest.raises(CheckpointError, match="several"):
        load_checkpoint(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: without(s, "model.norm.weight"), "1 missing .norm.weight"),
        (lambda s: without(s, "model.layers.2.mlp.up_proj.weight"), "layers.2.mlp.up_proj"),
        (lambda s: {**s, "model.layers.4.x": s["model.norm.weight"]}, "model.layers.4.x"),
        (lambda s: {**s, "model.layers.0.self_attn.q_proj.bias": s["model.norm.weight"]}, "bias"),
        (
            lambda s: {**s, "model.norm.weight": s["model.norm.weight"][:63]},
            r"model.norm.weight is \[63\], expected \[64\]",
        ),
        (
            lambda s: {
                **s,
                "model.layers.0.mlp.down_proj.weight": s["model.layers.0.mlp.down_proj.weight"].t(),
            },
            r"\[160, 64\], expected \[64, 160\]",
        ),
        (
            lambda s: {**s, "model.norm.weight": s["model.norm.weight"].reshape(1, 64)},
            r"\[1, 64\], expected \[64\]",
        ),
        (lambda s: {**s, "model.norm.weight": s["model.norm.weight"].double()}, "F64"),
        (
            lambda s: {
                **s,
                "model.embed_tokens.weight": s["model.embed_tokens.weight"][:0],
            },
            "embed_tokens",
        ),
        (lambda s: {"a.b": s["model.norm.weight"]}, "38 missing"),
    ],
)
def test_tensor_list_differs(
    change: Callable[[Any], Any], words: str, tiny_checkpoint: MakeTiny, tmp_path: Path
) -> None:
    """10 differences from the architecture's list: missing, extra, misshapen, wrong type."""
    folder = load_files.copy(tiny_checkpoint("gemma1"), tmp_path / "m")
    load_files.edit_state(folder, change)
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(folder)


def test_all_differences_are_listed_at_once(tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    folder = load_files.copy(tiny_checkpoint("gemma1"), tmp_path / "m")

    def change(s: load_files.State) -> None:
        s["x"] = s.pop("model.norm.weight")
        s["model.layers.1.input_layernorm.weight"] = s["model.embed_tokens.weight"][0, :5]

    load_files.edit_state(folder, lambda s: change(s))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    for word in ("1 missing", "1 not part", "1 misshapen", "norm.weight", "(x)"):
        assert word in str(caught.value)


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("kind", "tie", "expected"),
    [
        ("only embed", True, (True, False)),
        ("only embed", None, (True, False)),
        ("only embed", False, "lm_head.weight is missing"),
        ("only head", True, (True, True)),
        ("only head", False, "embed_tokens"),
        ("equal", True, (True, True)),
        ("equal", False, (True, True)),
        ("different", True, (False, True)),
        ("different", False, (False, False)),
        ("shorter head", False, "lm_head has 500 rows"),
        ("empty head", True, "lm_head"),
    ],
)
def test_ties(
    kind: str, tie: bool | None, expected: Any, tiny_checkpoint: MakeTiny, tmp_path: Path
) -> None:
    """11 cases of embedding, head and flag (O11): (tied, note given) or an error."""
    folder = load_files.copy(tiny_checkpoint("llama3"), tmp_path / "m")

    def change(s: load_files.State) -> None:
        heads = {
            "only head": s[EMBED],
            "equal": s[EMBED],
            "different": s[EMBED] + 1,
            "shorter head": s[EMBED][:500] + 1,
            "empty head": s[EMBED][:0],
        }
        if kind in heads:
            s[HEAD] = heads[kind]
        if kind == "only head":
            del s[EMBED]

    load_files.edit_state(folder, lambda s: change(s))
    drop = ("tie_word_embeddings",) if tie is None else ()
    load_files.edit_json(folder / "config.json", tie_word_embeddings=tie, drop=drop)
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            load_checkpoint(folder)
        return
    model = load_checkpoint(folder)
    assert (model.spec.tied, bool(model.notes)) == expected
    assert ((MODEL_LAYER, Role.HEAD) in model.tensors) == (not model.spec.tied)


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_non_finite_weight(bad: str, dtype: str, tmp_path: Path) -> None:
    """9 cases: NaN and both infinities in three types; the error has tensor and index (O14)."""
    folder = tiny.build("gemma1", tmp_path / "m", dtype=dtype)
    name = "model.layers.2.mlp.up_proj.weight"

    def change(s: load_files.State) -> None:
        s[name][17, 5] = float(bad)

    load_files.edit_state(folder, lambda s: change(s))
    ref = load_checkpoint(folder).tensors[2, Role.UP]
    assert np.isfinite(ref.read(0, 17)).all()
    for first, count in ((0, 160), (17, 1), (10, 20)):
        with pytest.raises(CheckpointError, match=rf"{name}: the weight at \[17, 5\] is {bad}"):
            ref.read(first, count)


def test_non_finite_norm(tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    folder = load_files.copy(tiny_checkpoint("gemma1"), tmp_path / "m")

    def change(s: load_files.State) -> None:
        s["model.norm.weight"][3] = float("nan")

    load_files.edit_state(folder, lambda s: change(s))
    ref = load_checkpoint(folder).tensors[MODEL_LAYER, Role.FINAL_NORM]
    with pytest.raises(CheckpointError, match=r"model.norm.weight: the weight at \[3\] is nan"):
        ref.read(0, 1)


def test_non_finite_past_the_first_piece(tmp_path: Path) -> None:
    """The row index counts from the tensor's start, also in a later piece of a long read."""
    from gemmake.load.source import PIECE_VALUES

    cols = 1024
    rows = PIECE_VALUES // cols + 10
    data = np.zeros((rows, cols), np.float32)
    data[rows - 3, 1000] = np.inf
    header = {"a": entry([rows, cols], 0, data.nbytes)}
    path = tmp_path / "m.safetensors"
    path.write_bytes(load_files.safetensors_bytes(header, data.tobytes()))
    with pytest.raises(CheckpointError, match=rf"\[{rows - 3}, 1000\]"):
        read_safetensors(path)["a"].read(0, rows)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[1]", b"\xff\xfe", b'{"a":1,"a":2}', b"[" * 100_000]
)
def test_broken_side_files(
    name: str, content: bytes | None, tiny_checkpoint: MakeTiny, tmp_path: Path
) -> None:
    """7 forms of damage to each of two files, absence among them."""
    folder = load_files.copy(tiny_checkpoint("gemma1"), tmp_path / "m")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "tokenizer",
    [
        {},
        {"model": []},
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}},
        {"model": {"vocab": {"a": -1}}},
        {"model": {"vocab": {"a": "0"}}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [3]},
        {"model": {"vocab": {"a": 0}}, "added_tokens": {"a": 0}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "b"}]},
        {"model": {"vocab": {"a": 512}}},
        {"model": {"vocab": {"a": 2**70}}},
    ],
)
def test_tokenizers_that_cannot_be(
    tokenizer: object, tiny_checkpoint: MakeTiny, tmp_path: Path
) -> None:
    """10 tokenizer.json files without a usable vocabulary."""
    folder = load_files.copy(tiny_checkpoint("gemma1"), tmp_path / "m")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_checkpoint(folder)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    """4 paths: absent, unknown suffix, empty folder, absent --config."""
    with pytest.raises(CheckpointError, match="not found"):
        load_checkpoint(tmp_path / "absent.safetensors")
    (tmp_path / "a.onnx").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="expected a Hugging Face folder"):
        load_checkpoint(tmp_path / "a.onnx")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no \.safetensors"):
        load_checkpoint(tmp_path / "empty")
    with pytest.raises(UsageError, match="--config"):
        load_checkpoint(tmp_path / "empty", tmp_path / "absent.json")


def test_folder_name_that_is_no_text(tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    """A folder whose name is not valid UTF-8 loads."""
    import os

    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xe6\xa8\xa1\xff"))
    load_files.copy(tiny_checkpoint("gemma1"), folder)
    assert load_checkpoint(folder).spec.name == "gemma1-238K"
