"""The families of text encoders this package knows: which file is which, and what its shapes can't tell.

Everything here works on shapes by key, as read from a safetensors header, imports no torch, and never raises on a
foreign file.
"""
# Facts: key names and constants from the published configurations as `transformers` 5.24 has them (its configuration
# classes default to Qwen3-8B, T5Gemma-2B, Gemma-2-9B, GLM-4-9B), the key names of google/t5-v1_1-xxl, and for GLM-4-9B
# in CogView4 from its trainers.

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .language_model_config import from_hugging_face

Shapes = Mapping[str, tuple[int, ...]]
Config = dict[str, Any]

EMBEDDING = "embed_tokens.weight"
T5_EMBEDDING = "shared.weight"
# What files put before the bare layout: Hugging Face's own nesting, and the component names of all-in-one files.
PREFIX = (
    r"(?:text_encoders?\.)?(?:(?:[a-z0-9_]+\.)?transformer\.)?"
    r"(?:model\.)?(?:language_model\.)?(?:model\.)?(?:encoder\.)?"
)
# Keys of a file that are no weights of the language model, after the prefix or beside it.
_OTHER_PARTS = "|".join(("lm_head", "visual", "multi_modal_projector", "vision_tower"))
_BESIDE = "|".join(("tokenizer_json", "tokenizer_config", "spiece_model", "text_encoder_config"))
IGNORED = "|".join(
    (
        rf"(?:^|\.)(?:{_OTHER_PARTS})\.",
        r"rotary_emb\.inv_freq$",
        rf"^(?:{_BESIDE})$",
        # T5: the embedding under its second name, and the other half of the model.
        r"^encoder\.embed_tokens\.weight$",
        r"^decoder\.(?:block|embed_tokens)\.",
        r"^decoder\.final_layer_norm\.",
    )
)


@dataclass(frozen=True)
class TextEncoder:
    """One family. `detect(shapes, prefix)` gives the module's constructor arguments, or None for a foreign file."""

    name: str
    title: str
    detect: Callable[[Shapes, str], Config | None]
    module: str = ".text_encoders.language_model:LanguageModel"  # relative to the package
    config: str = ".text_encoders.language_model_config:LanguageModelConfig"  # what its constructor takes
    dtypes: tuple[str, ...] = ("bfloat16", "float32")  # dtypes of computation that are safe, best first
    embedding: str = EMBEDDING  # the key, after the prefix, by which its files are found


def _layer_count(shapes: Shapes, prefix: str) -> int:
    count = 0
    while f"{prefix}layers.{count}.self_attn.q_proj.weight" in shapes:
        count += 1
    return count


def _rows(shapes: Shapes, key: str) -> int:
    """The first dimension of a tensor; 0 if it is missing or has none."""
    return (shapes.get(key) or (0,))[0]


def _sizes(shapes: Shapes, prefix: str, head_dim: int | None) -> Config | None:
    """The sizes any family has. Only first dimensions are read: quantized formats pack the second."""
    layer = f"{prefix}layers.0."
    vocabulary, width = _rows(shapes, prefix + EMBEDDING), _rows(shapes, prefix + "norm.weight")
    q, k = _rows(shapes, layer + "self_attn.q_proj.weight"), _rows(shapes, layer + "self_attn.k_proj.weight")
    inner = _rows(shapes, layer + "mlp.gate_up_proj.weight") // 2 or _rows(shapes, layer + "mlp.gate_proj.weight")
    if not (vocabulary and width and q and k and inner and head_dim):
        return None
    if q % head_dim or k % head_dim or q % k:
        return None
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": _layer_count(shapes, prefix),
        "num_attention_heads": q // head_dim,
        "num_key_value_heads": k // head_dim,
        "head_dim": head_dim,
        "attention_bias": layer + "self_attn.q_proj.bias" in shapes,
    }


def _qwen3(shapes: Shapes, prefix: str, rope_theta: float) -> Config | None:
    layer = f"{prefix}layers.0."
    if layer + "pre_feedforward_layernorm.weight" in shapes or layer + "mlp.gate.weight" in shapes:
        return None  # those are Gemma 3 and the mixture-of-experts variant
    sizes = _sizes(shapes, prefix, _rows(shapes, layer + "self_attn.q_norm.weight"))
    return sizes and {**sizes, "qk_norm": True, "rope_theta": rope_theta}


def detect_qwen3(shapes: Shapes, prefix: str = "") -> Config | None:
    """Qwen3 dense, any size. Keys and sizes equal Qwen3-VL's; a vision tower or `language_model.` means that one."""
    return None if _is_vision_language(shapes, prefix) else _qwen3(shapes, prefix, 1_000_000.0)


