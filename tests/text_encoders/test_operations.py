"""Casting layers: stored in one dtype, computing in their input's, as if the weights had been widened beforehand."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from nativedit.ldm.layers.operations import CastOps

IMAGE = (2, 4, 5, 6)
LAYERS: dict[str, tuple[Callable[[type], torch.nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda layer: layer(4, 3), (2, 4)),
    "Linear without bias": (lambda layer: layer(4, 3, bias=False), (2, 4)),
    "RMSNorm": (lambda layer: layer(4, eps=1e-6), (2, 4)),
    "LayerNorm": (lambda layer: layer(4, eps=1e-5), (2, 4)),
    "LayerNorm without affine": (lambda layer: layer(4, elementwise_affine=False), (2, 4)),
    "GroupNorm": (lambda layer: layer(2, 4), IMAGE),
    "Conv1d": (lambda layer: layer(4, 3, 3, padding=1), (2, 4, 5)),
    "Conv2d": (lambda layer: layer(4, 6, 3, stride=2, padding=1, groups=2), IMAGE),
    "Conv2d reflected": (lambda layer: layer(4, 6, 3, padding=1, padding_mode="reflect"), IMAGE),
    "Conv3d": (lambda layer: layer(4, 3, 2), (2, 4, 3, 5, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_a_layer_computes_as_torchs_with_its_weights_cast_beforehand(name: str, stored: torch.dtype):
    torch.manual_seed(0)
    build, shape = LAYERS[name]
    kind = name.split()[0]
    reference = build(getattr(torch.nn, kind)).to(stored)
    layer = build(getattr(CastOps, kind)).to(stored)
    layer.load_state_dict(reference.state_dict())
    for computed in (torch.float32, torch.bfloat16):
        x = torch.randn(shape).to(computed)
        actual = layer(x)
        assert actual.dtype == computed
        assert torch.equal(actual, copy.deepcopy(reference).to(computed)(x))
    assert all(parameter.dtype == stored for parameter in layer.parameters())


def test_an_embedding_returns_rows_as_stored():
    embedding = CastOps.Embedding(5, 3, dtype=torch.bfloat16)
    embedding.load_state_dict({"weight": torch.arange(15.0).view(5, 3)})
    assert torch.equal(embedding(torch.tensor([4])), torch.tensor([[12.0, 13, 14]], dtype=torch.bfloat16))


def test_weights_are_left_for_the_file_to_fill(monkeypatch: pytest.MonkeyPatch):
    def filled(*_: object, **__: object) -> None:
        raise AssertionError("a parameter was initialised")

    for name in ("kaiming_uniform_", "uniform_", "normal_", "ones_", "zeros_"):
        monkeypatch.setattr(torch.nn.init, name, filled)
    for name, (build, _) in LAYERS.items():
        build(getattr(CastOps, name.split()[0]))
    CastOps.Embedding(5, 3)
