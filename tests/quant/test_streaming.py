"""Quantizing files of any size: the bytes of one go, bounded memory, whole or not at all. B: cases of saving."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from quant_goldens import same_bytes
from safetensors.torch import load_file, save_file
from support import rel_err

from nativedit.files import OutputError, SafetensorsWriter, open_source
from nativedit.quant import stream
from nativedit.quant.convert import quantize
from nativedit.quant.dequantize import dequantize
from nativedit.quant.describe import describe
from nativedit.quant.errors import QuantError
from nativedit.quant.formats import FORMATS, parse_recipe
from nativedit.quant.kitchen import quantize_matrix, tensor_scale
from nativedit.quant.markers import RECORD_KEY
from nativedit.quant.repair import repair

pytestmark = pytest.mark.usefixtures("single_thread")

RECIPES = [*FORMATS, "int8_convrot", "int8_tensorwise:scale=tensor"]


def blocks(count=3, n=256, k=512, dtype=torch.bfloat16, prefix="") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for index in range(count):
        for name, shape in (("attn.qkv", (n, k)), ("mlp.up", (k, k))):
            tensors[f"{prefix}blocks.{index}.{name}.weight"] = torch.randn(*shape, generator=generator).to(dtype)
        tensors[f"{prefix}blocks.{index}.norm.weight"] = torch.ones(k, dtype=dtype)
    tensors[f"{prefix}img_in.weight"] = torch.randn(k, 64, generator=generator).to(dtype)
    return tensors


@pytest.fixture
def model(tmp_path):
    tensors = blocks()
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, {"format": "pt", "config": '{"a": 1}'})
    return path


def run(path, target, recipe="int8_convrot", **keywords):
    return quantize(path, target, format=recipe, policy={"min_weights": 0}, device="cpu", **keywords)


@pytest.mark.parametrize("recipe", RECIPES)
def test_row_chunks_give_the_bytes_of_one_go(tmp_path, monkeypatch, recipe):
    weight = torch.randn(1000, 512, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    weight[700, 3] = 9.0
    save_file({"blocks.0.a.weight": weight, "blocks.0.b.weight": weight.clone()}, tmp_path / "m.safetensors")
    monkeypatch.setattr(stream, "PIECE", 256 * 512 * 2)
    monkeypatch.setattr(stream, "COPIED", 256 * 512 * 2)
    monkeypatch.setattr("nativedit.quant.quantizer._BATCH_CPU", 128 * 512)
    run(tmp_path / "m.safetensors", tmp_path / "q.safetensors", recipe)
    parsed = parse_recipe(recipe)
    expected = quantize_matrix(weight, parsed, scale=tensor_scale(parsed, weight.abs().amax()))
    written = load_file(tmp_path / "q.safetensors")
    for suffix, tensor in expected.items():
        assert same_bytes(written[f"blocks.0.a.{suffix}"], tensor), suffix


@pytest.mark.parametrize("group", [16, 64, 256])
@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_our_faster_rotation_on_a_cpu_gives_comfy_kitchens_bytes(group, scale):
    from comfy_kitchen.tensor import TensorWiseINT8Layout

    weight = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(group)).mul_(scale).to(torch.bfloat16)
    weight[:, ::97] *= 50
    codes, params = TensorWiseINT8Layout.quantize(weight, per_channel=True, convrot=True, convrot_groupsize=group)
    ours = quantize_matrix(weight, parse_recipe(f"int8_tensorwise:convrot={group}"))
    assert same_bytes(ours["weight"], codes) and same_bytes(ours["weight_scale"], params.scale)


@pytest.mark.parametrize("heavy", [False, True], ids=["gaussian", "heavy tails"])
def test_a_large_weight_gets_the_codebook_that_comfy_kitchen_chooses(tmp_path, monkeypatch, heavy):
    weight = torch.randn(1536, 512, generator=torch.Generator().manual_seed(3))
    if heavy:
        weight = weight * torch.rand(1536, 32, generator=torch.Generator().manual_seed(4)).pow(8).repeat_interleave(
            16, 1
        )
        weight[:, ::61] *= 40
    weight = weight.to(torch.bfloat16)
    save_file({"blocks.0.a.weight": weight, "blocks.0.b.weight": weight.clone()}, tmp_path / "m.safetensors")
    monkeypatch.setattr(stream, "PIECE", 512 * 512 * 2)
    monkeypatch.setattr(stream, "COPIED", 512 * 512 * 2)
    run(tmp_path / "m.safetensors", tmp_path / "q.safetensors", "asym_w4a8_int8")
    expected = quantize_matrix(weight, parse_recipe("asym_w4a8_int8"))
    written = load_file(tmp_path / "q.safetensors")
    assert all(same_bytes(written[f"blocks.0.a.{suffix}"], tensor) for suffix, tensor in expected.items())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_source_dtype(tmp_path, dtype, recipe):
    tensors = {key: (value * 0.05).to(dtype) for key, value in blocks(1, dtype=torch.float32).items()}
    save_file(tensors, tmp_path / "m.safetensors")
    run(tmp_path / "m.safetensors", tmp_path / "q.safetensors", recipe)
    dequantize(tmp_path / "q.safetensors", tmp_path / "f.safetensors", dtype="float32")
    restored = load_file(tmp_path / "f.safetensors")
    for key, value in tensors.items():
        assert rel_err(restored[key], value.float()) < 0.25
    kept = load_file(tmp_path / "q.safetensors")
    expected = torch.bfloat16 if dtype.itemsize == 1 else dtype
    assert kept["blocks.0.norm.weight"].dtype == expected
    assert same_bytes(kept["img_in.weight"], tensors["img_in.weight"])


def test_kept_tensors_and_the_header_are_carried_over(tmp_path, model):
    report = run(model, tmp_path / "q.safetensors")
    source, result = load_file(model), load_file(tmp_path / "q.safetensors")
    for decision in report.kept:
        assert same_bytes(source[decision.key], result[decision.key])
    with open_source(tmp_path / "q.safetensors") as opened:
        assert opened.metadata["format"] == "pt" and opened.metadata["config"] == '{"a": 1}'
        record = json.loads(opened.metadata[RECORD_KEY])
    assert record["format"] == "int8_tensorwise:convrot=256" and record["source"]["name"] == "model.safetensors"
    assert set(record["layers"]) == {decision.layer for decision in report.quantized}


def test_the_record_settles_a_marker_that_was_changed_later(tmp_path, model):
    run(model, tmp_path / "q.safetensors")
    tensors = load_file(tmp_path / "q.safetensors")
    with open_source(tmp_path / "q.safetensors") as opened:
        metadata = opened.metadata
    for wrong in (
        {"format": "int8_tensorwise"},
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16},
    ):
        tampered = dict(tensors)
        raw = torch.tensor(list(json.dumps(wrong).encode()), dtype=torch.uint8)
        tampered["blocks.1.mlp.up.comfy_quant"] = raw
        save_file(tampered, tmp_path / "t.safetensors", metadata)
        assert [problem.layer for problem in describe(tmp_path / "t.safetensors").problems] == ["blocks.1.mlp.up"]
        repair(tmp_path / "t.safetensors", tmp_path / "r.safetensors")
        repaired = load_file(tmp_path / "r.safetensors")
        assert set(repaired) == set(tensors) and all(same_bytes(repaired[key], tensors[key]) for key in tensors)
        tampered["blocks.1.mlp.up.weight"] = tampered["blocks.1.mlp.up.weight"] + 1
        save_file(tampered, tmp_path / "u.safetensors", metadata)
        with pytest.raises(QuantError, match=r"blocks\.1\.mlp\.up"):
            repair(tmp_path / "u.safetensors", tmp_path / "v.safetensors")


def test_an_already_quantized_source_is_refused_unless_asked_for(tmp_path, model):
    run(model, tmp_path / "q.safetensors", "float8_e4m3fn")
    with pytest.raises(QuantError, match=r"quantized already .* requantize"):
        run(tmp_path / "q.safetensors", tmp_path / "x.safetensors")
    report = run(tmp_path / "q.safetensors", tmp_path / "x.safetensors", exclude=["*.mlp.up"], requantize=True)
    assert {str(decision.recipe) for decision in report.quantized} == {"int8_tensorwise:convrot=256"}
    first, second = load_file(tmp_path / "q.safetensors"), load_file(tmp_path / "x.safetensors")
    kept = [key for key in first if ".mlp.up." in key]
    assert kept and all(same_bytes(first[key], second[key]) for key in kept)
    dequantize(tmp_path / "x.safetensors", tmp_path / "f.safetensors")
    source = load_file(model)
    assert all(rel_err(value, source[key]) < 0.06 for key, value in load_file(tmp_path / "f.safetensors").items())


def test_shards_become_one_file_or_shards_again(tmp_path):
    folder = tmp_path / "transformer"
    folder.mkdir()
    tensors, names = blocks(2), {}
    for number in (1, 2):
        part = {
            key: value
            for key, value in tensors.items()
            if f"blocks.{number - 1}" in key or (number == 2 and "img" in key)
        }
        save_file(part, folder / f"m-0000{number}-of-00002.safetensors")
        names.update({key: f"m-0000{number}-of-00002.safetensors" for key in part})
    (folder / "m.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "config.json").write_text('{"_class_name": "X"}')
    run(folder, tmp_path / "one.safetensors")
    run(folder, tmp_path / "out")
    one = load_file(tmp_path / "one.safetensors")
    with open_source(tmp_path / "out") as shards:
        assert len(shards.paths) == 2 and shards.config == {"_class_name": "X"}
        assert set(shards) == set(one) and all(same_bytes(shards.read(key), one[key]) for key in one)
    assert not describe(tmp_path / "out").problems
    dequantize(tmp_path / "out", tmp_path / "back")
    with open_source(tmp_path / "back") as back:
        assert {key: value.shape for key, value in back.tensors.items()} == {
            k: tuple(v.shape) for k, v in tensors.items()
        }
    with pytest.raises(OutputError, match="files in it"):
        run(folder, tmp_path / "out")


def test_b09_other_components_stay_byte_identical(tmp_path):
    tensors = blocks(2, prefix="model.diffusion_model.")
    for prefix in ("first_stage_model.", "conditioner.embedders.0."):
        tensors.update(blocks(2, prefix=prefix))
    save_file(tensors, tmp_path / "m.safetensors")
    report = run(tmp_path / "m.safetensors", tmp_path / "q.safetensors")
    assert all(decision.layer.startswith("model.diffusion_model.") for decision in report.quantized)
    written = load_file(tmp_path / "q.safetensors")
    others = [key for key in tensors if not key.startswith("model.")]
    assert others and all(same_bytes(tensors[key], written[key]) for key in others)
    assert {decision.why for decision in report.kept if decision.key in others} == {"another component of the file"}


def test_b11_source_and_target_may_not_be_one_file(tmp_path, model):
    before = model.read_bytes()
    os.symlink(model, tmp_path / "link.safetensors")
    for target in (model, tmp_path / "link.safetensors"):
        for door in (run, dequantize, repair):
            with pytest.raises(OutputError, match="the source itself"):
                door(model, target)
    assert model.read_bytes() == before


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_b05_an_interrupt_leaves_the_old_file_and_nothing_else(tmp_path, model, failure):
    target = tmp_path / "q.safetensors"
    save_file({"old": torch.ones(1)}, target)
    before = target.read_bytes()

    def progress(done, total, label):
        if done > total // 2:
            raise failure

    for door in (run, dequantize, repair):
        with pytest.raises(failure):
            door(model, target, progress=progress)
        assert target.read_bytes() == before
        assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "q.safetensors"]
    with pytest.raises(failure):
        run(model, tmp_path / "folder", progress=progress)
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "q.safetensors"]


def test_b05_a_full_disk_leaves_nothing(tmp_path, model, monkeypatch):
    written = []

    def full(fd, data, offset, _pwrite=os.pwrite):
        written.append(len(data))
        if sum(written) > 500_000:
            raise OSError(28, "No space left on device")
        return _pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    for target in ("q.safetensors", "folder"):
        with pytest.raises(OutputError, match=f"/{target}.*: the disk is full"):
            run(model, tmp_path / target)
        written.clear()
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_progress_ends_at_the_whole_and_names_layers(tmp_path, model):
    seen = []
    run(model, tmp_path / "q.safetensors", progress=lambda *event: seen.append(event))
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert any("blocks.2" in label for _, _, label in seen)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_nan_and_infinity_are_reported_with_their_layer(tmp_path, value, recipe):
    tensors = blocks(2)
    tensors["blocks.1.mlp.up.weight"][300, 7] = value
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(QuantError, match=r"'blocks\.1\.mlp\.up' has NaN or infinite weights"):
        run(tmp_path / "m.safetensors", tmp_path / "q.safetensors", recipe)
    assert os.listdir(tmp_path) == ["m.safetensors"]
    run(tmp_path / "m.safetensors", tmp_path / "q.safetensors", recipe, exclude=["blocks.1.mlp.up"])


def test_a_dry_run_writes_nothing_and_foretells_the_size(tmp_path, model):
    dry = run(model, tmp_path / "q.safetensors", dry_run=True)
    assert not dry.written and os.listdir(tmp_path) == ["model.safetensors"]
    real = run(model, tmp_path / "q.safetensors")
    assert dry.bytes_after == real.bytes_after and dry.table() == real.table()
    with open_source(tmp_path / "q.safetensors") as opened:
        assert real.bytes_after == sum(info.nbytes for info in opened.tensors.values())
    assert "blocks.0.attn.qkv" in dry.table() and "would quantize 6 of" in str(dry)


def test_b15_empty_and_tied_tensors_survive(tmp_path):
    tensors = {**blocks(2), "blocks.0.empty.weight": torch.zeros(0, 512, dtype=torch.bfloat16)}
    tensors["lm_head.weight"] = tensors["blocks.0.mlp.up.weight"].clone()
    save_file(tensors, tmp_path / "m.safetensors")
    report = run(tmp_path / "m.safetensors", tmp_path / "q.safetensors")
    assert next(d.why for d in report.kept if d.layer == "blocks.0.empty") == "the weight is empty"
    written = load_file(tmp_path / "q.safetensors")
    assert written["blocks.0.empty.weight"].shape == (0, 512)
    assert same_bytes(written["lm_head.weight"], tensors["lm_head.weight"])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "wish",
    [
        {"format": "int8_convrot"},
        {"format": "nvfp4"},
        {"target_size": 580_000_000, "formats": ["int8_convrot", "nvfp4"]},
    ],
    ids=["int8_convrot", "nvfp4", "budget"],
)
def test_b03_memory_does_not_grow_with_the_model(tmp_path, wish):
    """A weight of 128 MB and 500 MB of others, in a process whose own memory (not the page cache) is watched."""
    path = tmp_path / "m.safetensors"
    entries = [("blocks.0.a.weight", "BF16", (16384, 4096)), ("blocks.0.b.weight", "BF16", (64, 4096))]
    entries += [(f"other.{index}", "U8", (125_000_000,)) for index in range(4)]
    row = torch.randn(1024, 4096).to(torch.bfloat16)
    with SafetensorsWriter(path, entries) as writer:
        for start in range(0, 16384, 1024):
            writer.write_rows("blocks.0.a.weight", start, row)
        writer.write("blocks.0.b.weight", row[:64])
        for name, _, (size,) in entries[2:]:
            writer.write(name, torch.zeros(size, dtype=torch.uint8))
    script = f"""
        import torch
        torch.set_num_threads(1)
        from nativedit.quant.convert import quantize
        from nativedit.quant import kitchen
        kitchen.layout_of("nvfp4")
        def anonymous():
            with open("/proc/self/status") as file:
                return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))
        base, peak = anonymous(), [0]
        def progress(*event):
            peak[0] = max(peak[0], anonymous())
        report = quantize({str(path)!r}, {str(tmp_path / "q.safetensors")!r}, device="cpu",
                          progress=progress, **{wish!r})
        assert len(report.quantized) == 1
        print(peak[0] - base)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 1024 * 1024, f"{int(result.stdout) / 1024:.0f} MB"
