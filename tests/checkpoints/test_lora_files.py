"""LoRA files renamed, split, joined and baked: no key lost, the change of the weights the same."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_module, write_folder

from nativedit.checkpoints.bake import bake_lora
from nativedit.checkpoints.convert import convert
from nativedit.checkpoints.lora import convert_lora
from nativedit.files import FileError, OutputError, open_source

pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("single_thread")

RANK = 4
PEFT = ("lora_A.weight", "lora_B.weight")
KOHYA = ("lora_down.weight", "lora_up.weight")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def lora_for(layers: dict[str, tuple[int, int]], prefix: str, names=PEFT, alpha: float | None = 2.0, flat=False):
    """layer -> (out, in): a LoRA in some spelling."""
    state = {}
    for number, (layer, (rows, columns)) in enumerate(layers.items()):
        start = prefix + (layer.replace(".", "_") if flat else layer)
        state[f"{start}.{names[0]}"] = random(RANK, columns, seed=2 * number)
        state[f"{start}.{names[1]}"] = random(rows, RANK, seed=2 * number + 1)
        if alpha is not None:
            state[f"{start}.alpha"] = torch.tensor(alpha)
    return state


def save(path, state):
    save_file({key: value.contiguous() for key, value in state.items()}, path, {"trainer": "test"})
    return path


def change(state: dict[str, torch.Tensor], start: str, names=PEFT) -> torch.Tensor:
    down, up = state[f"{start}.{names[0]}"], state[f"{start}.{names[1]}"]
    scale = float(state[f"{start}.alpha"]) / down.shape[0] if f"{start}.alpha" in state else 1.0
    return up @ down * scale


H = 256
FLUX = {
    "transformer_blocks.0.attn.to_q": (H, H),
    "transformer_blocks.0.attn.to_k": (H, H),
    "transformer_blocks.0.attn.to_v": (H, H),
    "transformer_blocks.0.attn.to_out.0": (H, H),
    "single_transformer_blocks.1.attn.to_q": (H, H),
    "single_transformer_blocks.1.attn.to_v": (H, H),
    "single_transformer_blocks.1.proj_mlp": (4 * H, H),
    "norm_out.linear": (2 * H, H),
}
SPELLINGS = {
    "transformer": ("transformer.", PEFT, False),
    "diffusion_model": ("diffusion_model.", PEFT, False),
    "peft": ("base_model.model.", PEFT, False),
    "kohya": ("lora_unet_", KOHYA, True),
    "old diffusers": ("transformer.", ("lora.down.weight", "lora.up.weight"), False),
}


@pytest.mark.parametrize("spelling", list(SPELLINGS))
@pytest.mark.parametrize("alpha", [None, 2.0])
def test_split_layers_of_any_spelling_become_fused_ones_without_a_key_left(spelling, alpha, tmp_path):
    prefix, names, flat = SPELLINGS[spelling]
    source = lora_for(FLUX, prefix, names, alpha, flat)
    report = convert_lora(save(tmp_path / "a.safetensors", source), tmp_path / "b.safetensors", layout="comfy")
    result = load_file(tmp_path / "b.safetensors")
    assert (report.renamed, report.fused, report.split) == (2, 2, 0)
    ends = (*names, "alpha")
    layers = {key.removesuffix("." + end) for key in result for end in ends if key.endswith("." + end)}
    assert {layer.removeprefix("diffusion_model.") for layer in layers} == {
        "double_blocks.0.img_attn.qkv",
        "double_blocks.0.img_attn.proj",
        "single_blocks.1.linear1",
        "final_layer.adaLN_modulation.1",
    }

    def theirs(layer: str) -> torch.Tensor:
        return change(source, prefix + (layer.replace(".", "_") if flat else layer), names)

    qkv = change(result, "diffusion_model.double_blocks.0.img_attn.qkv", names)
    torch.testing.assert_close(qkv, torch.cat([theirs(f"transformer_blocks.0.attn.to_{x}") for x in "qkv"]))
    single = "single_transformer_blocks.1."
    expected = torch.cat(
        [theirs(single + "attn.to_q"), torch.zeros(H, H), theirs(single + "attn.to_v"), theirs(single + "proj_mlp")]
    )
    torch.testing.assert_close(change(result, "diffusion_model.single_blocks.1.linear1", names), expected)
    swapped = change(result, "diffusion_model.final_layer.adaLN_modulation.1", names)
    torch.testing.assert_close(swapped, theirs("norm_out.linear").roll(H, 0))


COMFY = {
    "double_blocks.0.txt_attn.qkv": (3 * H, H),
    "single_blocks.0.linear1": (7 * H, H),
    "single_blocks.0.linear2": (H, 5 * H),
    "double_blocks.1.img_mlp.0": (4 * H, H),
}


def test_fused_layers_are_split_and_joined_again_to_the_bit(tmp_path):
    source = lora_for(COMFY, "diffusion_model.")
    save(tmp_path / "a.safetensors", source)
    report = convert_lora(tmp_path / "a.safetensors", tmp_path / "b.safetensors", layout="diffusers")
    assert (report.split, report.renamed) == (2, 2)
    names = {key.rsplit(".lora", 1)[0].removesuffix(".alpha") for key in load_file(tmp_path / "b.safetensors")}
    assert "transformer.single_transformer_blocks.0.proj_mlp" in names and len(names) == 9
    convert_lora(tmp_path / "b.safetensors", tmp_path / "c.safetensors", layout="comfy")
    result = load_file(tmp_path / "c.safetensors")
    assert result.keys() == source.keys() and all(torch.equal(result[key], source[key]) for key in source)
    with open_source(tmp_path / "c.safetensors") as opened:
        assert opened.metadata["trainer"] == "test"


def test_lumina_2s_unequal_parts_divide_right(tmp_path):
    source = lora_for({"layers.0.attention.qkv": (768, 384)}, "diffusion_model.")
    convert_lora(save(tmp_path / "a.safetensors", source), tmp_path / "b.safetensors", layout="diffusers")
    rows = {key: value.shape[0] for key, value in load_file(tmp_path / "b.safetensors").items() if "lora_B" in key}
    assert rows == {
        f"transformer.layers.0.attn.to_{x}.lora_B.weight": n for x, n in zip("qkv", (384, 192, 192), strict=True)
    }


def test_strengths_that_differ_are_kept_apart(tmp_path):
    source = {}
    for x, alpha in zip("qkv", (1.0, 2.0, 8.0), strict=True):
        source |= lora_for({f"layers.0.attention.to_{x}": (384, 384)}, "transformer.", alpha=alpha)
        source[f"transformer.layers.0.attention.to_{x}.lora_A.weight"] = random(RANK, 384, seed=ord(x))
    convert_lora(
        save(tmp_path / "a.safetensors", source), tmp_path / "b.safetensors", layout="comfy", architecture="z_image"
    )
    fused = change(load_file(tmp_path / "b.safetensors"), "diffusion_model.layers.0.attention.qkv")
    expected = torch.cat([change(source, f"transformer.layers.0.attention.to_{x}") for x in "qkv"])
    torch.testing.assert_close(fused, expected)


def test_keys_of_a_text_encoder_are_kept_and_counted(tmp_path):
    source = lora_for(FLUX, "lora_unet_", KOHYA, flat=True)
    other = lora_for({"text_model_encoder_layers_0_mlp_fc1": (8, 8)}, "lora_te1_", KOHYA)
    report = convert_lora(save(tmp_path / "a.safetensors", source | other), tmp_path / "b.safetensors", layout="comfy")
    result = load_file(tmp_path / "b.safetensors")
    assert set(report.kept) == set(other) <= set(result)


def test_a_width_that_the_lora_does_not_tell_is_asked_of_a_checkpoint(tmp_path):
    source = lora_for({"single_transformer_blocks.0.attn.to_q": (H, H)}, "transformer.")
    save(tmp_path / "a.safetensors", source)
    with pytest.raises(FileError, match=r"how wide 'single_blocks\.0\.linear1' is; name a checkpoint .* --model"):
        convert_lora(tmp_path / "a.safetensors", tmp_path / "b.safetensors", layout="comfy", architecture="flux")
    convert(write_folder(tmp_path / "there", tiny_module("flux_dev")), tmp_path / "model.safetensors")
    for model in ("model.safetensors", "there"):
        convert_lora(
            tmp_path / "a.safetensors",
            tmp_path / "b.safetensors",
            layout="comfy",
            architecture="flux",
            model=tmp_path / model,
        )
        up = load_file(tmp_path / "b.safetensors")["diffusion_model.single_blocks.0.linear1.lora_B.weight"]
        assert up.shape == (7 * H, RANK) and up[H:].count_nonzero() == 0


def test_loha_splits_exactly_and_lokr_is_refused_with_a_way_out(tmp_path):
    start = "diffusion_model.double_blocks.0.img_attn.qkv"
    loha = {f"{start}.hada_w{i}_a": random(3 * H, RANK, seed=i) for i in (1, 2)}
    loha |= {f"{start}.hada_w{i}_b": random(RANK, H, seed=i) for i in (1, 2)}
    convert_lora(
        save(tmp_path / "a.safetensors", loha), tmp_path / "b.safetensors", layout="diffusers", architecture="flux"
    )
    split = load_file(tmp_path / "b.safetensors")
    parts = [f"transformer.transformer_blocks.0.attn.to_{x}" for x in "qkv"]
    for i in (1, 2):
        assert torch.equal(torch.cat([split[f"{part}.hada_w{i}_a"] for part in parts]), loha[f"{start}.hada_w{i}_a"])
    lokr = {f"{start}.lokr_w1": random(4, 4), f"{start}.lokr_w2": random(3 * H // 4, H // 4)}
    with pytest.raises(FileError, match="can't be cut exactly; bake the LoRA"):
        convert_lora(
            save(tmp_path / "c.safetensors", lokr), tmp_path / "d.safetensors", layout="diffusers", architecture="flux"
        )


def test_a_layer_of_no_model_is_named(tmp_path):
    source = lora_for({**FLUX, "transformer_blocks.0.attn.to_strange": (H, H)}, "transformer.")
    with pytest.raises(
        FileError, match=r"1 layers are none of FLUX\.1: transformer\.transformer_blocks\.0\.attn\.to_strange"
    ):
        convert_lora(save(tmp_path / "a.safetensors", source), tmp_path / "b.safetensors", layout="comfy")
    with pytest.raises(FileError, match=r"is no LoRA that is understood; keys that fit nothing: a\.weight"):
        convert_lora(
            save(tmp_path / "c.safetensors", {"a.weight": random(2, 2)}), tmp_path / "b.safetensors", layout="comfy"
        )
    with pytest.raises(FileError, match="is a LoRA of a model that is not known"):
        convert_lora(
            save(tmp_path / "d.safetensors", lora_for({"nobody.knows": (4, 4)}, "")),
            tmp_path / "b.safetensors",
            layout="comfy",
        )
    with pytest.raises(OutputError, match="is the source itself"):
        convert_lora(tmp_path / "a.safetensors", tmp_path / "a.safetensors", layout="comfy")


# ---- baking ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flux")
    module = tiny_module("flux_dev")
    write_folder(folder / "float32", module)
    write_folder(folder / "bfloat16", module, dtype=torch.bfloat16)
    convert(folder / "float32", folder / "float32.safetensors")
    convert(folder / "bfloat16", folder / "bfloat16.safetensors")
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_baked_into_either_layout_the_model_is_the_same(dtype, flux, tmp_path):
    save(tmp_path / "lora.safetensors", lora_for(FLUX, "transformer."))
    bake_lora(tmp_path / "lora.safetensors", flux / f"{dtype}.safetensors", tmp_path / "ours.safetensors", strength=0.5)
    bake_lora(tmp_path / "lora.safetensors", flux / dtype, tmp_path / "theirs.safetensors", strength=0.5)
    convert(tmp_path / "theirs.safetensors", tmp_path / "converted.safetensors")
    ours, theirs = load_file(tmp_path / "ours.safetensors"), load_file(tmp_path / "converted.safetensors")
    original = load_file(flux / f"{dtype}.safetensors")
    assert ours.keys() == theirs.keys() == original.keys()
    changed = set()
    for key, value in ours.items():
        assert value.dtype == getattr(torch, dtype)
        torch.testing.assert_close(value, theirs[key], msg=key)
        if not torch.equal(value, original[key]):
            changed.add(key)
    assert changed == {
        "double_blocks.0.img_attn.qkv.weight",
        "double_blocks.0.img_attn.proj.weight",
        "single_blocks.1.linear1.weight",
        "final_layer.adaLN_modulation.1.weight",
    }


def test_a_baked_weight_is_the_sum_rounded_once(flux, tmp_path):
    source = lora_for({"double_blocks.0.img_attn.proj": (H, H)}, "diffusion_model.", alpha=2.0)
    save(tmp_path / "lora.safetensors", source)
    bake_lora(
        tmp_path / "lora.safetensors", flux / "bfloat16.safetensors", tmp_path / "out.safetensors", architecture="flux"
    )
    key = "double_blocks.0.img_attn.proj"
    before = load_file(flux / "bfloat16.safetensors")[f"{key}.weight"].float()
    expected = (before + change(source, f"diffusion_model.{key}")).bfloat16()
    assert torch.equal(load_file(tmp_path / "out.safetensors")[f"{key}.weight"], expected)


def test_a_lora_for_another_width_is_refused_before_anything_is_written(flux, tmp_path):
    save(tmp_path / "lora.safetensors", lora_for({"double_blocks.0.img_attn.proj": (8, 8)}, "diffusion_model."))
    with pytest.raises(FileError, match=r"of another model\?"):
        bake_lora(tmp_path / "lora.safetensors", flux / "float32.safetensors", tmp_path / "out.safetensors")
    save(tmp_path / "lora.safetensors", lora_for({"double_blocks.9.img_attn.proj": (H, H)}, "diffusion_model."))
    with pytest.raises(FileError, match=r"1 of its weights are not in .*double_blocks\.9\.img_attn\.proj\.weight"):
        bake_lora(tmp_path / "lora.safetensors", flux / "float32.safetensors", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(("lost", "there"), [("lora_A.weight", "lora_B.weight"), ("lora_B.weight", "lora_A.weight")])
def test_half_an_adapter_is_named_and_nothing_written(lost, there, flux, tmp_path):
    state = lora_for(FLUX, "transformer.")
    del state[f"transformer.norm_out.linear.{lost}"]
    source, out = save(tmp_path / "half.safetensors", state), tmp_path / "out.safetensors"
    with pytest.raises(FileError, match=f"'transformer.norm_out.linear' has {there} without its other factor"):
        convert_lora(source, out, layout="comfy")
    with pytest.raises(FileError, match="without its other factor"):
        bake_lora(source, flux / "float32.safetensors", out)
    assert not out.exists()


def broken(key: str, *shape: int) -> dict[str, torch.Tensor]:
    return {**lora_for(FLUX, "transformer."), f"transformer.transformer_blocks.0.attn.to_q.{key}": random(*shape)}


@pytest.mark.parametrize(
    ("key", "shape", "words"),
    [
        ("lora_A.weight", (RANK - 1, H), "their ranks differ"),
        ("lora_A.weight", (RANK, 99), r"take \[99, 256\] features"),
        ("lora_B.weight", (H - 1, RANK), "rows, .* were expected"),
    ],
)
def test_factors_that_do_not_fit_each_other_are_named(key, shape, words, tmp_path):
    source = save(tmp_path / "odd.safetensors", broken(key, *shape))
    with pytest.raises(FileError, match=words):
        convert_lora(source, tmp_path / "out.safetensors", layout="comfy")


def test_a_checkpoint_tells_whose_layers_are_when_several_models_have_them(flux, tmp_path):
    """Attention layers alone could be FLUX.1's or Chroma's."""
    layers = {name: FLUX[name] for name in list(FLUX)[:3]}
    source = save(tmp_path / "a.safetensors", lora_for(layers, "transformer."))
    model = flux / "float32.safetensors"
    report = convert_lora(source, tmp_path / "b.safetensors", layout="comfy", model=model)
    assert report.architecture == "FLUX.1"


def test_a_float8_lora_is_joined_in_its_own_type(tmp_path):
    state = {k: v.to(torch.float8_e4m3fn) for k, v in lora_for(FLUX, "transformer.", alpha=None).items()}
    convert_lora(save(tmp_path / "a.safetensors", state), tmp_path / "b.safetensors", layout="comfy")
    joined = load_file(tmp_path / "b.safetensors")
    assert {value.dtype for value in joined.values()} == {torch.float8_e4m3fn}
    whole = change(
        {key: value.float() for key, value in joined.items()}, "diffusion_model.double_blocks.0.img_attn.qkv"
    )
    exact = {key: value.float() for key, value in state.items()}
    for number, part in enumerate(("to_q", "to_k", "to_v")):
        own = change(exact, f"transformer.transformer_blocks.0.attn.{part}")
        torch.testing.assert_close(whole[number * H : (number + 1) * H], own)


def test_a_pickled_lora_is_read(tmp_path):
    state = lora_for(FLUX, "transformer.")
    torch.save(state, tmp_path / "a.pt")
    convert_lora(tmp_path / "a.pt", tmp_path / "b.safetensors", layout="diffusers")
    convert_lora(save(tmp_path / "a.safetensors", state), tmp_path / "c.safetensors", layout="diffusers")
    assert (tmp_path / "b.safetensors").stat().st_size > 0
    assert load_file(tmp_path / "b.safetensors").keys() == load_file(tmp_path / "c.safetensors").keys()


def test_a_strength_that_is_no_number_is_refused(flux, tmp_path):
    source = save(tmp_path / "a.safetensors", lora_for(FLUX, "transformer."))
    with pytest.raises(ValueError, match="strength nan is no finite number"):
        bake_lora(source, flux / "float32.safetensors", tmp_path / "out.safetensors", strength=float("nan"))
    assert not (tmp_path / "out.safetensors").exists()
