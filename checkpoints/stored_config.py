"""Constructor arguments that travel as a tensor, because ComfyUI's save nodes drop a file's header.

A uint8 tensor with the same JSON as a header's `config` entry; only files whose shapes don't tell everything have one.
"""

from __future__ import annotations

from ..files.source import Source

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
                metadata["config"] = source.read_bytes(key).numpy().tobytes().decode("utf-8", "replace")
                break
    return metadata
