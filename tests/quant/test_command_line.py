"""quantize, dequantize and repair as somebody calls them who trusts nothing: options, messages, what is left behind."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quant_goldens import same_bytes
from safetensors.torch import load_file, save_file
from support import rel_err

from nativedit.cli import main
from nativedit.files import open_source
from nativedit.quant.describe import describe
from nativedit.quant.formats import FORMATS, parse_recipe
from nativedit.quant.markers import RECORD_KEY, encode_marker
from nativedit.quant.policy import read_policy

pytestmark = pytest.mark.usefixtures("single_thread")

SMALL_TOO = "min_weights = 0\n"


def matrices(count: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {"img_in.weight": torch.randn(256, 64, generator=generator)}
    for index in range(count):
        for name in ("attn.q", "mlp.up"):
            tensors[f"blocks.{index}.{name}.weight"] = 0.05 * torch.randn(128, 256, generator=generator)
    return {key: value.to(torch.bfloat16) for key, value in tensors.items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_file(matrices(), "model.safetensors")
    Path("small.toml").write_text(SMALL_TOO)
    return tmp_path


@pytest.fixture
def called(folder: Path, capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """(exit code, standard output, standard error) of a command in a folder with a model and a policy."""

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(list(words))
        except SystemExit as error:
            code = error.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture
def quantize(called) -> Callable[..., tuple[int, str, str]]:
    def call(*options: str, source: str = "model.safetensors", target: str = "out.safetensors", recipe="int8_convrot"):
        return called(
            "quantize", source, target, "--format", recipe, "--policy", "small.toml", "--device", "cpu", *options
        )

    return call


def quantized(path: str = "out.safetensors") -> list[str]:
    return sorted(layer.name for layer in describe(path).layers)


def test_include_exclude_and_keep_edges_choose_layers(quantize):
    assert quantize("--exclude", "*.mlp.up", "--include", "img_in", "--keep-edges", "1", recipe="float8_e4m3fn")[0] == 0
    assert quantized() == ["blocks.1.attn.q", "blocks.2.attn.q", "img_in"]


def test_a_dry_run_says_of_every_layer_what_why_and_how_large(quantize):
    code, out, _ = quantize("--dry-run", "--keep-edges", "1")
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith(("blocks", "img_in"))}
    assert code == 0 and len(lines) == 9 and not os.path.exists("out.safetensors")
    assert "keep BF16" in lines["blocks.0.attn.q"] and "among the first or last 1" in lines["blocks.0.attn.q"]
    assert "int8_tensorwise:convrot=256" in lines["blocks.1.mlp.up"] and "65,536 ->" in lines["blocks.1.mlp.up"]
    assert "outside the repeated blocks" in lines["img_in"]


def test_the_last_line_names_the_formats_that_were_used(folder, called):
    (folder / "mixed.toml").write_text('min_weights = 0\n[[layers]]\nmatch = "blocks.0.*"\nformat = "nvfp4"\n')
    names = [f"blocks.{block}.{name}.weight" for block in range(3) for name in ("attn.q", "mlp.up")]
    save_file({name: torch.ones(64, 192, dtype=torch.bfloat16) for name in names}, folder / "narrow.safetensors")
    options = ("--format", "int8_convrot", "--dry-run", "--device", "cpu", "--policy")
    _, out, _ = called("quantize", "narrow.safetensors", "out.safetensors", *options, "mixed.toml")
    assert "would quantize 6 of 6 weights as int8_tensorwise:convrot=64, nvfp4, " in out
    (folder / "none.toml").write_text('min_weights = 0\n[[layers]]\nmatch = "*"\nformat = "keep"\n')
    _, out, _ = called("quantize", "narrow.safetensors", "out.safetensors", *options, "none.toml")
    assert "would quantize 0 of 6 weights, 0" in out


def test_a_limit_of_better_rounding_alone_is_refused(quantize):
    code, _, err = quantize("--rounding-seconds", "3")
    assert code == 2 and "--rounding feedback, which is not asked for" in err
    assert quantize("--rounding-seconds", "3", "--rounding", "feedback")[0] == 0


def test_hash_notes_the_sources_full_hash_and_without_it_the_headers(quantize):
    data = Path("model.safetensors").read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    for options in ((), ("--hash",)):
        assert quantize(*options)[0] == 0
        with open_source("out.safetensors") as source:
            identity = json.loads(source.metadata[RECORD_KEY])["source"]
        assert identity["header_sha256"] == hashlib.sha256(header).hexdigest() and identity["size"] == len(data)
        assert identity.get("sha256") == (hashlib.sha256(data).hexdigest() if options else None)


@pytest.mark.parametrize("recipe", [*FORMATS, "int8_convrot"])
def test_a15_m25_only_float8_without_a_calibrated_input_asks_for_full_precision(quantize, recipe):
    for options in ((), ("--fast-matmul",)):
        assert quantize(*options, recipe=recipe)[0] == 0
        markers = [layer.marker for layer in describe("out.safetensors").layers]
        flagged = recipe.startswith("float8") and not options
        assert markers and all(marker.get("full_precision_matrix_mult", False) == flagged for marker in markers)


def test_requantize_starts_from_what_the_codes_stand_for(quantize):
    assert quantize(recipe="float8_e4m3fn")[0] == 0
    code, _, err = quantize(source="out.safetensors", target="again.safetensors")
    assert code == 2 and "--requantize" in err and not os.path.exists("again.safetensors")
    assert quantize("--requantize", source="out.safetensors", target="again.safetensors")[0] == 0
    assert {layer.recipe for layer in describe("again.safetensors").layers} == {"int8_tensorwise:convrot=256"}
    assert main(["dequantize", "again.safetensors", "float.safetensors", "--quiet"]) == 0
    restored, source = load_file("float.safetensors"), load_file("model.safetensors")
    assert all(rel_err(restored[key], source[key]) < 0.06 for key in source)


def test_the_original_settles_what_a_file_leaves_open(quantize, called):
    assert quantize()[0] == 0
    bare = {key: value for key, value in load_file("out.safetensors").items() if not key.endswith("comfy_quant")}
    save_file(bare, "bare.safetensors")
    code, _, err = called("repair", "bare.safetensors", "fixed.safetensors")
    assert code == 2 and "undecidable" in err and "as the original" in err and "blocks.0.attn.q" in err
    assert called("repair", "bare.safetensors", "fixed.safetensors", "--original", "model.safetensors")[0] == 0
    fixed, wanted = load_file("fixed.safetensors"), load_file("out.safetensors")
    assert fixed.keys() == wanted.keys() and all(same_bytes(fixed[key], wanted[key]) for key in wanted)


def test_shards_go_in_and_come_out_as_shards_or_as_one_file(quantize, called):
    os.mkdir("shards")
    tensors, names = matrices(), {}
    for number in (1, 2):
        name = f"m-{number:05d}-of-00002.safetensors"
        own = {key: value for index, (key, value) in enumerate(tensors.items()) if index % 2 == number - 1}
        save_file(own, f"shards/{name}")
        names.update(dict.fromkeys(own, name))
    Path("shards/m.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert quantize(source="shards", target="one.safetensors")[0] == 0
    assert quantize(source="shards/m.safetensors.index.json", target="many")[0] == 0
    assert quantized("one.safetensors") == quantized("many") and len(list(Path("many").glob("*.safetensors"))) == 2
    code, _, err = quantize(source="shards", target="shards")
    assert code == 2 and "shards" in err and len(os.listdir("shards")) == 3


@pytest.mark.parametrize(
    "target", ["model.safetensors", "./x/../model.safetensors", "soft.safetensors", "hard.safetensors"]
)
def test_b11_the_source_is_never_its_own_target(quantize, called, target):
    os.mkdir("x")
    os.symlink("model.safetensors", "soft.safetensors")
    os.link("model.safetensors", "hard.safetensors")
    before = Path("model.safetensors").read_bytes()
    for code, _, err in (
        quantize(target=target),
        called("dequantize", "model.safetensors", target),
        called("repair", "model.safetensors", target),
    ):
        assert code == 2 and "the source itself" in err
    assert Path("model.safetensors").read_bytes() == before


def test_nothing_but_the_message_is_printed_when_something_is_wrong(quantize, called, folder):
    torch.save({"a": torch.ones(2)}, "model.pt")
    Path("lfs.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    before = sorted(os.listdir(folder))
    for (code, out, err), message in (
        (quantize(source="gone.safetensors"), "gone.safetensors: no such file or folder"),
        (quantize(source="model.pt"), "nativedit convert"),
        (quantize(source="lfs.safetensors"), "Git LFS pointer"),
        (quantize(target="gone/out.safetensors"), "does not exist"),
        (quantize(recipe="int5"), "unknown quantization format 'int5'"),
        (quantize("--exclude", "blocks.9.*"), "'blocks.9.*' matches no layer"),
        (quantize("--device", "cuda:99"), "device"),
        (quantize("--device", "tpu9"), "there is no device 'tpu9'"),
        (called("quantize", "model.safetensors", "out.safetensors"), "name a format"),
        (called("dequantize", "model.safetensors", "out.safetensors", "--dtype", "float8"), "unknown dtype"),
    ):
        assert code == 2 and out == "" and message in err
        assert err.startswith("nativedit: error: ") and len(err.splitlines()) == 1
    assert quantize("--keep-edges", "-1")[0] == 2
    assert sorted(os.listdir(folder)) == before


def test_dequantizing_what_is_not_quantized_says_so(called):
    code, out, _ = called("dequantize", "model.safetensors", "out.safetensors")
    assert code == 0 and "nothing in it is quantized" in out
    assert Path("out.safetensors").read_bytes() == Path("model.safetensors").read_bytes()


def hostile() -> dict[str, bytes]:
    def file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
        return (len(header) if length is None else length).to_bytes(8, "little") + header + data

    def entries(**tensors: tuple[str, list[int], list[int]]) -> bytes:
        return json.dumps(
            {key: {"dtype": d, "shape": s, "data_offsets": o} for key, (d, s, o) in tensors.items()}
        ).encode()

    weight = entries(**{"a.weight": ("U8", [2, 4], [0, 8])})
    return {
        "a length beyond the file": file(weight, bytes(8), 10**15),
        "overlapping tensors": file(entries(a=("U8", [8], [0, 8]), b=("U8", [8], [4, 12])), bytes(12)),
        "offsets out of range": file(entries(a=("U8", [8], [2**60, 2**60 + 8])), bytes(8)),
        "trailing bytes": file(weight, bytes(9)),
        "a key twice": file(weight[:-1] + b", " + weight[1:], bytes(8)),
        "deep nesting": file(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
        "not JSON": file(b"{oops}"),
        "not UTF-8": file(b'{"\xff": 1}'),
    }


@pytest.mark.parametrize("kind", hostile())
def test_h05_hostile_files_are_refused_at_once_by_every_command(called, kind):
    Path("bad.safetensors").write_bytes(hostile()[kind])
    started = time.process_time()
    for words in (
        ("inspect", "bad.safetensors"),
        ("quantize", "bad.safetensors", "out.safetensors", "--format", "nvfp4"),
        ("dequantize", "bad.safetensors", "out.safetensors"),
        ("repair", "bad.safetensors", "out.safetensors"),
    ):
        code, out, err = called(*words)
        assert code == 2 and out == "" and "bad.safetensors" in err and len(err.splitlines()) == 1
    assert time.process_time() - started < 5 and not os.path.exists("out.safetensors")


def test_no_gaussian_weight_in_any_format_raises_an_alarm(quantize):
    for recipe in [*FORMATS, "int8_convrot", "int8_tensorwise:scale=tensor", "int8_tensorwise:convrot=16"]:
        assert quantize(recipe=recipe)[0] == 0
        info = describe("out.safetensors")
        assert info.layers and not info.problems and not any(layer.notes for layer in info.layers)


def test_an_embedding_is_stored_only_in_what_comfyui_looks_rows_up_in(folder, quantize):
    save_file({"text_model.embeddings.token_embedding.weight": torch.randn(300, 256)}, "embedding.safetensors")
    for recipe, fits in (("nvfp4", False), ("float8_e4m3fn", True)):
        assert quantize("--include", "*token_embedding", source="embedding.safetensors", recipe=recipe)[0] == 0
        assert bool(quantized()) == fits


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_inspect_reads_a_few_kilobytes_of_a_file_of_40_gigabytes(called):
    rows = 40 * 10**9 // 4 // 256
    header, position = {}, 0
    for index in range(4):
        for suffix, dtype, shape, size in (
            ("weight", "F8_E4M3", [rows, 256], rows * 256),
            ("weight_scale", "F32", [], 4),
        ):
            offsets = [position, position + size]
            header[f"blocks.{index}.up.{suffix}"] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            position += size
    text = json.dumps(header).encode()
    Path("huge.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate("huge.safetensors", 8 + len(text) + position)

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    assert called("inspect", "huge.safetensors")[0] == 0  # imports what it needs
    before = bytes_read()
    code, out, _ = called("inspect", "huge.safetensors")
    assert code == 0 and "4 x float8_e4m3fn" in out and "40.0 GB" in out
    assert bytes_read() - before < 20_000


@pytest.mark.parametrize("name", ["text_model.encoder.layers.{}.mlp.fc1", "transformer.resblocks.{}.mlp.c_fc"])
def test_clip_is_kept_because_comfyui_would_take_its_codes_for_weights(folder, quantize, name):
    keys = [f"{name.format(index)}{other}.weight" for index in range(2) for other in ("", "_2")]
    save_file({key: torch.randn(128, 256) for key in keys}, "clip_l.safetensors")
    code, out, _ = quantize("--dry-run", source="clip_l.safetensors")
    assert code == 0 and out.count("ComfyUI reads no quantized CLIP") == 4 and "would quantize 0 of 4" in out


def test_a_policy_file_is_read_on_python_3_10_too(tmp_path, monkeypatch):
    (tmp_path / "p.toml").write_text('format = "nvfp4"\n')
    tomllib = pytest.importorskip("tomllib")
    stand_in = types.SimpleNamespace(load=tomllib.load, TOMLDecodeError=tomllib.TOMLDecodeError)
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setitem(sys.modules, "tomli", stand_in)
    assert read_policy(tmp_path / "p.toml").format == "nvfp4"
    monkeypatch.setitem(sys.modules, "tomli", None)
    with pytest.raises(ValueError, match=r"p\.toml: this Python reads no TOML. Install tomli"):
        read_policy(tmp_path / "p.toml")


def test_markers_are_spelled_as_comfyui_spells_them():
    marker = encode_marker(parse_recipe("int8_convrot").marker())
    text = b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}'
    assert bytes(marker.tolist()) == text


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--save-policy", "model.safetensors", "a policy is written as .toml"),
        ("--save-policy", "away/plan.toml", "there is no folder"),
        ("--report", "model.safetensors.index.json", "would overwrite"),
        ("--report", "away/report.json", "there is no folder"),
    ],
)
def test_reports_and_policies_never_take_a_models_place(tmp_path, capsys, monkeypatch, option, name, message):
    monkeypatch.chdir(tmp_path)
    save_file(matrices(1), "model.safetensors")
    keys = dict.fromkeys(matrices(1), "model.safetensors")
    Path("model.safetensors.index.json").write_text(json.dumps({"weight_map": keys}))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    given = ["quantize", "--quiet", "model.safetensors.index.json", "out.safetensors", "--format", "int8_convrot"]
    assert main([*given, option, name]) == 2
    assert message in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