def detect_qwen3_vl(shapes: Shapes, prefix: str = "") -> Config | None:
    """The text tower of Qwen3-VL. Its M-RoPE is ordinary RoPE for text, with its own theta."""
    return _qwen3(shapes, prefix, 5_000_000.0)


def _is_vision_language(shapes: Shapes, prefix: str) -> bool:
    return "language_model." in prefix or any("visual." in key for key in shapes)


def _gemma2_constants(sizes: Config, query_pre_attn_scalar: float) -> Config:
    return {
        **sizes,
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_offset": True,
        "embed_scale": sizes["hidden_size"] ** 0.5,
        "query_pre_attn_scalar": query_pre_attn_scalar,
        "attn_logit_softcapping": 50.0,
        "sliding_window": 4096,
        "layer_types": _alternating(sizes["num_hidden_layers"]),
    }


def _alternating(layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]


# Head sizes that no shape tells, by hidden size: T5Gemma base and 2B / 9B; Gemma 2 2B, 9B, 27B (with its own scale).
_T5GEMMA_HEAD_DIM = {768: 64, 2304: 256, 3584: 256}
_GEMMA2_HEAD_DIM_AND_SCALAR = {2304: (256, 256), 3584: (256, 256), 4608: (128, 144)}


def detect_t5gemma(shapes: Shapes, prefix: str = "") -> Config | None:
    """The encoder half of T5Gemma: bidirectional, four norms per block under names of its own."""
    layer, width = f"{prefix}layers.0.", _rows(shapes, prefix + "norm.weight")
    if layer + "pre_self_attn_layernorm.weight" not in shapes or layer + "cross_attn.q_proj.weight" in shapes:
        return None
    head_dim = _T5GEMMA_HEAD_DIM.get(width)
    sizes = _sizes(shapes, prefix, head_dim)
    return sizes and {**_gemma2_constants(sizes, head_dim), "block_norms": "t5gemma", "causal": False}


def detect_gemma2(shapes: Shapes, prefix: str = "") -> Config | None:
    """Gemma 2. Gemma 3 has the same block and norms on q and k besides."""
    layer, width = f"{prefix}layers.0.", _rows(shapes, prefix + "norm.weight")
    if (
        layer + "input_layernorm.weight" not in shapes
        or layer + "pre_feedforward_layernorm.weight" not in shapes
        or layer + "self_attn.q_norm.weight" in shapes
    ):
        return None
    head_dim, scalar = _GEMMA2_HEAD_DIM_AND_SCALAR.get(width, (None, None))
    sizes = _sizes(shapes, prefix, head_dim)
    return sizes and {**_gemma2_constants(sizes, scalar), "block_norms": "gemma2"}


def detect_glm4(shapes: Shapes, prefix: str = "") -> Config | None:
    """The language model of CogView4, told from other models with a fused gate by its vocabulary."""
    # GLM-4-9B: transformers' GlmModel.
    layer = f"{prefix}layers.0."
    if _rows(shapes, prefix + EMBEDDING) != 151552 or layer + "mlp.gate_up_proj.weight" not in shapes:
        return None
    sizes = _sizes(shapes, prefix, 128)
    if sizes is None:
        return None
    four_norms = layer + "post_self_attn_layernorm.weight" in shapes  # GLM-4-0414
    return {
        **sizes,
        "block_norms": "glm4" if four_norms else "pre",
        "rms_norm_eps": 1e-5 if four_norms else 1.5625e-07,
        "o_proj_bias": False,
        "fused_gate_up": True,
        "partial_rotary_factor": 0.5,
        "rope_interleaved": True,
    }


