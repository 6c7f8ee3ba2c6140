"""Hessians by torch: the float model over the calibration text, fast and in no fixed order.

For a calibration record only (record.py); nothing here decides a byte by itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gemmake.calibration import begin
from gemmake.emit import Host
from gemmake.model import Act, Block, InputFile, LayerSpec, Role
from gemmake.passes import quant
from gemmake.progress import Reporter
from gemmake.record import Hessians, header_for, write
from gemmake.state import State
from gemrun.format import spec

Tensor = Any  # torch.Tensor, which is imported where it is used
See = Callable[[spec.Op, Tensor], None]


def make_record(
    path: Path, text: InputFile, state: State, host: Host, reporter: Reporter
) -> InputFile:
    """Run the model, write the record, and return it as an input. Raises GemError."""
    # Threads that spin while they wait cost a shared machine four times the work; read at import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    torch.set_num_threads(host.threads)
    reporter.start("statistics by torch", len(state.layers))
    with host.clock.timed("statistics"), tempfile.TemporaryDirectory(prefix="gemmake-") as name:
        hidden, window = begin(state, host, Path(name))
        header = header_for(state, len(hidden), text)
        layers = hessians(state, torch.from_numpy(hidden.reshape(-1, window, hidden.shape[1])))
        return write(path, header, layers, reporter.advance)


def hessians(state: State, x: Tensor) -> Iterator[Hessians]:
    """Sums of x^T x for the products of every layer; x [windows, tokens, hidden] is used up."""
    import torch

    for index in range(len(state.model.spec.layers)):
        sums: dict[spec.Op, Tensor] = {}

        def see(step: spec.Op, inputs: Tensor, sums: dict[spec.Op, Tensor] = sums) -> None:
            added = (inputs.T @ inputs).double()
            sums[step] = sums[step] + added if step in sums else added

        layer = Layer(state, index, x.shape[1])
        with torch.inference_mode():
            for i in range(x.shape[0]):
                x[i] = layer.run(x[i].clone(), see)
        yield {step: total.numpy() for step, total in sums.items()}


class Layer:
    """One layer's weights as torch tensors. `run` takes hidden states [tokens, hidden]."""

    def __init__(self, state: State, index: int, tokens: int) -> None:
        import torch

        self.spec: LayerSpec = state.model.spec.layers[index]
        self.eps = state.model.spec.norm_eps
        self.weights: dict[Role, Tensor] = {
            role: torch.from_numpy(np.ascontiguousarray(ref.read(0, ref.rows)))
            for (layer, role), ref in state.model.tensors.items()
            if layer == index
        }
        rope = quant.rope_table(state.model.spec.ropes[self.spec.rope], tokens)
        self.cos, self.sin = torch.from_numpy(rope).chunk(2, dim=1)
        at = torch.arange(tokens)
        behind = at[:, None] - at[None, :]
        window = self.spec.window or tokens
        self.hidden_keys = (behind < 0) | (behind >= window)

    def run(self, x: Tensor, see: See) -> Tensor:
        """The layer's output; `see` gets the inputs of every product."""
        y = self._attention(self._norm(x, Role.ATTN_NORM), see)
        x = x + self._after(y, Role.POST_ATTN_NORM)
        y = self._ffn(self._norm(x, Role.FFN_NORM), see)
        return x + self._after(y, Role.POST_FFN_NORM)

    def _norm(self, x: Tensor, role: Role) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return x * scale * self.weights[role][0]

    def _after(self, y: Tensor, role: Role) -> Tensor:
        return self._norm(y, role) if self.spec.block is Block.SANDWICH else y

    def _heads(self, x: Tensor, role: Role, bias: Role, norm: Role | None, count: int) -> Tensor:
        """Projected heads [heads, tokens, head_dim], normed where the layer does."""
        y = x @ self.weights[role].T
        if bias in self.weights:
            y = y + self.weights[bias][0]
        y = y.reshape(len(x), count, self.spec.head_dim).transpose(0, 1)
        return self._norm(y, norm) if norm in self.weights and norm is not None else y

    def _rotated(self, y: Tensor) -> Tensor:
        import torch

        a, b = y.chunk(2, dim=-1)
        cos, sin = self.cos[: y.shape[1]], self.sin[: y.shape[1]]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def _attention(self, x: Tensor, see: See) -> Tensor:
        layer = self.spec
        see(spec.Op.QKV, x)
        q = self._rotated(self._heads(x, Role.Q, Role.Q_BIAS, Role.Q_NORM, layer.heads))
        k = self._rotated(self._heads(x, Role.K, Role.K_BIAS, Role.K_NORM, layer.kv_heads))
        v = self._heads(x, Role.V, Role.V_BIAS, None, layer.kv_heads)
        share = layer.heads // layer.kv_heads
        k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
        scores = q @ k.transpose(1, 2) * layer.score_scale
        if layer.attn_softcap is not None:
            scores = (scores / layer.attn_softcap).tanh() * layer.attn_softcap
        scores = scores.masked_fill(self.hidden_keys[: len(x), : len(x)], float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
        see(spec.Op.O, mixed)
        return mixed @ self.weights[Role.O].T

    def _ffn(self, x: Tensor, see: See) -> Tensor:
        import torch.nn.functional as f

        see(spec.Op.GATE_UP, x)
        gate = x @ self.weights[Role.GATE].T
        gelu = self.spec.act is Act.GELU_TANH
        gate = f.gelu(gate, approximate="tanh") if gelu else f.silu(gate)
        h = gate * (x @ self.weights[Role.UP].T)
        see(spec.Op.DOWN, h)
        return h @ self.weights[Role.DOWN].T
