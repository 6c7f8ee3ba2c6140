"""Token ids to logits, straight from an artifact's records: the engine's answer bit for bit.

The whole sequence is run at once. Chunks, rings, threads and units of work do not exist here, which
is the point: they may not show in a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference import floatmath as fm
from reference import formats
from reference import records as rec
from reference.floatmath import F32, I32
from reference.formats import Activations, Matrix

FNV_OFFSET, FNV_PRIME = 14695981039346656037, 1099511628211
Trace = Callable[[str, int, F32], None]  # name of the step, layer (-1: none), values


def fnv1a(data: bytes, state: int = FNV_OFFSET) -> int:
    """FNV-1a 64, the digest of the stored test vectors."""
    for byte in data:
        state = ((state ^ byte) * FNV_PRIME) & 0xFFFFFFFFFFFFFFFF
    return state


@dataclass(frozen=True)
class Quantised:
    """Queries, keys or values in int8: codes [T, heads, groups, g], scales [T, heads, groups]."""

    codes: I32
    scales: F32


class Interpreter:
    """Runs one artifact. `trace` sees every intermediate result, for finding a difference."""

    def __init__(self, image: rec.Image, trace: Trace | None = None) -> None:
        self.image = image
        self.conf = image.conf
        self.trace = trace or (lambda name, layer, values: None)
        self._matrices: dict[int, Matrix] = {}
        self._ropes = [image.rope(i) for i in range(int(self.conf["rope_count"]))]

    # ---- records ----

    def _matrix(self, index: int) -> Matrix:
        if index not in self._matrices:
            record = self.image.tensors[index]
            self._matrices[index] = formats.unpack(record, self.image.segments, self.image.data)
        return self._matrices[index]

    def _of_layer(self, layer: Any) -> dict[int, list[int]]:
        """Role -> indices of the layer's records, in file order (slabs of q, k, v are several)."""
        found: dict[int, list[int]] = {}
        first = int(layer["tens_first"])
        for index in range(first, first + int(layer["tens_count"])):
            found.setdefault(int(self.image.tensors[index]["role"]), []).append(index)
        return found

    def _vector(self, index: int) -> F32:
        return formats.vector(self.image.tensors[index], self.image.data)

    def _product(self, indices: list[int], x: Activations) -> F32:
        """[T, rows]: slabs one after another."""
        return np.concatenate([self._matrix(i).product(x)[:, 0] for i in indices], axis=-1)

    # ---- the forward pass ----

    def logits(self, ids: Sequence[int]) -> F32:
        """float32 [len(ids), vocab rows]: the logits after every position."""
        conf = self.conf
        hidden = int(conf["hidden"])
        embedding = self._matrix(int(conf["tens_embed"]))
        x = embedding.embed(ids, np.float32(conf["embed_scale"]))[:, :hidden]
        self.trace("embed", -1, x)
        for index, layer in enumerate(self.image.layers):
            x = self._layer(index, layer, x)
        norm = self._vector(int(conf["tens_final_norm"]))
        final = fm.rmsnorm(x, norm, np.float32(conf["norm_eps"]))
        self.trace("final_norm", -1, final)
        head = self._matrix(int(conf["tens_head"]))
        logits = fm.finite(head.product(Activations(final))[:, 0], "logits")
        if int(conf["flags"]) & rec.CONFF_FINAL_SOFTCAP:
            logits = fm.softcap(logits, np.float32(conf["final_softcap"]))
        self.trace("logits", -1, logits)
        return logits

    def _layer(self, index: int, layer: Any, x: F32) -> F32:
        eps = np.float32(self.conf["norm_eps"])
        tens = self._of_layer(layer)
        sandwich = int(layer["block"]) == rec.BLOCK_SANDWICH
        normed = fm.rmsnorm(x, self._vector(tens[rec.ROLE_ATTN_NORM][0]), eps)
        y = self._attention(index, layer, tens, normed)
        if sandwich:
            y = fm.rmsnorm(y, self._vector(tens[rec.ROLE_POST_ATTN_NORM][0]), eps)
        x = x + y
        self.trace("attn_residual", index, x)
        normed = fm.rmsnorm(x, self._vector(tens[rec.ROLE_FFN_NORM][0]), eps)
        both = self._matrix(tens[rec.ROLE_GATE_UP][0]).product(Activations(normed))
        act = fm.silu if int(layer["act"]) == rec.ACT_SILU else fm.gelu_tanh
        gated = act(both[:, 0]) * both[:, 1]
        self.trace("gated", index, gated)
        y = self._product(tens[rec.ROLE_DOWN], Activations(gated))
        if sandwich:
            y = fm.rmsnorm(y, self._vector(tens[rec.ROLE_POST_FFN_NORM][0]), eps)
        x = x + y
        self.trace("ffn_residual", index, x)
        return x

    def _attention(self, index: int, layer: Any, tens: dict[int, list[int]], normed: F32) -> F32:
        """[T, hidden]: projections, norms and RoPE per head, scores, values, output product."""
        x = Activations(normed)
        heads, kv_heads = int(layer["heads"]), int(layer["kv_heads"])
        dim = int(layer["head_dim"])
        q = self._project(layer, tens, (rec.ROLE_Q, rec.ROLE_Q_BIAS, rec.ROLE_Q_NORM), x, heads)
        k = self._project(layer, tens, (rec.ROLE_K, rec.ROLE_K_BIAS, rec.ROLE_K_NORM), x, kv_heads)
        v = self._product(tens[rec.ROLE_V], x)
        if rec.ROLE_V_BIAS in tens:
            v = v + self._vector(tens[rec.ROLE_V_BIAS][0])
        v = v.reshape(-1, kv_heads, dim)
        for name, values in (("q", q), ("k", k), ("v", v)):
            self.trace(name, index, values)
        context = self._mix(layer, q, k, v)
        self.trace("context", index, context)
        return self._product(tens[rec.ROLE_O], Activations(context.reshape(-1, heads * dim)))

    def _project(
        self,
        layer: Any,
        tens: dict[int, list[int]],
        roles: tuple[int, int, int],
        x: Activations,
        heads: int,
    ) -> F32:
        """Queries or keys [T, heads, head_dim]: product, bias, norm per head, RoPE."""
        weight, bias, norm = roles
        y = self._product(tens[weight], x)
        if bias in tens:
            y = y + self._vector(tens[bias][0])
        y = y.reshape(-1, heads, int(layer["head_dim"]))
        if norm in tens:
            y = fm.rmsnorm(y, self._vector(tens[norm][0]), np.float32(self.conf["norm_eps"]))
        table = self._ropes[int(layer["rope"])][: y.shape[0]]
        return fm.rope(y, table[:, None, 0], table[:, None, 1])

    def _seen(self, layer: Any, tokens: int) -> Seen:
        """[query, head, key]: what the layer's window and the units of its KV heads show."""
        repeat = int(layer["heads"]) // int(layer["kv_heads"])
        every = [_visible(tokens, int(layer["window"]))] * int(layer["kv_heads"])
        if self.image.units is not None:
            first = int(layer["unit_first"])
            for head, unit in enumerate(self.image.units[first : first + len(every)]):
                if unit["recent"]:
                    part = _kept(tokens, int(unit["sink"]), int(unit["recent"]))
                    every[head] = every[head] & part
        return np.repeat(np.stack(every, axis=1), repeat, axis=1)

    def _narrow(self, layer: Any, flag: int) -> list[int]:
        """KV heads whose values, or keys, have 4 bits."""
        if self.image.units is None:
            return []
        first = int(layer["unit_first"])
        own = self.image.units[first : first + int(layer["kv_heads"])]
        return [head for head, unit in enumerate(own) if unit["flags"] & flag]

    def _mix(self, layer: Any, q: F32, k: F32, v: F32) -> F32:
        """Attention proper: [T, heads, head_dim]."""
        tokens, heads, dim = q.shape
        repeat = heads // k.shape[1]
        kind = int(self.conf["kv_type"])
        if kind == rec.KV_INT8:
            group = int(layer["kv_group"])
            narrow = self._narrow(layer, rec.UNITF_KEY4)
            q, k = q.copy(), k.copy()
            for head in narrow:
                own = slice(head * repeat, (head + 1) * repeat)
                q[:, own], k[:, head] = fm.rotate(q[:, own], True), fm.rotate(k[:, head], False)
            parts = [Quantised(*fm.quantise_kv(t, group)) for t in (q, k, v)]
            for part, heads4 in ((1, narrow), (2, self._narrow(layer, rec.UNITF_VALUE4))):
                for head in heads4:
                    parts[part].codes[:, head] = fm.levels4(parts[part].codes[:, head])
            dots = _int8_dots(parts[0], parts[1], repeat)
        else:
            if kind == rec.KV_F16:
                with np.errstate(over="ignore"):
                    k, v = (t.astype(np.float16).astype(np.float32) for t in (k, v))
            for part in (q, k, v):
                fm.finite(part, "query, key or value")
            dots = _float_dots(q, k, repeat)
        scores = dots * np.float32(layer["score_scale"])
        if int(layer["flags"]) & rec.LAYERF_ATTN_SOFTCAP:
            scores = fm.softcap(scores, np.float32(layer["attn_softcap"]))
        visible = self._seen(layer, tokens)
        e, total = fm.softmax_parts(scores, visible)
        acc = np.zeros((tokens, heads, dim), np.float32)
        for j in range(tokens):  # positions ascending, masked ones not visited
            if kind == rec.KV_INT8:
                values, scales = parts[2].codes[j], parts[2].scales[j]
                weight = e[j:, :, None, j] * np.repeat(scales, repeat, 0)[None]
                weight = np.repeat(weight, group, axis=-1)
                value = np.repeat(values.reshape(-1, dim), repeat, 0).astype(np.float32)
            else:
                weight = e[j:, :, j, None]
                value = np.repeat(v[j], repeat, 0)
            more = fm.fmaf(weight, value[None], acc[j:])  # no earlier query sees it
            acc[j:] = np.where(visible[j:, :, j, None], more, acc[j:])
        return np.asarray(acc / total[..., None])


