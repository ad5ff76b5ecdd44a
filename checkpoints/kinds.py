"""What a file is, from its keys and shapes: for messages that say which loader wants it.

The order of the questions matters: an adapter names the model's layers too, an all-in-one file holds everything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..supported_models import Shapes, find_architecture
from ..text_encoders.families import find_text_encoder


@dataclass(frozen=True)
class Kind:
    """name: a word for code; title: for people; folder: under models/; loader: the node that takes it."""

    name: str
    title: str
    folder: str
    loader: str


DIFFUSION_MODEL = Kind("diffusion_model", "a diffusion model", "diffusion_models", "Load Diffusion Model")
TEXT_ENCODER = Kind("text_encoder", "a text encoder", "text_encoders", "Load Text Encoder (NativeDiT) or Load CLIP")
AUTOENCODER = Kind("autoencoder", "an autoencoder (VAE)", "vae", "Load VAE")
LORA = Kind("lora", "a LoRA or another adapter", "loras", "Load LoRA")
CHECKPOINT = Kind("checkpoint", "an all-in-one checkpoint", "checkpoints", "Load Checkpoint")
CONTROLNET = Kind("controlnet", "a ControlNet", "controlnet", "Load ControlNet Model")
UNKNOWN = Kind("unknown", "no kind of model that NativeDiT knows", "", "")

_ADAPTERS = (
    *(r"lora_[AB]", r"lora_(?:down|up)", r"lora\.(?:down|up)", r"hada_w[12]_[ab]"),
    *(r"lokr_w[12](?:_[ab])?", r"oft_blocks", r"dora_scale"),
)
_ADAPTER = rf"\.(?:{'|'.join(_ADAPTERS)})\b"
_EMBEDDINGS = "|".join(("embed_tokens", "shared", "token_embedding", "word_embeddings"))
_TEXT = "|".join(
    (
        rf"(?:^|\.)(?:{_EMBEDDINGS})\.weight$",
        r"encoder\.block\.0\.layer\.0" + r"\.SelfAttention\.q\.weight$",
        r"text_model\.encoder\.layers\.0\.",
    )
)
_VAE = (
    r"(?:^|\.)(?:decoder\.conv_in\.|decoder\.conv1\.|encoder\.conv_in\.|encoder\.conv1\.|decoder\.up_blocks\.|"
    r"encoder\.down_blocks\.|decoder\.up\.0\.|decoder\.project_in\.)"
)
_CONTROL = r"(?:^|\.)(?:control_model\.|controlnet_blocks\.|controlnet_cond_embedding\.|input_hint_block\.)"
_TRANSFORMER = r"(?:^|\.)(?:\w*blocks|layers)\.0\."
_ALL_IN_ONE = r"^(?:model\.diffusion_model|first_stage_model|cond_stage_model|text_encoders|vae)\."


def kind_of(shapes: Shapes) -> Kind:
    """Never raises."""
    keys = list(shapes)
    if any(re.search(_ADAPTER, key) for key in keys):
        return LORA
    parts = {match.group() for key in keys if (match := re.match(_ALL_IN_ONE, key))}
    if "model.diffusion_model." in parts and len(parts) > 1:
        return CHECKPOINT
    if any(re.search(_CONTROL, key) for key in keys):
        return CONTROLNET
    if find_architecture(shapes) is not None:
        return DIFFUSION_MODEL
    if find_text_encoder(shapes) or any(re.search(_TEXT, key) for key in keys):
        return TEXT_ENCODER
    if any(re.search(_VAE, key) for key in keys) and not any("diffusion_model." in key for key in keys):
        return AUTOENCODER
    if "model.diffusion_model." in parts or any(re.search(_TRANSFORMER, key) for key in keys):
        return DIFFUSION_MODEL
    return UNKNOWN


def wrong_slot(kind: Kind, wanted: Kind) -> str:
    """The sentence for a file of one kind in another kind's loader."""
    if kind is UNKNOWN:
        return f"is {kind.title}; this loader wants {wanted.title}"
    return (
        f"is {kind.title}, not {wanted.title}; put it into models/{kind.folder} and load it with the node {kind.loader}"
    )
