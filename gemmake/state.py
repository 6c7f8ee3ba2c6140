"""What flows through the pipeline: the model, and what the passes have decided about it so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gemmake.hdf import Hdf
from gemmake.model import InputFile, Model
from gemmake.options import CompileOptions
from gemmake.passes.layout import Stream
from gemmake.passes.memplan import Buffer
from gemmake.passes.place import Placement
from gemrun.format import assemble, pins, spec


@dataclass(frozen=True)
class State:
    """The compile between two passes. Fields keep their empty value until their pass has run."""

    model: Model
    options: CompileOptions
    hdf: Hdf
    inputs: tuple[InputFile, ...] = ()  # every file that decides bytes
    text: str = field(default="", repr=False)  # for calibration; empty where nothing is measured
    kv_groups: tuple[int, ...] = ()  # of each layer, where they were measured
    keeps: tuple[assemble.Keep, ...] = ()  # of each KV head, where one keeps a part
    kv_mask: Mapping[str, Any] | None = None  # how that was found, for the manifest
    value4: tuple[bool, ...] = ()  # of each KV head, where the values of one have 4 bits
    kv_values: Mapping[str, Any] | None = None  # how that was found, likewise
    key4: tuple[bool, ...] = ()  # of each KV head, where the keys of one have 4 bits
    kv_keys: Mapping[str, Any] | None = None  # how that was found, likewise
    pinned: pins.Pinned | None = None  # the prompt whose keys and values are stored
    placements: tuple[Placement, ...] = ()
    tokn: bytes = field(default=b"", repr=False)  # TOKN section
    tmpl: bytes | None = field(default=None, repr=False)  # TMPL section; None: no chat mode
    ropes: bytes = field(default=b"", repr=False)  # ROPE section
    thermal: spec.Thermal = field(default_factory=spec.Thermal)
    ladder: spec.Ladder | None = None  # what a program does that is told the temperature
    stream: Stream = field(default_factory=lambda: Stream((), (), 0))
    cold: tuple[spec.Cold, ...] = ()  # weights that do not stay in memory
    conf: spec.Conf = field(default_factory=spec.Conf)
    layers: tuple[spec.Layer, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    notes: tuple[str, ...] = ()  # sentences for the user
