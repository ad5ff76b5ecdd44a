"""From noise to latent beside diffusers' NucleusMoEImagePipeline 0.42.1, every component tiny and random."""

import dataclasses
import math

import pytest
import torch
from PIL import Image
from support import ROOT, rel_err

import nativedit
from nativedit.engine.flow import FlowSampling
from nativedit.engine.objects import Model
from nativedit.engine.patch_guidance import set_patch_renormalized_guidance
from nativedit.engine.sampling import Guider, sample
from nativedit.engine.schedules import sigmas_for
from nativedit.engine.wan_vae import load_wan_autoencoder
from nativedit.latent_formats import get_latent_format
from nativedit.ldm.layers.patches import unpatchify
from nativedit.ldm.nucleus.model import NucleusMoEImageTransformer2DModel
from nativedit.ldm.nucleus.sampling import patch_norm, patch_renormalized_guidance
from nativedit.parity.build import randomise
from nativedit.supported_models import get_architecture

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("single_thread")

CARD = get_architecture("nucleus_image")
CONFIG = {
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
    "dense_moe_strategy": "leave_first_block_dense",
    "num_experts": 4,
    "moe_intermediate_dim": 24,
    "capacity_factors": 2.0,
}
STEPS, CFG = 8, 4.0  # so many steps that a table of 1000 sigmas holds them exactly
# Both programs that users have: without a shift, and with FLUX.1's dynamic one.
SCHEDULERS = {
    "static": {"shift": 1.0},
    "dynamic": {"shift": 1.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15},
}


@pytest.fixture(scope="module")
def components():
    torch.manual_seed(0)
    transformer = diffusers.NucleusMoEImageTransformer2DModel(**CONFIG).eval()
    randomise(transformer)
    vae = diffusers.AutoencoderKLQwenImage(base_dim=8).eval()
    embeds = {"prompt_embeds": torch.randn(1, 7, 24), "negative_prompt_embeds": torch.randn(1, 4, 24)}
    masks = {name + "_mask": torch.ones(value.shape[:2], dtype=torch.long) for name, value in embeds.items()}
    return transformer, vae, embeds, masks


