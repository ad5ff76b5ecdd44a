"""Sana and SANA-Sprint in the engine, from files to a latent, beside diffusers' whole pipelines (0.42.1)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfyui_files as files
import pytest
import sana_files as sana
import torch
from comfyui_graphs import node
from support import rel_err

sys.path.insert(0, str(Path(__file__).parent))

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

SCALE = 0.41407


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sana_models")
    for name in ("diffusion_models", "text_encoders", "vae", "loras", "checkpoints"):
        (made / name).mkdir()
    sana.write(made)
    return made


@pytest.fixture
def outputs(run: Callable, folder: Path) -> Callable[[dict], dict[str, Any]]:
    def of(graph: dict) -> dict[str, Any]:
        return run(graph, models_dir=folder).outputs

    return of


def reference(kind: str, config: dict[str, Any], scheduler: Any) -> Any:
    """The pipeline with our files' weights; its autoencoder is there for its compression alone."""
    transformer = diffusers.SanaTransformer2DModel(**config).eval()
    transformer.load_state_dict(sana.dit_state(config))
    text = transformers.Gemma2Model(
        transformers.Gemma2Config(
            **{key: value for key, value in sana.text_config().items() if key in GEMMA},
            attn_implementation="eager",
        )
    ).eval()
    text.load_state_dict(sana.text_state())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=sana.tokenizer(), bos_token="<bos>", pad_token="<pad>", eos_token="<eos>"
    )
    pipeline = getattr(diffusers, kind)(tokenizer, text, diffusers.AutoencoderDC(**TINY_VAE), transformer, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


GEMMA = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "sliding_window",
    "layer_types",
}
TINY_VAE = {
    "latent_channels": 32,
    "encoder_block_out_channels": (8,) * 6,
    "decoder_block_out_channels": (8,) * 6,
    "encoder_layers_per_block": (1,) * 6,
    "decoder_layers_per_block": (1,) * 6,
    "encoder_block_types": "ResBlock",
    "decoder_block_types": "ResBlock",
    "encoder_qkv_multiscales": ((),) * 6,
    "decoder_qkv_multiscales": ((),) * 6,
    "encoder_out_shortcut": False,
    "decoder_in_shortcut": False,
}


def dpm(order: int) -> Any:
    """Sana's published scheduler: its timesteps are whole numbers, cut off after the point."""
    return diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, solver_order=order
    )


def noise(seed: int = 7, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 32, 3, 4, generator=torch.manual_seed(seed))


@pytest.mark.parametrize(
    "prompt", [sana.PROMPT, "  UPPER case ", "word " * 400], ids=["ordinary", "cleaned", "too long"]
)
def test_prompts_are_encoded_as_by_the_pipeline(outputs: Callable, prompt: str):
    pipeline = reference("SanaPipeline", sana.DIT, dpm(2))
    negative = "Blurry, ugly "
    states, mask, unstates, unmask = pipeline.encode_prompt(
        prompt, True, negative_prompt=negative, device=torch.device("cpu"),
        complex_human_instruction=sana_instruction(),
    )  # fmt: skip

    made = outputs(sana.with_negative(sana.graph(prompt=prompt, steps=1), negative))

    for name, expected, real in (("positive", states, mask), ("negative", unstates, unmask)):
        [[ours, extra]] = made[name][0]
        assert extra["attention_mask"].all()
        assert rel_err(ours, expected[:, real[0].bool()]) <= 1e-5, name


def test_an_empty_prompt_is_the_pipelines_negative_one(outputs: Callable):
    pipeline = reference("SanaPipeline", sana.DIT, dpm(2))
    _, _, states, mask = pipeline.encode_prompt("a", True, negative_prompt="", device=torch.device("cpu"))

    [[ours, _]] = outputs(sana.graph(steps=1))["negative"][0]

    assert rel_err(ours, states[:, mask[0].bool()]) <= 1e-5


def sana_instruction() -> list[str]:
    from nativedit.supported_models._sana import INSTRUCTION

    return INSTRUCTION.split("\n")


