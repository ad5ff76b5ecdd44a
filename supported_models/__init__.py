"""One file per architecture: its card. See docs/architecture.md, "The card"."""

from ._architecture import Architecture, Defaults, KeyMap, Match, Part, Sampling, Shapes, import_dotted
from ._registry import (
    ARCHITECTURE_ENTRY,
    PREFIXES,
    architectures,
    closest_architectures,
    find_architecture,
    get_architecture,
    header_config,
    prompt_readers,
)
from ._settings import AUTO, PUBLISHED, Settings, decide
from ._two_way import Rule, Run, Target, TwoWayMap

__all__ = [
    "ARCHITECTURE_ENTRY",
    "AUTO",
    "PREFIXES",
    "PUBLISHED",
    "Architecture",
    "Defaults",
    "KeyMap",
    "Match",
    "Part",
    "Rule",
    "Run",
    "Sampling",
    "Settings",
    "Shapes",
    "Target",
    "TwoWayMap",
    "architectures",
    "closest_architectures",
    "decide",
    "find_architecture",
    "get_architecture",
    "header_config",
    "import_dotted",
    "prompt_readers",
]
