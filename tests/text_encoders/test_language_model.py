"""The language model against `transformers`, on random tiny configurations of every family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support import rel_err
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from nativedit.ldm.layers.operations import CastOps
from nativedit.text_encoders.language_model import LanguageModel, LanguageModelConfig
from nativedit.text_encoders.language_model_config import from_hugging_face

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclasses.dataclass
class Family:
    """A reference class and the options of its configuration that deserve a test."""

    config: Callable[..., Any]
    model: Callable[..., Any]
    options: dict[str, Any]

    def build(self, seed: int = 0) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = self.model(self.config(**{**SIZES, **self.options})).eval().requires_grad_(False)
        for parameter in model.parameters():  # norms start at exactly one (or zero), biases at zero
            parameter.add_(torch.randn_like(parameter) * 0.1)
        return model


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


FAMILIES = {
    "qwen3": Family(transformers.Qwen3Config, transformers.Qwen3Model, _rope(1e6)),
    "qwen3 with biases": Family(
        transformers.Qwen3Config, transformers.Qwen3Model, {"attention_bias": True, **_rope(1e4)}
    ),
    "qwen3_vl": Family(Qwen3VLTextConfig, Qwen3VLTextModel, _rope(5e6, mrope_section=[4, 2, 2])),
    "t5gemma": Family(
        T5GemmaModuleConfig,
        T5GemmaEncoder,
        {"sliding_window": 3, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "dropout_rate": 0.0},
    ),
    "gemma2": Family(
        transformers.Gemma2Config,
        transformers.Gemma2Model,
        {"sliding_window": 3, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
    ),
    "glm": Family(
        transformers.GlmConfig, transformers.GlmModel, {"attention_bias": True, **_rope(1e4, partial_rotary_factor=0.5)}
    ),
    "glm4": Family(transformers.Glm4Config, transformers.Glm4Model, _rope(1e4, partial_rotary_factor=0.5)),
    "llama": Family(transformers.LlamaConfig, transformers.LlamaModel, {"mlp_bias": True, **_rope(1e4)}),
    "llama 3": Family(transformers.LlamaConfig, transformers.LlamaModel, {"rope_parameters": LLAMA3_ROPE}),
    "smollm3": Family(
        transformers.SmolLM3Config, transformers.SmolLM3Model, {"no_rope_layer_interval": 2, **_rope(1e4)}
    ),
}
PADDINGS = {
    "none": None,
    "right": [[1] * 9, [1] * 6 + [0] * 3, [1] + [0] * 8],
    "left": [[1] * 9, [0] * 3 + [1] * 6, [0] * 8 + [1]],
}
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


def native(reference: torch.nn.Module, dtype: torch.dtype | None = None, operations: Any = torch.nn) -> LanguageModel:
    """Our module with the reference's configuration and weights; every key has to match."""
    _, config = from_hugging_face(reference.config.to_dict())
    model = LanguageModel(**config, dtype=dtype, operations=operations)
    model.load_state_dict(reference.state_dict(), strict=True)
    return model.eval().requires_grad_(False)


def with_weights_in(dtype: torch.dtype, reference: torch.nn.Module) -> torch.nn.Module:
    """Casts the parameters alone, as `from_pretrained(dtype=...)` does: `.to(dtype)` would round RoPE's table too."""
    for parameter in reference.parameters():
        parameter.data = parameter.data.to(dtype)
    return reference


def some_ids(batch: int = 3, length: int = 9) -> torch.Tensor:
    return torch.randint(3, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(7))


