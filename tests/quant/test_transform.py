"""From any source into memory or a file: the same bytes, and a file that is whole or not there."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import nativedit
from nativedit.checkpoints import transform
from nativedit.files import FileError, open_source
from nativedit.files.memory import Lazy, MemoryWriter, TensorSource
from nativedit.quant.formats import OFFERED
from nativedit.quant.reader import read_quantized

POLICY = {"min_weights": 10}


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"attn.qkv": (384, 256), "mlp.up": (512, 256)}
    tensors = {
        f"layers.{block}.{name}.weight": torch.randn(shape, generator=generator).bfloat16()
        for block in range(2)
        for name, shape in shapes.items()
    }
    return {**tensors, "norm.weight": torch.ones(256), "layers.0.mlp.up.bias": torch.ones(512).bfloat16()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for key, value in first.items():
        other = second[key]
        assert (value.dtype, value.shape) == (other.dtype, other.shape), key
        assert torch.equal(value.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), key


@pytest.mark.parametrize("name", OFFERED)
def test_memory_holds_the_bytes_of_the_file(state, tmp_path: Path, name: str):
    source, wanted = tmp_path / "source.safetensors", tmp_path / "wanted.safetensors"
    save_file(state, source)
    nativedit.quantize(source, wanted, format=name, policy=POLICY)

    with open_source(source) as opened:
        same(transform.plan(opened, name, policy=POLICY).tensors(), load_file(wanted))
    same(transform.plan(TensorSource("graph", state), name, policy=POLICY).tensors(), load_file(wanted))


def test_a_number_that_float16_can_not_hold_is_no_infinity(state, tmp_path: Path):
    large = {**state, "norm.weight": state["norm.weight"].index_fill(0, torch.tensor([7]), 70000.0)}
    with pytest.raises(FileError, match=r"'norm.weight' has values that float16 can't hold"):
        transform.plan(TensorSource("graph", large), "float16").write(tmp_path / "out.safetensors", {})
    assert not list(tmp_path.iterdir())
    assert transform.plan(TensorSource("graph", large), "bfloat16").tensors()["norm.weight"][7] == 70144.0
    masked = {**state, "mask": torch.tensor([0.0, float("-inf")])}
    assert transform.plan(TensorSource("graph", masked), "float16").tensors()["mask"].tolist() == [0.0, float("-inf")]


@pytest.mark.parametrize("name", OFFERED)
def test_what_is_quantized_in_the_same_way_stays_as_it_is(state, name: str):
    quantized = TensorSource("graph", transform.plan(TensorSource("graph", state), name, policy=POLICY).tensors())

    assert transform.plan(quantized, name, policy=POLICY).changes_nothing
    assert transform.plan(quantized, None).changes_nothing


def test_what_is_quantized_in_another_way_is_refused(state):
    quantized = TensorSource("graph", transform.plan(TensorSource("graph", state), "nvfp4", policy=POLICY).tensors())

    with pytest.raises(FileError, match=r"quantized already .* nvfp4"):
        transform.plan(quantized, "float8_e4m3fn", policy=POLICY)


def test_a_number_format_undoes_quantization(state):
    quantized = transform.plan(TensorSource("graph", state), "int8_convrot", policy=POLICY).tensors()

    plain = transform.plan(TensorSource("graph", quantized), "float16").tensors()

    assert plain.keys() == state.keys()
    assert {value.dtype for value in plain.values()} == {torch.float16}


def test_the_record_tells_the_true_shape_of_padded_weights(tmp_path: Path):
    weight = torch.randn(200, 72).bfloat16()
    tensors = {"blocks.0.a.weight": weight, "blocks.0.b.weight": weight}
    target = tmp_path / "padded.safetensors"
    transform.plan(TensorSource("graph", tensors), "nvfp4", policy=POLICY).write(target, {})
    again = tmp_path / "again.safetensors"

    with open_source(target) as source:
        transform.plan(source, None).write(again, {})
    with open_source(again) as source:
        layer = read_quantized(source).layers["blocks.0.a"]

    assert (layer.shape, layer.exact) == ((200, 72), True)


def test_lazy_tensors_are_made_when_they_are_read_and_not_kept():
    made = []

    def make(name):
        made.append(name)
        return torch.full((4, 8), 1.0)

    source = TensorSource("graph", {n: Lazy(torch.float32, (4, 8), lambda n=n: make(n)) for n in ("a", "b")})
    assert made == []
    assert torch.equal(source.read_rows("a", 1, 3), torch.ones(2, 8))
    source.read("a")
    source.read("b")
    source.read("a")
    assert made == ["a", "b", "a"]


def test_a_source_is_not_written_to(state):
    before = {key: value.clone() for key, value in state.items()}
    for name in OFFERED:
        transform.plan(TensorSource("graph", state), name, policy=POLICY).tensors()
    same(state, before)


def test_memory_takes_no_more_than_was_announced():
    memory = MemoryWriter([("a", "F32", (2,))])

    with pytest.raises(FileError, match="more bytes"):
        memory.write_bytes("a", b"123456789")


def test_a_full_disk_leaves_the_old_file(state, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"old")
    calls = []

    def full(fd, data, offset):
        calls.append(offset)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(FileError, match="disk is full"):
        transform.plan(TensorSource("graph", state), "int8_convrot", policy=POLICY).write(target, {})

    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


KILLED = """
import os, signal, sys, time
import torch
torch.set_num_threads(1)
from nativedit.checkpoints import transform
from nativedit.files.memory import TensorSource

folder, delays = sys.argv[1], [float(text) for text in sys.argv[2:]]
state = {f"layers.{i}.mlp.weight": torch.full((256, 256), float(i)) for i in range(40)}
state["layers.0.other.weight"] = torch.ones(256, 256)
for number, delay in enumerate(delays):
    child = os.fork()
    if child == 0:
        transform.plan(TensorSource("graph", state), None).write(f"{folder}/model.safetensors", {"number": str(number)})
        transform.plan(TensorSource("graph", state), None).write(f"{folder}/new_{number}.safetensors", {})
        os._exit(0)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks and kills")
def test_fifty_kills_leave_whole_files_only(tmp_path: Path):
    save_file({"old": torch.ones(1)}, tmp_path / "model.safetensors")
    delays = [str(random.Random(number).uniform(0.0, 0.05)) for number in range(50)]

    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), *delays], check=True, timeout=120)

    visible = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert tmp_path / "model.safetensors" in visible
    for path in visible:
        tensors = load_file(path)
        assert len(tensors) in (1, 41), path
