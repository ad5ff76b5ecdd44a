"""A model's ordinary life inside ComfyUI's Python; test_life.py makes a test of each check.

Run as `python inside_life.py COMFYUI BASE FILE`. BASE/models holds tiny models of ours, diffusion models and text
encoders alike named after their row, BASE/inputs the inputs of each row; results go to FILE as JSON, {check: "" or the
traceback}.
"""

import json
import time
import traceback

import quant_world  # before anything that imports comfy

import life_checks  # isort: skip


def main():
    checks = {name: check for name, check in vars(life_checks).items() if name.startswith("check_")}
    results = {}
    for name, check in checks.items():
        for row in quant_world.ROWS:
            start = time.process_time()
            try:
                check(row)
                results[f"{name}[{row}]"] = ""
            except Exception:
                results[f"{name}[{row}]"] = traceback.format_exc()[-3000:]
            quant_world.RESULTS[f"{name} {row}"] = round(time.process_time() - start, 2)
    quant_world.OUTPUT.write_text(json.dumps({"checks": results, "values": quant_world.RESULTS}))


main()
