"""Tiny random checkpoints in the form of full Hugging Face folders, made by transformers itself.

`build("gemma3", folder)` writes config.json, model.safetensors, generation_config.json, a small
tokenizer.json that is trained here, tokenizer_config.json and a chat template. The same family and
seed give the same bytes. Sizes are those of architectures where heads * head_dim differs from the
hidden size and where windows are short, so that a mistake shows. Norm weights and biases are moved
away from their defaults of 0 and 1, which hide errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FAMILIES = (
    "gemma1",
    "gemma2",
    "gemma3",
    "gemma3_rope8",
    "llama3",
    "smollm2",
    "qwen2",
    "qwen3",
)
VOCAB = 512
HIDDEN = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "initializer_range": 0.08,
    "max_position_embeddings": 256,
}
_GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
_GEMMA3_ROPE8 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Text that the tokenizers are trained on: own sentences, several scripts, digits, code.
_TEXT = """The conveyor stops when the light curtain is interrupted, and the controller reports it.
A gateway reads the meters every fifteen minutes and sends 96 values a day to the plant.
What is the temperature of the motor? The temperature of the motor is 71.5 degrees Celsius.
Please close the valve before you open the other valve; otherwise the pressure rises.
If the robot is in the cell, the door is locked. If the door is open, the robot is stopped.
Der Förderer hält an, wenn die Lichtschranke unterbrochen wird. Größe: 12 mm, Höhe: 7 mm.
La température du moteur est trop élevée ; vérifiez le ventilateur et l'alimentation.
机器人停止工作。请检查电机的温度。温度是七十一度。阀门已经关闭，压力正常。
for i in range(10):\n    print(i, values[i])\nreturn {"status": 0, "text": "ready"}
int main(void) { return 0; }  /* 2024-05-17 10:30:00 */  x = a * b + c - 1;
the the the and and of of to to in in is is it it that that for for with with was was
"""

_GEMMA_TEMPLATE = (
    "{{ bos_token }}"
    "{%- if messages[0]['role'] == 'system' -%}"
    "{%- set prefix = messages[0]['content'] + '\n\n' -%}{%- set turns = messages[1:] -%}"
    "{%- else -%}{%- set prefix = '' -%}{%- set turns = messages -%}{%- endif -%}"
    "{%- for m in turns -%}"
    "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "{%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}"
    "{{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') }}"
    "{{ m['content'] | trim }}{{ '<end_of_turn>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
_CHATML_TEMPLATE = (
    "{% for m in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA3_TEMPLATE = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim }}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_SPLIT_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPLIT_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Family:
    """How one family is built: class names in transformers, sizes, tokenizer."""

    model: str
    config: str
    sizes: Mapping[str, Any]
    tokenizer: Callable[[], tuple[dict[str, Any], dict[str, Any]]]
    template: str
    eos: int | list[int]
    bos: int | None
    pad: int | None = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json
    plus1: bool = False  # norms are stored as w with an effective weight of 1 + w
    template_file: bool = False  # chat_template.jinja instead of a field of tokenizer_config


def build(family: str, folder: Path, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a tiny checkpoint of `family` (one of FAMILIES) to `folder` and return the folder.

    `dtype` is the storage type: float32, float16 or bfloat16.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    spec = _FAMILY[family]
    model = _model(spec, seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    _write_tokenizer(spec, folder)
    return folder


def reference(folder: Path) -> Any:
    """The checkpoint in `folder` as a transformers model: float32, eager attention, eval mode."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def to_pt(folder: Path, target: Path) -> Path:
    """Write the checkpoint in `folder` to `target` as a state dict, with config.json and tokenizer
    files beside it."""
    import torch
    from safetensors.torch import load_file

    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(load_file(folder / "model.safetensors"), target)
    _copy_side_files(folder, target.parent)
    return target


