"""The wrong kind of file in each loader: what it is, what is close to it, the first keys that did not match."""

from __future__ import annotations

import pytest
import torch
from key_layouts import CARDS, layout
from safetensors.torch import save_file

from nativedit.checkpoints.autoencoder import load_autoencoder
from nativedit.checkpoints.convert import convert
from nativedit.checkpoints.load import load_diffusion_model, load_text_encoder
from nativedit.files import FileError
from nativedit.supported_models import closest_architectures, find_architecture

LORA = {"transformer.transformer_blocks.0.attn.to_q.lora_A.weight": (4, 8)}
VAE = {"encoder.conv_in.weight": (8, 3, 3, 3), "decoder.conv_in.weight": (8, 4, 3, 3)}
TEXT = {"model.embed_tokens.weight": (16, 8), "model.layers.0.self_attn.q_proj.weight": (8, 8)}
TRAINER = {f"trunk.blocks.{i}.attention.wqkv.weight": (24, 8) for i in range(3)}
UNKNOWN = {"some.tensor": (2, 2)}
ALL_IN_ONE = {
    "model.diffusion_model.a.weight": (2, 2),
    "vae.encoder.conv_in.weight": (2, 2),
    "text_encoders.t5.a": (2,),
}


def write(tmp_path, shapes) -> str:
    save_file({key: torch.zeros(shape) for key, shape in shapes.items()}, tmp_path / "file.safetensors")
    return tmp_path / "file.safetensors"


def convert_it(path, tmp_path):
    return convert(path, tmp_path / "out.safetensors")


LOADERS = {
    "diffusion model": lambda path, tmp_path: load_diffusion_model(path),
    "text encoder": lambda path, tmp_path: load_text_encoder(path),
    "autoencoder": lambda path, tmp_path: load_autoencoder(path),
    "convert": convert_it,
}
CASES = [
    ("diffusion model", LORA, "is a LoRA or another adapter, not a diffusion model; put it into models/loras"),
    ("diffusion model", VAE, "is an autoencoder (VAE), not a diffusion model; put it into models/vae"),
    ("diffusion model", TEXT, "is a text encoder, not a diffusion model; put it into models/text_encoders"),
    ("diffusion model", ALL_IN_ONE, "is an all-in-one checkpoint, not a diffusion model"),
    ("diffusion model", UNKNOWN, "is no kind of model that NativeDiT knows"),
    ("diffusion model", TRAINER, "is a diffusion model of an unknown layout"),
    ("text encoder", LORA, "is a LoRA or another adapter, not a text encoder"),
    ("text encoder", VAE, "is an autoencoder (VAE), not a text encoder"),
    ("text encoder", UNKNOWN, "is no kind of model that NativeDiT knows; this loader wants a text encoder"),
    ("text encoder", ALL_IN_ONE, "is an all-in-one checkpoint, not a text encoder; put it into models/checkpoints"),
    ("text encoder", TRAINER, "is a diffusion model, not a text encoder; put it into models/diffusion_models"),
    ("autoencoder", LORA, "is a LoRA or another adapter, not an autoencoder (VAE); put it into models/loras"),
    ("autoencoder", TEXT, "is a text encoder, not an autoencoder (VAE); put it into models/text_encoders"),
    ("autoencoder", TRAINER, "is a diffusion model, not an autoencoder (VAE)"),
    ("autoencoder", ALL_IN_ONE, "is an all-in-one checkpoint, not an autoencoder (VAE)"),
    ("autoencoder", UNKNOWN, "is no kind of model that NativeDiT knows; this loader wants an autoencoder"),
    ("autoencoder", VAE, "is an autoencoder of a kind that NativeDiT does not know"),
    ("convert", LORA, "is a LoRA or another adapter; `nativedit lora` converts those"),
    ("convert", UNKNOWN, "is no kind of model that NativeDiT knows"),
    ("convert", TRAINER, "is a diffusion model of an unknown layout"),
    ("convert", ALL_IN_ONE, "is an all-in-one checkpoint"),
]


@pytest.mark.parametrize(("loader", "shapes", "words"), CASES)
def test_a_wrong_file_is_called_what_it_is(loader, shapes, words, tmp_path):
    with pytest.raises(FileError) as error:
        LOADERS[loader](write(tmp_path, shapes), tmp_path)
    assert words in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("loader", ["diffusion model", "convert"])
def test_an_unknown_layout_names_what_is_close_and_its_first_keys(loader, tmp_path):
    """A full fine-tune that renamed the model's blocks: FLUX's other layers are still there."""
    shapes = {}
    for key in layout("flux_schnell.comfy"):
        if key.startswith(("img_in", "txt_in", "vector_in", "final_layer", "single_blocks.0.")):
            shapes[key.replace("single_blocks", "solo_blocks")] = (4, 4)
    with pytest.raises(FileError) as error:
        LOADERS[loader](write(tmp_path, shapes), tmp_path)
    message = str(error.value)
    assert "is a diffusion model of an unknown layout; the closest known: flux" in message
    assert "its first keys: " in message and "final_layer" in message


@pytest.mark.parametrize("row", ["flux_dev", "z_image", "wan21_t2v_14b", "sd35_large", "lumina2", "krea2"])
@pytest.mark.parametrize("side", ["comfy", "diffusers"])
def test_the_closest_architecture_of_a_model_that_lost_its_first_block_is_its_own(row, side):
    shapes = {key: shape for key, shape in layout(f"{row}.{side}").items() if ".0." not in key}

    assert find_architecture(shapes) is None
    assert closest_architectures({f"model.{key}": shape for key, shape in shapes.items()})[0] == CARDS[row]


def test_a_core_model_in_our_own_loader_says_who_loads_it(tmp_path):
    shapes = {key: tuple(1 for _ in shape) for key, shape in layout("krea2.comfy").items()}
    shapes |= {"first.weight": (2, 4), "txtfusion.projector.weight": (1, 3)}
    with pytest.raises(
        (FileError, ValueError), match="Krea 2 has no module of ours: ComfyUI's core or diffusers loads it"
    ):
        load_diffusion_model(write(tmp_path, shapes))
