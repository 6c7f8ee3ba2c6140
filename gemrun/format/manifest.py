"""The manifest: one msgpack map that names what the records only number.

Keys (all but kv_keys, kv_mask and kv_values present, ascending):
    format      "gembin manifest 1"
    inputs      [{name, size, sha256}] of every file the compile read, sha256 as hex
    kv          {type, layout_id, context, layers: [[kv_heads, head_dim, group, window], ..]}
    kv_keys     {units, key4, ..} only where the compile decided which KV heads hold keys of 4 bits:
                as kv_values
    kv_mask     {covered, units, partial, ..} only where the compile decided what KV heads keep:
                the share of heads, 0 to 1, that was decided on enough samples and passed the gate;
                KV heads, and those of them that keep a part; whatever else is said about it
    kv_values   {units, value4, ..} only where the compile decided which KV heads hold values of 4
                bits: KV heads, and those of them that do; whatever else is said about it
    licence     text, as the checkpoint states it
    model       {name, family, hidden, vocab_rows, layers, trained_context}
    notes       [text] sentences for people: dropped tensors, ties, warnings of the compile
    options     {option: value} of the compile, resolved; pin_prompt {tokens, ..} exactly where a
                prompt is pinned: its tokens, whatever else is said about it
    tensors     [{name, role, layer, format: [[format, groups], ..], shape: [rows, cols],
                report: {measure: float}}] in the order of TENS
    tools       {tool: version}
Only None, bool, int, float, str, bytes, list and dict with str keys, at most 8 deep, 16 MiB in all.
Floats are stored as binary64, so the size does not depend on their values: a compile can reserve
room with zeros and fill the figures in later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgpack  # type: ignore[import-untyped]

from gemrun.format import pins, sizes, spec
from gemrun.format.codes import Code, FormatError
from gemrun.format.spec import Conf, Format, KvType, KvUnit, Layer, Role, Segment, Tensor

TAG = "gembin manifest 1"
MAX_DEPTH = 8
KEYS = ("format", "inputs", "kv", "licence", "model", "notes", "options", "tensors", "tools")
KV_KEYS, KV_MASK, KV_VALUES = "kv_keys", "kv_mask", "kv_values"
OPTIONAL = (KV_KEYS, KV_MASK, KV_VALUES)  # not in every manifest


def encode(manifest: Mapping[str, Any]) -> bytes:
    """Canonical msgpack: sorted keys, binary64 floats. ValueError when too deep or too large."""
    packed: bytes = msgpack.packb(_sorted(manifest, 1), use_bin_type=True)
    if len(packed) > spec.MAX_MANIFEST:
        raise ValueError(f"manifest: {len(packed)} bytes, at most {spec.MAX_MANIFEST} are allowed")
    return packed


def _sorted(value: Any, depth: int) -> Any:
    """The same value with sorted keys. Nested at most MAX_DEPTH deep, so the calls are too."""
    if isinstance(value, Mapping | list | tuple) and depth > MAX_DEPTH:
        raise ValueError(f"manifest: nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        return {k: _sorted(value[k], depth + 1) for k in sorted(value, key=_key)}
    if isinstance(value, list | tuple):
        return [_sorted(v, depth + 1) for v in value]
    if value is None or isinstance(value, bool | bytes):
        return value
    for kind in (int, float, str):  # enums become the plain number or text
        if isinstance(value, kind):
            return kind(value)
    raise ValueError(f"manifest: cannot hold a {type(value).__name__}")


def _key(key: Any) -> bytes:
    if not isinstance(key, str):
        raise ValueError(f"manifest: key {key!r} is not text")
    return key.encode("utf-8")


def decode(data: bytes | memoryview) -> dict[str, Any]:
    """Read a manifest. FormatError(MANIFEST) unless it is exactly what `encode` would write."""
    if len(data) > spec.MAX_MANIFEST:
        raise FormatError(Code.MANIFEST, f"manifest: {len(data)} bytes, above {spec.MAX_MANIFEST}")
    raw = bytes(data)
    _check_depth(raw)
    try:
        value = msgpack.unpackb(raw, raw=False, strict_map_key=True)
        again = encode(value) if isinstance(value, dict) else b""
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise FormatError(Code.MANIFEST, f"manifest: not readable: {error}", REBUILD) from error
    if again != raw:
        raise FormatError(Code.MANIFEST, "manifest: not in canonical form", REBUILD)
    assert isinstance(value, dict)
    return value


REBUILD = "compile the artifact again"


def _check_depth(raw: bytes) -> None:
    """Walk the msgpack heads without recursion; refuses nesting before it costs anything."""
    open_items = [1]  # how many values are still to come at every level
    at = 0
    while open_items:
        if open_items[-1] == 0:
            open_items.pop()
            continue
        open_items[-1] -= 1
        if at >= len(raw):
            raise FormatError(Code.MANIFEST, "manifest: ends early", REBUILD)
        at, children = _skip(raw, at)
        if children >= 0:
            if len(open_items) > MAX_DEPTH:
                raise FormatError(Code.MANIFEST, "manifest: nested too deep", REBUILD)
            if children > len(raw) - at:
                raise FormatError(Code.MANIFEST, "manifest: counts beyond its end", REBUILD)
            open_items.append(children)
    if at != len(raw):
        raise FormatError(Code.MANIFEST, f"manifest: {len(raw) - at} bytes too many", REBUILD)


# First byte -> (bytes of length field, fixed bytes after it); arrays and maps apart.
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_FIXED |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_NESTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def _skip(raw: bytes, at: int) -> tuple[int, int]:
    """Position after one head (and its scalar's bytes), and child values, -1 for a scalar."""
    head, at = raw[at], at + 1
    if head <= 0x7F or head >= 0xE0:
        return at, -1
    if head <= 0x8F:
        return at, 2 * (head & 15)
    if head <= 0x9F:
        return at, head & 15
    if head <= 0xBF:
        return at + (head & 31), -1
    if head in _FIXED:
        return at + _FIXED[head], -1
    if head in _SIZED:
        width = _SIZED[head]
        return at + width + int.from_bytes(raw[at : at + width], "big"), -1
    if head in _NESTED:
        width, each = _NESTED[head]
        return at + width, each * int.from_bytes(raw[at : at + width], "big")
    raise FormatError(Code.MANIFEST, f"manifest: type byte 0x{head:02x} is not allowed", REBUILD)


# ---- what the manifest says, from the records ----
def kv_entry(conf: Conf, layers: Sequence[Layer], units: Sequence[KvUnit] = ()) -> dict[str, Any]:
    """The `kv` entry."""
    return {
        "type": KvType(conf.kv_type).name.lower(),
        "layout_id": sizes.kv_layout_id(conf, layers, units),
        "context": conf.context,
        "layers": [[la.kv_heads, la.head_dim, la.kv_group, la.window] for la in layers],
    }


def model_entry(conf: Conf) -> dict[str, Any]:
    """The `model` entry."""
    return {
        "name": spec.field_text(conf.name),
        "family": spec.field_text(conf.family),
        "hidden": conf.hidden,
        "vocab_rows": conf.vocab_rows,
        "layers": conf.layer_count,
        "trained_context": conf.trained_context,
    }


def tensor_entry(
    name: str,
    tensor: Tensor,
    segments: Sequence[Segment],
    report: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """One entry of `tensors`; `segments` are all of SEGM."""
    own = sizes.segments_of(tensor, segments)
    return {
        "name": name,
        "role": Role(tensor.role).name.lower(),
        "layer": tensor.layer,
        "format": [[Format(s.format).name.lower(), s.group_count] for s in own],
        "shape": [tensor.rows, tensor.cols],
        "report": {k: float(v) for k, v in (report or {}).items()},
    }


def build(
    conf: Conf,
    layers: Sequence[Layer],
    tensors: Iterable[Mapping[str, Any]],
    *,
    inputs: Iterable[Mapping[str, Any]] = (),
    licence: str = "",
    notes: Iterable[str] = (),
    options: Mapping[str, Any] | None = None,
    tools: Mapping[str, str] | None = None,
    units: Sequence[KvUnit] = (),
    kv_mask: Mapping[str, Any] | None = None,
    kv_values: Mapping[str, Any] | None = None,
    kv_keys: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A whole manifest; `tensors` are tensor_entry() results in the order of TENS."""
    return {
        "format": TAG,
        "inputs": [dict(i) for i in inputs],
        "kv": kv_entry(conf, layers, units),
        **({} if kv_keys is None else {KV_KEYS: dict(kv_keys)}),
        **({} if kv_mask is None else {KV_MASK: dict(kv_mask)}),
        **({} if kv_values is None else {KV_VALUES: dict(kv_values)}),
        "licence": licence,
        "model": model_entry(conf),
        "notes": list(notes),
        "options": dict(options or {}),
        "tensors": [dict(t) for t in tensors],
        "tools": dict(tools or {}),
    }


def check(
    manifest: Mapping[str, Any],
    conf: Conf,
    layers: Sequence[Layer],
    tensors: Sequence[Tensor],
    segments: Sequence[Segment],
    units: Sequence[KvUnit] = (),
) -> None:
    """Compare a manifest with the records. FormatError(MANIFEST) names the first difference."""
    if tuple(k for k in manifest if k not in OPTIONAL) != KEYS or manifest["format"] != TAG:
        _differs("keys", list(KEYS), list(manifest))
    for key, wanted in (("kv", kv_entry(conf, layers, units)), ("model", model_entry(conf))):
        if manifest[key] != wanted:
            _differs(key, wanted, manifest[key])
    _check_shapes(manifest)
    heads = sum(layer.kv_heads for layer in layers)
    for name, key, count in (
        (KV_KEYS, "key4", sum(unit.key4 for unit in units)),
        (KV_VALUES, "value4", sum(unit.value4 for unit in units)),
    ):
        if name in manifest:
            _check_narrow(name, manifest[name], {"units": heads, key: count})
    if KV_MASK in manifest:
        _check_mask(manifest[KV_MASK], heads, sum(unit.partial for unit in units))
    listed = manifest["tensors"]
    if not isinstance(listed, list) or len(listed) != len(tensors):
        _differs("tensors", len(tensors), len(listed) if isinstance(listed, list) else listed)
    for index, (entry, tensor) in enumerate(zip(listed, tensors, strict=True)):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            _differs(f"tensors[{index}].name", "text", entry)
        wanted = tensor_entry(entry["name"], tensor, segments)
        for field in ("role", "layer", "format", "shape"):
            if entry.get(field) != wanted[field]:
                _differs(f"tensors[{index}].{field}", wanted[field], entry.get(field))
        report = entry.get("report")
        if not isinstance(report, dict) or not all(isinstance(v, float) for v in report.values()):
            _malformed(f"tensors[{index}].report", "a map of floats", report)


def check_pin(manifest: Mapping[str, Any], tokens: int | None) -> None:
    """Compare what the options say about a pinned prompt with the tokens of PINP; None: there is no
    such section. FormatError(MANIFEST)."""
    told = manifest["options"].get(pins.OPTION)
    if told is not None and not isinstance(told, dict):
        _malformed(f"options.{pins.OPTION}", "a map", told)
    found = None if told is None else told.get("tokens")
    if found != tokens:
        _differs(f"options.{pins.OPTION}.tokens", tokens, found)


def _check_shapes(manifest: Mapping[str, Any]) -> None:
    """The types of what no record repeats. FormatError(MANIFEST) names the first wrong one."""
    for key in ("options", "tools"):
        if not isinstance(manifest[key], dict):
            _malformed(key, "a map", manifest[key])
    if not isinstance(manifest["licence"], str):
        _malformed("licence", "text", manifest["licence"])
    for key, kind, what in (("inputs", dict, "maps"), ("notes", str, "texts")):
        value = manifest[key]
        if not isinstance(value, list) or not all(isinstance(v, kind) for v in value):
            _malformed(key, f"a list of {what}", value)


def _check_mask(mask: Any, heads: int, partial: int) -> None:
    """kv_mask against the KV heads that there are, and those of them that keep a part."""
    if not isinstance(mask, dict):
        _malformed(KV_MASK, "a map", mask)
    covered = mask.get("covered")
    if not isinstance(covered, float) or not 0.0 <= covered <= 1.0:
        _malformed(f"{KV_MASK}.covered", "a share from 0 to 1", covered)
    for key, wanted in (("units", heads), ("partial", partial)):
        if mask.get(key) != wanted:
            _differs(f"{KV_MASK}.{key}", wanted, mask.get(key))


def _check_narrow(name: str, told: Any, counts: Mapping[str, int]) -> None:
    """kv_keys or kv_values against the KV heads that there are, and those of them with 4 bits."""
    if not isinstance(told, dict):
        _malformed(name, "a map", told)
    for key, wanted in counts.items():
        if told.get(key) != wanted:
            _differs(f"{name}.{key}", wanted, told.get(key))


def _malformed(where: str, wanted: str, found: object) -> None:
    what = f"manifest: {where} is {found!r:.200}, not {wanted}"
    raise FormatError(Code.MANIFEST, what, REBUILD)


def _differs(where: str, wanted: object, found: object) -> None:
    raise FormatError(
        Code.MANIFEST,
        f"manifest: {where} is {found!r:.200}, the records say {wanted!r:.200}",
        REBUILD,
    )
