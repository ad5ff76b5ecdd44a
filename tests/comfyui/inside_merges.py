"""Memory of merges in a row, inside ComfyUI's Python; test_merges.py reads the numbers.

Run as `python inside_merges.py COMFYUI BASE FILE`. BASE/models/diffusion_models holds merge_0 to merge_6.safetensors;
results go to FILE as JSON: {what was done: MB of anonymous memory that it took at most beyond what was there before}.
"""

import ctypes
import gc
import json
import threading
import time

from quant_world import GRAPH, MODELS, OUTPUT, error, host  # before anything that imports comfy

import comfy.sd  # isort: skip
import comfy.utils  # isort: skip
import nodes  # isort: skip
import torch  # isort: skip
from comfy_extras.nodes_model_merging import ModelMergeSimple  # isort: skip
from safetensors.torch import load_file  # isort: skip

assert nodes  # ComfyUI imports it before its extra nodes
comfy.utils.DISABLE_MMAP = False  # weights of the sources stay in the page cache, as users have it


def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024


class Peak:
    def __enter__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what earlier work freed shall not hide what this one takes
        self.base = self.most = anonymous()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.stop.is_set():
            self.most = max(self.most, anonymous())
            time.sleep(0.002)

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()
        self.megabytes = self.most - self.base


def source(number):
    return comfy.sd.load_diffusion_model(str(MODELS / f"merge_{number}.safetensors"))


def merged(model, number):
    merge = ModelMergeSimple.execute if hasattr(ModelMergeSimple, "execute") else ModelMergeSimple().merge
    done = merge(model, source(number), 0.5)
    return (done if isinstance(done, tuple) else done.result)[0]


def chain(count):
    model = source(0)
    for number in range(1, count + 1):
        model = merged(model, number)
    return model


def expected(count):
    value = load_file(MODELS / "merge_0.safetensors")
    for number in range(1, count + 1):
        other = load_file(MODELS / f"merge_{number}.safetensors")
        value = {key: 0.5 * tensor.float() + 0.5 * other[key].float() for key, tensor in value.items()}
    return value


def saved(count):
    model = chain(count)
    with Peak() as peak:
        path = host.save_diffusion_model(model, prefix=f"merges/{count}", graph=GRAPH).path
    state, wanted = load_file(path), expected(count)
    assert max(error(value.float(), wanted[key]) for key, value in state.items()) < 0.02
    return peak.megabytes


def quantized(count):
    model = chain(count)
    with Peak() as peak:
        model = host.quantize_model(model, precision="float8_e4m3fn")
    return peak.megabytes


def quantized_each_time(count):
    """Every merge becomes a quantized model, which is merged with the next one."""
    model = host.quantize_model(source(0), precision="float8_e4m3fn")
    with Peak() as peak:
        for number in range(1, count + 1):
            model = host.quantize_model(merged(model, number), precision="float8_e4m3fn")
            gc.collect()
    return peak.megabytes


def main():
    results = {"of a source": (MODELS / "merge_0.safetensors").stat().st_size / 2**20}
    with torch.inference_mode():
        saved(1)  # what is imported and allocated once
        for work in (saved, quantized, quantized_each_time):
            for count in (1, 6):
                results[f"{work.__name__} {count}"] = work(count)
                gc.collect()
    OUTPUT.write_text(json.dumps(results))


main()
