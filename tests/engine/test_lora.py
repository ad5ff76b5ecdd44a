"""LoRA files in every spelling that trainers use; how much fitted is said."""

from __future__ import annotations

import sys
from pathlib import Path

import comfyui_files as files
import pytest
import torch
from comfyui_graphs import between, node, text_to_latent
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from graphs import with_lora


def model_only(file: str, strength: float = 1.0) -> dict:
    loader = node("LoraLoaderModelOnly", lora_name=file, strength_model=strength)
    return between(text_to_latent(steps=1), "model", "sampler", "lora", loader)


def weights(result, number: int = 0) -> dict[str, torch.Tensor]:
    given = result.outputs["lora"][number]
    module = given.module if number == 0 else given.encoder.model
    return module.state_dict()


@pytest.mark.parametrize("spelling", files.DIT_SPELLINGS)
def test_every_layer_is_changed_by_its_product(run, spelling: str):
    result = run(model_only(f"dit_{spelling}.safetensors", strength=0.5))

    state = files.dit_state()
    added = files.lora(state, "{}")
    changed = weights(result)
    for key, weight in state.items():
        name = key.removesuffix(".weight")
        if f"{name}.lora_A.weight" in added:
            weight = weight + 0.5 * added[f"{name}.lora_B.weight"] @ added[f"{name}.lora_A.weight"]
        torch.testing.assert_close(changed[key], weight)
    assert result.notes == [
        f"PRXPixel: {len(added) // 2} of {len(added) // 2} layers of dit_{spelling}.safetensors applied"
    ]


# peft writes a bare text encoder's layers as it writes a diffusion model's; such a file does not say whose they are.
@pytest.mark.parametrize("spelling", [name for name in files.TEXT_SPELLINGS if name != "peft"])
def test_a_text_encoders_layers_go_to_the_text_encoder(run, spelling: str):
    result = run(with_lora(f"text_{spelling}.safetensors", strength=1.0))

    state = files.text_state()
    added = files.lora(state, "{}")
    name = "layers.1.mlp.up_proj"
    expected = state[f"{name}.weight"] + added[f"{name}.lora_B.weight"] @ added[f"{name}.lora_A.weight"]
    torch.testing.assert_close(weights(result, 1)[f"{name}.weight"], expected)
    assert result.outputs["lora"][0] is result.outputs["model"][0]


@pytest.mark.parametrize("kind", ["dora_scale", "lokr_w1", "hada_w1_a", "lora_magnitude_vector.weight", "diff"])
def test_adapters_of_another_kind_are_no_wrong_picture(run, models: Path, kind: str):
    """The pairs of a DoRA alone are another change than the DoRA."""
    added = {} if kind == "diff" else files.lora(files.dit_state(), "transformer.{}")
    added[f"transformer.blocks.0.gate_proj.{kind}"] = torch.ones(4, 1)
    save_file(added, models / "loras" / f"other_{kind}.safetensors")

    with pytest.raises(
        Exception, match=f"the embedded engine does not \\({kind.split('.')[0]}\\); run the workflow in"
    ):
        run(model_only(f"other_{kind}.safetensors"))


def test_the_original_keeps_its_weights_and_shares_the_rest(run):
    result = run(model_only("dit_comfy.safetensors"))
    before, after = result.outputs["model"][0].module, result.outputs["lora"][0].module

    for key, weight in files.dit_state().items():
        assert torch.equal(before.state_dict()[key], weight)
    shared = "blocks.0.attention.norm_q.weight"
    assert before.get_parameter(shared).data_ptr() == after.get_parameter(shared).data_ptr()


def test_a_strength_of_zero_changes_nothing(run):
    result = run(model_only("dit_comfy.safetensors", strength=0.0))

    assert result.outputs["lora"][0] is result.outputs["model"][0]


def test_alpha_scales_by_the_rank(run, models: Path):
    lora = files.lora(files.dit_state(), "lora_unet_{}")
    halved = {key: torch.tensor(1.0) if key.endswith(".alpha") else value for key, value in lora.items()}
    save_file(halved, models / "loras" / "half_alpha.safetensors")
    by_alpha = weights(run(model_only("half_alpha.safetensors", strength=1.0)))
    by_strength = weights(run(model_only("dit_kohya.safetensors", strength=0.5)))

    for key, weight in by_alpha.items():
        torch.testing.assert_close(weight, by_strength[key])


