"""One door for files, folders, shards and components."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from nativedit.files import DamagedFile, FileError, NotSafetensors, UnsafePath, open_source

TENSORS = {
    "a.weight": torch.arange(24, dtype=torch.float32).reshape(6, 4),
    "b.weight": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    "c": torch.tensor(7, dtype=torch.int64),
    "f8": torch.arange(5).to(torch.float8_e4m3fn),
    "empty": torch.zeros(0, 3),
}


def equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(*bits)


def sharded(folder, config=True):
    folder.mkdir()
    save_file({name: TENSORS[name] for name in ("a.weight", "c")}, folder / "model-00001-of-00002.safetensors")
    save_file({name: TENSORS[name] for name in ("b.weight", "f8")}, folder / "model-00002-of-00002.safetensors")
    weight_map = {"a.weight": 1, "c": 1, "b.weight": 2, "f8": 2}
    names = {name: f"model-0000{number}-of-00002.safetensors" for name, number in weight_map.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    if config:
        (folder / "config.json").write_text('{"num_layers": 2}')
    return folder


def test_reads_every_tensor_of_a_file(tmp_path):
    save_file(TENSORS, tmp_path / "m.safetensors", {"k": "v"})
    with open_source(tmp_path / "m.safetensors") as source:
        assert source.metadata == {"k": "v"} and source.config is None
        assert set(source) == set(TENSORS)
        assert all(equal(source.read(name), TENSORS[name]) for name in TENSORS)


def test_reads_rows_and_bytes(tmp_path):
    save_file(TENSORS, tmp_path / "m.safetensors")
    with open_source(tmp_path / "m.safetensors") as source:
        assert equal(source.read_rows("a.weight", 2, 5), TENSORS["a.weight"][2:5])
        assert source.read_bytes("f8", 1, 3).tolist() == TENSORS["f8"].view(torch.uint8)[1:3].tolist()
        with pytest.raises(FileError, match="no rows 2:9"):
            source.read_rows("a.weight", 2, 9)
        with pytest.raises(FileError, match="has no tensor 'x'"):
            source.read("x")


def test_a_tensor_owns_its_memory(tmp_path):
    save_file(TENSORS, tmp_path / "m.safetensors")
    with open_source(tmp_path / "m.safetensors") as source:
        tensor = source.read("a.weight")
    tensor.add_(1)
    assert equal(tensor, TENSORS["a.weight"] + 1)


def test_reads_from_several_threads(tmp_path):
    tensors = {str(index): torch.full((1000,), float(index)) for index in range(20)}
    save_file(tensors, tmp_path / "m.safetensors")
    with open_source(tmp_path / "m.safetensors") as source, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(source.read, list(tensors) * 5))
    assert all(bool((value == int(name)).all()) for name, value in zip(list(tensors) * 5, results, strict=True))


@pytest.mark.parametrize("through", ["folder", "index", "component", "no index"])
def test_joins_shards(tmp_path, through):
    folder = sharded(tmp_path / "transformer")
    path, component = folder, None
    if through == "index":
        path = folder / "model.safetensors.index.json"
    if through == "component":
        path, component = tmp_path, "transformer"
    if through == "no index":
        (folder / "model.safetensors.index.json").unlink()
    with open_source(path, component=component) as source:
        assert set(source) == set(TENSORS) - {"empty"}
        assert all(equal(source.read(name), TENSORS[name]) for name in source)
        assert source.config == {"num_layers": 2}
        assert len(source.paths) == 2


def test_opens_each_shard_once(tmp_path, monkeypatch):
    folder = sharded(tmp_path / "m")
    with open_source(folder) as source:
        opened = []
        monkeypatch.setattr(
            "builtins.open", lambda file, *a, _open=open, **k: (opened.append(str(file)), _open(file, *a, **k))[1]
        )
        for _ in range(3):
            for name in source:
                source.read(name)
    assert sorted(opened) == sorted(source.paths)


def test_a_missing_shard_is_named(tmp_path):
    folder = sharded(tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileError, match="model-00002-of-00002"):
        open_source(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(FileError, match="lacks shard 00002"):
        open_source(folder)


def test_an_index_can_not_reach_outside_its_folder(tmp_path):
    folder = sharded(tmp_path / "m")
    save_file(TENSORS, tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a.weight": "../secret.safetensors"}}')
    with pytest.raises(UnsafePath):
        open_source(folder)


def test_an_index_that_promises_too_much_is_refused(tmp_path):
    folder = sharded(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"zzz": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(DamagedFile, match="'zzz'"):
        open_source(folder)


def test_one_tensor_in_two_shards_is_refused(tmp_path):
    for number in (1, 2):
        save_file({"a": torch.zeros(1)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    with pytest.raises(DamagedFile, match="also in"):
        open_source(tmp_path)


def test_says_what_a_folder_without_weights_holds(tmp_path):
    with pytest.raises(NotSafetensors, match="without"):
        open_source(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(NotSafetensors, match="only pickles"):
        open_source(tmp_path)
    sharded(tmp_path / "transformer")
    with pytest.raises(NotSafetensors, match="in its folders transformer"):
        open_source(tmp_path)


def test_of_two_variants_the_plain_one_is_taken(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "diffusion_pytorch_model.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "diffusion_pytorch_model.fp16.safetensors")
    with open_source(tmp_path) as source:
        assert source.read("a").item() == 0
    (tmp_path / "diffusion_pytorch_model.safetensors").rename(tmp_path / "other.safetensors")
    with pytest.raises(FileError, match="several candidates"):
        open_source(tmp_path)


def test_a_file_cut_off_after_opening_is_named(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(1000)}, path)
    with open_source(path) as source:
        source.read_bytes("a", 0, 4)
        with open(path, "r+b") as file:
            file.truncate(200)
        with pytest.raises(DamagedFile, match="ended at byte"):
            source.read("a")


def test_a_dtype_that_torch_lacks_is_named_when_it_is_read(tmp_path):
    header = json.dumps({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\x12")
    with open_source(tmp_path / "m.safetensors") as source:
        assert source.read_bytes("a").tolist() == [0x12]
        with pytest.raises(FileError, match="no dtype for F4"):
            source.read("a")
