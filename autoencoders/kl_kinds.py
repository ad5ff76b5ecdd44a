"""The KL autoencoders this package claims, told by their shapes."""
# Facts: published config.json files of FLUX.1 (black-forest-labs) and CogView4-6B (THUDM); key names of the original
# layout from black-forest-labs/flux (ae.safetensors) and of what ComfyUI's core saves.

from __future__ import annotations

import re
from collections.abc import Callable

from . import Autoencoder, Config, Layout, Shapes

SIGNATURE = (
    "encoder.conv_in.weight",
    "encoder.down_blocks.0.resnets.0.conv1.weight",
    "encoder.mid_block.resnets.1.conv2.weight",
    "encoder.conv_out.weight",
    "decoder.mid_block.resnets.0.conv1.weight",
    "decoder.up_blocks.0.resnets.0.conv1.weight",
    "decoder.conv_out.weight",
)

_PLAIN = (
    (r"\.down\.(\d+)\.block\.(\d+)\.", r".down_blocks.\1.resnets.\2."),
    (r"\.down\.(\d+)\.downsample\.", r".down_blocks.\1.downsamplers.0."),
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attn_1\.norm\.", ".mid_block.attentions.0.group_norm."),
    (r"\.mid\.attn_1\.([qkv])\.", r".mid_block.attentions.0.to_\1."),
    (r"\.mid\.attn_1\.proj_out\.", ".mid_block.attentions.0.to_out.0."),
    (r"coder\.norm_out\.", "coder.conv_norm_out."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
)
_UP = r"^decoder\.up\.(\d+)\.(?:block\.(\d+)|upsample)\."


def original_layout(shapes: Shapes) -> Callable[[str], str]:
    """From the original names (CompVis, FLUX, ComfyUI's core) to ours: decoder levels count from the other end."""
    top = max((int(match[1]) for key in shapes if (match := re.match(_UP, key))), default=0)

    def rename(key: str) -> str:
        match = re.match(_UP, key)
        if match:
            inner = "upsamplers.0" if match[2] is None else f"resnets.{match[2]}"
            key = f"decoder.up_blocks.{top - int(match[1])}.{inner}.{key[match.end() :]}"
        for pattern, replacement in _PLAIN:
            key = re.sub(pattern, replacement, key)
        return key

    return rename


# What diffusers called the attention's layers before 2023.
_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def old_layout(shapes: Shapes) -> Callable[[str], str]:
    """From the names of 2022 to today's."""
    pattern = rf"\.attentions\.0\.({'|'.join(_OLD_ATTENTION)})\."
    return lambda key: re.sub(pattern, lambda match: f".attentions.0.{_OLD_ATTENTION[match[1]]}.", key)


ORIGINAL = Layout("original", marker="encoder.down.0.block.0.conv1.weight", renamer=original_layout)
OLD = Layout("diffusers of 2022", marker="encoder.mid_block.attentions.0.query.weight", renamer=old_layout)


def kl_config(shapes: Shapes, prefix: str = "") -> Config | None:
    """Constructor arguments of any two-dimensional KL autoencoder, or None. ``norm_num_groups`` no shape tells."""
    if any(prefix + key not in shapes for key in SIGNATURE):
        return None
    conv_in, conv_out = shapes[prefix + "encoder.conv_in.weight"], shapes[prefix + "encoder.conv_out.weight"]
    if len(conv_in) != 4 or conv_out[0] % 2 or prefix + "bn.running_mean" in shapes:
        return None  # video autoencoders; deterministic ones; FLUX.2's
    if prefix + OLD.marker in shapes:
        return None  # the attention is there, under other names
    levels = _count(shapes, prefix + "encoder.down_blocks.{}.resnets.0.conv1.weight")
    return {
        "in_channels": conv_in[1],
        "out_channels": shapes[prefix + "decoder.conv_out.weight"][0],
        "block_out_channels": [
            shapes[f"{prefix}encoder.down_blocks.{level}.resnets.0.conv1.weight"][0] for level in range(levels)
        ],
        "layers_per_block": _count(shapes, prefix + "encoder.down_blocks.0.resnets.{}.conv1.weight"),
        "latent_channels": conv_out[0] // 2,
        "use_quant_conv": prefix + "quant_conv.weight" in shapes,
        "use_post_quant_conv": prefix + "post_quant_conv.weight" in shapes,
        "mid_block_add_attention": prefix + "encoder.mid_block.attentions.0.to_q.weight" in shapes,
    }


def _count(shapes: Shapes, pattern: str) -> int:
    count = 0
    while pattern.format(count) in shapes:
        count += 1
    return count


def detect_flux(shapes: Shapes, prefix: str = "") -> Config | None:
    """FLUX.1's. SD3's has the same shapes and the same maths; the two differ in the scale of the latents alone."""
    config = kl_config(shapes, prefix)
    if not _is_16_channels(config) or not config["mid_block_add_attention"]:
        return None
    return {**config, "scaling_factor": 0.3611, "shift_factor": 0.1159}


def detect_cogview4(shapes: Shapes, prefix: str = "") -> Config | None:
    config = kl_config(shapes, prefix)
    if not _is_16_channels(config) or config["mid_block_add_attention"]:
        return None
    return {**config, "scaling_factor": 1.0, "shift_factor": 0.0}


def _is_16_channels(config: Config | None) -> bool:
    if config is None or config["use_quant_conv"] or config["use_post_quant_conv"]:
        return False
    return (config["latent_channels"], config["in_channels"], config["out_channels"]) == (16, 3, 3)


AUTOENCODERS = (
    Autoencoder(
        name="kl_flux",
        title="FLUX.1 autoencoder",
        module=".autoencoders.kl:AutoencoderKL",
        detect=detect_flux,
        compression=8,
        latent_channels=16,
        latent_format="flux",
        layouts=(ORIGINAL, OLD),
    ),
    Autoencoder(
        name="kl_cogview4",
        title="CogView4 autoencoder",
        module=".autoencoders.kl:AutoencoderKL",
        detect=detect_cogview4,
        compression=8,
        latent_channels=16,
        latent_format="cogview4",
        layouts=(ORIGINAL, OLD),
        # The published configuration asks for float32 (force_upcast).
        dtypes=("float32", "bfloat16"),
    ),
)