def hidden_states(
    reference: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    # T5Gemma reads a missing mask out of the padding id; ones say the same thing to every family.
    mask = torch.ones_like(ids) if mask is None else mask.long()
    output = reference(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    return output.last_hidden_state, list(output.hidden_states)


def error(actual: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor | None = None) -> float:
    """Relative error over the tokens that count."""
    if mask is not None:
        actual, expected = actual[mask], expected[mask]
    return rel_err(actual.detach(), expected)


@every_family
@pytest.mark.parametrize("padding", PADDINGS)
def test_last_and_intermediate_states_are_the_references(family: Family, padding: str):
    reference, ids = family.build(), some_ids()
    mask = None if PADDINGS[padding] is None else torch.tensor(PADDINGS[padding], dtype=torch.bool)
    model = native(reference)
    last, states = hidden_states(reference, ids, mask)
    exact_last, exact_states = hidden_states(reference.double(), ids, mask)

    actual, actual_states = model(ids, mask, layers=range(len(states)))

    def bound(expected: torch.Tensor, exact: torch.Tensor) -> float:
        return max(2e-6, 3 * error(expected, exact, mask))

    assert error(actual, last, mask) <= bound(last, exact_last)
    for index, (ours, theirs, exact) in enumerate(zip(actual_states, states, exact_states, strict=True)):
        assert error(ours, theirs, mask) <= bound(theirs, exact), f"hidden state {index}"
    assert actual.isfinite().all()


@every_family
def test_bfloat16_is_as_exact_as_the_references(family: Family):
    reference, ids = family.build(), some_ids()
    theirs, _ = hidden_states(with_weights_in(torch.bfloat16, reference), ids, None)
    actual = native(reference, dtype=torch.bfloat16)(ids)
    exact, _ = hidden_states(with_weights_in(torch.float64, reference), ids, None)
    assert actual.dtype == torch.bfloat16
    assert error(actual, exact) <= 2 * error(theirs, exact)


@every_family
def test_bfloat16_storage_computes_in_float32_with_casting_layers(family: Family):
    reference, ids = with_weights_in(torch.bfloat16, family.build()), some_ids()
    model = native(reference, dtype=torch.bfloat16, operations=CastOps)
    expected, _ = hidden_states(with_weights_in(torch.float32, reference), ids, None)
    actual = model(ids, compute_dtype=torch.float32)
    assert actual.dtype == torch.float32
    assert error(actual, expected) <= 2e-6
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_more_shapes_of_qwen3():
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        kv_heads, groups, half, layers = (int(torch.randint(1, 5, (), generator=draw)) for _ in range(4))
        sizes = {
            "hidden_size": 8 * int(torch.randint(1, 6, (), generator=draw)),
            "num_attention_heads": kv_heads * groups,
            "num_key_value_heads": kv_heads,
            "head_dim": 2 * half,
            "num_hidden_layers": layers,
        }
        reference = Family(transformers.Qwen3Config, transformers.Qwen3Model, {**sizes, **_rope(1e5)}).build(seed)
        ids = some_ids(2, 5 + seed)
        assert error(native(reference)(ids), hidden_states(reference, ids, None)[0]) <= 2e-6, sizes


@every_family
def test_padding_on_either_side_changes_nothing_for_the_prompt(family: Family):
    model = native(family.build())
    ids = some_ids(1, 5)
    pad = torch.zeros(1, 3, dtype=torch.long)
    real, masked = torch.ones(1, 5, dtype=torch.bool), pad.bool()
    alone = model(ids)
    right = model(torch.cat((ids, pad), 1), torch.cat((real, masked), 1))[:, :5]
    left = model(torch.cat((pad, ids), 1), torch.cat((masked, real), 1))[:, 3:]
    assert error(right, alone) <= 2e-6
    assert error(left, alone) <= 2e-6


@every_family
def test_a_prompt_without_tokens_is_finite(family: Family):
    model = native(family.build())
    ids = some_ids()
    assert model(ids, torch.zeros_like(ids).bool()).isfinite().all()
    assert model(ids[:, :0]).shape == (3, 0, SIZES["hidden_size"])
    last, (embedded, middle) = model(ids[:, :0], ids[:, :0].bool(), layers=(0, 2))
    assert last.shape == embedded.shape == middle.shape == (3, 0, SIZES["hidden_size"])


def test_masks_of_integers_and_booleans_mean_the_same():
    model, ids = native(FAMILIES["qwen3"].build()), some_ids()
    mask = torch.tensor(PADDINGS["right"])
    assert torch.equal(model(ids, mask), model(ids, mask.bool()))
    assert torch.equal(model(ids, mask), model(ids, mask.float()))


def test_states_are_numbered_as_in_transformers_and_from_the_end():
    model, ids = native(FAMILIES["qwen3"].build()), some_ids()
    last, states = model(ids, layers=(-1, 3, -2, 0, -5))
    assert torch.equal(states[0], last)
    assert torch.equal(states[1], states[2])
    assert torch.equal(states[3], states[4])
    with pytest.raises(IndexError, match="hidden state 5 does not exist: this model has 5"):
        model(ids, layers=(5,))


@pytest.mark.parametrize("layers", [(-2,), (1, 0), (0,), (-1, 2)])
def test_layers_beyond_the_deepest_state_asked_for_do_not_run(layers: tuple[int, ...]):
    model, ids, ran = native(FAMILIES["qwen3"].build()), some_ids(), []
    _, expected = model(ids, layers=layers)
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: ran.append(1))

    last, states = model(ids, layers=layers, last=False)

    assert last is None and all(torch.equal(a, b) for a, b in zip(states, expected, strict=True))
    assert len(ran) == max(layer % 5 for layer in layers)


def test_an_encoder_cut_off_early_gives_the_state_of_the_whole_model():
    reference, ids = FAMILIES["glm"].build(), some_ids()
    _, config = from_hugging_face(reference.config.to_dict())
    short = LanguageModel(**{**config, "num_hidden_layers": 3, "final_norm": False})
    short.load_state_dict({k: v for k, v in reference.state_dict().items() if not k.startswith(("layers.3.", "norm."))})
    assert error(short(ids), hidden_states(reference, ids, None)[1][-2]) <= 2e-6


def test_it_is_built_without_memory_and_touches_no_weight_before_loading():
    class Lazy(CastOps):
        class Linear(CastOps.Linear):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.weight = None

    LanguageModel(**{**QWEN3_VL_2B, "num_hidden_layers": 1, "vocab_size": 10}, operations=Lazy)
    model = LanguageModel(**QWEN3_VL_2B, device="meta", dtype=torch.bfloat16)
    assert not list(model.buffers())
    assert sum(p.numel() for p in model.parameters()) == 1_720_574_976


QWEN3_VL_2B = {  # ../shared/architectures/prx_pixel.md, section 2
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 5e6,
    "qk_norm": True,
}


def test_t5gemma_2b_has_the_published_size():
    _, config = from_hugging_face(transformers.T5GemmaConfig().to_dict())
    model = LanguageModel(**config, device="meta")
    # 288 tensors, 2,614,341,888 parameters: ../shared/architectures/prx.md, section 2
    assert len(model.state_dict()) == 288
    assert sum(p.numel() for p in model.parameters()) == 2_614_341_888


def test_glm4_9b_has_the_published_size():
    _, config = from_hugging_face(transformers.GlmConfig(attention_bias=True, num_key_value_heads=2).to_dict())
    model = LanguageModel(**config, device="meta")
    # 442 keys, 8,779,194,368 parameters: ../shared/architectures/cogview4.md
    assert len(model.state_dict()) == 442
    assert sum(p.numel() for p in model.parameters()) == 8_779_194_368


def test_it_trains():
    model = LanguageModel(**{**dataclasses.asdict(LanguageModelConfig(10, 8, 16, 2, 2)), "qk_norm": True})
    model(torch.tensor([[1, 2, 3]])).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary": 1}, "no option rotary"),
        ({"num_key_value_heads": 3}, "num_attention_heads 16 is no multiple of num_key_value_heads 3"),
        ({"block_norms": "post"}, "block_norms 'post' is unknown; known are pre, gemma2, t5gemma, glm4"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is unknown"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 28 layers"),
        ({"layer_types": ["sliding_attention"] * 28}, "sliding_window"),
        ({"head_dim": None, "hidden_size": 100}, "hidden_size 100 does not divide into 16 heads"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "known is rope_type 'llama3'"),
    ],
)
def test_a_wrong_option_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LanguageModel(**{**QWEN3_VL_2B, **change}, device="meta")


def test_an_unknown_model_type_is_named():
    with pytest.raises(ValueError, match="model_type 'bert' is no known text encoder; known are qwen3"):
        from_hugging_face({"model_type": "bert"})
