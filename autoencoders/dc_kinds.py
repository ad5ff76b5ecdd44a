"""The deep-compression autoencoders this package claims, told by their shapes."""
# Facts: config.json of mit-han-lab/dc-ae-f32c32-sana-1.0-diffusers and -1.1-diffusers (375 keys; 1.1 differs in weights
# alone); key names of the original (mit-han-lab/efficientvit) layout from the converter in diffusers 0.42.1.

from __future__ import annotations

import re
from typing import Any

from . import Autoencoder, Config, Layout, Renamer, Shapes

SIGNATURE = (
    "encoder.conv_out.weight",
    "decoder.conv_in.weight",
    "decoder.norm_out.bias",
    "encoder.down_blocks.0.0.conv1.weight",
    "decoder.up_blocks.0.0.conv.weight",
)
_BLOCK = r"^(?:encoder\.down|decoder\.up)_blocks\.(\d+)\.(\d+)\.(.+)$"
# Of every published model; only a filter's second weight tells it, and a model without filters has none.
HEAD_DIM = 32


def dc_config(shapes: Shapes, prefix: str = "") -> Config | None:
    """Constructor arguments of any DC-AE that starts with a convolution, or None.

    The two shortcuts and the decoder's activations no shape tells; they are those of all published models that are
    built so. ``scaling_factor`` is not in a file at all.
    """
    if any(prefix + key not in shapes for key in SIGNATURE):
        return None
    own = {key[len(prefix) :]: tuple(shape) for key, shape in shapes.items() if key.startswith(prefix)}
    down, up = _half(own, "encoder.down"), _half(own, "decoder.up")
    if len(down["widths"]) != len(up["widths"]) or len(own["encoder.conv_in.weight"]) != 4:
        return None
    last_down = own[f"encoder.down_blocks.0.{down['layers'][0]}.conv.weight"][0]
    first_up = own["decoder.up_blocks.0.0.conv.weight"][0]
    return {
        "in_channels": own["encoder.conv_in.weight"][1],
        "latent_channels": own["encoder.conv_out.weight"][0],
        "attention_head_dim": down["head_dim"] or up["head_dim"] or HEAD_DIM,
        "encoder_block_types": down["types"],
        "decoder_block_types": up["types"],
        "encoder_block_out_channels": down["widths"],
        "decoder_block_out_channels": up["widths"],
        "encoder_layers_per_block": down["layers"],
        "decoder_layers_per_block": up["layers"],
        "encoder_qkv_multiscales": down["multiscales"],
        "decoder_qkv_multiscales": up["multiscales"],
        "upsample_block_type": "interpolate" if first_up == up["widths"][0] else "pixel_shuffle",
        "downsample_block_type": "Conv" if last_down == down["widths"][1] else "pixel_unshuffle",
        "decoder_norm_types": up["norms"],
    }


# The publisher's own layout (efficientvit): every layer in a wrapper, queries, keys and values in one.
_ORIGINAL = (
    (r"\bmain\.|\bop_list\.", ""),
    (r"^(encoder|decoder)\.project_in\.conv\.", r"\1.conv_in."),
    (r"^encoder\.project_out\.0\.conv\.", "encoder.conv_out."),
    (r"^decoder\.project_out\.0\.", "decoder.norm_out."),
    (r"^decoder\.project_out\.2\.conv\.", "decoder.conv_out."),
    (r"^encoder\.stages\.", "encoder.down_blocks."),
    (r"^decoder\.stages\.", "decoder.up_blocks."),
    (r"\.context_module\.", ".attn."),
    (r"\.local_module\.", ".conv_out."),
    (r"\.aggreg\.(\d+)\.0\.", r".to_qkv_multiscale.\1.proj_in."),
    (r"\.aggreg\.(\d+)\.1\.", r".to_qkv_multiscale.\1.proj_out."),
    (r"\.(inverted|depth|point)_conv\.conv\.", r".conv_\1."),
    (r"\.(?:point_conv|conv2)\.norm\.", ".norm."),
    (r"\.(conv[12]?)\.conv\.", r".\1."),
    (r"\.proj\.conv\.", ".to_out."),
    (r"\.proj\.norm\.", ".norm_out."),
)


def _original_layout(shapes: Shapes) -> Renamer:
    def rename(key: str) -> str | tuple[str, ...]:
        for pattern, replacement in _ORIGINAL:
            key = re.sub(pattern, replacement, key)
        stem, fused, _ = key.partition(".qkv.conv.weight")
        return tuple(f"{stem}.to_{part}.weight" for part in "qkv") if fused else key

    return rename


ORIGINAL = Layout("original", marker="encoder.project_in.conv.weight", renamer=_original_layout)


def _half(shapes: Shapes, half: str) -> dict[str, Any]:
    """Level by level: block type, width, number of blocks, filter sizes, norm."""
    levels: dict[int, dict[int, dict[str, tuple[int, ...]]]] = {}
    for key, shape in shapes.items():
        match = re.match(_BLOCK, key)
        if match and key.startswith(half):
            levels.setdefault(int(match[1]), {}).setdefault(int(match[2]), {})[match[3]] = shape
    found: dict[str, Any] = {
        name: [] for name in ("types", "widths", "layers", "multiscales", "norms")
    } | {"head_dim": None}  # fmt: skip
    for _, blocks in sorted(levels.items()):
        real = [block for _, block in sorted(blocks.items()) if "conv.weight" not in block]  # the others resample
        block = real[0]
        vit = "attn.to_q.weight" in block
        scales, size = [], "attn.to_qkv_multiscale.{}.proj_{}.weight"
        while size.format(len(scales), "in") in block:
            found["head_dim"] = block[size.format(len(scales), "out")][1]
            scales.append(block[size.format(len(scales), "in")][2])
        found["types"].append("EfficientViTBlock" if vit else "ResBlock")
        found["widths"].append(block["attn.norm_out.bias" if vit else "norm.bias"][0])
        found["layers"].append(len(real))
        found["multiscales"].append(scales)
        batch = ("attn.norm_out" if vit else "norm") + ".running_mean" in block
        found["norms"].append("batch_norm" if batch else "rms_norm")
    return found


def detect_f32c32(shapes: Shapes, prefix: str = "") -> Config | None:
    """32 channels, 32 times smaller: Sana's. DC-AE's other f32c32 models start with a downsampling and are another
    latent space."""
    config = dc_config(shapes, prefix)
    if config is None or (config["latent_channels"], config["in_channels"]) != (32, 3):
        return None
    if len(config["encoder_block_out_channels"]) != 6:
        return None
    return {**config, "scaling_factor": 0.41407}


AUTOENCODERS = (
    Autoencoder(
        name="dc_ae_f32c32",
        title="DC-AE f32c32 (Sana)",
        module=".autoencoders.dc_ae:AutoencoderDC",
        detect=detect_f32c32,
        compression=32,
        latent_channels=32,
        latent_format="dc_ae_f32c32",
        layouts=(ORIGINAL,),
    ),
)
