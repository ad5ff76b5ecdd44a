"""Files: safetensors headers, streaming read and write, atomic replace, safe paths."""

from .errors import DamagedFile, FileError, NotSafetensors, OutputError, UnsafePath
from .header import Header, TensorInfo, read_header
from .paths import contained, refuse_same_file
from .source import Source, open_source
from .writer import SafetensorsWriter, write_safetensors

__all__ = [
    "DamagedFile",
    "FileError",
    "Header",
    "NotSafetensors",
    "OutputError",
    "SafetensorsWriter",
    "Source",
    "TensorInfo",
    "UnsafePath",
    "contained",
    "open_source",
    "read_header",
    "refuse_same_file",
    "write_safetensors",
]
