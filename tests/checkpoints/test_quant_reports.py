"""Reports on quantization: data, page, picture; two of them compared."""

from __future__ import annotations

import html.parser
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import nativedit
from nativedit.checkpoints.quant_report import read_report, report_data
from nativedit.checkpoints.report_figures import blocks, shares
from nativedit.checkpoints.report_html import html_of_report
from nativedit.checkpoints.report_picture import picture_of_report, picture_of_reports
from nativedit.cli import main
from nativedit.engine.drawn_text import rasterise

POLICY = {"min_weights": 1}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    generator = torch.Generator().manual_seed(0)
    state = {"img_in.weight": torch.randn(128, 64, generator=generator)}
    for index in range(3):
        for name in ("attn", "mlp<b>"):
            state[f"blocks.{index}.{name}.weight"] = torch.randn(128, 128, generator=generator)
    path = tmp_path_factory.mktemp("reports") / "model.safetensors"
    save_file({key: value.to(torch.bfloat16) for key, value in state.items()}, path)
    return path


@pytest.fixture(scope="module")
def folder(source: Path) -> Path:
    """Two quantizations by the command line, each with its report."""
    made = source.parent
    (made / "policy.toml").write_text("min_weights = 1\n", encoding="utf-8")
    common = [
        "quantize",
        str(source),
        "--quiet",
        "--policy",
        str(made / "policy.toml"),
        "--formats",
        "int8_tensorwise,nvfp4",
    ]
    for name, wish in {"a": "30dB", "b": "20dB"}.items():
        report = ["--report", str(made / f"{name}.json"), "--min-sqnr", wish]
        assert main([common[0], common[1], str(made / f"{name}.safetensors"), *common[2:], *report]) == 0
    return made


def test_a_report_holds_the_plan_the_error_of_every_layer_and_why(folder: Path):
    data = read_report(folder / "a.json")

    assert data["source"] == "model.safetensors" and data["budget"]["min_sqnr"] == 30.0
    assert data["sqnr"] >= 30 and data["file_size"] == (folder / "a.safetensors").stat().st_size
    quantized = [layer for layer in data["layers"] if layer["format"] != "kept"]
    assert quantized and all(layer["sqnr"] is not None and layer["why"] and layer["options"] for layer in quantized)
    noise = sum(layer["noise"] for layer in data["layers"])
    signal = sum(layer["signal"] for layer in data["layers"])
    assert 10 * math.log10(signal / noise) == pytest.approx(data["sqnr"], abs=1e-3)
    assert sum(share.nbytes for share in shares(data)) == data["file_size"]
    assert [block.name for block in blocks(data["layers"])] == ["blocks.0", "blocks.1", "blocks.2", "outside blocks"]
    assert str(folder) not in (folder / "a.json").read_text(encoding="utf-8")


def test_a_report_without_a_budget_measures_what_was_decided(source: Path, tmp_path: Path):
    report = nativedit.quantize(source, tmp_path / "out.safetensors", format="nvfp4", policy=POLICY, measure=True)

    data = report_data(report)
    assert data["measured"] and 15 < data["sqnr"] < 25 and data["budget"] == {}
    assert {layer["format"] for layer in data["layers"]} == {"nvfp4", "kept"}


def test_nothing_is_measured_unless_it_is_asked_for(source: Path, tmp_path: Path):
    report = nativedit.quantize(source, tmp_path / "out.safetensors", format="nvfp4", policy=POLICY)
    data = report_data(report)
    assert report.sqnr is None and not data["measured"] and data["sqnr"] is None
    assert picture_of_report(data, rasterise).shape[1:] == (1024, 3)


