"""The options of the language model, and how a published config.json maps onto them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

# Names of a block's norms: before attention, after attention, before the MLP, after the MLP (None: no such norm).
# The same name sits at different places in different families (`post_attention_layernorm`).
BLOCK_NORMS: dict[str, tuple[str, str | None, str, str | None]] = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "gemma2": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "t5gemma": (
        "pre_self_attn_layernorm",
        "post_self_attn_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "glm4": ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
}


ACTIVATION_NAMES = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class LanguageModelConfig:
    """What a family is made of. Names are those of a configuration published on Hugging Face, where one exists; the
    module takes the same names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None  # None: as many as attention heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    hidden_act: str = "silu"  # "silu" or "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    rms_norm_offset: bool = False  # scale by (1 + weight), as the Gemma family does
    block_norms: str = "pre"  # a key of BLOCK_NORMS
    final_norm: bool = True  # False: the last state is the last block's output (encoders cut off early)
    embed_scale: float | None = None  # factor on the embeddings, rounded to the dtype of the computation
    attention_bias: bool = False  # biases of q, k and v, and of o unless `o_proj_bias` says otherwise
    o_proj_bias: bool | None = None
    mlp_bias: bool = False
    fused_gate_up: bool = False  # one `gate_up_proj`, gate first
    qk_norm: bool = False  # RMS norm of every head's q and k before RoPE
    causal: bool = True
    query_pre_attn_scalar: float | None = None  # scores are divided by its root; None: head_dim
    attn_logit_softcapping: float | None = None  # scores become cap * tanh(scores / cap)
    sliding_window: int | None = None  # used by layers of type "sliding_attention"
    layer_types: Sequence[str] | None = None  # per layer "full_attention" or "sliding_attention"; None: all full
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None  # None or {"rope_type": "llama3", ...}
    partial_rotary_factor: float = 1.0  # the leading part of a head that RoPE turns
    rope_interleaved: bool = False  # pairs (0, 1), (2, 3), ... instead of (0, half), (1, half + 1), ...
    no_rope_layers: Sequence[int] | None = None  # per layer 1 (RoPE) or 0 (none); None: RoPE in all

    def __post_init__(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} does not divide into {heads} heads: give head_dim explicitly"
            )
        for name, known in {"block_norms": tuple(BLOCK_NORMS), "hidden_act": ACTIVATION_NAMES}.items():
            if vars(self)[name] not in known:
                raise ValueError(f"{name} {vars(self)[name]!r} is unknown; known are {', '.join(known)}")
        for name, per_layer in (("layer_types", self.layer_types), ("no_rope_layers", self.no_rope_layers)):
            if per_layer is not None and len(per_layer) < self.num_hidden_layers:
                raise ValueError(f"{name} has {len(per_layer)} entries for {self.num_hidden_layers} layers")
        kinds = set(self.layer_types or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            raise ValueError(f"layer_types {sorted(kinds)} are unknown; known are full_attention and sliding_attention")
        if "sliding_attention" in (self.layer_types or ()) and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention layers: give sliding_window")
        if self.rope_scaling and self.rope_scaling.get("rope_type", "default") not in ("default", "llama3"):
            raise ValueError(f"rope_scaling {self.rope_scaling!r} is unknown; known is rope_type 'llama3'")


CONFIG_FIELDS = frozenset(field.name for field in fields(LanguageModelConfig))

# What a model type implies without saying so in its config.json.
_GEMMA2 = {"rms_norm_offset": True, "block_norms": "gemma2"}
_GLM4 = {"fused_gate_up": True, "rope_interleaved": True, "o_proj_bias": False}
MODEL_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"qk_norm": True}),
    "qwen3_vl_text": ("qwen3_vl", {"qk_norm": True}),
    "t5_gemma_module": ("t5gemma", {**_GEMMA2, "block_norms": "t5gemma", "causal": False}),
    "gemma2": ("gemma2", _GEMMA2),
    "glm": ("glm4", _GLM4),
    "glm4": ("glm4", {**_GLM4, "block_norms": "glm4"}),
    "llama": ("llama", {}),
    "smollm3": ("smollm3", {}),
}
# Where a model that is more than its text encoder keeps that part's configuration.
_PARTS = {"qwen3_vl": "text_config", "t5gemma": "encoder"}


# T5's names for what every other text encoder calls otherwise.
_T5_NAMES = {
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "d_kv": "head_dim",
}


def _t5_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments of T5Encoder."""
    kept = ("vocab_size", "relative_attention_num_buckets", "relative_attention_max_distance", "layer_norm_epsilon")
    named = {ours: config[theirs] for theirs, ours in _T5_NAMES.items() if theirs in config}
    return named | {key: config[key] for key in kept if key in config}


def from_hugging_face(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(family name, constructor arguments of its module) from the contents of a published config.json.

    Both spellings of the RoPE settings are read: `rope_theta` and `rope_scaling`, or the newer `rope_parameters`.
    Raises ValueError for a model type that no module here covers.
    """
    model_type = config.get("model_type")
    if model_type in _PARTS:
        config = config[_PARTS[model_type]]
        model_type = config.get("model_type")
    if model_type not in (*MODEL_TYPES, "t5"):
        raise ValueError(
            f"config.json: model_type {model_type!r} is no known text encoder; "
            f"known are {', '.join([*MODEL_TYPES, *_PARTS, 't5'])}"
        )
    if model_type == "t5":
        return "t5xxl", _t5_arguments(config)
    family, implied = MODEL_TYPES[model_type]
    given = {key: value for key, value in config.items() if key in CONFIG_FIELDS and value is not None}
    result = {**given, **implied}
    if "hidden_activation" in config:  # Gemma's name; its `hidden_act`, where present, is a leftover
        result["hidden_act"] = config["hidden_activation"]
    if result.get("rms_norm_offset"):
        result["embed_scale"] = result["hidden_size"] ** 0.5
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            result[name] = rope[name]
    result.pop("rope_scaling", None)
    if rope.get("rope_type", "default") != "default":
        result["rope_scaling"] = rope
    if "sliding_attention" not in (result.get("layer_types") or ()):
        result.pop("layer_types", None)
        result.pop("sliding_window", None)
    return family, result
