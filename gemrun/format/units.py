"""An artifact again, with the same weights, in which KV heads keep something else.

    with_units(source, target, [(0, 0), (1, 7), ..])          test vectors are blank: fill_tests
    with rewritten(source, target, keeps) as out:             or, to go on before it has its name:
        out.fill("TEST", payload); out.finish()               see writer.ArtifactWriter

The units are those of csrc/FORMAT.md, KVMK: (sink, recent) blocks of every KV head, in order of
layers, then heads; (0, 0) keeps everything. Where all do, the result is the dense artifact.
A pinned prompt is left out: its keys and values were computed with the units of the source.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemrun.format import assemble, manifest, pins, spec, writer
from gemrun.format.assemble import Keep
from gemrun.format.codes import Code, FormatError
from gemrun.format.reader import Artifact, read_artifact

Source = str | bytes | os.PathLike[str]
PIECE = 16 << 20  # bytes of weights that are copied at once: whole huge pages


def keeps_of(artifact: Artifact) -> tuple[Keep, ...]:
    """(sink, recent) of every KV head; empty where all keep everything."""
    return tuple((unit.sink, unit.recent) for unit in artifact.units)


def value4_of(artifact: Artifact) -> tuple[bool, ...]:
    """Whether the values of every KV head have 4 bits; empty where there is no KVMK."""
    return tuple(unit.value4 for unit in artifact.units)


def key4_of(artifact: Artifact) -> tuple[bool, ...]:
    """Whether the keys of every KV head have 4 bits; empty where there is no KVMK."""
    return tuple(unit.key4 for unit in artifact.units)


def with_units(
    source: Source,
    target: writer.PathLike,
    keeps: Sequence[Keep],
    *,
    value4: Sequence[bool] = (),
    key4: Sequence[bool] = (),
    kv_mask: Mapping[str, Any] | None = None,
    kv_values: Mapping[str, Any] | None = None,
    kv_keys: Mapping[str, Any] | None = None,
    notes: Sequence[str] | None = None,
    fill: Callable[[Path], bytes] | None = None,
) -> writer.Written:
    """Write the artifact at `source` to `target` with other units, unsigned.

    `fill` makes the TEST records from the sealed file; without it they are blank. The rest is as
    in `rewritten`.
    """
    again = rewritten(
        source, target, keeps, value4=value4, key4=key4, kv_mask=kv_mask, kv_values=kv_values,
        kv_keys=kv_keys, notes=notes,
    )  # fmt: skip
    with again as out:
        if fill is not None:
            out.fill("TEST", fill(Path(out.partial)))
        return out.finish()


@contextmanager
def rewritten(
    source: Source,
    target: writer.PathLike,
    keeps: Sequence[Keep],
    *,
    value4: Sequence[bool] = (),
    key4: Sequence[bool] = (),
    kv_mask: Mapping[str, Any] | None = None,
    kv_values: Mapping[str, Any] | None = None,
    kv_keys: Mapping[str, Any] | None = None,
    notes: Sequence[str] | None = None,
    pinned: pins.Pinned | None = None,
) -> Iterator[writer.ArtifactWriter]:
    """A sealed `.partial` of the artifact with other units and blank test vectors.

    `kv_mask`, `kv_values` and `kv_keys` are the manifest's entries of those names, without them
    there are none; `notes` replace those of the source; room is reserved for the blocks of a
    `pinned` prompt (PINP). FormatError for a source that is damaged or newer than this, and for
    units that FORMAT.md refuses; ValueError for another number of them; WriteError as the writer
    has it.
    """
    with read_artifact(source, verify="fast") as artifact:
        _refuse_newer(artifact)
        told: dict[str, Any] = {} if kv_mask is None else {manifest.KV_MASK: dict(kv_mask)}
        told |= {} if kv_values is None else {manifest.KV_VALUES: dict(kv_values)}
        told |= {} if kv_keys is None else {manifest.KV_KEYS: dict(kv_keys)}
        told |= {} if notes is None else {"notes": list(notes)}
        done = assemble.assemble(records_of(artifact, keeps, told, (value4, key4), pinned))
        same = {n: getattr(artifact.header, n) for n in ("target", "optional_features")}
        header = replace(done.header, **same)
        with writer.ArtifactWriter(target, header, done.parts) as out:
            _copy_weights(artifact, out)
            out.seal()
            yield out


def records_of(
    artifact: Artifact,
    keeps: Sequence[Keep],
    changed: Mapping[str, Any],
    narrow: tuple[Sequence[bool], Sequence[bool]] = ((), ()),
    pinned: pins.Pinned | None = None,
) -> assemble.Records:
    """What `assemble` takes: the records of an artifact, with other units (`narrow`: value4 and
    key4 of them), blank tests, a blank `pinned` prompt or none, and some entries of the manifest
    `changed`."""
    header, conf = artifact.header, artifact.conf
    layers, units = assemble.place_units(conf, artifact.layers, keeps, *narrow)
    start = artifact.sections["WHOT"].offset
    told = {k: v for k, v in artifact.manifest.items() if k not in manifest.OPTIONAL}
    options = {k: v for k, v in told["options"].items() if k != pins.OPTION}
    told["options"] = options | (pinned.option if pinned else {})
    told |= {"kv": manifest.kv_entry(conf, layers, units), **changed}
    return assemble.Records(
        conf=conf,
        layers=layers,
        tensors=[assemble.moved(tensor, -start) for tensor in artifact.tensors],
        segments=artifact.segments,
        plans=artifact.plans,
        rope=bytes(artifact.section("ROPE")),
        tokn=bytes(artifact.section("TOKN")),
        tmpl=bytes(artifact.section("TMPL")) if "TMPL" in artifact.sections else None,
        thermal=artifact.thermal,
        ladder=artifact.ladder,
        tests=writer.blank_tests(len(artifact.tests)),
        hdf=bytes(artifact.section("HDFJ")),
        hdf_sha256=header.hdf_sha256,
        manifest=manifest.encode(told),
        weights_size=artifact.sections["WHOT"].size,
        target=spec.field_text(header.target),
        isa=header.isa,
        isa_features=header.isa_features,
        ram_budget=header.ram_budget,
        units=units,
        pin=pins.blank(conf, layers, units, pinned.ids) if pinned else b"",
        cold=artifact.cold,
    )


def _refuse_newer(artifact: Artifact) -> None:
    """What a newer release put in would get lost."""
    strange = [name for name in artifact.sections if name not in spec.SECTIONS]
    known = {name: spec.size_of(record) for name, record in spec.ARRAYS.items()}
    known["THRM"] += spec.size_of(spec.Ladder) if artifact.ladder else 0
    strange += [
        name
        for name, size in known.items()
        if name in artifact.sections and artifact.sections[name].record_size != size
    ]
    if artifact.header.minor > spec.MINOR or strange:
        what = f"header: format 1.{artifact.header.minor} {' '.join(strange)}".rstrip()
        raise FormatError(Code.VERSION, f"{what} is newer than this tool", "use its own release")


def _copy_weights(artifact: Artifact, out: writer.ArtifactWriter) -> None:
    """WHOT as it is; its stored digest is compared on the way."""
    weights = artifact.section("WHOT")
    try:
        for at in range(0, len(weights), PIECE):
            out.write_weights(weights[at : at + PIECE])
    finally:
        weights.release()
    if out.sha256_of("WHOT") != artifact.sections["WHOT"].sha256:
        raise FormatError(Code.SHA256, "section WHOT: SHA-256 differs", "copy the file again")