def test_a_lora_that_fits_in_part_says_how_much(run):
    (note,) = run(model_only("most_fit.safetensors")).notes

    assert note.startswith("PRXPixel: ") and "layers of most_fit.safetensors applied; not found in the model: " in note


def test_a_layer_of_another_size_is_left_out_and_said(run, models: Path):
    lora = files.lora(files.dit_state(), "{}")
    for part, shape in (("A", (2, 48)), ("B", (192, 2))):
        lora[f"blocks.0.attention.img_qkv_proj.lora_{part}.weight"] = torch.ones(shape)
    save_file(lora, models / "loras" / "one_wider.safetensors")
    result = run(model_only("one_wider.safetensors"))

    count = len(lora) // 2
    (note,) = result.notes
    assert (
        f"{count - 1} of {count} layers of one_wider.safetensors applied; of another size than in the model: " in note
    )
    key = "blocks.0.attention.img_qkv_proj.weight"
    assert torch.equal(weights(result)[key], files.dit_state()[key])


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("few_fit", "2 of .* it was made for another model; not found in the model: "),
        ("no_lora", "holds no LoRA"),
        (
            "other_width",
            r"0 of 1 .*img_qkv_proj changes \[192, 48\] where the model has \[192, 64\] \(most take 48 features",
        ),
        ("two_ranks", r"the factors of .*img_qkv_proj do not fit: \[192, 3\] and \[2, 64\]"),
    ],
)
def test_a_lora_that_does_not_fit_is_refused(run, models: Path, file: str, expected: str):
    from nativedit.engine.errors import NodeError

    folder = models / "loras"
    save_file({"x.weight": torch.zeros(2)}, folder / "no_lora.safetensors")
    for name, shapes in (("other_width", ((2, 48), (192, 2))), ("two_ranks", ((2, 64), (192, 3)))):
        factors = zip("AB", shapes, strict=True)
        wrong = {f"blocks.0.attention.img_qkv_proj.lora_{p}.weight": torch.zeros(shape) for p, shape in factors}
        save_file(wrong, folder / f"{name}.safetensors")

    with pytest.raises(NodeError, match=f"node lora LoraLoaderModelOnly: .*{file}.safetensors: .*{expected}"):
        run(model_only(f"{file}.safetensors"))


def test_weights_in_bfloat16_stay_in_bfloat16(run, monkeypatch: pytest.MonkeyPatch):
    from nativedit.engine import host

    monkeypatch.setattr(host, "_free_memory", lambda: 0)
    graph = model_only("dit_comfy.safetensors")
    graph["model"]["inputs"]["unet_name"] = "tiny_bf16.safetensors"

    assert {weight.dtype for weight in weights(run(graph)).values()} == {torch.bfloat16}


def test_a_quantized_layer_gets_its_change_in_full(run, models: Path):
    """int8 codes are no numbers to add to; and in 127 steps most of a small change would be lost."""
    import nativedit

    source = models / "diffusion_models" / "tiny.safetensors"
    nativedit.quantize(source, source.with_name("tiny_int8.safetensors"), format="int8_tensorwise")
    graph = model_only("dit_comfy.safetensors", strength=0.5)
    graph["model"]["inputs"]["unet_name"] = "tiny_int8.safetensors"
    result = run(graph)

    before, after = result.outputs["model"][0].module, result.outputs["lora"][0].module
    quantized = [name for name, layer in before.named_modules() if getattr(layer, "quantization", None)]
    assert quantized
    added = files.lora(files.dit_state(), "{}")
    for name in quantized:
        own, plain = before.get_submodule(name), after.get_submodule(name)
        change = 0.5 * added[f"{name}.lora_B.weight"] @ added[f"{name}.lora_A.weight"]
        expected = own.dequantized(torch.bfloat16).float() + change
        torch.testing.assert_close(plain.weight.float(), expected, rtol=0.01, atol=0.002)
        assert own.weight.dtype == torch.int8