class WholeTimesteps(torch.nn.Module):
    """A transformer that is given timesteps as the pipeline gives them."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x, timesteps, *args, **kwargs):
        return self.module(x, timesteps.trunc(), *args, **kwargs)


def guider(made: dict[str, Any]) -> Any:
    from nativedit.engine.sampling import Guider

    model = made["model"][0]
    model = replace(model, module=WholeTimesteps(model.module))
    return Guider(model, made["positive"][0], made["negative"][0], 4.5)


def pipeline_latents(pipeline: Any, steps: int, start: torch.Tensor) -> list[torch.Tensor]:
    """After every step."""
    seen = []

    def note(_pipeline, _step, _timestep, tensors):
        seen.append(tensors["latents"].clone())
        return tensors

    pipeline(
        sana.PROMPT,
        negative_prompt="",
        height=96,
        width=128,
        num_inference_steps=steps,
        guidance_scale=4.5,
        latents=start.clone(),
        use_resolution_binning=False,
        output_type="latent",
        callback_on_step_end=note,
    )
    return seen


@torch.inference_mode()
def test_every_step_of_the_published_pipeline_is_reproduced(outputs: Callable):
    """Solver and schedule are diffusers'; prompts, guidance, model and conversion to a clean latent are ours."""
    expected = pipeline_latents(reference("SanaPipeline", sana.DIT, dpm(2)), 4, noise())
    ours, x = guider(outputs(sana.graph(steps=1))), noise()
    solver = dpm(2)
    solver.set_timesteps(4)

    for step, timestep in enumerate(solver.timesteps):
        sigma = solver.sigmas[step]
        velocity = (x - ours.denoised(x, sigma[None].float())) / sigma
        x = solver.step(velocity, timestep, x).prev_sample
        assert rel_err(x, expected[step]) <= 1e-4, step


def test_the_engines_euler_is_the_pipelines_solver_of_first_order(outputs: Callable):
    from nativedit.engine.sampling import sample

    expected = pipeline_latents(reference("SanaPipeline", sana.DIT, dpm(1)), 5, noise())[-1]
    solver = dpm(1)
    solver.set_timesteps(5)
    ours = guider(outputs(sana.graph(steps=1)))
    sigmas = solver.sigmas.clone().float()
    start = noise() / sigmas[0]  # the pipeline takes its noise for sigma 1, though its first sigma is below

    latent = sample(ours, start, torch.zeros_like(start), "euler", sigmas, seed=0)

    assert rel_err(latent * SCALE, expected) <= 1e-4


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_sprint_in_a_ksampler_is_the_sprint_pipeline(outputs: Callable, steps: int):
    latent = outputs(sana.sprint_graph(steps=steps, seed=7))["sampler"][0]["samples"]

    assert rel_err(latent * SCALE, sprint_reference(steps)) <= 1e-4


def sprint_reference(steps: int, guidance: float = 4.5) -> torch.Tensor:
    """Noise between steps as an LCM sampler draws it: the next seed's."""
    pipeline = reference("SanaSprintPipeline", sana.SPRINT, diffusers.SCMScheduler())
    return pipeline(
        sana.PROMPT,
        height=96,
        width=128,
        num_inference_steps=steps,
        intermediate_timesteps=1.3 if steps == 2 else None,
        guidance_scale=guidance,
        latents=noise(),
        generator=torch.Generator().manual_seed(8),
        use_resolution_binning=False,
        output_type="latent",
    ).images


def test_the_guidance_node_sets_what_sprint_is_told(outputs: Callable):
    made = outputs(sana.with_guidance(sana.sprint_graph(), 2.0))["sampler"][0]["samples"]

    assert rel_err(made * SCALE, sprint_reference(2, guidance=2.0)) <= 1e-4


def test_custom_sampling_with_the_published_schedule_is_the_same(outputs: Callable):
    graph = sana.sprint_graph()
    graph |= {
        "noise": node("RandomNoise", noise_seed=7),
        "guider": node("BasicGuider", model=["model", 0], conditioning=["positive", 0]),
        "select": node("KSamplerSelect", sampler_name="lcm"),
        "sigmas": node("BasicScheduler", model=["model", 0], scheduler="published", steps=2, denoise=1.0),
        "custom": node(
            "SamplerCustomAdvanced",
            noise=["noise", 0],
            guider=["guider", 0],
            sampler=["select", 0],
            sigmas=["sigmas", 0],
            latent_image=["latent", 0],
        ),
        "custom_save": node("SaveLatent", samples=["custom", 0], filename_prefix="custom"),
    }
    made = outputs(graph)

    assert made["sigmas"][0].tolist() == pytest.approx([1.0, 0.782708, 0.0], abs=1e-6)
    assert torch.equal(made["custom"][0]["samples"], made["sampler"][0]["samples"])


@pytest.mark.parametrize("file", [sana.MODEL, sana.SPRINT_MODEL])
def test_auto_is_what_the_publisher_uses(outputs: Callable, file: str):
    ksampler = sana.sprint_graph() if file == sana.SPRINT_MODEL else sana.graph(steps=20, sampler="dpmpp_2m")
    own = {key: ksampler["sampler"]["inputs"][key] for key in ("model", "positive", "negative", "latent_image", "seed")}

    auto = node("NativeDiTSample", **own)
    auto_save = node("SaveLatent", samples=["auto", 0], filename_prefix="auto")
    made = outputs({**ksampler, "auto": auto, "auto_save": auto_save})

    assert torch.equal(made["auto"][0]["samples"], made["sampler"][0]["samples"])


