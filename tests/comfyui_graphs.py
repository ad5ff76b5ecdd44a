"""Graphs in ComfyUI's API format, with readable node ids."""

from __future__ import annotations

from typing import Any

Graph = dict[str, Any]

PROMPT = "a red circle above a blue square"


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def own_text_encoder(file: str) -> dict[str, Any]:
    return node("NativeDiTLoadTextEncoder", file=file, architecture="auto", precision="as stored")


def text_to_latent(
    *,
    model: str = "tiny.safetensors",
    clip: str = "tiny_text.safetensors",
    prompt: str = PROMPT,
    negative: str = "",
    size: tuple[int, int] = (64, 48),
    batch: int = 1,
    seed: int = 7,
    steps: int = 4,
    cfg: float = 4.0,
    sampler: str = "euler",
    scheduler: str = "simple",
    denoise: float = 1.0,
    loader: str = "UNETLoader",
    own_clip_loader: bool = True,
) -> Graph:
    """From files to a saved latent; `model` -> `sampler` -> `save`. size: width, height."""
    graph = {
        "model": node("UNETLoader", unet_name=model, weight_dtype="default"),
        "clip": node("CLIPLoader", clip_name=clip, type="stable_diffusion"),
        "positive": node("CLIPTextEncode", text=prompt, clip=["clip", 0]),
        "negative": node("CLIPTextEncode", text=negative, clip=["clip", 0]),
        "latent": node("NativeDiTEmptyLatent", model=["model", 0], width=size[0], height=size[1], batch_size=batch),
        "sampler": node(
            "KSampler",
            model=["model", 0],
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            seed=seed,
            steps=steps,
            cfg=cfg,
            sampler_name=sampler,
            scheduler=scheduler,
            denoise=denoise,
        ),
        "save": node("SaveLatent", samples=["sampler", 0], filename_prefix="latents/test"),
    }
    if loader != "UNETLoader":
        graph["model"] = node(loader, file=model, architecture="auto", precision="as stored")
    if own_clip_loader:
        graph["clip"] = own_text_encoder(clip)
    return graph


def from_checkpoint(name: str) -> Graph:
    """`text_to_latent` with everything from one file; the autoencoder is output 2 of node `checkpoint`."""
    graph = {**text_to_latent(), "checkpoint": node("CheckpointLoaderSimple", ckpt_name=name)}
    del graph["clip"], graph["model"]
    for key in ("positive", "negative"):
        graph[key] = node("CLIPTextEncode", text=graph[key]["inputs"]["text"], clip=["checkpoint", 1])
    graph["latent"]["inputs"]["model"] = graph["sampler"]["inputs"]["model"] = ["checkpoint", 0]
    return graph


def between(graph: Graph, source: str, target: str, name: str, new: dict[str, Any], input_name: str = "model") -> Graph:
    """``new`` (as node ``name``, taking ``input_name``) put between ``source`` and ``target``, on a copy."""
    graph = {key: {**value, "inputs": dict(value["inputs"])} for key, value in graph.items()}
    graph[name] = {**new, "inputs": {**new["inputs"], input_name: [source, 0]}}
    for key, value in graph[target]["inputs"].items():
        if value == [source, 0]:
            graph[target]["inputs"][key] = [name, 0]
    return graph


def with_model_node(graph: Graph, name: str, kind: str, **inputs: Any) -> Graph:
    """A node that patches the model, right before the sampler."""
    source = graph["sampler"]["inputs"]["model"][0]
    return between(graph, source, "sampler", name, node(kind, **inputs))


def with_picture(graph: Graph) -> Graph:
    """Decode and save a picture besides the latent."""
    return {
        **graph,
        "vae": node("VAELoader", vae_name="pixel_space"),
        "decode": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "picture": node("SaveImage", images=["decode", 0], filename_prefix="test"),
    }
