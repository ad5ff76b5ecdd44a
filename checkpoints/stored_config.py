"""Constructor arguments that travel as a tensor, because ComfyUI's save nodes drop a file's header.

A uint8 tensor with the same JSON as a header's `config` entry; only files whose shapes don't tell everything have one.
"""

from __future__ import annotations

import json

from ..files.source import Source
from ..supported_models import ARCHITECTURE_ENTRY

DIFFUSION_MODEL_CONFIG = "nativedit_config"
TEXT_ENCODER_CONFIG = "text_encoder_config"
_MAX_BYTES = 1 << 20


def is_config(key: str) -> bool:
    """Whether this tensor, under whatever prefix, is no weight but a configuration."""
    return key.rpartition(".")[2] in (DIFFUSION_MODEL_CONFIG, TEXT_ENCODER_CONFIG)


def metadata_of(source: Source) -> dict[str, str]:
    """The header's entries, `config` taken from the tensor where the header has none."""
    metadata = dict(source.metadata)
    if "config" not in metadata:
        for key in source:
            if is_config(key) and source.tensors[key].nbytes <= _MAX_BYTES:
                metadata = {**entries_of(source.read_bytes(key).numpy().tobytes()), **metadata}
                break
    return metadata


def entries_of(data: bytes) -> dict[str, str]:
    """The tensor's content as header entries: `config`, and whose model's prompts a text encoder encodes."""
    text = data.decode("utf-8", "replace")
    try:
        architecture = json.loads(text).get(ARCHITECTURE_ENTRY)
    except (ValueError, AttributeError):
        architecture = None
    return {"config": text} | ({ARCHITECTURE_ENTRY: architecture} if isinstance(architecture, str) else {})
