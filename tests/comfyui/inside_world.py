"""ComfyUI in this process, with the pack as ComfyUI imports it, for the checks of inside.py. Imported before any comfy.

sys.argv: COMFYUI BASE FILE; the pack is in BASE/custom_nodes.
"""

import asyncio
import importlib.util
import json
import logging
import sys
from pathlib import Path

COMFYUI, BASE = Path(sys.argv[1]), Path(sys.argv[2])
OUTPUT = Path(sys.argv[3])
sys.argv = ["main.py", "--cpu", "--base-directory", str(BASE)]
sys.path.insert(0, str(COMFYUI))

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import comfy_api.latest  # noqa: E402, F401
import comfyui_version  # noqa: E402
import folder_paths  # noqa: E402, F401
import torch  # noqa: E402

PACK = BASE / "custom_nodes" / "ComfyUI-NativeDiT"
TINY = BASE / "models" / "diffusion_models" / "tiny.safetensors"
TEXT = BASE / "models" / "text_encoders" / "tiny_text.safetensors"
VERSION = tuple(int(part) for part in comfyui_version.__version__.split(".")[:2])


class Log(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def during(self, action):
        before = len(self.lines)
        result = action()
        return result, self.lines[before:]


LOG = Log()
logging.getLogger().addHandler(LOG)
logging.getLogger().setLevel(logging.INFO)


def load_pack(folder):
    """As ComfyUI's nodes.py does: under a name made from the path."""
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def node_list(module):
    return asyncio.run(asyncio.run(module.comfy_entrypoint()).get_node_list())


def part(name):
    """A module of the pack."""
    return importlib.import_module(f"{STATE['pack'].__name__}.{name}")


STATE = {}
RECORDED = []  # calls that foreign wrappers saw


def state_dict(path=TINY):
    return comfy.utils.load_torch_file(str(path))


def clip():
    if "clip" not in STATE:
        [loader] = [node for node in STATE["nodes"] if node.__name__ == "NativeDiTLoadTextEncoder"]
        STATE["clip"] = loader.execute("tiny_text.safetensors").args[0]
    return STATE["clip"]


def model_call(patcher):
    """The denoised picture at one sigma, for a fixed noisy input."""
    model = patcher.model
    x = torch.randn(1, 3, 48, 64, generator=torch.manual_seed(11))
    context = torch.randn(1, 5, 32, generator=torch.manual_seed(12))
    with torch.inference_mode():
        return model.apply_model(x, torch.tensor([0.7]), c_crossattn=context, transformer_options={})


def with_lora(patcher):
    lora = comfy.utils.load_torch_file(str(BASE / "models" / "loras" / "dit_comfy.safetensors"))
    return comfy.sd.load_lora_for_models(patcher, None, lora, 1.0, 0.0)[0]


def bytes_tensor(value):
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def quantized(name):
    marker = bytes_tensor({"format": name})
    return {"blocks.0.gate_proj.comfy_quant": marker, "blocks.0.gate_proj.weight_scale": torch.ones(())}
