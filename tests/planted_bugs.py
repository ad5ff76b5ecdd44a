"""Copies of our models with one mistake each, such as ports really have, and the first stage that shows it."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from support import ROOT

_numbers = itertools.count()


@dataclass(frozen=True)
class Bug:
    """``line`` of the model's source (every place where it stands) becomes ``mistake``."""

    name: str
    line: str
    mistake: str
    first_stage: str

    def __str__(self) -> str:
        return self.name


def plant(bug: Bug, source: str, folder: Path) -> ModuleType:
    """The module ``ldm/<family>/model.py`` with the mistake in it; ``source``: its path in the repository."""
    text = (ROOT / source).read_text(encoding="utf-8")
    assert bug.line in text, f"{source} has changed: {bug.line!r} is gone, plant the bug {bug.name!r} anew"
    path = folder / "model.py"
    path.write_text(text.replace(bug.line, bug.mistake), encoding="utf-8")
    package = "nativedit." + source.removesuffix("/model.py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(f"{package}.planted_{next(_numbers)}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


PRX = "ldm/prx/model.py"
PRX_BUGS = (
    Bug(
        "sign: the residual is subtracted",
        "img = torch.addcmul(img, gate_attn, x)",
        "img = torch.addcmul(img, gate_attn, x, value=-1)",
        "blocks.0.mlp.input",
    ),
    Bug("eps: 1e-5 for 1e-6", "EPS = 1e-6", "EPS = 1e-5", "blocks.0.attention.input"),
    Bug(
        "swapped chunks: scale before shift",
        "shift_attn, scale_attn, gate_attn, shift_mlp",
        "scale_attn, shift_attn, gate_attn, shift_mlp",
        "blocks.0.attention.input",
    ),
    Bug("wrong RoPE pairing: halves for neighbours", "rotate_pairs", "rotate_halves", "blocks.0.attention.query"),
    Bug("missing mask", "mask=attn_mask", "mask=None", "blocks.0.attention.mask"),
    Bug(
        "shifted positions: counted from 1",
        "self.theta, x.device)",
        "self.theta, x.device, offsets=(1.0, 1.0))",
        "rope",
    ),
    Bug(
        "sign: the output is data - noise",
        "out = unpatchify(self.final_layer(img, vec)",
        "out = unpatchify(-self.final_layer(img, vec)",
        "output",
    ),
    Bug(
        "eps: one norm's alone",
        "self.norm_q = operations.RMSNorm(dim // heads, eps=EPS",
        "self.norm_q = operations.RMSNorm(dim // heads, eps=1e-5",
        "blocks.0.attention.norm_q",
    ),
    Bug(
        "swapped chunks: the last layer's",
        "shift, scale = self.adaLN_modulation",
        "scale, shift = self.adaLN_modulation",
        "final_layer.linear.input",
    ),
    Bug(
        "swapped chunks: queries for keys",
        "q, k, v = self.img_qkv_proj",
        "k, q, v = self.img_qkv_proj",
        "blocks.0.attention.norm_q",
    ),
    Bug("exact GELU", '"tanh"', '"none"', "blocks.0.down_proj.input"),
    Bug("time sines first", "scale=self.time_factor)", "scale=self.time_factor, cos_first=False)", "time_in.input"),
)

COGVIEW4 = "ldm/cogview4/model.py"
COGVIEW4_BUGS = (
    Bug(
        "wrong RoPE pairing: neighbours for halves",
        "rotate_halves",
        "rotate_pairs",
        "transformer_blocks.0.attn1.query",
    ),
    Bug(
        "swapped chunks: the text's gate for the image's",
        "            gate_mlp,\n            txt_gate_mlp,",
        "            txt_gate_mlp,\n            gate_mlp,",
        "transformer_blocks.0",
    ),
    Bug("missing mask", "mask=attn_mask", "mask=None", "transformer_blocks.0.attn1.mask"),
    Bug(
        "shifted positions: rounded up",
        "row = torch.arange(rows, device=device) * axes[0] // rows",
        "row = (torch.arange(rows, device=device) * axes[0] + rows - 1) // rows + 1",
        "rope",
    ),
    Bug("eps: 1e-6 for 1e-5", "EPS = 1e-5", "EPS = 1e-6", "transformer_blocks.0.attn1.input"),
)
