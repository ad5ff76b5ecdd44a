""" "auto" as a file in our loaders: the best one that is here for the chosen architecture, never a download."""

from __future__ import annotations

from pathlib import Path

import comfyui_files as files
import pytest
import torch
from comfyui_graphs import node, text_to_latent
from safetensors.torch import save_file

import nativedit
from nativedit import engine
from nativedit.checkpoints import resolve
from nativedit.engine.errors import WorkflowError

pytestmark = pytest.mark.usefixtures("single_thread")
NAME = "prxpixel_t2i.safetensors"
TEXT = "qwen3_vl_embedding_2b.safetensors"


@pytest.fixture
def models(tmp_path: Path, monkeypatch) -> Path:
    folder = tmp_path / "models"
    for kind in ("diffusion_models", "text_encoders", "vae", "checkpoints"):
        (folder / kind).mkdir(parents=True)
    engine._cache = None

    def no_download(*args, **options):
        raise AssertionError("a loader must not download")

    monkeypatch.setattr(resolve, "fetch", no_download)
    return folder


def write_model(path: Path, dtype: torch.dtype = torch.float32, seed: int = 1) -> None:
    save_file(files.dit_state(seed=seed, dtype=dtype), path)


def write_text(path: Path) -> None:
    save_file({**files.text_state(), **files.tokenizer_tensor()}, path, files.FOR_PRX_PIXEL)


def write_vae(path: Path, kind: str) -> None:
    save_file(files.random_state(files.autoencoder(kind), 3), path)


@pytest.fixture
def run(models, tmp_path):
    def short(graph):
        return nativedit.run(graph, models_dir=models, output_dir=tmp_path / "output", progress=False)

    return short


def auto_graph(model: str = "auto", text: str = "auto", architecture: str = "prx_pixel"):
    graph = text_to_latent(size=(32, 24), steps=1, cfg=1.0)
    graph["model"] = node("NativeDiTLoadDiffusionModel", file=model, architecture=architecture, precision="as stored")
    graph["clip"] = node("NativeDiTLoadTextEncoder", file=text, architecture=architecture, precision="as stored")
    return graph


def loaded(result) -> str:
    return result.outputs["model"][0].file


def test_auto_samples_as_the_file_by_name(run, models):
    write_model(models / "diffusion_models" / NAME)
    write_text(models / "text_encoders" / TEXT)

    automatic = run(auto_graph()).outputs["sampler"][0]["samples"]
    engine._cache = None

    assert torch.equal(run(auto_graph(NAME, TEXT)).outputs["sampler"][0]["samples"], automatic)


def test_the_best_precision_is_taken_and_a_better_one_that_arrives_is_noticed(run, models):
    write_text(models / "text_encoders" / TEXT)
    write_model(models / "diffusion_models/mine_fp16.safetensors", torch.float16)
    assert loaded(run(auto_graph())) == "mine_fp16.safetensors"
    again = run(auto_graph())
    assert "model" in again.cached

    write_model(models / "diffusion_models/other.safetensors", torch.bfloat16)

    changed = run(auto_graph())
    assert "model" not in changed.cached and loaded(changed) == "other.safetensors"


def test_the_saved_picture_names_the_file_that_was_taken(run, models):
    write_model(models / "diffusion_models" / NAME)
    write_text(models / "text_encoders" / TEXT)

    result = run({**auto_graph(), "keep": node("NativeDiTSaveDiffusionModel", model=["model", 0],
                  filename_prefix="m", precision="as stored", policy="card")})  # fmt: skip

    assert NAME in nativedit.inspect(result.outputs["keep"][0]).metadata["prompt"]


def test_a_model_in_an_all_in_one_file_is_found(run, models):
    write_text(models / "text_encoders" / TEXT)
    save_file({files.PREFIX + key: value for key, value in files.dit_state().items()},
              models / "checkpoints/all.safetensors")  # fmt: skip

    assert loaded(run(auto_graph())) == "checkpoints/all.safetensors"


def test_what_is_missing_is_said_before_anything_runs_and_the_demo_is_no_answer(run, models):
    with pytest.raises(WorkflowError) as error:
        run(auto_graph())

    message = str(error.value)
    assert message.count("input file can't be found: auto for PRXPixel: is not among the models") == 2
    assert "diffusion_models, checkpoints" in message and "text_encoders" in message


def test_auto_needs_an_architecture(run, models):
    write_model(models / "diffusion_models" / NAME)

    with pytest.raises(WorkflowError, match="choose the architecture too"):
        run(auto_graph(architecture="auto"))


def test_a_core_model_is_found_and_said_to_be_cores(run, models):
    from hollow import write_hollow
    from key_layouts import layout

    write_text(models / "text_encoders" / TEXT)
    write_hollow(models / "diffusion_models/z.safetensors", layout("z_image.comfy"))
    graph = auto_graph()
    graph["model"]["inputs"]["architecture"] = "z_image"

    with pytest.raises(engine.errors.NodeError, match=r"z\.safetensors: is Z-Image.*ComfyUI's core runs"):
        run(graph)


def test_a_vae_is_the_architectures(run, models):
    write_vae(models / "vae/other.safetensors", "dc_ae")
    write_vae(models / "vae/some.safetensors", "kl")

    def vae(architecture: str):
        loader = node("NativeDiTLoadVAE", file="auto", precision="auto", architecture=architecture)
        saver = node("NativeDiTSaveVAE", vae=["vae", 0], filename_prefix="v", precision="as stored")
        return run({"vae": loader, "save": saver}).outputs["vae"][0].name

    assert vae("cogview4") == "some.safetensors"
    assert vae("sana") == "other.safetensors"
    with pytest.raises(WorkflowError, match="auto for FLUX"):
        vae("flux")


def test_a_model_of_pixels_needs_no_file(models):
    from nativedit.engine.auto_files import named
    from nativedit.engine.model_folders import ModelFolders

    assert named(ModelFolders(models), "vae", "auto", "prx_pixel") == "pixel_space"
