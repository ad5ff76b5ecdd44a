"""LoRA files in the spellings of every trainer, through ComfyUI's own loaders."""

from __future__ import annotations

from collections.abc import Callable

import comfyui_files as files
import pytest
import torch
from comfyui_graphs import node, text_to_latent, with_model_node
from comfyui_server import GraphError, Server
from support import rel_err

pytestmark = pytest.mark.comfyui

NOT_LOADED = ("lora key not loaded", "NOT LOADED", "layers of this LoRA applied")


def for_model_only(name: str) -> dict:
    return with_model_node(text_to_latent(), "lora", "LoraLoaderModelOnly", lora_name=name, strength_model=1.0)


def for_both(name: str) -> dict:
    graph = text_to_latent()
    graph["lora"] = node(
        "LoraLoader", lora_name=name, strength_model=1.0, strength_clip=1.0, model=["model", 0], clip=["clip", 0]
    )
    graph["sampler"]["inputs"]["model"] = ["lora", 0]
    for prompt in ("positive", "negative"):
        graph[prompt]["inputs"]["clip"] = ["lora", 1]
    return graph


def merged_latent(latent: Callable, server: Server, state: dict, spelling: str) -> torch.Tensor:
    """The same LoRA multiplied out and added by hand."""
    lora = files.lora(state, spelling)
    merged = dict(state)
    for key in state:
        down = lora.get(f"{spelling.format(key.removesuffix('.weight'))}.lora_A.weight")
        if down is not None:
            merged[key] = state[key] + lora[f"{spelling.format(key.removesuffix('.weight'))}.lora_B.weight"] @ down
    files.save_file(merged, server.models("diffusion_models") / "merged.safetensors")
    return latent(text_to_latent(model="merged.safetensors"))


def test_every_spelling_for_the_diffusion_model_matches_every_layer(server: Server, latent: Callable):
    expected = merged_latent(latent, server, files.dit_state(), "diffusion_model.{}")

    for name in files.DIT_SPELLINGS:
        result, log = server.log_during(lambda name=name: latent(for_model_only(f"dit_{name}.safetensors")))
        assert not any(line in log for line in NOT_LOADED), (name, log)
        assert rel_err(result, expected) <= 1e-4, name


def test_every_spelling_for_the_text_encoder_matches_every_layer(server: Server, latent: Callable):
    results = {}
    for name in files.TEXT_SPELLINGS:
        results[name], log = server.log_during(lambda name=name: latent(for_both(f"text_{name}.safetensors")))
        assert not any(line in log for line in NOT_LOADED), (name, log)

    first = results["comfy"]
    assert rel_err(first, latent(text_to_latent())) > 1e-3
    assert all(rel_err(result, first) <= 1e-5 for result in results.values())


def test_a_lora_that_fits_in_part_says_how_much(server: Server, latent: Callable):
    _, log = server.log_during(lambda: latent(for_model_only("most_fit.safetensors")))

    layers = sum(key.endswith("lora_A.weight") for key in files.lora(files.dit_state(), "diffusion_model.{}"))
    assert f"{layers - 2} of {layers} layers of this LoRA applied" in log


def test_a_lora_of_another_model_is_an_error(server: Server):
    with pytest.raises(
        GraphError, match=r"2 of \d+ layers of this LoRA applied: it was made for another model"
    ) as error:
        server.run(for_model_only("few_fit.safetensors"))
    assert error.value.node == "lora"


def with_wide_layers(count: int | None) -> dict[str, torch.Tensor]:
    """A LoRA for the tiny model, ``count`` layers of it (None: all) from one of hidden size 128."""
    fitting = files.lora(files.dit_state(), "diffusion_model.{}")
    wide = files.lora(files.dit_state({**files.DIT, "hidden_size": 128}), "diffusion_model.{}")
    layers = sorted({key.split(".lora_")[0] for key in fitting if ".blocks." in key})[:count]
    return {key: wide[key] if key.split(".lora_")[0] in layers else value for key, value in fitting.items()}


def test_a_lora_of_a_wider_model_is_an_error_with_both_widths(server: Server):
    files.save_file(with_wide_layers(None), server.models("loras") / "wider.safetensors")

    with pytest.raises(
        GraphError, match=r"\d+ of \d+ layers of this LoRA applied: it was made for another model; of anot"
    ) as error:
        server.run(for_model_only("wider.safetensors"))
    assert error.value.node == "lora"
    assert "most take 128 features in the LoRA and 64 in the model" in str(error.value)
    assert "not found" not in str(error.value) and "layout" not in str(error.value)


def test_a_lora_with_some_layers_of_another_size_says_how_much(server: Server, latent: Callable):
    files.save_file(with_wide_layers(2), server.models("loras") / "two_wider.safetensors")
    _, log = server.log_during(lambda: latent(for_model_only("two_wider.safetensors")))

    count = len(with_wide_layers(2)) // 2
    assert f"{count - 2} of {count} layers of this LoRA applied; of another size than in the diffusion model: " in log


def test_a_text_encoders_lora_of_another_size_is_an_error(server: Server):
    wide = files.text_state(config={**files.TEXT, "intermediate_size": 96, "hidden_size": 48})
    files.save_file(files.lora(wide, "text_encoder.{}"), server.models("loras") / "text_wider.safetensors")

    with pytest.raises(GraphError, match=r"0 of 14 layers .* \(most take 48 features in the LoRA and 32 in the model"):
        server.run(for_both("text_wider.safetensors"))


def test_a_file_that_is_no_lora_is_an_error(server: Server):
    files.save_file({"something.weight": torch.zeros(2, 2)}, server.models("loras") / "no_lora.safetensors")

    with pytest.raises(GraphError, match=r"holds no layer of a LoRA: something\.weight") as error:
        server.run(for_model_only("no_lora.safetensors"))
    assert error.value.node == "lora"
