"""Reports on files and models of ComfyUI, and the repair of files."""

from __future__ import annotations

from typing import Any

import folder_paths
import numpy as np
import torch

from ..checkpoints.comparison import compare
from ..checkpoints.inspection import inspect_layers
from ..checkpoints.opened import open_checkpoint
from ..checkpoints.picture import picture_of_comparison, picture_of_file
from ..checkpoints.quant_report import report_data, report_text
from ..checkpoints.report_picture import picture_of_report
from ..host import Pictured, Saved
from ..quant.repair import repair
from ..quant.report import QuantizationReport
from .progress import node_progress
from .save import new_file
from .weights import diffusion_weights


def model_file(name: str) -> str:
    """The path of a file named as ``folder/name`` in the models folders. Raises FileNotFoundError."""
    folder, _, file = name.partition("/")
    return folder_paths.get_full_path_or_raise(folder, file)


def inspect_checkpoint(file: str) -> Pictured:
    """See ``host.Host``. Raises FileError."""
    with open_checkpoint(model_file(file)) as checkpoint:
        found = inspect_layers(checkpoint)
    return Pictured(found.text(), _image(picture_of_file(found, rasterise)))


def repair_checkpoint(file: str, prefix: str, original: str | None) -> Saved:
    """See ``host.Host``. Raises QuantError for layers that stay unreadable, OutputError, UnsafePath."""
    path, shown = new_file(prefix)
    given = None if original is None else model_file(original)
    report = repair(model_file(file), path, original=given, progress=node_progress())
    changes = "\n".join(report.warnings) or "it was in order already"
    return Saved(path, f"{shown['filename']}:\n{changes}", shown)


def compare_models(reference: Any, model: Any) -> Pictured:
    """See ``host.Host``. Raises FileError when the two are different architectures."""
    with reference.use_ejected(), model.use_ejected():
        first = diffusion_weights(reference, "the reference").source
        found = compare(first, diffusion_weights(model, "the compared model").source, node_progress())
    return Pictured(found.text(), _image(picture_of_comparison(found, rasterise)))


def quantization_report(report: QuantizationReport) -> Pictured:
    """What a quantization decided of every layer, and what it changed."""
    return Pictured(report_text(report), _image(picture_of_report(report_data(report), rasterise)))


def _image(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels).unsqueeze(0)


def rasterise(text: str) -> np.ndarray:
    """Coverage [height, width] from 0 to 1 of a line of text in Pillow's own font."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default()
    _, _, right, bottom = font.getbbox(text or " ")
    image = Image.new("L", (max(round(right), 1), max(round(bottom) + 2, 14)))
    ImageDraw.Draw(image).text((0, 0), text, fill=255, font=font)
    return np.asarray(image, dtype=np.float32) / 255.0
