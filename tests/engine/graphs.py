"""Graphs whose latents are compared with ComfyUI's: name -> graph in API format; `save` saves the latent."""

from __future__ import annotations

from typing import Any

from comfyui_graphs import between, node, text_to_latent, with_model_node

Graph = dict[str, Any]


def small(**settings: Any) -> Graph:
    return text_to_latent(**{"size": (32, 24)} | settings)


PRX = {"model": "tiny_prx.safetensors", "clip": "tiny_t5gemma.safetensors"}


def image_to_image(
    *,
    masked: bool = False,
    sampler: str = "euler",
    denoise: float = 0.6,
    model_files: dict[str, str] | None = None,
    size: tuple[int, int] = (32, 24),
) -> Graph:
    """From a latent that was sampled before; with a mask only its right part is sampled again."""
    graph = small(steps=3, seed=11, size=size, **(model_files or {}))
    second = small(steps=4, sampler=sampler, denoise=denoise)["sampler"]
    second["inputs"]["latent_image"] = ["sampler", 0]
    graph |= {"second": second}
    graph["save"]["inputs"]["samples"] = ["second", 0]
    if masked:
        graph["mask"] = node("SolidMask", value=0.7, width=16, height=24)
        graph["masked"] = node("SetLatentNoiseMask", samples=["sampler", 0], mask=["mask", 0])
        second["inputs"]["latent_image"] = ["masked", 0]
    return graph


def advanced(*, return_noise: str = "enable") -> Graph:
    """One run cut in two at step 3 of 6."""
    graph = small()
    common = {
        "model": ["model", 0],
        "positive": ["positive", 0],
        "negative": ["negative", 0],
        "noise_seed": 7,
        "steps": 6,
        "cfg": 4.0,
        "sampler_name": "euler",
        "scheduler": "normal",
    }
    first = {"add_noise": "enable", "start_at_step": 0, "end_at_step": 3, "return_with_leftover_noise": return_noise}
    second = {"add_noise": "disable", "start_at_step": 3, "end_at_step": 10000, "return_with_leftover_noise": "disable"}
    graph["first"] = node("KSamplerAdvanced", **common, **first, latent_image=["latent", 0])
    graph["sampler"] = node("KSamplerAdvanced", **common, **second, latent_image=["first", 0])
    return graph


def custom(guider: str = "CFGGuider", *, denoise: float = 1.0) -> Graph:
    graph = small()
    settings = {"model": ["model", 0]}
    if guider == "CFGGuider":
        settings |= {"positive": ["positive", 0], "negative": ["negative", 0], "cfg": 3.0}
    else:
        settings |= {"conditioning": ["positive", 0]}
    graph |= {
        "noise": node("RandomNoise", noise_seed=5),
        "guider": node(guider, **settings),
        "select": node("KSamplerSelect", sampler_name="dpmpp_2m"),
        "sigmas": node("BasicScheduler", model=["model", 0], scheduler="karras", steps=4, denoise=denoise),
        "sampler": node(
            "SamplerCustomAdvanced",
            noise=["noise", 0],
            guider=["guider", 0],
            sampler=["select", 0],
            sigmas=["sigmas", 0],
            latent_image=["latent", 0],
        ),
    }
    return graph


def empty(kind: str, width: int, height: int) -> Graph:
    return {**small(), "latent": node(kind, width=width, height=height, batch_size=2)}


def with_lora(file: str, *, strength: float = 0.8) -> Graph:
    graph = small()
    loader = node("LoraLoader", clip=["clip", 0], lora_name=file, strength_model=strength, strength_clip=strength)
    graph = between(graph, "model", "sampler", "lora", loader)
    for key in ("positive", "negative"):
        graph[key]["inputs"]["clip"] = ["lora", 1]
    return graph


def zeroed() -> Graph:
    graph = small(negative="blue")
    return between(graph, "negative", "sampler", "zero", node("ConditioningZeroOut"), "conditioning")


GRAPHS: dict[str, Graph] = {
    "plain": small(),
    "bfloat16": small(model="tiny_bf16.safetensors", clip="tiny_text_bf16.safetensors"),
    "header_config": small(model="odd.safetensors", clip="odd_text.safetensors"),
    "weighted": small(prompt="a (red:1.4) circle (above) a [blue] square \\(small\\)", negative="(green:0.5)"),
    "no_guidance": small(cfg=1.0),
    "odd_size": small(size=(48, 40), steps=3),
    "batch": small(batch=2, sampler="euler_ancestral", scheduler="sgm_uniform"),
    "heun_beta": small(sampler="heun", scheduler="beta", steps=5),
    "uni_pc": small(sampler="uni_pc", scheduler="exponential", steps=5),
    "lcm": small(sampler="lcm", scheduler="ddim_uniform", cfg=1.5),
    "image_to_image": image_to_image(),
    "masked": image_to_image(masked=True),
    "masked_ddim": image_to_image(masked=True, sampler="ddim", denoise=1.0),
    "advanced": advanced(),
    "advanced_denoised": advanced(return_noise="disable"),
    "custom": custom(),
    "custom_basic": custom("BasicGuider", denoise=0.5),
    "prx": small(**PRX, prompt="A (Red:1.3) circle &amp; a Square", size=(48, 32)),
    "prx_image": image_to_image(model_files=PRX, size=(48, 32)),
    "prx_sd3_latent": {
        **small(**PRX, sampler="res_multistep"),
        "latent": node("EmptySD3LatentImage", width=72, height=40, batch_size=1),
    },
    "sd3_shift": with_model_node(small(), "shifted", "ModelSamplingSD3", shift=5.0),
    "aura_shift": with_model_node(small(scheduler="normal"), "shifted", "ModelSamplingAuraFlow", shift=1.0),
    "noise_scale": with_model_node(small(sampler="lcm"), "scaled", "ModelNoiseScale", noise_scale=1.5),
    "radiance_latent": empty("EmptyChromaRadianceLatentImage", 32, 24),
    "small_latent": empty("EmptyLatentImage", 32, 24),
    "sd3_latent": empty("EmptySD3LatentImage", 32, 24),
    "zeroed": zeroed(),
    "lora": with_lora("dit_comfy.safetensors"),
    "lora_kohya": with_lora("dit_kohya.safetensors", strength=-0.5),
    "lora_text": with_lora("text_kohya.safetensors"),
}
