"""The T5 v1.1 encoder against `transformers`, on random tiny configurations, and how its files are recognised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support import rel_err

from nativedit.ldm.layers.operations import CastOps
from nativedit.text_encoders.families import find_text_encoder, module_keys
from nativedit.text_encoders.language_model_config import from_hugging_face
from nativedit.text_encoders.t5 import T5Encoder

SIZES = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_heads": 4}


def reference(**options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.T5Config(**{**SIZES, "feed_forward_proj": "gated-gelu", **options})
    model = transformers.T5EncoderModel(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3)
    return model


def weights(model: torch.nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    keys = [key for key in model.state_dict() if key != "encoder.embed_tokens.weight"]
    return {prefix + key: model.state_dict()[key].clone() for key in keys}


def ours(model: torch.nn.Module, **place: Any) -> T5Encoder:
    _, config = from_hugging_face(model.config.to_dict())
    encoder = T5Encoder(**config, **place).eval()
    encoder.load_state_dict(weights(model))
    return encoder


@pytest.mark.parametrize("options", [{}, {"d_kv": 16, "num_heads": 3}, {"relative_attention_num_buckets": 8}])
@torch.inference_mode()
def test_every_hidden_state_is_that_of_transformers(options: dict[str, Any]):
    model = reference(**options)
    ids = torch.randint(0, 60, (2, 200), generator=torch.manual_seed(1))  # longer than the last exact distance

    expected = model(ids, output_hidden_states=True).hidden_states
    _, states = ours(model)(ids, layers=range(5))

    assert max(rel_err(a, b) for a, b in zip(states, expected, strict=True)) < 1e-6


@torch.inference_mode()
def test_an_inner_state_after_the_final_norm():
    model, ids = reference(), torch.arange(12)[None]
    inner = model(ids, output_hidden_states=True).hidden_states[-3]

    _, (state,) = ours(model)(ids, layers=(-3,), normed=True)

    assert rel_err(state, model.encoder.final_layer_norm(inner)) < 1e-6


@torch.inference_mode()
def test_blocks_beyond_the_deepest_state_asked_for_do_not_run():
    encoder, ids, ran = ours(reference()), torch.arange(12)[None], []
    _, expected = encoder(ids, layers=(-3, 1), normed=True)
    for index, block in enumerate(encoder.encoder.block):
        block.register_forward_hook(lambda *_, index=index: ran.append(index))

    last, states = encoder(ids, layers=(-3, 1), normed=True, last=False)

    assert last is None and all(torch.equal(a, b) for a, b in zip(states, expected, strict=True))
    assert ran == [0, 1]


@torch.inference_mode()
def test_masked_tokens_are_not_attended_to():
    model, ids = reference(), torch.arange(20)[None]
    mask = (torch.arange(20) < 13).long()[None]

    expected = model(ids, attention_mask=mask).last_hidden_state

    assert rel_err(ours(model)(ids, mask)[:, :13], expected[:, :13]) < 1e-6


@torch.inference_mode()
def test_weights_in_bfloat16_compute_in_float32():
    model, ids = reference(), torch.arange(12)[None]
    stored = ours(model, dtype=torch.bfloat16, operations=CastOps)

    state = stored(ids, compute_dtype=torch.float32)

    assert state.dtype == torch.float32
    assert rel_err(state, model(ids).last_hidden_state) < 0.02


def test_no_token_is_no_state():
    assert ours(reference())(torch.zeros(1, 0, dtype=torch.long)).shape == (1, 0, 32)


@pytest.mark.parametrize("prefix", ["", "text_encoders.t5xxl.transformer.", "text_encoder."])
def test_a_file_is_recognised_by_its_shapes(prefix: str):
    model = reference()
    tensors = weights(model, prefix)

    [(family, found, config)] = find_text_encoder({key: tuple(value.shape) for key, value in tensors.items()})

    assert (family.name, found) == ("t5xxl", prefix)
    encoder = T5Encoder(**config)
    encoder.load_state_dict({ours: tensors[theirs] for theirs, ours in module_keys(tensors, prefix).items()})


def test_the_embeddings_second_name_and_a_decoder_are_left_out():
    keys = ["shared.weight", "encoder.embed_tokens.weight", "decoder.block.0.layer.0.SelfAttention.q.weight"]

    assert module_keys(keys, "") == {"shared.weight": "shared.weight"}


def test_umt5_which_has_a_bias_in_every_block_is_another_model():
    shapes = {key: tuple(value.shape) for key, value in weights(reference()).items()}
    bias = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
    shapes[bias.format(1)] = shapes[bias.format(0)]

    assert find_text_encoder(shapes) == []


def test_the_published_size():
    config = transformers.T5Config(
        vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu"
    )
    with torch.device("meta"):
        model = transformers.T5EncoderModel(config)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}

    [(_, prefix, arguments)] = find_text_encoder(shapes)

    encoder = T5Encoder(**arguments, device="meta")
    expected = {key: tuple(value.shape) for key, value in encoder.state_dict().items()}
    assert {ours: shapes[key] for key, ours in module_keys(shapes, prefix).items()} == expected
    assert sum(value.numel() for value in encoder.parameters()) == 4_762_310_656
