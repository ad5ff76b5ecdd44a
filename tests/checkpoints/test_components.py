"""Text encoders with their tokenizers, autoencoders, and models of several parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_module, write_folder

from nativedit.autoencoders import find_autoencoder
from nativedit.checkpoints.components import join
from nativedit.checkpoints.convert import convert
from nativedit.checkpoints.load import load_text_encoder
from nativedit.files import FileError, open_source

pytestmark = pytest.mark.usefixtures("single_thread")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def read_all(path) -> dict[str, torch.Tensor]:
    with open_source(path) as source:
        return {key: source.read(key) for key in source}


# ---- text encoders ---------------------------------------------------------------------------------------------------

QWEN3 = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def write_qwen3(folder: Path, head: bool = True) -> Path:
    cls = transformers.Qwen3ForCausalLM if head else transformers.Qwen3Model
    torch.manual_seed(0)
    cls(transformers.Qwen3Config(**QWEN3, tie_word_embeddings=False)).save_pretrained(folder / "text_encoder")
    vocabulary = {"<end>": 0, "a": 1, "b": 2, "[UNK]": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps({"pad_token": "<end>", "noise": 1}))
    return folder


@pytest.mark.parametrize("head", [True, False])
def test_a_text_encoder_is_one_file_with_its_tokenizer(head, tmp_path):
    folder = write_qwen3(tmp_path / "pipeline", head)
    report = convert(folder / "text_encoder", tmp_path / "qwen3.safetensors")
    assert report.kind == "text_encoder" and report.notes == []
    state = load_file(tmp_path / "qwen3.safetensors")
    assert "model.layers.1.self_attn.q_proj.weight" in state and "tokenizer_json" in state
    for other in (folder / "tokenizer").iterdir():
        other.unlink()
    loaded = load_text_encoder(tmp_path / "qwen3.safetensors", family="qwen3")
    assert loaded.tokenizer.encode("b a") == [2, 1] and loaded.tokenizer.pad_id == 0


def test_a_text_encoder_comes_back_with_its_configuration_and_tokenizer(tmp_path):
    folder = write_qwen3(tmp_path / "pipeline")
    convert(folder / "text_encoder", tmp_path / "qwen3.safetensors")
    convert(tmp_path / "qwen3.safetensors", tmp_path / "back", layout="diffusers")
    assert same(read_all(tmp_path / "back"), read_all(folder / "text_encoder"))
    model = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "back")
    assert model.config.hidden_size == 32
    tokenizer = (folder / "tokenizer/tokenizer.json").read_bytes()
    assert (tmp_path / "back/tokenizer.json").read_bytes() == tokenizer
    convert(tmp_path / "back", tmp_path / "again.safetensors")
    assert same(load_file(tmp_path / "again.safetensors"), load_file(tmp_path / "qwen3.safetensors"))


def test_a_text_encoder_without_a_tokenizer_says_so(tmp_path):
    folder = write_qwen3(tmp_path / "pipeline")
    (folder / "tokenizer/tokenizer.json").rename(tmp_path / "elsewhere.json")
    report = convert(folder / "text_encoder", tmp_path / "a.safetensors")
    assert any("no tokenizer" in note for note in report.notes)
    convert(folder / "text_encoder", tmp_path / "b.safetensors", tokenizer=tmp_path / "elsewhere.json")
    assert "tokenizer_json" in load_file(tmp_path / "b.safetensors")


def test_a_text_encoder_with_a_layer_missing_is_refused(tmp_path):
    folder = write_qwen3(tmp_path / "pipeline")
    state = read_all(folder / "text_encoder")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "broken.safetensors")
    with pytest.raises(FileError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        convert(tmp_path / "broken.safetensors", tmp_path / "a.safetensors")


# ---- autoencoders ----------------------------------------------------------------------------------------------------


def kl_module(attention: bool = True) -> torch.nn.Module:
    torch.manual_seed(1)
    return diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=["DownEncoderBlock2D"] * 3,
        up_block_types=["UpDecoderBlock2D"] * 3,
        block_out_channels=[32, 32, 64],
        layers_per_block=1,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=attention,
        scaling_factor=0.3611,
        shift_factor=0.1159,
    )


@pytest.mark.parametrize("attention", [True, False])
def test_a_kl_autoencoder_becomes_comfyuis_layout_and_comes_back(attention, tmp_path):
    module = kl_module(attention)
    module.save_pretrained(tmp_path / "vae")
    convert(tmp_path / "vae", tmp_path / "ae.safetensors")
    ours = load_file(tmp_path / "ae.safetensors")
    assert "decoder.up.2.block.0.conv1.weight" in ours and ours["encoder.down.0.block.0.conv1.weight"].shape[0] == 32
    if attention:
        assert ours["encoder.mid.attn_1.q.weight"].shape == (64, 64, 1, 1)
    match = find_autoencoder({key: tuple(value.shape) for key, value in ours.items()})
    assert match.layout == "original"
    convert(tmp_path / "ae.safetensors", tmp_path / "back", layout="diffusers")
    assert same(read_all(tmp_path / "back"), module.state_dict())
    loaded = diffusers.AutoencoderKL.from_pretrained(tmp_path / "back")
    assert loaded.config.scaling_factor == 0.3611
    convert(tmp_path / "back", tmp_path / "again.safetensors")
    assert same(load_file(tmp_path / "again.safetensors"), ours)


def test_diffusers_own_converter_agrees_about_the_autoencoder(tmp_path):
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    module = kl_module()
    module.save_pretrained(tmp_path / "vae")
    convert(tmp_path / "vae", tmp_path / "ae.safetensors")
    state = convert_ldm_vae_checkpoint(load_file(tmp_path / "ae.safetensors"), module.config)
    assert same(state, module.state_dict())


def test_the_attention_of_2022_is_read_as_todays(tmp_path):
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = {}
    for key, value in kl_module().state_dict().items():
        for new, name in old.items():
            key = key.replace(f"attentions.0.{new}.", f"attentions.0.{name}.")
        state[key] = value
    save_file(state, tmp_path / "old.safetensors")
    kl_module().save_pretrained(tmp_path / "vae")
    convert(tmp_path / "old.safetensors", tmp_path / "a.safetensors")
    convert(tmp_path / "vae", tmp_path / "b.safetensors")
    assert same(load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors"))


def test_an_autoencoder_of_a_kind_that_is_unknown_is_refused(tmp_path):
    save_file(
        {"encoder.conv1.weight": torch.zeros(2), "decoder.conv1.weight": torch.zeros(2)}, tmp_path / "a.safetensors"
    )
    with pytest.raises(FileError, match="is an autoencoder whose other layout this pack does not know"):
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors")


# ---- several parts ---------------------------------------------------------------------------------------------------


def pipeline(folder: Path, *extra: str) -> Path:
    write_qwen3(folder)
    write_folder(folder / "transformer", tiny_module("wan21_t2v_14b"))
    kl_module().save_pretrained(folder / "vae")
    index = {"_class_name": "SomePipeline", "scheduler": ["diffusers", "X"]}
    for name in ("transformer", *extra, "text_encoder", "vae", "tokenizer"):
        index[name] = ["diffusers", "Y"]
    for name in extra:
        write_folder(folder / name, tiny_module("wan21_t2v_14b"))
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def test_a_pipeline_becomes_files_in_comfyuis_folders(tmp_path):
    folder = pipeline(tmp_path / "Wan2.1")
    report = convert(folder, tmp_path / "models")
    files = sorted(
        path.relative_to(tmp_path / "models").as_posix() for path in (tmp_path / "models").rglob("*.safetensors")
    )
    assert files == [
        "diffusion_models/Wan2.1.safetensors",
        "text_encoders/Wan2.1.safetensors",
        "vae/Wan2.1.safetensors",
    ]
    assert len(report.notes) == 3
    convert(folder, tmp_path / "one.safetensors")
    assert same(
        load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "models/diffusion_models/Wan2.1.safetensors")
    )
    convert(folder, tmp_path / "vae.safetensors", component="vae")
    assert same(load_file(tmp_path / "vae.safetensors"), load_file(tmp_path / "models/vae/Wan2.1.safetensors"))


def test_wan_2_2s_pair_keeps_comfyuis_names(tmp_path):
    convert(pipeline(tmp_path / "wan2.2_t2v", "transformer_2"), tmp_path / "models")
    names = sorted(path.name for path in (tmp_path / "models/diffusion_models").iterdir())
    assert names == ["wan2.2_t2v_high_noise.safetensors", "wan2.2_t2v_low_noise.safetensors"]


def test_parts_that_are_not_converted_are_named(tmp_path):
    folder = pipeline(tmp_path / "p", "transformer_2")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"text_encoder_2": ["transformers", "X"], "transformer_3": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index))

    alone = convert(folder, tmp_path / "one.safetensors")
    assert alone.notes == [
        "this is the pipeline's transformer alone; it also has transformer_2, text_encoder, vae (component)"
    ]
    everything = convert(folder, tmp_path / "flux1.dev", component="all")
    assert everything.notes[-1] == "text_encoder_2: named in model_index.json, but its weights are not there"
    assert sorted(path.name for path in (tmp_path / "flux1.dev").iterdir()) == [
        "diffusion_models",
        "text_encoders",
        "vae",
    ]


def test_a_checkpoint_of_several_parts_splits_and_joins_to_the_bit(tmp_path):
    folder = pipeline(tmp_path / "p")
    convert(folder, tmp_path / "parts")
    parts = {
        "model.diffusion_model.": tmp_path / "parts/diffusion_models/p.safetensors",
        "text_encoders.qwen3.transformer.": tmp_path / "parts/text_encoders/p.safetensors",
        "vae.": tmp_path / "parts/vae/p.safetensors",
    }
    join(parts, tmp_path / "all.safetensors")
    whole = load_file(tmp_path / "all.safetensors")
    assert len(whole) == sum(len(load_file(path)) for path in parts.values())
    convert(tmp_path / "all.safetensors", tmp_path / "again")
    again = tmp_path / "again"
    assert same(load_file(again / "diffusion_models/all.safetensors"), load_file(parts["model.diffusion_model."]))
    assert same(load_file(again / "vae/all.safetensors"), load_file(parts["vae."]))
    text = load_file(again / "text_encoders/all_qwen3.safetensors")
    assert same(
        {k.removeprefix("transformer."): v for k, v in text.items()},
        load_file(parts["text_encoders.qwen3.transformer."]),
    )
    with pytest.raises(FileError, match="is an all-in-one checkpoint; give a folder"):
        convert(tmp_path / "all.safetensors", tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"prefix 'unet\.' is not one of"):
        join({"unet.": parts["vae."]}, tmp_path / "x.safetensors")


def test_parts_that_comfyui_would_not_find_are_not_joined(tmp_path):
    folder = pipeline(tmp_path / "p")
    write_folder(tmp_path / "flux", tiny_module("flux_dev"))
    out = tmp_path / "all.safetensors"
    with pytest.raises(FileError, match="flux: has diffusers' names; make ComfyUI's file of it first"):
        join({"model.diffusion_model.": tmp_path / "flux"}, out)
    with pytest.raises(FileError, match="vae: has diffusers' names"):
        join({"vae.": folder / "vae"}, out)
    convert(tmp_path / "flux", tmp_path / "flux.safetensors")
    join({"model.diffusion_model.": tmp_path / "flux.safetensors"}, tmp_path / "once.safetensors")
    with pytest.raises(FileError, match=r"has the prefix 'model\.diffusion_model\.' already"):
        join({"model.diffusion_model.": tmp_path / "once.safetensors"}, out)
    assert not out.exists()


def test_a_key_of_no_part_stops_the_splitting(tmp_path):
    state = {"model.diffusion_model.a.weight": torch.zeros(2), "vae.b": torch.zeros(2), "strange": torch.zeros(1)}
    save_file(state, tmp_path / "all.safetensors")
    with pytest.raises(FileError, match="1 keys belong to no part that is known: strange"):
        convert(tmp_path / "all.safetensors", tmp_path / "parts")
    assert not (tmp_path / "parts").exists()
