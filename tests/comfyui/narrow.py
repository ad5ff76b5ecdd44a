"""ComfyUI's detection for models of its own architectures that are narrower than any published one.

Of Lumina 2, Z-Image, Qwen-Image, Chroma and (in old versions) FLUX it takes widths for granted that no shape is asked
for. Installed before the pack, so that the pack meets it as ComfyUI's own answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]


def install(model_detection: Any) -> None:
    original = model_detection.detect_unet_config

    def detect_unet_config(state_dict: Any, key_prefix: str, *args: Any, **kwargs: Any) -> Any:
        config = original(state_dict, key_prefix, *args, **kwargs)
        kind = (config or {}).get("image_model")
        if kind in SIZES:
            own = {
                key.removeprefix(key_prefix): tuple(value.shape)
                for key, value in state_dict.items()
                if key.startswith(key_prefix)
            }
            config.update(SIZES[kind](own))
        return config

    model_detection.detect_unet_config = detect_unet_config


def _lumina(shapes: Shapes) -> dict[str, Any]:
    width = shapes["cap_embedder.1.weight"][0]
    sizes = {
        "ffn_dim_multiplier": shapes["layers.0.feed_forward.w1.weight"][0] / width,
        "n_refiner_layers": _count(shapes, "noise_refiner."),
    }
    if "cap_pad_token" not in shapes:  # Lumina 2
        heads = width // 96
        rows = shapes["layers.0.attention.qkv.weight"][0]
        return {
            **sizes,
            "n_heads": heads,
            "n_kv_heads": (rows // 96 - heads) // 2,
            "axes_dims": [32, 32, 32],
            "axes_lens": [300, 512, 512],
            "rope_theta": 10000.0,
        }
    return {  # Z-Image
        **sizes,
        "n_heads": width // 128,
        "n_kv_heads": width // 128,
        "axes_dims": [32, 48, 48],
        "axes_lens": [1536, 512, 512],
        "rope_theta": 256.0,
        "z_image_modulation": True,
        "time_scale": 1000.0,
        "pad_tokens_multiple": 32,
    }


def _count(shapes: Shapes, prefix: str) -> int:
    return len({key[len(prefix) :].split(".")[0] for key in shapes if key.startswith(prefix)})


def _qwen_image(shapes: Shapes) -> dict[str, Any]:
    return {
        "num_attention_heads": shapes["img_in.weight"][0] // 128,
        "joint_attention_dim": shapes["txt_norm.weight"][0],
    }


def _flux(shapes: Shapes) -> dict[str, Any]:
    """Later versions of ComfyUI read it themselves."""
    rows = shapes["double_blocks.0.img_attn.qkv.weight"][0] // 3
    return {"num_heads": rows // shapes[_first(shapes, "double_blocks.0.img_attn.norm.key_norm.")][0]}


def _first(shapes: Shapes, prefix: str) -> str:
    return next(key for key in shapes if key.startswith(prefix))


def _chroma(shapes: Shapes) -> dict[str, Any]:
    return {
        **_flux(shapes),
        "hidden_dim": shapes["distilled_guidance_layer.in_proj.weight"][0],
        "out_dim": shapes["distilled_guidance_layer.out_proj.weight"][0],
        "n_layers": _count(shapes, "distilled_guidance_layer.layers."),
    }


SIZES = {
    "lumina2": _lumina,
    "qwen_image": _qwen_image,
    "chroma": _chroma,
    "flux": _flux,
    "flux2": _flux,
}
