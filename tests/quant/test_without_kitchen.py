"""comfy-kitchen missing, too old, or with a layout that is an empty shell: said in one sentence, and the rest works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import nativedit
from nativedit.checkpoints.inspection import inspect_layers
from nativedit.checkpoints.opened import open_checkpoint
from nativedit.cli import main
from nativedit.quant.formats import FORMATS, OFFERED

NAMES = ["float8_e4m3fn", "mxfp8", "nvfp4", "int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    weights = {f"blocks.{index}.mlp.up.weight": torch.randn(256, 256, dtype=torch.bfloat16) for index in range(3)}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def refusal(model: Path, name: str) -> str:
    target = model.with_name("out.safetensors")
    with pytest.raises(ImportError) as caught:
        nativedit.quantize(model, target, format=name, policy={"min_weights": 1}, device="cpu")
    assert sorted(path.name for path in model.parent.iterdir()) == ["model.safetensors"]
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a13_without_the_package_the_message_says_what_to_install(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)
    monkeypatch.setitem(sys.modules, "comfy_kitchen.tensor", None)

    assert f"{name} needs comfy-kitchen (pip install comfy-kitchen)" in refusal(model, name)


@pytest.mark.parametrize("shell", [False, True], ids=["no such layout", "an empty shell of it"])
@pytest.mark.parametrize("name", NAMES)
def test_a13_a_layout_that_this_version_lacks_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str, shell: bool
):
    tensor = pytest.importorskip("comfy_kitchen.tensor")
    layout = FORMATS[name].layout
    if shell:
        monkeypatch.setattr(tensor, layout, None)
    else:
        monkeypatch.delattr(tensor, layout)

    assert f"comfy-kitchen has no {layout}, which the format {name} needs" in refusal(model, name)


def test_a13_files_are_inspected_without_the_package(model: Path, monkeypatch: pytest.MonkeyPatch):
    target = model.with_name("nvfp4.safetensors")
    nativedit.quantize(model, target, format="nvfp4", include=["blocks.*"], device="cpu")
    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)
    monkeypatch.setitem(sys.modules, "comfy_kitchen.tensor", None)

    assert nativedit.inspect(target).quantization.is_quantized
    with open_checkpoint(target) as checkpoint:
        assert "nvfp4" in inspect_layers(checkpoint).text()


def test_quantizing_on_a_cpu_does_not_wait_for_the_package(model: Path):
    """Importing it takes as long as quantizing a gigabyte."""
    command = """if True:
        import sys
        import torch
        heavy = {"comfy_kitchen", "sympy", "torch._dynamo"} - sys.modules.keys()
        from nativedit.cli import main
        source, *names = sys.argv[1:]
        for name in names:
            target = source.replace("model.", name + ".")
            assert main(["quantize", source, target, "--format", name, "--include", "*up*", "--device", "cpu"]) == 0
            if name.startswith("float8"):
                assert main(["dequantize", target, target + ".back.safetensors"]) == 0
        assert main(["inspect", target]) == 0
        print(sorted(heavy & sys.modules.keys()))
    """
    names = [name for name in OFFERED if name != "asym_w4a8_int8"]
    result = subprocess.run([sys.executable, "-c", command, model, *names], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
    assert result.stdout.count("quantized 3 of 3") == len(names)


def test_g07_the_doctor_says_what_this_machine_can_do(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and "int8_convrot" in printed and "every 256" in printed

    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)
    monkeypatch.setitem(sys.modules, "comfy_kitchen.tensor", None)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all("pip install comfy-kitchen" in row["problem"] for row in found["formats"])
    assert {row["format"] for row in found["formats"]} == set(OFFERED)