@pytest.fixture(scope="session")
def converted(folder: Path) -> Callable[[str], str]:
    """The publisher's pickle as the file that `convert` makes of it; the engine reads no pickles."""
    import nativedit

    def of(name: str) -> str:
        target = folder / "diffusion_models" / name.replace(".pth", "_converted.safetensors")
        if not target.exists():
            nativedit.convert(folder / "diffusion_models" / name, target)
        return target.name

    return of


@pytest.mark.parametrize("name", ["sana", "sana_sprint"])
def test_the_examples_settings_are_the_cards(outputs: Callable, name: str):
    graph = sana.example(name)
    source, output = graph["save"]["inputs"]["samples"]
    own = {key: graph[source]["inputs"][key] for key in ("model", "positive", "negative", "latent_image", "seed")}
    auto_save = node("SaveLatent", samples=["auto", 0], filename_prefix="auto")

    made = outputs({**graph, "auto": node("NativeDiTSample", **own), "auto_save": auto_save})

    assert torch.equal(made["auto"][0]["samples"], made[source][output]["samples"])


def test_the_publishers_files_give_the_same_latent(outputs: Callable, converted: Callable):
    expected = outputs(sana.graph())["sampler"][0]["samples"]

    assert torch.equal(outputs(sana.graph(model=converted("sana.pth")))["sampler"][0]["samples"], expected)


@pytest.mark.parametrize("file", ["sana_4k.pth", "sana_4k.safetensors"])
def test_the_4k_model_has_its_positions_and_its_shift(outputs: Callable, converted: Callable, file: str):
    """By the position table of the publisher's file, or by the configuration in the header."""
    made = outputs(sana.graph(model=converted(file) if file.endswith(".pth") else file))
    model = made["model"][0]

    assert model.sampling.shift == 6.0
    assert (model.module.patch_embed.interpolation_scale, model.module.patch_embed.base_size) == (2.0, 128)
    plain = outputs(sana.graph())
    assert plain["model"][0].sampling.shift == 3.0
    assert rel_err(made["sampler"][0]["samples"], plain["sampler"][0]["samples"]) > 1e-2


@pytest.mark.parametrize("file", [sana.VAE, sana.PUBLISHERS_VAE])
def test_a_picture_goes_through_the_autoencoder(outputs: Callable, file: str):
    graph = sana.graph(steps=2)
    graph |= {
        "vae": node("VAELoader", vae_name=file),
        "decode": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "picture": node("PreviewImage", images=["decode", 0]),
    }
    made = outputs(graph)
    module = files.autoencoder("dc_ae")
    module.load_state_dict(files.random_state(module, 25))

    with torch.inference_mode():
        expected = (module.decode(made["sampler"][0]["samples"]) + 1).div(2).clamp(0, 1).movedim(1, -1)
    assert made["decode"][0].shape == (1, 96, 128, 3)
    assert rel_err(made["decode"][0], expected) <= 1e-5


@pytest.mark.parametrize(("format", "error"), [("int8_tensorwise", 0.1), ("float8_e4m3fn", 0.2), ("nvfp4", 0.6)])
def test_a_quantized_file_has_matrices_for_1x1_convolutions(outputs: Callable, folder: Path, format: str, error: float):
    import nativedit

    target = folder / "diffusion_models" / f"sana_{format}.safetensors"
    report = nativedit.quantize(folder / "diffusion_models" / sana.MODEL, target, format=format)

    chosen = {decision.layer for decision in report.quantized}
    assert "transformer_blocks.1.ff.conv_point" in chosen and "transformer_blocks.0.attn2.to_k" in chosen
    assert not any("conv_depth" in layer or "embed" in layer for layer in chosen)
    stored = files.tensors(target)
    assert stored["transformer_blocks.0.ff.conv_inverted.weight"].ndim == 2
    expected = outputs(sana.graph(cfg=1.0))["sampler"][0]["samples"]
    quantized = outputs(sana.graph(cfg=1.0, model=target.name))["sampler"][0]["samples"]
    assert 1e-4 < rel_err(quantized, expected) < error

    back = folder / "diffusion_models" / f"sana_{format}_back.safetensors"
    nativedit.dequantize(target, back, dtype="float32")
    assert rel_err(outputs(sana.graph(cfg=1.0, model=back.name))["sampler"][0]["samples"], quantized) < error / 10


def test_a_weighted_prompt_weighs_its_own_words_alone(outputs: Callable):
    graph = sana.graph(prompt="a (red:1.5) circle", steps=1)
    weighted, plain = (
        outputs(graph)["positive"][0][0][0],
        outputs(sana.graph(prompt="a red circle", steps=1))["positive"][0][0][0],
    )

    changed = [i for i in range(plain.shape[1]) if rel_err(weighted[:, i], plain[:, i]) > 1e-5]
    ids = sana.tokenizer().encode("a red circle", add_special_tokens=False)
    assert 0 not in changed
    assert 0 < len(changed) < len(ids.ids)
