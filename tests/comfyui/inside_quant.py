"""Quantizing, saving and comparing models inside ComfyUI's Python; test_quant_inside.py makes a test of each check.

Run as `python inside_quant.py COMFYUI BASE FILE`. BASE/models/diffusion_models holds tiny models of ComfyUI's own
architectures, BASE/inputs their inputs; results go to FILE as JSON, {check: "" or the traceback}.
"""

import json
import sys
import time
import traceback
from pathlib import Path

import quant_world  # before anything that imports comfy
import torch

import quant_files_checks  # isort: skip
import quant_patch_checks  # isort: skip

sys.path.append(str(Path(__file__).resolve().parent.parent))
import quant_rows


def main():
    checks = {**vars(quant_files_checks), **vars(quant_patch_checks)}
    checks = {name: check for name, check in checks.items() if name.startswith("check_")}
    results = {name: run(check) for name, check in checks.items() if name.startswith("check_once_")}
    for row in quant_world.ROWS:
        for name, check in checks.items():
            if quant_rows.wanted(name, row):
                results[f"{name}[{row}]"] = run(check, row)
        quant_world.forget()
    quant_world.OUTPUT.write_text(json.dumps({"checks": results, "values": quant_world.RESULTS}))


def run(check, *arguments):
    start = time.process_time()
    try:
        with torch.inference_mode():  # as ComfyUI runs its nodes
            check(*arguments)
    except Exception:
        return traceback.format_exc()[-3000:]
    finally:
        seconds = round(time.process_time() - start, 2)
        quant_world.RESULTS.setdefault("processor seconds", {})[" ".join([check.__name__, *arguments])] = seconds
    return ""


main()
