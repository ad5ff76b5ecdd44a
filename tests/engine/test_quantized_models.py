"""CogView4 and F-Lite in the engine with transformer and text encoder quantized in every format, and saved again."""

from __future__ import annotations

from pathlib import Path

import cogview4_files as cogview4
import f_lite_files as f_lite
import pytest
import torch
from comfyui_graphs import node
from safetensors.torch import load_file
from support import rel_err

import nativedit
from nativedit.quant.formats import OFFERED

# Of the latent, for random weights in tiny models: what 8 bits and 4 bits may cost.
WORST = {"nvfp4": 0.4, "convrot_w4a4": 0.5, "asym_w4a8_int8": 0.4}
ROWS = {"cogview4": cogview4, "f_lite": f_lite}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("quantized_models")
    cogview4.write(made, cogview4.WIDE_DIT, cogview4.WIDE_GLM)
    f_lite.write(made, f_lite.WIDE_DIT, f_lite.WIDE_T5)
    return made


def graph(row: str, *, model: str = "", text: str = "") -> dict:
    """Up to the latent, with other files."""
    made = ROWS[row].graph(sampler={"steps": 2, "cfg": 1.0})
    made = {key: made[key] for key in ("model", "clip", "positive", "negative", "latent", "sampler", "save")}
    for name, kind, file in (("model", "unet_name" if row == "f_lite" else "file", model), ("clip", "file", text)):
        made[name]["inputs"][kind] = file or made[name]["inputs"][kind]
    return made


@pytest.fixture(scope="session")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The latent of the files that are not quantized, by row."""
    options = {"models_dir": folder, "output_dir": tmp_path_factory.mktemp("plain"), "progress": False}
    return {row: nativedit.run(graph(row), **options).outputs["sampler"][0]["samples"] for row in ROWS}


@pytest.mark.parametrize("name", OFFERED)
@pytest.mark.parametrize("row", ROWS)
def test_a_quantized_model_samples_close_to_its_source_and_is_saved_as_it_is(
    run, folder: Path, plain: dict[str, torch.Tensor], row: str, name: str
):
    files = ROWS[row].NAMES
    for kind, policy in (("diffusion_models", None), ("text_encoders", {"min_weights": 10000})):
        target = folder / kind / f"{row}_{name}.safetensors"
        report = nativedit.quantize(folder / kind / files[kind], target, format=name, policy=policy)
        assert len(report.quantized) > 10
    save = node(
        "NativeDiTSaveDiffusionModel",
        model=["model", 0],
        filename_prefix="saved",
        precision="as stored",
        policy="card",
    )
    file = f"{row}_{name}.safetensors"

    outputs = run({**graph(row, model=file, text=file), "written": save}, models_dir=folder).outputs

    assert 1e-5 < rel_err(outputs["sampler"][0]["samples"], plain[row]) < WORST.get(name, 0.1)
    written, expected = load_file(outputs["written"][0]), load_file(folder / "diffusion_models" / file)
    assert written.keys() == expected.keys()
    for key, value in written.items():
        same = value.reshape(-1).view(torch.uint8), expected[key].reshape(-1).view(torch.uint8)
        assert value.dtype == expected[key].dtype and torch.equal(*same), key
