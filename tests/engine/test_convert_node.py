"""NativeDiTConvertCheckpoint without ComfyUI: from the models folders into the output folder, and nowhere else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from comfyui_graphs import node
from safetensors.torch import load_file, save_file
from tiny_models import tiny_module, write_folder

import nativedit
from nativedit import engine
from nativedit.checkpoints.convert import convert
from nativedit.engine.errors import NodeError, WorkflowError

pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("single_thread")

SOURCE = "diffusers/Klein"


@pytest.fixture
def models(tmp_path) -> Path:
    folder = tmp_path / "models"
    write_folder(folder / SOURCE, tiny_module("flux_schnell"), shards=2)
    (folder / "diffusion_models").mkdir()
    engine._cache = None
    return folder


@pytest.fixture
def run(models, tmp_path):
    def short(**inputs):
        graph = {"convert": node("NativeDiTConvertCheckpoint", **{"filename_prefix": "out/a", **inputs})}
        options = {"models_dir": models, "output_dir": tmp_path / "output", "progress": False}
        return nativedit.run(graph, **options)

    return short


def path_of(result) -> Path:
    return Path(result.outputs["convert"][0])


def test_a_folder_becomes_the_file_that_the_command_makes(run, models, tmp_path):
    written = path_of(run(source=SOURCE))

    assert written == tmp_path / "output/out/a_00001_.safetensors"
    convert(models / SOURCE, tmp_path / "wanted.safetensors")
    assert written.read_bytes() == (tmp_path / "wanted.safetensors").read_bytes()


def test_a_file_becomes_a_folder_with_its_configuration(run, models, tmp_path):
    convert(models / SOURCE, models / "diffusion_models/klein.safetensors")

    written = path_of(run(source="diffusion_models/klein.safetensors", layout="diffusers"))

    assert written == tmp_path / "output/out/a_00001_"
    assert json.loads((written / "config.json").read_text())["_class_name"] == "FluxTransformer2DModel"
    convert(written, tmp_path / "again.safetensors")
    first, second = load_file(tmp_path / "again.safetensors"), load_file(models / "diffusion_models/klein.safetensors")
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_numbers_go_on_and_what_did_not_change_is_not_done_again(run, models):
    assert path_of(run(source=SOURCE)).name == "a_00001_.safetensors"
    again = run(source=SOURCE)
    assert again.cached == ["convert"]

    state = load_file(models / SOURCE / "diffusion_pytorch_model-00001-of-00002.safetensors")
    save_file({key: value + 1 for key, value in state.items()},
              models / SOURCE / "diffusion_pytorch_model-00001-of-00002.safetensors")  # fmt: skip

    changed = run(source=SOURCE)
    assert changed.cached == [] and path_of(changed).name == "a_00002_.safetensors"


def test_every_part_of_a_pipeline_or_of_an_all_in_one_file_gets_its_own(run, models, tmp_path):
    pipeline = models / "diffusers/Whole"
    for name in ("transformer", "transformer_2"):
        write_folder(pipeline / name, tiny_module("wan21_t2v_14b"))
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "W"], "transformer_2": ["diffusers", "W"]}
    (pipeline / "model_index.json").write_text(json.dumps(index))

    written = path_of(run(source="diffusers/Whole", component="all", filename_prefix="wan 2.2"))

    names = sorted(path.relative_to(written).as_posix() for path in written.rglob("*.safetensors"))
    assert names == [f"diffusion_models/Whole_{noise}_noise.safetensors" for noise in ("high", "low")]
    assert path_of(run(source="diffusers/Whole", component="transformer_2")).suffix == ".safetensors"
    with pytest.raises(NodeError, match=r"has no part 'vae'; it has transformer, transformer_2"):
        run(source="diffusers/Whole", component="vae")
    save_file(
        {"model.diffusion_model.a": torch.zeros(2), "vae.b": torch.zeros(2)}, models / "diffusion_models/c.safetensors"
    )
    parts = path_of(run(source="diffusion_models/c.safetensors", component="all"))
    assert {path.parent.name for path in parts.rglob("*.safetensors")} == {"diffusion_models", "vae"}


PREFIXES = ["../x", "/tmp/x", "C:\\x", "..\\x", "a/../../x", "nul", "sub/aux.model", "a\0b", "a\nb"]


@pytest.mark.parametrize("layout", ["comfy", "diffusers"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_nothing_is_written_outside_the_output_folder(prefix, layout, run, tmp_path):
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(WorkflowError, match="input filename_prefix: "):
        run(source=SOURCE, filename_prefix=prefix, layout=layout)

    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before and path.name != "output"] == []


@pytest.mark.parametrize("layout", ["comfy", "diffusers"])
def test_a_link_in_the_output_folder_leads_nowhere(layout, run, tmp_path):
    (tmp_path / "output").mkdir()
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "output/link")

    with pytest.raises(NodeError, match="a link on the way leads out of"):
        run(source=SOURCE, filename_prefix="link/x", layout=layout)

    assert os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("source", ["diffusers/../../secret", "/etc/passwd", "diffusers", "../models/diffusers/Klein"])
def test_only_what_is_listed_can_be_read(source, run, models):
    write_folder(models.parent / "secret", tiny_module("ernie_image"))

    with pytest.raises(WorkflowError, match="input source can't be"):
        run(source=source)


def test_an_interrupted_conversion_leaves_nothing(run, tmp_path, monkeypatch):
    from nativedit.engine.progress import Bar

    def interrupted(self, done, total=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(Bar, "to", interrupted)
    for layout in ("comfy", "diffusers"):
        with pytest.raises(KeyboardInterrupt):
            run(source=SOURCE, layout=layout)
        assert os.listdir(tmp_path / "output/out") == []


def test_what_is_wrong_is_said_with_the_node(run, models):
    save_file({"a.lora_A.weight": torch.zeros(2)}, models / "diffusion_models/lora.safetensors")

    with pytest.raises(NodeError, match=r"lora\.safetensors.*is a LoRA or another adapter"):
        run(source="diffusion_models/lora.safetensors")
    with pytest.raises(NodeError, match="is a diffusion model alone; there are no parts to take apart"):
        run(source=SOURCE, component="all")
    with pytest.raises(NodeError, match=r"has no part 'vae'; it is no pipeline"):
        run(source=SOURCE, component="vae")