def to_shards(folder: Path, target: Path, count: int = 3) -> Path:
    """Write the checkpoint in `folder` to the folder `target` as `count` shards with an index."""
    from safetensors.torch import load_file, save_file

    target.mkdir(parents=True, exist_ok=True)
    state = load_file(folder / "model.safetensors")
    names = sorted(state)
    weight_map: dict[str, str] = {}
    for shard in range(count):
        file = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        part = {name: state[name] for name in names[shard::count]}
        save_file(part, target / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    size = sum(t.numel() * t.element_size() for t in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    _copy_side_files(folder, target)
    return target


def _copy_side_files(folder: Path, target: Path) -> None:
    """Everything but the weights."""
    for path in sorted(folder.iterdir()):
        side = path.suffix in (".json", ".jinja") and "index" not in path.name
        if side and path.parent != target:
            (target / path.name).write_bytes(path.read_bytes())


def _model(spec: _Family, seed: int) -> Any:
    """A random model of the family, without touching the caller's random state."""
    import torch
    import transformers

    config = getattr(transformers, spec.config)(
        **_COMMON,
        **spec.sizes,
        eos_token_id=spec.eos,
        bos_token_id=spec.bos,
        pad_token_id=spec.pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, spec.model)(config)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if name.endswith("norm.weight"):
                    noise = torch.randn(value.shape) * 0.2
                    value.copy_(noise if spec.plus1 else 1.0 + noise)
                elif name.endswith(".bias"):
                    value.copy_(torch.randn(value.shape) * 0.2)
    for name, setting in spec.sampling.items():
        setattr(model.generation_config, name, setting)
    return model


def _write_tokenizer(spec: _Family, folder: Path) -> None:
    tokenizer, config = spec.tokenizer()
    if spec.template_file:
        (folder / "chat_template.jinja").write_text(spec.template, encoding="utf-8")
    else:
        config["chat_template"] = spec.template
    for name, value in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        text = json.dumps(value, indent=1, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def _added(content: str, token_id: int, *, special: bool = True) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _train(size: int, normalizer: Any, pre_tokenizer: Any, alphabet: list[str]) -> dict[str, Any]:
    """The `model` part of a tokenizer.json after training on the text: vocab and merges."""
    from tokenizers import Tokenizer, models, trainers

    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=alphabet,
        max_token_length=10,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def _bos_first(bos: str, bos_id: int) -> dict[str, Any]:
    """A post-processor that puts bos before the text."""
    token = {"SpecialToken": {"id": bos, "type_id": 0}}
    second = {"SpecialToken": {"id": bos, "type_id": 1}}
    single = [token, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, second, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def _sentencepiece_style() -> tuple[dict[str, Any], dict[str, Any]]:
    """Byte-fallback BPE in Gemma's form with 500 ids: the last 12 rows have no token."""
    from tokenizers import normalizers

    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    pieces = control + [f"<0x{i:02X}>" for i in range(256)]
    model = _train(500 - len(pieces), normalizers.Replace(" ", "\u2581"), None, ["\u2581"])
    learned = sorted(model["vocab"], key=model["vocab"].__getitem__)
    vocab = {piece: i for i, piece in enumerate(pieces + learned)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(name, i) for i, name in enumerate(control)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": _bos_first("<bos>", 2),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": model["merges"],
        },
    }
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "tokenizer_class": "GemmaTokenizer",
    }
    return tokenizer, config


def _byte_level(
    *, ids: int, first: list[str], last: list[str], split: dict[str, Any], ignore_merges: bool
) -> dict[str, Any]:
    """Byte-level BPE with `ids` token ids; control tokens stand before or after the pieces."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer_split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model = _train(ids - len(first) - len(last), None, trainer_split, alphabet)
    learned = sorted(model["vocab"], key=model["vocab"].__getitem__)
    pieces = first + learned
    control = [*enumerate(first), *((len(pieces) + i, name) for i, name in enumerate(last))]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(name, i) for i, name in control],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, {**level, "use_regex": split["type"] == "Digits"}],
        },
        "post_processor": {**level, "use_regex": False},
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": model["merges"],
        },
    }


def _regex_split(digits: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": _SPLIT_HEAD + digits + _SPLIT_TAIL},
        "behavior": "Isolated",
        "invert": False,
    }


def _llama3_style() -> tuple[dict[str, Any], dict[str, Any]]:
    """512 ids, the five control tokens last, bos added by the post-processor."""
    names = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    tokenizer = _byte_level(
        ids=VOCAB, first=[], last=names, split=_regex_split(r"\p{N}{1,3}"), ignore_merges=True
    )
    tokenizer["post_processor"] = {
        "type": "Sequence",
        "processors": [tokenizer["post_processor"], _bos_first(names[0], VOCAB - 5)],
    }
    config = {"bos_token": names[0], "eos_token": names[4]}
    return tokenizer, {**config, "tokenizer_class": "PreTrainedTokenizerFast"}


def _smollm2_style() -> tuple[dict[str, Any], dict[str, Any]]:
    """512 ids, three control tokens first, single digits, no bos."""
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    split = {"type": "Digits", "individual_digits": True}
    tokenizer = _byte_level(ids=VOCAB, first=names, last=[], split=split, ignore_merges=False)
    config = {
        "add_prefix_space": False,
        "bos_token": names[1],
        "eos_token": names[2],
        "pad_token": names[2],
        "unk_token": names[0],
        "tokenizer_class": "GPT2Tokenizer",
    }
    return tokenizer, config


def _qwen_style() -> tuple[dict[str, Any], dict[str, Any]]:
    """496 ids: the last 16 rows have no token, as in the real files. NFC, no bos."""
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = _byte_level(
        ids=496, first=[], last=names, split=_regex_split(r"\p{N}"), ignore_merges=False
    )
    tokenizer["normalizer"] = {"type": "NFC"}
    config = {
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": names[2],
        "pad_token": names[0],
        "unk_token": None,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    return tokenizer, config


def _gemma(version: str, config: str, sizes: dict[str, Any]) -> _Family:
    return _Family(
        model=f"{version}ForCausalLM",
        config=config,
        sizes=sizes,
        tokenizer=_sentencepiece_style,
        template=_GEMMA_TEMPLATE,
        eos=1,
        bos=2,
        plus1=True,
        template_file=True,
    )


_GEMMA3_SIZES = {
    "num_hidden_layers": 6,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
}
_DENSE_SIZES = {
    "num_hidden_layers": 4,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_QWEN_SAMPLING = {
    "eos_token_id": [495, 493],
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
}
_FAMILY: Mapping[str, _Family] = {
    "gemma1": _gemma(
        "Gemma",
        "GemmaConfig",
        {
            "num_hidden_layers": 4,
            "intermediate_size": 160,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
        },
    ),
    "gemma2": _gemma(
        "Gemma2",
        "Gemma2Config",
        {
            "num_hidden_layers": 4,
            "intermediate_size": 160,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": _gemma(
        "Gemma3", "Gemma3TextConfig", {**_GEMMA3_SIZES, "rope_parameters": _GEMMA3_ROPE}
    ),
    "gemma3_rope8": _gemma(
        "Gemma3",
        "Gemma3TextConfig",
        {**_GEMMA3_SIZES, "num_key_value_heads": 2, "rope_parameters": _GEMMA3_ROPE8},
    ),
    "llama3": _Family(
        model="LlamaForCausalLM",
        config="LlamaConfig",
        sizes={**_DENSE_SIZES, "rms_norm_eps": 1e-5, "rope_parameters": _LLAMA3_ROPE},
        tokenizer=_llama3_style,
        template=_LLAMA3_TEMPLATE,
        eos=[VOCAB - 4, VOCAB - 1],
        bos=VOCAB - 5,
        pad=None,
    ),
    "smollm2": _Family(
        model="LlamaForCausalLM",
        config="LlamaConfig",
        sizes={
            **_DENSE_SIZES,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
        tokenizer=_smollm2_style,
        template=_CHATML_TEMPLATE,
        eos=2,
        bos=1,
        pad=2,
        template_file=True,
    ),
    "qwen2": _Family(
        model="Qwen2ForCausalLM",
        config="Qwen2Config",
        sizes={
            **_DENSE_SIZES,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        tokenizer=_qwen_style,
        template=_CHATML_TEMPLATE,
        eos=495,
        bos=None,
        pad=493,
        sampling=_QWEN_SAMPLING,
    ),
    "qwen3": _Family(
        model="Qwen3ForCausalLM",
        config="Qwen3Config",
        sizes={
            **_DENSE_SIZES,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        tokenizer=_qwen_style,
        template=_CHATML_TEMPLATE,
        eos=495,
        bos=None,
        pad=493,
        sampling=_QWEN_SAMPLING,
    ),
}
