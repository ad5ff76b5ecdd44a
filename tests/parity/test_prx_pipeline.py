"""Whole pictures: diffusers' PRXPipeline and PRXPixelPipeline 0.42.1 beside the engine, from prompt to pixels.

Tiny random components, saved as the files that people have and loaded by the engine's own loaders. Noise and sigmas are
the reference's: its scheduler shifts the low end twice, which no schedule of ours does. Batch 1, because the reference
fails at batch 2 with guidance. Text goes through transformers' encoder there, through our language model here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from dit_checks import randomise
from PIL import Image
from safetensors.torch import save_file
from support import ROOT, rel_err

from nativedit.engine.host import EngineHost
from nativedit.engine.model_folders import ModelFolders
from nativedit.engine.sampling import Guider, sample
from nativedit.supported_models import find_architecture, get_architecture

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("ftfy")
pytestmark = pytest.mark.usefixtures("single_thread")

WORDS = ["<pad>", "<unk>", "a", "red", "fox", "on", "snow", "see", "Red", "FOX", "https", ":", "&", "amp", ";", "&amp"]
TEXT = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
PROMPT = "A Red FOX on snow &amp;amp; see https://example.com/fox.png"
SCALES = {"prx": 1.0, "prx_dc_ae": 1.0, "prx_pixel": 2.0}  # of the noise, by PRXPixel's model card


@dataclass
class Pair:
    """The reference pipeline, and the engine's model, text encoder and autoencoder from the same weights."""

    name: str
    pipeline: Any
    model: Any
    clip: Any
    vae: Any


def tokenizer_json() -> str:
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer.to_str()


def reference_tokenizer() -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer_json()),
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=256,
    )


def t5gemma() -> torch.nn.Module:
    from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    config = T5GemmaModuleConfig(**TEXT, query_pre_attn_scalar=8, attn_implementation="eager", dropout_rate=0.0)
    return T5GemmaEncoder(config)


def qwen3_vl() -> torch.nn.Module:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]}
    return Qwen3VLTextModel(Qwen3VLTextConfig(**TEXT, rope_parameters=rope, attn_implementation="eager"))


def autoencoder() -> torch.nn.Module:
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 32, 32, 32),
        layers_per_block=1,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.3611,
        shift_factor=0.1159,
    )


def transformer(name: str) -> torch.nn.Module:
    common = {"context_in_dim": 32, "hidden_size": 48, "num_heads": 3, "depth": 2, "axes_dim": [8, 8]}
    kinds = {
        "prx": {"in_channels": 16, "patch_size": 2},
        "prx_dc_ae": {"in_channels": 32, "patch_size": 1},
        "prx_pixel": {"in_channels": 3, "patch_size": 8, "bottleneck_size": 12, "resolution_embeds": True},
    }
    return diffusers.PRXTransformer2DModel(**kinds[name], **common)


NAMES = {"diffusion_models": "model.safetensors", "text_encoders": "text.safetensors", "vae": "vae.safetensors"}


def files_of(folder: Path, network, encoder, vae, names: dict[str, str] = NAMES) -> EngineHost:
    """The components as files in ComfyUI's folders, and the engine with these folders."""
    for name in ("diffusion_models", "text_encoders", "vae"):
        (folder / name).mkdir(exist_ok=True)
    save_file(network.state_dict(), folder / "diffusion_models" / names["diffusion_models"])
    tokenizer = torch.frombuffer(bytearray(tokenizer_json().encode()), dtype=torch.uint8).clone()
    save_file(
        {**encoder.state_dict(), "tokenizer_json": tokenizer},
        folder / "text_encoders" / names["text_encoders"],
        {"config": json.dumps({"text_encoder": encoder.config.to_dict()})},
    )
    if vae is not None:
        save_file(vae.state_dict(), folder / "vae" / names["vae"])
    return EngineHost(ModelFolders(folder), folder / "output", folder / "input", device=torch.device("cpu"))


