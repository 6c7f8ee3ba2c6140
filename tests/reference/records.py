"""The records of an artifact as NumPy structured arrays, read by the layout of csrc/gembin.h.

No checks beyond the ones that a mistake in a test would trip over: this is a decoder ring for good
files, the readers under test do the refusing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

HEADER = np.dtype(
    [
        ("magic", "V8"), ("byte_order", "<u4"), ("major", "<u2"), ("minor", "<u2"),
        ("header_size", "<u4"), ("entry_size", "<u4"), ("section_count", "<u4"), ("align", "<u4"),
        ("file_size", "<u8"), ("table_offset", "<u8"),
        ("required_features", "<u8"), ("optional_features", "<u8"),
        ("ram_weights", "<u8"), ("ram_arena", "<u8"), ("ram_kv", "<u8"), ("ram_total", "<u8"),
        ("ram_budget", "<u8"),
        ("isa", "<u4"), ("isa_features", "<u4"), ("engine_abi_min", "<u4"), ("kv_layout_id", "<u4"),
        ("hdf_sha256", "V32"), ("root_sha256", "V32"), ("target", "V16"),
        ("ram_tables", "<u8"), ("ram_engine", "<u8"), ("ram_stacks", "<u8"), ("reserved", "V24"),
        ("table_crc32", "<u4"), ("header_crc32", "<u4"),
    ]
)  # fmt: skip
SECTION = np.dtype(
    [
        ("type", "<u4"), ("flags", "<u4"), ("offset", "<u8"), ("size", "<u8"), ("mem_size", "<u8"),
        ("record_size", "<u4"), ("crc32", "<u4"), ("record_count", "<u8"), ("reserved0", "V16"),
        ("sha256", "V32"), ("name", "V16"), ("reserved1", "V16"),
    ]
)  # fmt: skip
CONF = np.dtype(
    [
        ("layer_count", "<u4"), ("hidden", "<u4"), ("vocab_rows", "<u4"), ("rope_count", "<u4"),
        ("context", "<u4"), ("trained_context", "<u4"), ("chunk", "<u4"), ("threads", "<u4"),
        ("kv_type", "<u4"), ("flags", "<u4"),
        ("tens_embed", "<u4"), ("tens_head", "<u4"), ("tens_final_norm", "<u4"),
        ("act_mode", "<u4"),
        ("norm_eps", "<f4"), ("embed_scale", "<f4"), ("final_softcap", "<f4"),
        ("temperature", "<f4"), ("top_p", "<f4"), ("min_p", "<f4"), ("repetition_penalty", "<f4"),
        ("top_k", "<u4"), ("text_limit", "<u4"), ("reserved0", "<u4"),
        ("family", "V16"), ("name", "V64"), ("reserved", "V80"),
    ]
)  # fmt: skip
LAYER = np.dtype(
    [
        ("kind", "<u4"), ("flags", "<u4"), ("heads", "<u4"), ("kv_heads", "<u4"),
        ("head_dim", "<u4"), ("ffn", "<u4"), ("rope", "<u4"), ("window", "<u4"),
        ("block", "<u4"), ("act", "<u4"), ("score_scale", "<f4"), ("attn_softcap", "<f4"),
        ("kv_source", "<u4"), ("kv_group", "<u4"), ("kv_offset", "<u8"), ("kv_size", "<u8"),
        ("kv_blocks", "<u4"), ("tens_first", "<u4"), ("tens_count", "<u4"),
        ("sparsity_z", "<f4"), ("unit_first", "<u4"), ("reserved", "V36"),
    ]
)  # fmt: skip
UNIT = np.dtype(
    [("sink", "<u4"), ("recent", "<u2"), ("flags", "<u2"), ("blocks", "<u4"), ("first", "<u4")]
)
UNITF_VALUE4, UNITF_KEY4 = 1, 2
SEGMENT = np.dtype(
    [("format", "<u4"), ("first_group", "<u4"), ("group_count", "<u4"), ("reserved", "<u4")]
)
TENSOR = np.dtype(
    [
        ("role", "<u4"), ("layer", "<i4"), ("seg_first", "<u4"), ("seg_count", "<u4"),
        ("rows", "<u4"), ("cols", "<u4"), ("rows_padded", "<u4"), ("cols_padded", "<u4"),
        ("slab_first", "<u4"), ("slab_count", "<u4"), ("parts", "<u4"), ("reserved0", "<u4"),
        ("offset", "<u8"), ("size", "<u8"), ("second_offset", "<u8"), ("second_size", "<u8"),
        ("reserved", "V16"),
    ]
)  # fmt: skip
ROPE = np.dtype([("pairs", "<u4"), ("positions", "<u4"), ("offset", "<u8")])
PLAN = np.dtype(
    [
        ("kind", "<u4"), ("first_op", "<u4"), ("last_op", "<u4"), ("reserved0", "<u4"),
        ("offset", "<u8"), ("size", "<u8"), ("reserved", "V16"),
    ]
)  # fmt: skip
THERMAL = np.dtype(
    [
        ("threshold_c", "<f4"), ("hysteresis_c", "<f4"), ("device_max_c", "<f4"), ("mode", "<u4"),
        ("reserved", "V48"),
    ]
)  # fmt: skip
TEST = np.dtype(
    [
        ("prompt_count", "<u4"), ("step_count", "<u4"), ("digest", "<u8"),
        ("prompt", "<u4", (400,)), ("steps", "<u4", (64,)), ("reserved", "V176"),
    ]
)  # fmt: skip

SIZES = {
    "gb_header": (HEADER, 256), "gb_section": (SECTION, 128), "gb_conf": (CONF, 256),
    "gb_layer": (LAYER, 128), "gb_segment": (SEGMENT, 16), "gb_tensor": (TENSOR, 96),
    "gb_rope": (ROPE, 16), "gb_plan": (PLAN, 48), "gb_thermal": (THERMAL, 64),
    "gb_test": (TEST, 2048), "gb_kv_unit": (UNIT, 16),
}  # fmt: skip

# Values of the records' fields that the interpreter needs.
ROLE_EMBED, ROLE_HEAD, ROLE_FINAL_NORM = 1, 2, 3
ROLE_ATTN_NORM, ROLE_Q, ROLE_K, ROLE_V, ROLE_O = 10, 11, 12, 13, 14
ROLE_Q_BIAS, ROLE_K_BIAS, ROLE_V_BIAS, ROLE_Q_NORM, ROLE_K_NORM = 15, 16, 17, 18, 19
ROLE_POST_ATTN_NORM, ROLE_FFN_NORM, ROLE_POST_FFN_NORM = 20, 21, 22
ROLE_GATE_UP, ROLE_DOWN = 25, 26
LAYERF_QK_NORM, LAYERF_QKV_BIAS, LAYERF_ATTN_SOFTCAP = 1, 2, 4
CONFF_TIED, CONFF_FINAL_SOFTCAP = 1, 2
KV_F32, KV_F16, KV_INT8 = 0, 1, 2
BLOCK_SANDWICH = 1
ACT_SILU = 1


@dataclass(frozen=True)
class Image:
    """The bytes of an artifact and its records."""

    data: bytes

    @staticmethod
    def load(path: Path) -> Image:
        return Image(path.read_bytes())

    @cached_property
    def header(self) -> Any:
        return np.frombuffer(self.data, HEADER, 1)[0]

    @cached_property
    def sections(self) -> dict[str, Any]:
        """Section entries by their four letters."""
        count = int(self.header["section_count"])
        table = np.frombuffer(self.data, SECTION, count, int(self.header["table_offset"]))
        return {int(s["type"]).to_bytes(4, "little").decode("ascii"): s for s in table}

    def section(self, name: str) -> bytes:
        entry = self.sections[name]
        first = int(entry["offset"])
        return self.data[first : first + int(entry["size"])]

    def _array(self, name: str, dtype: np.dtype[Any]) -> Any:
        """Records of a section; a newer minor version may have grown them at their end."""
        entry, data = self.sections[name], self.section(name)
        step, count = int(entry["record_size"]), int(entry["record_count"])
        rows = b"".join(data[i * step : i * step + dtype.itemsize] for i in range(count))
        return np.frombuffer(rows, dtype)

    @cached_property
    def conf(self) -> Any:
        return self._array("CONF", CONF)[0]

    @cached_property
    def layers(self) -> Any:
        return self._array("LAYR", LAYER)

    @cached_property
    def units(self) -> Any:
        """Records of KVMK; None where every KV head keeps all of its layer's window."""
        return self._array("KVMK", UNIT) if "KVMK" in self.sections else None

    @cached_property
    def tensors(self) -> Any:
        return self._array("TENS", TENSOR)

    @cached_property
    def segments(self) -> Any:
        return self._array("SEGM", SEGMENT)

    @cached_property
    def tests(self) -> Any:
        return self._array("TEST", TEST)

    def rope(self, index: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Table `index`: float32 [positions][2][pairs], cosines first."""
        data = self.section("ROPE")
        entry = np.frombuffer(data, ROPE, 1, index * ROPE.itemsize)[0]
        pairs, positions = int(entry["pairs"]), int(entry["positions"])
        table = np.frombuffer(data, "<f4", 2 * pairs * positions, int(entry["offset"]))
        return table.reshape(positions, 2, pairs)
