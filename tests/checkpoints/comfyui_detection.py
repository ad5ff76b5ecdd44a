"""Run with ComfyUI's own Python, in ComfyUI's folder: what its detection says of key sets, before and after the pack
is installed. Not a test.

Arguments: the pack's folder, a JSON file {name: {key: shape}}, the JSON file to write {name: [before, after]}.
"""

import asyncio
import importlib.util
import json
import sys

sys.path.insert(0, ".")
pack, layouts_file, result_file = sys.argv[1:4]
sys.argv = [sys.argv[0], "--cpu"]

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_detection  # noqa: E402
import comfy.supported_models  # noqa: E402
import torch  # noqa: E402


def verdict(shapes, prefix):
    state = {prefix + key: torch.empty(shape, device="meta", dtype=torch.bfloat16) for key, shape in shapes.items()}
    try:
        config = comfy.model_detection.model_config_from_unet(state, prefix)
    except Exception as error:  # some foreign layouts make ComfyUI's detection raise; they must go on doing so
        return f"raises {type(error).__name__}"
    return "nothing" if config is None else f"{type(config).__name__} {sorted(map(str, config.unet_config.items()))}"


with open(layouts_file, encoding="utf-8") as file:
    layouts = json.load(file)
PREFIX = "model.diffusion_model."
before = {name: [verdict(shapes, prefix) for prefix in ("", PREFIX)] for name, shapes in layouts.items()}
known = list(comfy.supported_models.models)
spec = importlib.util.spec_from_file_location("the_pack", f"{pack}/__init__.py", submodule_search_locations=[pack])
module = importlib.util.module_from_spec(spec)
sys.modules["the_pack"] = module
spec.loader.exec_module(module)
asyncio.run(module.comfy_entrypoint())
added = [getattr(model, "__name__", "?") for model in comfy.supported_models.models if model not in known]
after = {name: [verdict(shapes, prefix) for prefix in ("", PREFIX)] for name, shapes in layouts.items()}
with open(result_file, "w", encoding="utf-8") as file:
    json.dump({"before": before, "after": after, "added": added}, file)