Seen = np.ndarray[Any, np.dtype[np.bool_]]


def _visible(tokens: int, window: int) -> Seen:
    """[query, key]: key j is visible from i when i - window < j <= i (window 0: all)."""
    i, j = np.arange(tokens)[:, None], np.arange(tokens)[None]
    seen = j <= i
    return seen & (i - window < j) if window else seen


def _kept(tokens: int, sink: int, recent: int) -> Seen:
    """[query, key]: of the blocks of 32 keys up to the query's own the first and the last ones."""
    block = np.arange(tokens) // 32
    return (block < sink)[None] | (block[:, None] - block[None] < recent)


def _float_dots(q: F32, k: F32, repeat: int) -> F32:
    """[T, heads, T]: R1 dot products of float queries and keys."""
    keys = np.repeat(k, repeat, axis=1).swapaxes(0, 1)  # [heads, T, dim]
    return fm.dot16(q[:, :, None], keys[None])


def _int8_dots(q: Quantised, k: Quantised, repeat: int) -> F32:
    """[T, heads, T]: K1, acc = fmaf((float)dot, qs * ks, acc), groups ascending from +0."""
    codes = np.repeat(k.codes, repeat, axis=1)  # [T, heads, groups, g]
    scales = np.repeat(k.scales, repeat, axis=1)
    tokens, heads, groups = q.scales.shape
    acc = np.zeros((tokens, heads, tokens), np.float32)
    for g in range(groups):
        dot = np.einsum("ihd,jhd->ihj", q.codes[:, :, g], codes[:, :, g])
        both = q.scales[:, :, g][:, :, None] * scales[:, :, g].T[None]
        acc = fm.fmaf(dot.astype(np.float32), both, acc)
    return acc


def greedy(logits: F32) -> int:
    """S1: the largest logit, ties to the lowest id."""
    return int(np.argmax(logits))


def vector_digest(interpreter: Interpreter, prompt: Sequence[int], steps: Sequence[int]) -> int:
    """Digest of a stored test vector: logits after the last prompt position, then each step."""
    logits = interpreter.logits([*prompt, *steps])
    state = FNV_OFFSET
    for row in logits[len(prompt) - 1 :]:
        state = fnv1a(np.ascontiguousarray(row, "<f4").tobytes(), state)
    return state