def detect_t5(shapes: Shapes, prefix: str = "") -> Config | None:
    """The encoder of T5 v1.1 (gated), any size. UMT5 has the same keys and a position bias in every block."""
    block = prefix + "encoder.block.{}.layer."
    if block.format(1) + "0.SelfAttention.relative_attention_bias.weight" in shapes:
        return None
    bias = shapes.get(block.format(0) + "0.SelfAttention.relative_attention_bias.weight") or (0, 0)
    sizes = {
        "vocab_size": _rows(shapes, prefix + T5_EMBEDDING),
        "hidden_size": _rows(shapes, prefix + "encoder.final_layer_norm.weight"),
        "intermediate_size": _rows(shapes, block.format(0) + "1.DenseReluDense.wi_0.weight"),
        "num_attention_heads": bias[-1],
        "relative_attention_num_buckets": bias[0],
    }
    width = _rows(shapes, block.format(0) + "0.SelfAttention.q.weight")
    if not all(sizes.values()) or not width or width % bias[-1]:
        return None
    layers = 0
    while block.format(layers) + "0.SelfAttention.q.weight" in shapes:
        layers += 1
    return {**sizes, "num_hidden_layers": layers, "head_dim": width // bias[-1]}


TEXT_ENCODERS: tuple[TextEncoder, ...] = (
    TextEncoder("qwen3_vl", "Qwen3-VL text tower", detect_qwen3_vl),
    TextEncoder("qwen3", "Qwen3", detect_qwen3),
    TextEncoder("t5gemma", "T5Gemma encoder", detect_t5gemma),
    TextEncoder("gemma2", "Gemma 2", detect_gemma2),
    TextEncoder("glm4", "GLM-4", detect_glm4),
    TextEncoder(
        "t5xxl",
        "T5 v1.1 encoder",
        detect_t5,
        ".text_encoders.t5:T5Encoder",
        ".text_encoders.t5:T5Config",
        embedding=T5_EMBEDDING,
    ),
)


def text_encoder(name: str) -> TextEncoder:
    """The family called `name`; ValueError that lists the known ones otherwise."""
    for family in TEXT_ENCODERS:
        if family.name == name:
            return family
    raise ValueError(f"text encoder {name!r} is unknown; known are {', '.join(f.name for f in TEXT_ENCODERS)}")


def find_text_encoder(
    shapes: Shapes, metadata: Mapping[str, str] | None = None
) -> list[tuple[TextEncoder, str, Config]]:
    """Which text encoder a file holds: its family, the prefix of its keys and the constructor's arguments, the best
    match first.

    Two families, one of which has seen pictures, can share every key and size; then both are returned, the one that
    the file's other evidence speaks for first, and the caller's own knowledge decides. An entry in the header that
    names the family wins over all of it.
    """
    # Qwen3 and Qwen3-VL. 28 layers of width 2048 without other evidence are Qwen3-VL-2B, the encoder of PRXPixel. The
    # entry is `config`: {"text_encoder": {"family": ..., ...}}.
    given = header_config(metadata)
    family_name = given.pop("family", None)
    found: list[tuple[TextEncoder, str, Config]] = []
    for family, prefix in _places(shapes):
        if family_name == family.name:
            config = {**(family.detect(shapes, prefix) or {}), **given}
            if config.keys() >= REQUIRED:
                found.append((family, prefix, config))
        elif family_name is None:
            config = family.detect(shapes, prefix)
            if config is not None:
                found.append((family, prefix, {**config, **given}))
    return sorted(found, key=lambda match: _less_likely(shapes, *match))


def _places(shapes: Shapes) -> Iterator[tuple[TextEncoder, str]]:
    """Families and the prefixes under which a file may hold them."""
    for embedding in dict.fromkeys(family.embedding for family in TEXT_ENCODERS):
        for prefix in sorted({key[: -len(embedding)] for key in shapes if key.endswith(embedding)}):
            if re.fullmatch(PREFIX, prefix):
                yield from ((family, prefix) for family in TEXT_ENCODERS if family.embedding == embedding)


REQUIRED = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}


def _less_likely(shapes: Shapes, family: TextEncoder, prefix: str, config: Config) -> bool:
    if family.name != "qwen3_vl" or _is_vision_language(shapes, prefix):
        return False
    return (config["num_hidden_layers"], config["hidden_size"]) != (28, 2048)


def header_config(metadata: Mapping[str, str] | None) -> Config:
    """The text encoder's part of a safetensors header's `config` entry; {} if there is none that can be read.

    Constructor arguments and `family`, or a published config.json as it is (it has a `model_type`).
    """
    try:
        part = json.loads((metadata or {}).get("config") or "{}")["text_encoder"]
        if "model_type" in part:
            family, config = from_hugging_face(part)
            return {"family": family, **config}
        return dict(part)
    except (ValueError, KeyError, TypeError):
        return {}


def module_keys(keys: Iterable[str], prefix: str) -> dict[str, str]:
    """{key in the file: key in the module} for the weights under `prefix`.

    Left out are the language model's head, a vision tower, RoPE tables and tokenizers. Unknown keys under the prefix
    stay in, for a strict loader to complain about.
    """
    return {
        key: key[len(prefix) :] for key in keys if key.startswith(prefix) and not re.search(IGNORED, key[len(prefix) :])
    }