def ours(transformer, shift):
    module = NucleusMoEImageTransformer2DModel(**CONFIG, device="meta")
    module.load_state_dict(transformer.state_dict(), assign=True)
    return Model(
        file="tiny",
        module=module.requires_grad_(False).eval(),
        architecture=CARD,
        latent=get_latent_format("wan21"),
        sampling=dataclasses.replace(FlowSampling.of_card(CARD.sampling), shift=shift),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


@pytest.mark.parametrize("size", [(96, 64), (80, 48)])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_sampled_latent_equals_the_pipelines(components, kind, size):
    """The second size has odd counts of tokens."""
    transformer, vae, embeds, masks = components
    width, height = size
    noise = torch.randn(1, 16, height // 8, width // 8, generator=torch.Generator().manual_seed(5))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**SCHEDULERS[kind])
    pipeline = diffusers.NucleusMoEImagePipeline(transformer, scheduler, vae, text_encoder=None, processor=None)
    pipeline.set_progress_bar_config(disable=True)
    packed = pipeline._pack_latents(noise, 1, 16, height // 8, width // 8, 2)
    with torch.no_grad():
        theirs = pipeline(
            **embeds,
            **masks,
            height=height,
            width=width,
            num_inference_steps=STEPS,
            guidance_scale=CFG,
            latents=packed,
            output_type="latent",
        ).images
    tokens = noise.shape[-1] * noise.shape[-2] // 4
    shift = math.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256)) if kind == "dynamic" else CARD.sampling.shift
    model = set_patch_renormalized_guidance(ours(transformer, shift), 2)
    guider = Guider(model, [(embeds["prompt_embeds"], {})], [(embeds["negative_prompt_embeds"], {})], CFG)
    sigmas = sigmas_for(model.sampling, CARD.defaults.scheduler, STEPS)
    made = sample(guider, noise, torch.zeros_like(noise), CARD.defaults.sampler, sigmas, seed=0)
    assert rel_err(model.latent.into_model(made), unpatchify(theirs, 2, *noise.shape[-2:])) <= 1e-4


def test_guidance_keeps_each_patchs_length_and_turns_it():
    torch.manual_seed(0)
    cond, uncond = torch.randn(2, 16, 8, 6), torch.randn(2, 16, 8, 6)
    guided = patch_renormalized_guidance(cond, uncond, 4.0)
    assert torch.allclose(patch_norm(guided, 2), patch_norm(cond, 2), rtol=1e-5)
    plain = uncond + 4.0 * (cond - uncond)
    assert torch.allclose(torch.cosine_similarity(guided[:, :, :1, :1], plain[:, :, :1, :1]), torch.ones(2, 1, 1))
    assert rel_err(guided, plain) > 0.1
    assert rel_err(patch_renormalized_guidance(cond, uncond, 1.0), cond) <= 1e-6


def test_guidance_takes_an_axis_for_frames_multiples_and_odd_sizes():
    torch.manual_seed(0)
    cond, uncond = torch.randn(1, 16, 5, 7), torch.randn(1, 16, 5, 7)
    guided = patch_renormalized_guidance(cond, uncond, 4.0)
    assert torch.equal(patch_renormalized_guidance(cond[:, :, None], uncond[:, :, None], 4.0)[:, :, 0], guided)
    assert torch.allclose(patch_renormalized_guidance(cond * 0.3, uncond * 0.3, 4.0), guided * 0.3, atol=1e-6)
    assert patch_renormalized_guidance(cond * 0, uncond * 0, 4.0).eq(0).all()


@pytest.mark.parametrize("tile", [None, 64])
def test_the_engines_autoencoder_is_the_pipelines(components, tile, tmp_path):
    from safetensors.torch import save_file

    _, vae, _, _ = components
    save_file(vae.state_dict(), tmp_path / "vae.safetensors")
    loaded = load_wan_autoencoder(tmp_path / "vae.safetensors", device=torch.device("cpu"))
    pictures = torch.rand(2, 96, 64, 3)
    with torch.no_grad():
        latents = vae.encode((pictures.movedim(-1, 1) * 2 - 1)[:, :, None]).latent_dist.mode()
        decoded = vae.decode(latents).sample[:, :, 0].movedim(1, -1) / 2 + 0.5
    assert loaded.channels == 16 and rel_err(loaded.encode(pictures), latents[:, :, 0]) <= 1e-5
    made = loaded.decode(latents[:, :, 0], tile=tile)
    assert made.shape == pictures.shape
    if tile is None:
        assert rel_err(made, decoded.clamp(0, 1)) <= 1e-5


def test_another_autoencoder_is_not_taken(tmp_path):
    from safetensors.torch import save_file

    save_file({"decoder.conv_in.weight": torch.zeros(1)}, tmp_path / "vae.safetensors")
    assert load_wan_autoencoder(tmp_path / "vae.safetensors", device=torch.device("cpu")) is None


@pytest.mark.parametrize("workflow", ["nucleus_image.json", "api/nucleus_image.json"])
def test_the_example_workflow_runs_on_tiny_files_in_the_published_layouts(workflow, tmp_path):
    import nucleus_files

    nucleus_files.write(tmp_path / "models")
    result = nativedit.run(
        ROOT / "example_workflows" / workflow,
        models_dir=tmp_path / "models",
        output_dir=tmp_path / "output",
        values={"NativeDiTEmptyLatent.width": 80, "NativeDiTEmptyLatent.height": 48, "KSampler.steps": 2},
        progress=False,
    )
    nodes = {node["class_type"]: node["inputs"] for node in result.prompt.values()}
    sampler = nodes["KSampler"]
    assert (sampler["cfg"], sampler["sampler_name"], sampler["scheduler"]) == (4.0, "euler", "simple")
    assert nodes["NativeDiTPatchRenormalizedGuidance"]["patch_size"] == 2
    assert result.prompt[sampler["model"][0]]["class_type"] == "NativeDiTPatchRenormalizedGuidance"
    (picture,) = result.pictures
    assert Image.open(picture).size == (80, 48)
