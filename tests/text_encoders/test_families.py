"""Which family a file belongs to, from its keys and shapes: published sizes, prefixes, look-alikes, headers."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import find_shared
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

from nativedit.supported_models import import_dotted
from nativedit.text_encoders.families import TEXT_ENCODERS, find_text_encoder, module_keys, text_encoder
from nativedit.text_encoders.language_model import LanguageModel
from nativedit.text_encoders.language_model_config import LanguageModelConfig, from_hugging_face

QWEN3_VL_2B = Qwen3VLConfig(
    text_config={
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "rope_theta": 5e6,
    }
)
QWEN3_8B = transformers.Qwen3Config(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_key_value_heads=8,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)
PUBLISHED = {  # transformers' configuration classes default to the published sizes
    "qwen3_vl": QWEN3_VL_2B,
    "qwen3": QWEN3_8B,
    "t5gemma": transformers.T5GemmaConfig(),
    "gemma2": transformers.Gemma2Config(),
    "glm4": transformers.GlmConfig(attention_bias=True, rms_norm_eps=1.5625e-07),
}

# Every diffusion model's layout, where the developers' facts lie beside the checkout.
SHARED = find_shared()
LAYOUTS = sorted((SHARED / "reference" / "layouts").glob("*.*.json")) if SHARED else []


def shapes_of(config: dict[str, Any], prefix: str = "") -> dict[str, tuple[int, ...]]:
    return {prefix + key: shape for key, shape in _shapes_of(json.dumps(config, sort_keys=True)).items()}


@functools.cache
def _shapes_of(config: str) -> dict[str, tuple[int, ...]]:
    state = LanguageModel(**json.loads(config), device="meta").state_dict()
    return {key: tuple(value.shape) for key, value in state.items()}


def published(name: str) -> dict[str, Any]:
    return from_hugging_face(PUBLISHED[name].to_dict())[1]


def meaning(config: dict[str, Any]) -> LanguageModelConfig:
    """Configurations that build the same module are equal, whether a default is written out or not."""
    layer_types = config.get("layer_types")
    return LanguageModelConfig(**{**config, "layer_types": layer_types and tuple(layer_types)})


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_alone_rebuild_the_published_configuration(name: str):
    family, prefix, config = find_text_encoder(shapes_of(published(name)))[0]
    assert (family.name, prefix) == (name, "")
    ours, theirs = meaning(config), meaning(published(name))
    for field in ("attention_bias", "o_proj_bias", "num_key_value_heads", "query_pre_attn_scalar", "head_dim"):
        # None stands for a value that another option gives
        assert getattr(ours, field) in (getattr(theirs, field), getattr(theirs, field) or getattr(ours, field))
    assert shapes_of(config) == shapes_of(published(name))
    assert {**vars(ours), "query_pre_attn_scalar": 0} == {**vars(theirs), "query_pre_attn_scalar": 0}


@pytest.mark.parametrize(
    "prefix",
    [
        *("model.", "model.language_model.", "language_model.", "language_model.model."),
        *("text_encoder.", "text_encoder.model.", "text_encoders.model.", "encoder.", "model.encoder."),
    ],
)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_and_all_in_one_prefixes_are_seen_through(name: str, prefix: str):
    shapes = shapes_of({**published(name), "num_hidden_layers": 2, "layer_types": None}, prefix)
    found = {(family.name, where) for family, where, _ in find_text_encoder({**shapes, "lm_head.weight": (9, 9)})}
    expected = "qwen3_vl" if name == "qwen3" and "language_model" in prefix else name
    assert (expected, prefix) in found
    assert {family for family, _ in found} <= ({"qwen3", "qwen3_vl"} if "qwen3" in name else {name})


def test_qwen3_and_its_vision_sibling_are_told_apart_by_what_evidence_there_is():
    def names(shapes: dict[str, tuple[int, ...]]) -> list[str]:
        return [family.name for family, _, _ in find_text_encoder(shapes)]

    two_b, eight_b = shapes_of(published("qwen3_vl")), shapes_of(published("qwen3"))
    assert names(two_b) == ["qwen3_vl", "qwen3"]
    assert names(eight_b) == ["qwen3", "qwen3_vl"]
    assert names({**eight_b, "visual.blocks.0.norm1.weight": (9,)}) == ["qwen3_vl"]
    thetas = {family.name: config["rope_theta"] for family, _, config in find_text_encoder(two_b)}
    assert thetas == {"qwen3": 1e6, "qwen3_vl": 5e6}


def test_t5gemmas_decoder_is_not_its_encoder():
    encoder = shapes_of(published("t5gemma"), "model.encoder.")
    decoder = {key.replace("encoder", "decoder"): shape for key, shape in encoder.items()}
    cross = {f"model.decoder.layers.{i}.cross_attn.q_proj.weight": (2048, 2304) for i in range(26)}
    assert [prefix for _, prefix, _ in find_text_encoder({**encoder, **decoder, **cross})] == ["model.encoder."]
    as_encoder = {key.replace("model.decoder.", ""): shape for key, shape in {**decoder, **cross}.items()}
    assert find_text_encoder(as_encoder) == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", {"layers.0.self_attn.q_norm.weight": (256,)}),  # Gemma 3
        ("qwen3", {"layers.0.mlp.gate.weight": (128, 4096)}),  # Qwen3's mixture of experts
        ("glm4", {"embed_tokens.weight": (32064, 4096)}),  # another model with a fused MLP
        ("t5gemma", {"norm.weight": (640,)}),  # a size whose heads are not known
        ("qwen3", {"layers.0.self_attn.k_proj.weight": (1000, 4096)}),
        ("qwen3", {"layers.0.self_attn.k_proj.weight": (0, 4096)}),
        ("qwen3", {"embed_tokens.weight": ()}),
        ("qwen3", {"norm.weight": ()}),
        ("qwen3", {"layers.0.self_attn.q_norm.weight": (0,)}),
        ("gemma2", {"norm.weight": ()}),
        ("glm4", {"layers.0.mlp.gate_up_proj.weight": ()}),
    ],
)
def test_look_alikes_and_broken_shapes_are_nobodys(name: str, change: dict[str, tuple[int, ...]]):
    assert find_text_encoder({**shapes_of(published(name)), **change}) == []


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda path: path.stem)
def test_no_diffusion_model_is_taken_for_a_text_encoder(layout: Path):
    shapes = {key: tuple(shape) for key, shape in json.loads(layout.read_text())["keys"].items()}
    assert find_text_encoder(shapes) == []


def test_detection_never_raises():
    draw = random.Random(0)
    keys = [key for name in PUBLISHED for key in shapes_of({**published(name), "num_hidden_layers": 1})]
    for _ in range(2000):
        some = draw.sample(keys, draw.randint(0, len(keys)))
        shapes = {key: tuple(draw.choice([0, 1, 64, 2304]) for _ in range(draw.randint(0, 3))) for key in some}
        for family in TEXT_ENCODERS:
            assert family.detect(shapes, "") is None or family.detect(shapes, "")["num_hidden_layers"] == 1
        find_text_encoder({f"model.{key}": shape for key, shape in shapes.items()}, {"config": "{"})


def test_widths_packed_by_quantization_do_not_matter():
    shapes = shapes_of(published("t5gemma"))
    packed = {k: (v[0], v[1] // 2) if k.endswith("proj.weight") else v for k, v in shapes.items()}
    assert find_text_encoder(packed)[0][2] == find_text_encoder(shapes)[0][2]


TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def header(**entry: Any) -> dict[str, str]:
    return {"config": json.dumps({"text_encoder": entry}), "format": "pt"}


def test_a_header_beats_constants_and_order():
    shapes = shapes_of({**TINY, "qk_norm": True}, "model.")
    [(family, prefix, config)] = find_text_encoder(shapes, header(family="qwen3", rope_theta=123.0))
    assert (family.name, prefix, config["rope_theta"]) == ("qwen3", "model.", 123.0)
    [(family, _, config)] = find_text_encoder(shapes_of(published("qwen3")), header(family="qwen3_vl"))
    assert (family.name, config["rope_theta"]) == ("qwen3_vl", 5e6)
    assert {config["rope_theta"] for _, _, config in find_text_encoder(shapes, header(rope_theta=7.0))} == {7.0}


def test_a_header_gives_sizes_that_no_rule_knows():
    tiny = {**TINY, "rms_norm_offset": True, "block_norms": "t5gemma", "causal": False, "head_dim": 4}
    shapes = shapes_of(tiny)
    assert find_text_encoder(shapes) == []
    [(family, _, config)] = find_text_encoder(shapes, header(family="t5gemma", **tiny))
    assert family.name == "t5gemma"
    assert shapes_of(config) == shapes


def test_a_header_may_be_a_published_config_json():
    config = transformers.T5GemmaConfig(
        encoder={**TINY, "num_key_value_heads": 1, "head_dim": 4, "dropout_rate": 0.0}
    ).to_dict()
    shapes = shapes_of(from_hugging_face(config)[1])
    [(family, _, found)] = find_text_encoder(shapes, header(**config))
    assert (family.name, found["head_dim"], found["causal"]) == ("t5gemma", 4, False)


@pytest.mark.parametrize(
    "config", ["", "{", "[]", "3", "null", '{"text_encoder": 3}', '{"text_encoder": {"model_type": "bert"}}']
)
def test_a_header_that_cannot_be_read_is_as_none(config: str):
    shapes = shapes_of(published("gemma2"))
    assert find_text_encoder(shapes, {"config": config}) == find_text_encoder(shapes) != []


def test_only_the_language_models_weights_are_loaded():
    own = ["embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "norm.weight"]
    others = ["visual.patch_embed.proj.weight", "lm_head.weight", "layers.0.self_attn.rotary_emb.inv_freq"]
    tensors = ["tokenizer_json", "spiece_model", "tokenizer_config", "text_encoder_config"]
    assert module_keys([*own, *others, *tensors], "") == {key: key for key in own}
    nested = [f"model.language_model.{key}" for key in own] + ["model.visual.norm.weight", "lm_head.weight"]
    assert module_keys([*nested, *tensors], "model.language_model.") == dict(zip(nested, own, strict=False))
    assert module_keys(["model.surprise"], "model.") == {"model.surprise": "surprise"}


def test_families_are_named_and_their_module_is_where_they_say():
    for family in TEXT_ENCODERS:
        assert text_encoder(family.name) is family
        assert issubclass(import_dotted(family.module), torch.nn.Module)
        assert dataclasses.is_dataclass(import_dotted(family.config))
        assert all(hasattr(torch, dtype) for dtype in family.dtypes)
    with pytest.raises(ValueError, match="text encoder 'clip' is unknown; known are qwen3_vl, qwen3, t5gemma"):
        text_encoder("clip")


def test_detection_imports_no_torch():
    code = "import sys, nativedit.text_encoders.families; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
