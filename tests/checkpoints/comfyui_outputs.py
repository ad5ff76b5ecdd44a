"""Run with ComfyUI's own Python, in ComfyUI's folder: its modules on given files and inputs. Not a test.

Argument: a JSON file with a list of {"module": "comfy.ldm...:Class", "arguments", "file", "inputs", "output"}; with
"method" it is that method which is called, of a class that takes no operations.
"""

import importlib
import json
import sys
import traceback

sys.path.insert(0, ".")
job_file, sys.argv = sys.argv[1], [sys.argv[0], "--cpu"]

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.ops  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

torch.set_num_threads(1)

with open(job_file, encoding="utf-8") as file:
    jobs = json.load(file)


def output_of(job):
    module, _, name = job["module"].partition(":")
    cls = getattr(importlib.import_module(module), name)
    method = job.get("method", "forward")
    places = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.manual_cast}
    model = cls(**job["arguments"], **(places if method == "forward" else {}))
    state, names = load_file(job["file"]), set(model.state_dict())
    # What ComfyUI's model base does before loading: its modules of the FLUX family spell the norms otherwise.
    state = {key if key in names else key.removesuffix(".scale") + ".weight": value for key, value in state.items()}
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        return getattr(model.eval(), method)(**load_file(job["inputs"]), **job["options"]).float().contiguous()


for job in jobs:
    try:
        save_file({"output": output_of(job)}, job["output"])
    except Exception:  # the other models are to be judged too
        with open(job["output"] + ".error", "w", encoding="utf-8") as file:
            file.write(traceback.format_exc())
