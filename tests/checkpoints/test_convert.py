"""Conversion both ways: nothing missing, nothing left over, every bit back; what can't be converted is said by name."""

from __future__ import annotations

import json
import os

import pytest
import torch
from key_layouts import CARDS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import TINY, tiny_module, write_folder

from nativedit.checkpoints.convert import convert
from nativedit.files import FileError, OutputError, open_source
from nativedit.supported_models import get_architecture

pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("single_thread")
rows = pytest.mark.parametrize("row", list(TINY))


def read_all(path) -> dict[str, torch.Tensor]:
    with open_source(path) as source:
        return {key: source.read(key) for key in source}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[key].dtype == second[key].dtype and torch.equal(first[key], second[key]) for key in first
    )


@rows
def test_there_and_back_gives_every_bit_and_the_configuration(row, tmp_path):
    folder = write_folder(tmp_path / "there", tiny_module(row), shards=3)
    file, back, again = tmp_path / "model.safetensors", tmp_path / "back", tmp_path / "again.safetensors"
    report = convert(folder, file)
    assert report.architecture == get_architecture(CARDS[row]).title and report.left_out == []
    convert(file, back, layout="diffusers")
    assert same(read_all(back), read_all(folder))
    assert json.loads((back / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    convert(back, again)
    assert same(load_file(again), load_file(file))


@rows
def test_parameters_are_as_many_in_both_layouts(row, tmp_path):
    folder = write_folder(tmp_path / "there", tiny_module(row))
    convert(folder, tmp_path / "model.safetensors")
    computed = set(get_architecture(CARDS[row]).two_way.computed)
    ours = {key: value for key, value in load_file(tmp_path / "model.safetensors").items() if key not in computed}
    assert sum(v.numel() for v in ours.values()) == sum(v.numel() for v in read_all(folder).values())


@pytest.mark.parametrize("row", ["flux_dev", "lumina2", "krea2", "sd35_medium"])
def test_the_diffusers_class_loads_what_comes_back(row, tmp_path):
    import diffusers

    module = tiny_module(row)
    convert(write_folder(tmp_path / "there", module), tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        bare = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    save_file(bare, tmp_path / "bare.safetensors")  # without a header: the configuration comes from shapes
    convert(tmp_path / "bare.safetensors", tmp_path / "back", layout="diffusers")
    loaded = getattr(diffusers, TINY[row][0]).from_pretrained(tmp_path / "back")
    assert same(loaded.state_dict(), module.state_dict())


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model.", "net."])
def test_a_prefixed_file_loses_its_prefix(prefix, tmp_path):
    convert(write_folder(tmp_path / "there", tiny_module("flux_schnell")), tmp_path / "model.safetensors")
    ours = load_file(tmp_path / "model.safetensors")
    old = {key.replace("_norm.scale", "_norm.weight"): value for key, value in ours.items()}
    save_file({prefix + key: value for key, value in old.items()}, tmp_path / "prefixed.safetensors", {"mine": "kept"})
    convert(tmp_path / "prefixed.safetensors", tmp_path / "plain.safetensors")
    assert same(load_file(tmp_path / "plain.safetensors"), ours)
    with open_source(tmp_path / "plain.safetensors") as source:
        assert source.metadata["mine"] == "kept"


def test_a_diffusers_keyed_single_file_with_a_prefix_converts(tmp_path):
    folder = write_folder(tmp_path / "there", tiny_module("chroma"))
    save_file({f"transformer.{k}": v for k, v in read_all(folder).items()}, tmp_path / "joined.safetensors")
    convert(folder, tmp_path / "a.safetensors")
    convert(tmp_path / "joined.safetensors", tmp_path / "b.safetensors")
    assert same(load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors"))


def test_large_folders_become_shards_with_an_index(tmp_path):
    folder = write_folder(tmp_path / "there", tiny_module("wan21_t2v_14b"))
    convert(folder, tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "back", layout="diffusers", shard_bytes=2_000_000)
    names = sorted(os.listdir(tmp_path / "back"))
    count = len(names) - 2
    assert count > 1 and names[-1] == "diffusion_pytorch_model.safetensors.index.json"
    assert f"diffusion_pytorch_model-00001-of-{count:05d}.safetensors" in names
    assert same(read_all(tmp_path / "back"), read_all(folder))


def test_shards_are_opened_once_and_nothing_else_is_written(tmp_path, monkeypatch):
    from nativedit.files import source as source_module

    folder = write_folder(tmp_path / "there", tiny_module("flux_dev"), shards=4)
    opened: list[str] = []
    original = source_module._Part.__init__
    monkeypatch.setattr(
        source_module._Part, "__init__", lambda self, header: (opened.append(header.path), original(self, header))[1]
    )
    (tmp_path / "out").mkdir()
    convert(folder, tmp_path / "out/model.safetensors")
    assert len(opened) == len(set(opened)) == 4
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


# ---- pickles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".ckpt"])
@pytest.mark.parametrize("nest", [None, "state_dict", "module"])
def test_a_pickle_of_plain_tensors_converts(suffix, nest, tmp_path):
    folder = write_folder(tmp_path / "there", tiny_module("sd35_large"))
    convert(folder, tmp_path / "a.safetensors")
    state = load_file(tmp_path / "a.safetensors")
    torch.save({nest: state, "step": 3} if nest else state, tmp_path / f"model{suffix}")
    convert(tmp_path / f"model{suffix}", tmp_path / "b.safetensors")
    assert same(load_file(tmp_path / "b.safetensors"), state)


def test_a_folder_of_bin_shards_converts(tmp_path):
    folder = write_folder(tmp_path / "there", tiny_module("lumina2"))
    state, pickled = read_all(folder), tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text((folder / "config.json").read_text())
    keys = list(state)
    names = ["diffusion_pytorch_model-00001-of-00002.bin", "diffusion_pytorch_model-00002-of-00002.bin"]
    for number, name in enumerate(names):
        torch.save({key: state[key] for key in keys[number::2]}, pickled / name)
    weight_map = {key: names[index % 2] for index, key in enumerate(keys)}
    (pickled / "diffusion_pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    convert(folder, tmp_path / "a.safetensors")
    convert(pickled, tmp_path / "b.safetensors")
    assert same(load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors"))
    (pickled / names[1]).unlink()
    with pytest.raises(FileError, match=r"00002-of-00002\.bin"):
        convert(pickled, tmp_path / "c.safetensors")


def bin_shards(folder) -> None:
    folder.mkdir()
    for number in (1, 2):
        torch.save({f"a{number}.weight": torch.zeros(2)}, folder / f"model-0000{number}-of-00002.bin")


def test_bin_shards_need_no_index_to_be_one_model(tmp_path):
    state = read_all(write_folder(tmp_path / "there", tiny_module("lumina2")))
    keys = list(state)
    (tmp_path / "bins").mkdir()
    for number in (0, 1):
        torch.save({key: state[key] for key in keys[number::2]}, tmp_path / f"bins/model-0000{number + 1}-of-00002.bin")
    convert(tmp_path / "there", tmp_path / "a.safetensors")
    convert(tmp_path / "bins", tmp_path / "b.safetensors")
    assert same(load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors"))
    index = tmp_path / "bins/model.bin.index.json"
    weight_map = {key: f"model-0000{position % 2 + 1}-of-00002.bin" for position, key in enumerate(keys)}
    index.write_text(json.dumps({"weight_map": weight_map}))
    convert(index, tmp_path / "c.safetensors")
    assert same(load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "c.safetensors"))
    index.unlink()
    (tmp_path / "bins/model-00001-of-00002.bin").unlink()
    with pytest.raises(FileError, match="lacks shard 00001 of 00002"):
        convert(tmp_path / "bins", tmp_path / "d.safetensors")


BROKEN = [(name, text) for name in ("model.bin.index.json", "config.json", "model_index.json") for text in ("{", "[]")]
MAPLESS = [("model.bin.index.json", text) for text in ("{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}')]


@pytest.mark.parametrize(("name", "text"), BROKEN + MAPLESS)
def test_a_broken_json_beside_the_weights_is_named(name, text, tmp_path):
    bin_shards(tmp_path / "bins")
    (tmp_path / "bins" / name).write_text(text)
    with pytest.raises(FileError, match=name.replace(".", r"\.")):
        convert(tmp_path / "bins", tmp_path / "out.safetensors")


def test_safetensors_under_a_pickles_name_are_read_as_what_they_are(tmp_path):
    write_folder(tmp_path / "there", tiny_module("sd35_large"))
    convert(tmp_path / "there", tmp_path / "a.safetensors")
    (tmp_path / "a.ckpt").write_bytes((tmp_path / "a.safetensors").read_bytes())
    convert(tmp_path / "a.ckpt", tmp_path / "b.safetensors")
    assert same(load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors"))


def test_a_web_page_under_a_pickles_name_is_called_one(tmp_path):
    (tmp_path / "a.ckpt").write_text("<!doctype html><html></html>")
    with pytest.raises(FileError, match="a web page"):
        convert(tmp_path / "a.ckpt", tmp_path / "b.safetensors")


def test_an_empty_source_is_not_the_current_folder(tmp_path):
    with pytest.raises(ValueError, match="no source was named"):
        convert("", tmp_path / "b.safetensors")


class Canary:
    def __reduce__(self):
        return (os.mkdir, (os.environ["NATIVEDIT_CANARY"],))


def test_code_in_a_pickle_is_never_run(tmp_path, monkeypatch):
    monkeypatch.setenv("NATIVEDIT_CANARY", str(tmp_path / "ran"))
    torch.save({"a.weight": torch.zeros(2), "b": Canary()}, tmp_path / "evil.pth")
    with pytest.raises(FileError, match=r"it would run \w+\.mkdir.*safetensors version"):
        convert(tmp_path / "evil.pth", tmp_path / "out.safetensors")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out.safetensors").exists()


# ---- what can be worked out ------------------------------------------------------------------------------------------


def test_a_repackaged_file_may_lack_a_buffer_that_can_be_worked_out(tmp_path):
    convert(write_folder(tmp_path / "there", tiny_module("minimax_h3")), tmp_path / "whole.safetensors")
    whole = load_file(tmp_path / "whole.safetensors")
    computed = get_architecture("minimax_h3").two_way.computed
    assert computed and computed.keys() <= whole.keys()
    save_file({key: value for key, value in whole.items() if key not in computed}, tmp_path / "less.safetensors")
    convert(tmp_path / "less.safetensors", tmp_path / "again.safetensors")
    assert same(load_file(tmp_path / "again.safetensors"), whole)
    convert(tmp_path / "less.safetensors", tmp_path / "back", layout="diffusers")
    assert same(read_all(tmp_path / "back"), read_all(tmp_path / "there"))


# ---- what is refused -------------------------------------------------------------------------------------------------


def changed(tmp_path, row: str, change) -> str:
    state = tiny_module(row).state_dict()
    change(state)
    save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "changed.safetensors")
    return tmp_path / "changed.safetensors"


def test_a_missing_weight_is_named(tmp_path):
    path = changed(tmp_path, "flux_dev", lambda state: state.pop("transformer_blocks.1.attn.to_k.weight"))
    with pytest.raises(FileError, match=r"1 weights of FLUX.1 are missing: transformer_blocks\.1\.attn\.to_k\.weight"):
        convert(path, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_an_unknown_key_is_named(tmp_path):
    path = changed(tmp_path, "wan21_t2v_14b", lambda state: state.update({"blocks.0.extra.weight": torch.zeros(2)}))
    with pytest.raises(FileError, match=r"1 keys are none of its: blocks\.0\.extra\.weight"):
        convert(path, tmp_path / "out.safetensors")


def test_a_folder_that_lacks_its_last_blocks_is_noticed_by_its_configuration(tmp_path):
    folder = write_folder(tmp_path / "there", tiny_module("wan21_t2v_14b"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_layers": 5}))
    with pytest.raises(FileError, match="says num_layers = 5, the weights have 2: a part is missing"):
        convert(folder, tmp_path / "out.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "num_layers": 1}))
    with pytest.raises(FileError, match=r"the weights have 2: it is the config\.json of another model"):
        convert(folder, tmp_path / "out.safetensors")


def test_the_source_is_never_its_own_target(tmp_path):
    folder = write_folder(tmp_path / "there", tiny_module("ernie_image"))
    convert(folder, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    os.symlink(tmp_path / "model.safetensors", tmp_path / "link.safetensors")
    os.link(tmp_path / "model.safetensors", tmp_path / "hard.safetensors")
    for name in ("model", "link", "hard"):
        with pytest.raises(OutputError, match="is the source itself"):
            convert(tmp_path / "model.safetensors", tmp_path / f"{name}.safetensors")
    with pytest.raises(OutputError):
        convert(folder, folder, layout="diffusers")
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    from nativedit.files.writer import SafetensorsWriter

    folder = write_folder(tmp_path / "there", tiny_module("ernie_image"))
    (tmp_path / "out").mkdir()
    target = tmp_path / "out/model.safetensors"
    target.write_bytes(b"the old file")
    count = 0

    def failing(self, name, data, offset=0):
        nonlocal count
        count += 1
        if count > 5:
            raise OutputError(self.path, "the disk is full")

    monkeypatch.setattr(SafetensorsWriter, "write_bytes", failing)
    with pytest.raises(OutputError, match="disk is full"):
        convert(folder, target)
    assert os.listdir(tmp_path / "out") == ["model.safetensors"] and target.read_bytes() == b"the old file"
    with pytest.raises(OutputError, match="disk is full"):
        convert(folder, tmp_path / "out/folder", layout="diffusers")
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


@pytest.mark.parametrize(
    ("layout", "name", "word"),
    [
        ("comfy", "out.ckpt", "not a .safetensors name"),
        ("comfy", "out", "is a folder"),
        ("diffusers", "o.safetensors", "is a folder"),
    ],
)
def test_a_name_of_the_wrong_kind_is_refused(layout, name, word, tmp_path):
    folder = write_folder(tmp_path / "there", tiny_module("ernie_image"))
    with pytest.raises(OutputError, match=word):
        convert(folder, tmp_path / name, layout=layout)
    with pytest.raises(ValueError, match="layout 'onnx' is unknown; known are comfy, diffusers"):
        convert(folder, tmp_path / "x.safetensors", layout="onnx")
