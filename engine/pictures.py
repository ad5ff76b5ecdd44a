"""Pictures on disk: PNG with the workflow inside, named and numbered as ComfyUI does it, never overwriting."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..files.errors import UnsafePath
from ..files.paths import contained

__all__ = ["NumberedFiles", "expand_prefix", "file_digest", "input_file", "read_picture", "save_pictures"]

# Letters of a %date:...% template, as ComfyUI's editor reads them.
_DATE = {"yyyy": "%Y", "yy": "%y", "MM": "%m", "M": "%-m", "dd": "%d", "d": "%-d"}
_DATE |= {"hh": "%H", "h": "%-H", "mm": "%M", "m": "%-M", "ss": "%S", "s": "%-S"}
_CLOCK = {"year": "%Y", "month": "%m", "day": "%d", "hour": "%H", "minute": "%M", "second": "%S"}
_ILLEGAL = r'[<>:"/\\|?*\x00-\x1f\x7f]'


def expand_prefix(
    prefix: str,
    *,
    width: int,
    height: int,
    prompt: Mapping[str, Any] | None = None,
    now: time.struct_time | None = None,
) -> str:
    """Fills in %width%, %height%, %year%..., %date:yyyy-MM-dd% and %Node title.input%; anything else stays."""
    now = now or time.localtime()

    def clock(directive: str) -> str:
        text = time.strftime(directive.replace("-", ""), now)
        return text.lstrip("0") or "0" if "-" in directive else text

    def value(match: re.Match) -> str:
        name = match.group(1)
        if name in ("width", "height"):
            return str(width if name == "width" else height)
        if name in _CLOCK:
            return clock(_CLOCK[name])
        if name.startswith("date:"):
            return re.sub("yyyy|yy|MM?|dd?|hh?|mm?|ss?", lambda part: clock(_DATE[part.group()]), name[5:])
        title, _, key = name.rpartition(".")
        for node in (prompt or {}).values():
            if title and title in (node.get("_meta", {}).get("title"), node["class_type"]):
                found = node["inputs"].get(key)
                if isinstance(found, (str, int, float)):
                    return re.sub(_ILLEGAL, "_", str(found))
        return match.group()

    return re.sub(r"%([^%]+)%", value, prefix)


class NumberedFiles:
    """Files with a running number behind their prefix, under a folder, described as ComfyUI's nodes do.

    The prefix may hold subfolders and templates; one that leaves the folder raises UnsafePath.
    """

    # prefix_00001_.png, prefix_00002_.png, ...

    def __init__(self, folder: Path, prefix: str, *, suffix: str = ".png", kind: str = "output"):
        self.target = contained(folder, prefix)
        self.base = Path(os.path.realpath(folder))
        self.suffix, self.kind = suffix, kind
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.counter = _next_number(self.target)

    def write(self, data: bytes, batch_number: int = 0) -> dict[str, str]:
        """Takes the first free number; another process may be taking numbers at the same time."""
        stem = self.target.name.replace("%batch_num%", str(batch_number))
        while True:
            path = self.target.with_name(f"{stem}_{self.counter:05}_{self.suffix}")
            self.counter += 1
            try:
                with open(path, "xb") as file:
                    file.write(data)
                break
            except FileExistsError:
                continue
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        subfolder = path.parent.relative_to(self.base).as_posix()
        return {"filename": path.name, "subfolder": "" if subfolder == "." else subfolder, "type": self.kind}


def save_pictures(
    pictures: torch.Tensor,
    folder: Path,
    prefix: str,
    prompt: Mapping[str, Any] | None = None,
    extra_pnginfo: Mapping[str, Any] | None = None,
    *,
    kind: str = "output",
    compress_level: int = 4,
) -> list[dict[str, str]]:
    """Writes pictures with values from zero to one; returns for each what ComfyUI says of a file: its name, subfolder
    and type."""
    # [B, H, W, 3]
    prefix = expand_prefix(prefix, width=pictures.shape[2], height=pictures.shape[1], prompt=prompt)
    files = NumberedFiles(folder, prefix, kind=kind)
    return [
        files.write(png_bytes(picture, prompt, extra_pnginfo, compress_level), number)
        for number, picture in enumerate(pictures)
    ]


def png_bytes(
    picture: torch.Tensor, prompt: Mapping[str, Any] | None, extra: Mapping[str, Any] | None, compress_level: int = 4
) -> bytes:
    """A picture with values from zero to one as the bytes of a file, with the texts in it that ComfyUI writes."""
    # [H, W, 3] as PNG with a tEXt chunk "prompt" and one per entry of `extra`.
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    values = (picture.detach().cpu().float() * 255.0).clamp(0, 255).to(torch.uint8)
    info = PngInfo()
    if prompt is not None:
        info.add_text("prompt", json.dumps(prompt))
    for key, value in (extra or {}).items():
        info.add_text(key, json.dumps(value))
    buffer = io.BytesIO()
    Image.fromarray(values.numpy()).save(buffer, "png", pnginfo=info, compress_level=compress_level)
    return buffer.getvalue()


def _next_number(target: Path) -> int:
    """One more than the highest number of the files that start with this name: name_00007_.png."""
    start = os.path.normcase(target.name) + "_"
    numbers = [0]
    for name in os.listdir(target.parent):
        if os.path.normcase(name).startswith(start):
            digits = re.match(r"\d+", name[len(start) :])
            numbers.append(int(digits.group()) if digits else 0)
    return max(numbers) + 1


def input_file(host: Any, name: str) -> tuple[Path, str | None]:
    """(path of an input that a workflow names, what is wrong or None). "name [output]" means the output folder."""
    roots = {"input": host.input_dir, "output": host.output_dir, "temp": host.temp_dir}
    match = re.fullmatch(r"(.*?)\s*\[(input|output|temp)\]", name)
    name, root = (match[1], roots[match[2]]) if match else (name, roots["input"])
    try:
        path = contained(root, name)
    except UnsafePath as error:
        return root, f"input file: {error}"
    if not path.is_file():
        return path, f"names an input file that is not there: {path}; put it there, or give --input-dir"
    return path, None


def file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_picture(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """([F, H, W, 3] from 0 to 1, mask [F, H, W], 1 where transparent; [F, 64, 64] of zeros without transparency)."""
    from PIL import Image, ImageOps, ImageSequence

    pictures, masks = [], []
    with Image.open(path) as image:
        for frame in ImageSequence.Iterator(image):
            frame = ImageOps.exif_transpose(frame)
            if "transparency" in frame.info and "A" not in frame.getbands():
                frame = frame.convert("RGBA")
            if pictures and tuple(pictures[0].shape[1::-1]) != frame.size:
                continue
            pictures.append(_values(frame.convert("RGB")))
            masks.append(1.0 - _values(frame.getchannel("A")) if "A" in frame.getbands() else torch.zeros(64, 64))
    return torch.stack(pictures), torch.stack(masks)


def _values(image: Any) -> torch.Tensor:
    """A Pillow image of 8-bit channels as [H, W, C], or [H, W] for one channel, from 0 to 1."""
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float() / 255.0
    return flat.reshape(image.height, image.width, -1).squeeze(-1)
