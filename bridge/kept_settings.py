"""The settings that a sampler node resolved, for pictures of later runs in which its result comes from ComfyUI's cache.

The node writes them beside its own title in the prompt, which save nodes put into pictures. A node that does not run
writes nothing, so what it wrote is put back when a prompt comes in where it and all before it stand as they did.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from .hooks import guarded

KEPT = 256
_kept: dict[str, dict[str, Any]] = {}


def install() -> None:
    running = sys.modules.get("server")  # there when ComfyUI serves anyone; importing it would start half of it
    if running is not None and put_back not in running.PromptServer.instance.on_prompt_handlers:
        running.PromptServer.instance.add_on_prompt_handler(put_back)


def keep(prompt: Mapping[str, Any] | None, node_id: str | None, settings: dict[str, Any]) -> None:
    if prompt is None or node_id not in prompt:
        return
    _kept.pop(key := _fingerprint(prompt, node_id, {}), None)
    _kept[key] = settings
    while len(_kept) > KEPT:
        del _kept[next(iter(_kept))]


def put_back(data: dict[str, Any]) -> dict[str, Any]:
    """For ComfyUI's handlers of /prompt: the request as it came, with settings where they are known. A node that runs
    after all writes its own over them."""
    with guarded("the settings of cached samplers"):
        prompt = data.get("prompt")
        fingerprints: dict[str, str] = {}
        for node_id, node in prompt.items() if _kept and isinstance(prompt, dict) else ():
            if node.get("class_type") == "NativeDiTSample":
                settings = _kept.get(_fingerprint(prompt, node_id, fingerprints))
                if settings is not None:
                    node.setdefault("_meta", {})["nativedit"] = settings
    return data


def _fingerprint(prompt: Mapping[str, Any], node_id: str, known: dict[str, str]) -> str:
    """Of a node and of all that it depends on, whatever their ids and titles are."""
    if node_id not in known:
        known[node_id] = ""  # a loop ends here; ComfyUI refuses it later
        node = prompt[node_id]
        inputs = {
            name: [_fingerprint(prompt, value[0], known), *value[1:]]
            if isinstance(value, list) and value and value[0] in prompt
            else value
            for name, value in node.get("inputs", {}).items()
        }
        text = json.dumps([node.get("class_type"), inputs], sort_keys=True)
        known[node_id] = hashlib.sha256(text.encode()).hexdigest()
    return known[node_id]