@pytest.fixture(scope="module", params=["prx", "prx_dc_ae", "prx_pixel"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name = request.param
    torch.manual_seed(11)
    network, encoder = transformer(name), qwen3_vl() if name == "prx_pixel" else t5gemma()
    vae = autoencoder() if name == "prx" else None  # DC-AE's own tests compare what it decodes
    for module in filter(None, (network, encoder, vae)):
        randomise(module.eval().requires_grad_(False))
    parts = {
        "transformer": network,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "text_encoder": encoder,
        "tokenizer": reference_tokenizer(),
    }
    pipeline = diffusers.PRXPixelPipeline(**parts) if name == "prx_pixel" else diffusers.PRXPipeline(**parts, vae=vae)
    pipeline.set_progress_bar_config(disable=True)
    host = files_of(tmp_path_factory.mktemp(name), network, encoder, vae)
    model = host.load_diffusion_model("model.safetensors")
    clip = host.load_text_encoder("text.safetensors", architecture=name)
    decoder = (
        host.load_vae("pixel_space" if name == "prx_pixel" else "vae.safetensors") if name != "prx_dc_ae" else None
    )
    return Pair(name, pipeline, model, clip, decoder)


def noise_for(pair: Pair) -> torch.Tensor:
    channels, side = pair.model.latent.channels, {"prx": 8, "prx_dc_ae": 6, "prx_pixel": 32}[pair.name]
    return torch.randn(1, channels, side, side + pair.model.patch_size, generator=torch.Generator().manual_seed(3))


def run_reference(pair: Pair, noise: torch.Tensor, steps: int, cfg: float, output: str) -> tuple[Any, list]:
    """The pipeline's result, and the latent after every step."""
    latents: list[torch.Tensor] = []
    # Without a VAE the latent pipeline counts 8 pixels per latent pixel.
    compression = 1 if pair.name == "prx_pixel" else 8

    def keep(_pipeline, _step, _time, given):
        latents.append(given["latents"].clone())
        return given

    result = pair.pipeline(
        prompt=PROMPT,
        height=noise.shape[-2] * compression,
        width=noise.shape[-1] * compression,
        num_inference_steps=steps,
        guidance_scale=cfg,
        latents=noise * SCALES[pair.name],
        output_type=output,
        use_resolution_binning=False,
        callback_on_step_end=keep,
    )
    return result.images, latents


def run_ours(pair: Pair, noise: torch.Tensor, sigmas: torch.Tensor, cfg: float) -> tuple[torch.Tensor, list]:
    """The raw latent, and the latent in the model's scale after every step: x0 + (x - x0) * next / sigma."""
    latents, x = [], noise * pair.model.sampling.noise_scale

    def keep(step: int, x0: torch.Tensor) -> None:
        nonlocal x
        x = x0 + (x - x0) * sigmas[step + 1] / sigmas[step]
        latents.append(x)

    guider = Guider(pair.model, [pair.clip.encode(PROMPT)], [pair.clip.encode("")], cfg)
    zeros = torch.zeros_like(noise)
    return sample(guider, noise, zeros, "euler", sigmas, seed=0, on_step=keep), latents


def test_the_engine_recognises_the_files(pair: Pair):
    assert pair.model.architecture.name == pair.name
    assert (
        pair.model.architecture.autoencoder
        == {
            "prx": "kl_flux",
            "prx_dc_ae": "dc_ae_f32c32",
            "prx_pixel": "pixel_space",
        }[pair.name]
    )


def test_the_prompt_is_cleaned_and_cut_into_the_references_tokens(pair: Pair):
    ids, mask = pair.pipeline._tokenize_prompts([PROMPT], torch.device("cpu"))
    from nativedit.text_encoders.prompt import tokenize_prompt

    ours = tokenize_prompt(pair.clip.encoder.tokenizer, get_architecture(pair.name).prompt, PROMPT)
    assert ours == ids[0][mask[0]].tolist()
    cleaned = pair.name != "prx_pixel"
    assert (WORDS.index("Red") not in ours) == cleaned, "the latent models lower the case, the pixel model keeps it"


def test_text_states_are_the_references_where_text_stands(pair: Pair):
    states, mask, _, negative_mask = pair.pipeline.encode_prompt(PROMPT, negative_prompt="")
    ours, extra = pair.clip.encode(PROMPT)
    assert rel_err(ours[0], states[0][mask[0]]) <= 1e-5 and bool(extra["attention_mask"].all())
    empty, extra = pair.clip.encode("")
    assert not negative_mask.any() and not extra["attention_mask"].any() and empty.isfinite().all()


@pytest.mark.parametrize("cfg", [5.0, 1.0])
def test_every_step_and_the_last_latent_are_the_references(pair: Pair, cfg: float):
    noise, steps = noise_for(pair), 8
    _, expected = run_reference(pair, noise, steps, cfg, "pt" if pair.name == "prx_pixel" else "latent")
    result, latents = run_ours(pair, noise, pair.pipeline.scheduler.sigmas, cfg)
    assert len(latents) == len(expected) == steps
    for step, (ours, theirs) in enumerate(zip(latents, expected, strict=True)):
        assert rel_err(ours, theirs) <= 1e-4, f"step {step}"
    assert rel_err(pair.model.latent.into_model(result), expected[-1]) <= 1e-4


def test_pictures_are_the_references(pair: Pair):
    if pair.vae is None:
        assert pair.name == "prx_dc_ae"  # compared to the latent above, and its decoder in test_dc_ae
        return
    noise = noise_for(pair)
    pictures, _ = run_reference(pair, noise, 4, 5.0, "np")
    result, _ = run_ours(pair, noise, pair.pipeline.scheduler.sigmas, 5.0)
    assert rel_err(pair.vae.decode(result), torch.from_numpy(pictures)) <= 1e-4


def test_the_references_schedule_shifts_twice_and_the_cards_is_the_trainers(pair: Pair):
    from nativedit.cli_compare import _card_sigmas

    pair.pipeline.scheduler.set_timesteps(4)
    theirs = pair.pipeline.scheduler.sigmas.tolist()
    ours = _card_sigmas(pair.model.architecture, 4, 8, 8)
    assert ours == pytest.approx([1.0, 0.9, 0.75, 0.5, 0.0], abs=1e-6), "linspace(1, 0), shifted by 3: Photoroom/PRX"
    assert theirs[-2] == pytest.approx(0.00893, abs=1e-5)


@pytest.mark.parametrize("workflow", ["prx.json", "api/prx.json"])
def test_the_example_workflow_runs_on_tiny_weights(workflow: str, tmp_path: Path):
    import nativedit

    torch.manual_seed(5)
    network, encoder, vae = transformer("prx"), t5gemma(), autoencoder()
    for module in (network, encoder, vae):
        randomise(module.requires_grad_(False))
    names = {folder: known[0] for folder, known in get_architecture("prx").files.items()}
    files_of(tmp_path, network, encoder, vae, names)
    small = {"NativeDiTEmptyLatent.width": 64, "NativeDiTEmptyLatent.height": 48, "KSampler.steps": 2}
    result = nativedit.run(
        ROOT / "example_workflows" / workflow,
        models_dir=tmp_path,
        output_dir=tmp_path / "output",
        values=small,
        progress=False,
    )
    sampler = next(node for node in result.prompt.values() if node["class_type"] == "KSampler")["inputs"]
    assert (sampler["cfg"], sampler["sampler_name"], sampler["scheduler"]) == (5.0, "euler", "simple")
    (picture,) = result.pictures
    assert Image.open(picture).size == (64, 48)


# the cards

PUBLISHED = {
    "prx": ({}, 188, 1_170_691_648),
    "prx_dc_ae": ({"in_channels": 32, "patch_size": 1}, 188, 1_170_576_928),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "transformer."])
def test_published_models_are_told_apart_by_the_width_of_a_token(name: str, prefix: str):
    config, keys, parameters = PUBLISHED[name]
    with torch.device("meta"):
        state = diffusers.PRXTransformer2DModel(**config).state_dict()
    assert len(state) == keys and sum(value.numel() for value in state.values()) == parameters
    match = find_architecture({prefix + key: tuple(value.shape) for key, value in state.items()})
    assert (match.architecture.name, match.prefix) == (name, prefix)
    assert match.config["in_channels"] * match.config["patch_size"] ** 2 == state["img_in.weight"].shape[1]
    module = match.architecture.module_class()(**match.config, device="meta")
    assert {key: value.shape for key, value in module.state_dict().items()} == {k: v.shape for k, v in state.items()}


def test_other_widths_and_pixel_models_are_not_claimed_by_latent_cards():
    with torch.device("meta"):
        odd = diffusers.PRXTransformer2DModel(in_channels=32, patch_size=2, depth=1).state_dict()
        pixel = transformer("prx_pixel").state_dict()
    for state in (odd, pixel):
        shapes = {key: tuple(value.shape) for key, value in state.items()}
        assert get_architecture("prx").match(shapes) is None and get_architecture("prx_dc_ae").match(shapes) is None


def test_the_trainers_layout_of_a_latent_model_is_recognised():
    with torch.device("meta"):
        state = diffusers.PRXTransformer2DModel(depth=2).state_dict()
    names = (
        ("attention.img_qkv_proj", "img_qkv_proj"),
        ("attention.txt_kv_proj", "txt_kv_proj"),
        ("attention.norm_q.weight", "qk_norm.query_norm.scale"),
        ("attention.norm_k.weight", "qk_norm.key_norm.scale"),
        ("attention.norm_added_k.weight", "k_norm.scale"),
        ("attention.to_out.0", "attn_out"),
    )

    def theirs(key: str) -> str:
        for ours, trainer in names:
            key = key.replace(ours, trainer)
        return f"state.model.denoiser.{key}"

    shapes = {theirs(key): tuple(value.shape) for key, value in state.items()}
    match = find_architecture(shapes)
    assert (match.architecture.name, match.layout.name) == ("prx", "trainer")
    assert {match.rename(key) for key in shapes} == set(state)


def test_settings_of_a_variant_follow_from_its_name():
    """Model cards: 28 steps with guidance 5; distilled: 8 steps without; sizes are in the repositories' names."""
    card, dc_ae = get_architecture("prx"), get_architecture("prx_dc_ae")
    for of, name, expected in (
        (card, "prx_1024_t2i_beta.safetensors", (28, 5.0, 1024)),
        (card, "Photoroom/prx-512-t2i-sft-distilled", (8, 1.0, 512)),
        (card, "prx_256_t2i.safetensors", (28, 5.0, 256)),
        (card, None, (28, 5.0, 1024)),
        (dc_ae, "prx_512_t2i_dc_ae_sft_distilled.safetensors", (8, 1.0, 512)),
        (dc_ae, "mine.safetensors", (28, 5.0, 512)),
    ):
        settings = of.defaults_for(name)
        assert (settings.steps, settings.cfg, settings.width) == expected, name


def test_the_wide_layer_is_rotated_in_smaller_groups():
    """down_proj has 6272 inputs, 24.5 groups of 256 and 98 of 64; nvfp4's groups of 16 fit."""
    from nativedit.quant.formats import parse_recipe
    from nativedit.quant.policy import Policy, decide

    with torch.device("meta"):
        state = diffusers.PRXTransformer2DModel().state_dict()
    tensors = {key: ("BF16", tuple(value.shape), 0) for key, value in state.items()}
    card = get_architecture("prx").quantization

    def quantized(format: str) -> dict[str, Any]:
        decided = decide(tensors, Policy(parse_recipe(format), card=card))
        return {d.layer: d.recipe for d in decided if d.recipe is not None}

    blocks, rotated = quantized("nvfp4"), quantized("int8_convrot")
    wide = {f"blocks.{i}.down_proj" for i in range(16)}
    assert len(blocks) == 6 * 16 and all(layer.startswith("blocks.") for layer in blocks)
    assert rotated.keys() == blocks.keys()
    assert {layer for layer, recipe in rotated.items() if recipe.convrot_groupsize == 64} == wide
