"""Whole pictures: diffusers' CogView4Pipeline 0.42.1 beside the engine, from prompt to pixels, tiny random weights.

The engine runs a graph of our nodes with every setting on auto; what both transformers are given and give is compared
call by call.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cogview4_files as cogview4
import comfyui_files as files
import numpy as np
import pytest
import torch
from comfyui_graphs import node
from PIL import Image
from support import rel_err

import nativedit
from nativedit import engine

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.usefixtures("single_thread")

STEPS, SEED = 4, 7


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    cogview4.write(folder)
    return folder


@pytest.fixture(scope="module")
def pipeline() -> Any:
    network = diffusers.CogView4Transformer2DModel(**cogview4.DIT)
    network.load_state_dict(cogview4.dit_state())
    names = {"fused_gate_up", "rope_interleaved", "o_proj_bias"}
    config = {key: value for key, value in cogview4.GLM.items() if key not in names}
    glm = transformers.GlmModel(transformers.GlmConfig(**config, pad_token_id=0, attn_implementation="eager"))
    glm.load_state_dict(cogview4.text_state())
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        **files.KL,
    )
    vae.load_state_dict(cogview4.vae_state())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(cogview4.tokenizer_json().decode()),
        pad_token="<|endoftext|>",
        padding_side="left",
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
    )
    made = diffusers.CogView4Pipeline(tokenizer, glm.eval(), vae.eval(), network.eval(), scheduler)
    made.set_progress_bar_config(disable=True)
    return made


class Calls:
    """What a transformer is given and gives, call by call."""

    def __init__(self, module: torch.nn.Module):
        self.given: list[dict[str, torch.Tensor]] = []
        self.hook = module.register_forward_hook(self.note, with_kwargs=True)

    def note(self, module, args, kwargs, output):
        if args:  # ours: x, timesteps, context
            x, timesteps, context = args
        else:
            x, timesteps, context = (kwargs[key] for key in ("hidden_states", "timestep", "encoder_hidden_states"))
        out = output[0] if isinstance(output, tuple) else output
        self.given.append({"x": x, "timesteps": timesteps.float(), "context": context, "output": out})


def reference(pipeline: Any, size: tuple[int, int], negative: str, cfg: float, **options: Any):
    calls = Calls(pipeline.transformer)
    result = pipeline(
        prompt=cogview4.PROMPT,
        negative_prompt=negative,
        width=size[0],
        height=size[1],
        num_inference_steps=STEPS,
        guidance_scale=cfg,
        generator=torch.manual_seed(SEED),
        output_type="np",
        **options,
    )
    calls.hook.remove()
    return calls.given, result.images[0]


def ours(models: Path, output: Path, graph: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    from nativedit.engine import host

    calls: list[Calls] = []
    load = host.load_diffusion_model

    def listened(*args: Any, **kwargs: Any) -> torch.nn.Module:
        module = load(*args, **kwargs)
        calls.append(Calls(module))
        return module

    monkeypatch.setattr(host, "load_diffusion_model", listened)
    monkeypatch.setattr(engine, "_cache", None)
    result = nativedit.run(graph, models_dir=models, output_dir=output, progress=False)
    with Image.open(result.pictures[0]) as picture:
        return calls[0].given, np.asarray(picture), result


@pytest.mark.parametrize(
    ("size", "negative", "cfg"),
    [((96, 64), "", 3.5), ((64, 128), "small green square on the background and a red circle above the blue", 5.0)],
)
def test_every_step_and_the_picture_are_the_pipelines(
    pipeline: Any, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size, negative: str, cfg: float
):
    expected, picture = reference(pipeline, size, negative, cfg)
    graph = cogview4.graph(size=size, negative=negative, sampler={"cfg": -1.0 if cfg == 3.5 else cfg, "seed": SEED})

    given, pixels, _ = ours(models, tmp_path, graph, monkeypatch)

    assert len(given) == len(expected) == 2 * STEPS
    for call, (mine, theirs) in enumerate(zip(given, expected, strict=True)):
        assert mine["context"].shape == theirs["context"].shape
        assert mine["context"].shape[1] % 16 == 0
        torch.testing.assert_close(mine["timesteps"], theirs["timesteps"], rtol=1e-5, atol=1e-3)
        for name in ("x", "context", "output"):
            assert rel_err(mine[name], theirs[name]) <= 1e-4, (call, name)
    assert np.abs(pixels / 255 - picture).max() <= 1.01 / 255 + 1e-3


def test_sizes_and_crop_set_by_a_node_are_the_pipelines(
    pipeline: Any, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes = {"original_size": (640, 512), "crops_coords_top_left": (16, 8)}
    expected, _ = reference(pipeline, (96, 64), "", 3.5, **sizes)
    graph = cogview4.graph(sampler={"seed": SEED})
    for prompt in ("positive", "negative"):
        graph[f"{prompt}_sizes"] = node(
            "NativeDiTSizeConditions",
            conditioning=[prompt, 0],
            original_width=512,
            original_height=640,
            crop_left=8,
            crop_top=16,
            target_width=0,
            target_height=0,
        )
        graph["sampler"]["inputs"][prompt] = [f"{prompt}_sizes", 0]

    given, _, _ = ours(models, tmp_path, graph, monkeypatch)

    assert rel_err(given[-1]["output"], expected[-1]["output"]) <= 1e-4
    plain, _ = reference(pipeline, (96, 64), "", 3.5)
    assert rel_err(given[-1]["output"], plain[-1]["output"]) > 1e-3


def test_the_settings_are_told_and_kept_in_the_picture(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    graph = cogview4.graph(sampler={"steps": 2})

    _, _, result = ours(models, tmp_path, graph, monkeypatch)

    assert result.ui["sampler"]["text"] == ["2 steps, cfg 3.5, euler, published, shift 0.4796"]
    with Image.open(result.pictures[0]) as picture:
        kept = json.loads(picture.info["prompt"])["sampler"]
    assert kept["_meta"]["nativedit"] == {
        "steps": 2,
        "cfg": 3.5,
        "sampler": "euler",
        "scheduler": "published",
        "shift": pytest.approx(0.75 * (24 / 256) ** 0.5 + 0.25),
        "denoise": 1.0,
    }
    assert kept["inputs"]["cfg"] == -1.0, "the widgets stay as the user left them"