class Page(html.parser.HTMLParser):
    """What a browser would fetch, and whether every tag that needs it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.fetched += [value for name, value in attributes if name in ("src", "href", "data") and value]
        if tag in ("script", "link", "img", "iframe"):
            self.fetched.append(tag)
        if tag in ("svg", "table", "details", "div", "pre", "style", "body", "html"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and tag == self.open[-1]:
            self.open.pop()


def test_the_page_is_one_file_that_loads_nothing(folder: Path):
    text = html_of_report(read_report(folder / "a.json"))

    page = Page()
    page.feed(text)
    assert page.fetched == [] and page.open == []
    assert "url(" not in text and "@import" not in text and "http" not in text
    assert "mlp&lt;b&gt;" in text and "mlp<b>" not in text
    assert "takes" in text and "[[layers]]" in text


def test_the_picture_shows_the_colours_of_all_formats(folder: Path):
    picture = picture_of_report(read_report(folder / "b.json"), rasterise)

    assert picture.min() >= 0 and picture.max() <= 1 and picture.shape[1] == 1024
    for colour in ((0.68, 0.82, 0.36), (0.68, 0.48, 0.92), (0.50, 0.54, 0.60)):  # int8, nvfp4, kept
        share = np.isclose(picture, colour, atol=1e-3).all(axis=-1).mean()
        assert share > 0.001 or colour == (0.68, 0.82, 0.36), colour


def large(count: int = 500) -> dict[str, Any]:
    """A report on a model of many layers."""
    layers = []
    for index in range(count):
        name = f"blocks.{index // 8}.layer{index % 8}"
        kept = index % 8 == 7
        noise = 0.0 if kept else 1.0 + index % 5
        layers.append(
            {
                "name": name,
                "block": f"blocks.{index // 8}",
                "shape": [3072, 3072],
                "dtype": "BF16",
                "format": "kept" if kept else ("nvfp4", "int8_tensorwise:convrot=256")[index % 2],
                "bytes_before": 18_874_368,
                "bytes_after": 9_437_184,
                "why": "card",
                "signal": 1e4,
                "noise": noise,
                "sqnr": None if kept else 10 * math.log10(1e4 / noise),
                "options": [],
            }
        )
    size = sum(layer["bytes_after"] for layer in layers)
    head = {"source": "m.safetensors", "destination": "q.safetensors", "format": "nvfp4", "budget": {}, "sqnr": 35.0}
    rest = {
        "measured": True,
        "bytes_before": 2 * size,
        "bytes_after": size,
        "file_size": size,
        "warnings": [],
        "plan": {},
    }
    return {"nativedit_report": 1, **head, **rest, "layers": layers}


def test_five_hundred_layers_have_room_in_the_picture():
    picture = picture_of_report(large(), rasterise)
    assert picture.shape[0] < 2400
    picture = picture_of_report(large(4000), rasterise)
    assert picture.shape[0] < 2600


def test_two_reports_are_compared_in_words_data_page_and_picture(folder: Path, capsys: pytest.CaptureFixture):
    files = [str(folder / "a.json"), str(folder / "b.json")]
    for ending in ("json", "html", "png"):
        assert main(["compare-reports", *files, "--report", str(folder / f"c.{ending}")]) == 0

    said = capsys.readouterr().out
    assert "A  a.safetensors" in said and "B  b.safetensors" in said and " -> nvfp4" in said
    found = json.loads((folder / "c.json").read_text(encoding="utf-8"))
    assert found["layers_in_both"] == 7 and found["changed"]
    assert found["a"]["sqnr"] > found["b"]["sqnr"] and found["a"]["file_size"] > found["b"]["file_size"]
    page = Page()
    page.feed((folder / "c.html").read_text(encoding="utf-8"))
    assert page.fetched == [] and page.open == []
    with Image.open(folder / "c.png") as picture:
        assert picture.size[0] == 1024
    assert picture_of_reports(large(), large(), rasterise).shape[0] < 1000


def test_reports_on_different_models_and_other_files_are_refused(folder: Path, capsys: pytest.CaptureFixture):
    other = {**large(), "source": "other.safetensors"}
    (folder / "other.json").write_text(json.dumps(other), encoding="utf-8")
    (folder / "no.json").write_text("{}", encoding="utf-8")

    assert main(["compare-reports", str(folder / "a.json"), str(folder / "other.json")]) == 2
    assert "no layer in common" in capsys.readouterr().err
    assert main(["compare-reports", str(folder / "a.json"), str(folder / "no.json")]) == 2
    assert "is no report of a quantization" in capsys.readouterr().err


def test_a_comparison_does_not_replace_what_it_compares(folder: Path, capsys: pytest.CaptureFixture):
    before = (folder / "a.json").read_bytes()
    files = [str(folder / "a.json"), str(folder / "b.json")]
    assert main(["compare-reports", *files, "--report", files[0]]) == 2
    assert "is the source itself" in capsys.readouterr().err
    assert (folder / "a.json").read_bytes() == before


def test_an_unknown_kind_of_report_is_refused_before_the_work(source: Path, tmp_path: Path, capsys):
    out = tmp_path / "out.safetensors"
    assert main(["quantize", str(source), str(out), "--format", "nvfp4", "--report", str(tmp_path / "r.pdf")]) == 2
    assert "a report is written as .html, .png or .json" in capsys.readouterr().err
    assert not out.exists()
