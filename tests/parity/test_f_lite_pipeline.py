"""F-Lite from prompt to latent: the engine beside the published pipeline's steps, written out plainly.

Text goes through transformers' T5, the transformer's maths through plain_f_lite, schedule and guidance through the
formulas of the published pipeline (fal-ai/f-lite at 85f0471), whose code can't be installed beside the tests.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import f_lite_files as f_lite
import plain_f_lite
import pytest
import torch
from support import rel_err

import nativedit
from nativedit import engine

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("single_thread")

STEPS, SEED = 4, 7
SCALE, SHIFT = 0.3611, 0.1159  # FLUX.1's latents


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    f_lite.write(folder)
    return folder


@pytest.fixture(scope="module")
def t5() -> torch.nn.Module:
    names = {"hidden_size": "d_model", "intermediate_size": "d_ff", "num_hidden_layers": "num_layers"}
    names |= {"num_attention_heads": "num_heads", "head_dim": "d_kv"}
    config = {names.get(key, key): value for key, value in f_lite.T5.items()}
    model = transformers.T5EncoderModel(transformers.T5Config(**config, feed_forward_proj="gated-gelu")).eval()
    missing, unexpected = model.load_state_dict(f_lite.text_state(), strict=False)
    assert (missing, unexpected) in (([], []), (["encoder.embed_tokens.weight"], []))
    return model


def encoded(t5: torch.nn.Module, text: str) -> torch.Tensor:
    states = t5(torch.tensor([f_lite.token_ids(text)]), output_hidden_states=True).hidden_states
    return t5.encoder.final_layer_norm(states[-8])


def published(t5: torch.nn.Module, size: tuple[int, int], negative: str, cfg: float, projected: bool) -> torch.Tensor:
    """The published pipeline in float32; its model predicts data - noise. size: width, height."""
    weights = f_lite.dit_state()
    height, width = size[1] // 8, size[0] // 8
    alpha = 2 * (height * width) ** 0.5 / 64
    times = [alpha * t / (1 + (alpha - 1) * t) for t in (1 - i / STEPS for i in range(STEPS + 1))]
    context = encoded(t5, f_lite.PROMPT)
    against = encoded(t5, negative) if negative else torch.zeros_like(context)
    x = torch.randn(1, 16, height, width, generator=torch.manual_seed(SEED))
    for now, then in pairwise(times):
        t = torch.tensor([now])
        cond, uncond = (plain_f_lite.forward(weights, f_lite.DIT, x, t, text) for text in (context, against))
        difference = cond - uncond
        if projected:
            across = difference - (cond * difference).sum() / (cond * cond).sum() * cond
            across = across * min(1.0, 0.03 / float(across.std()))
            velocity = cond + (cfg - 1) * across
        else:
            velocity = uncond + cfg * difference
        x = x + (now - then) * velocity
    return x / SCALE + SHIFT


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize(("size", "negative", "cfg"), [((96, 64), "", 6.0), ((64, 80), "small green square", 3.5)])
@torch.inference_mode()
def test_the_latent_is_the_published_pipelines(
    t5, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size, negative: str, cfg: float, projected: bool
):
    monkeypatch.setattr(engine, "_cache", None)
    graph = f_lite.graph(
        size=size, negative=negative, projected=projected, sampler={"cfg": -1.0 if cfg == 6.0 else cfg, "seed": SEED}
    )

    made = nativedit.run(graph, models_dir=models, output_dir=tmp_path, progress=False).outputs["sampler"][0]["samples"]

    expected = published(t5, size, negative, cfg, projected)
    assert expected.std() > 0.1
    assert rel_err(made, expected) <= 1e-4


def test_no_prompt_at_all_is_zeros_and_a_given_one_is_padded_and_seen(models: Path, tmp_path: Path, t5):
    graph = f_lite.graph(negative="")

    result = nativedit.run(graph, models_dir=models, output_dir=tmp_path, progress=False)

    [(states, extra)] = result.outputs["negative"][0]
    assert not states.any() and extra["attention_mask"].all()
    [(states, extra)] = result.outputs["positive"][0]
    assert states.shape == (1, 512, 32) and extra["attention_mask"].all()
    assert rel_err(states, encoded(t5, f_lite.PROMPT).detach()) <= 1e-5
