"""ComfyUI with the pack in this process, and what the checks of inside_quant.py do with models."""

import asyncio
import functools
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path

COMFYUI, BASE, OUTPUT = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
ONLY = sys.argv[4:]
sys.argv = ["main.py", "--cpu", "--base-directory", str(BASE)]
sys.path.insert(0, str(COMFYUI))

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_detection  # noqa: E402
import comfy.model_management  # noqa: E402
import comfy.quant_ops  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import comfy_api.latest  # noqa: E402, F401
import folder_paths  # noqa: E402
import narrow  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

torch.set_num_threads(1)
# Weights in memory of their own: BLAS rounds by alignment, and a mapped file's weights lie where its header's length
# puts them.
comfy.utils.DISABLE_MMAP = True
folder_paths.set_output_directory(str(BASE / "output"))
narrow.install(comfy.model_detection)
PACK = BASE / "custom_nodes" / "ComfyUI-NativeDiT"
MODELS = BASE / "models" / "diffusion_models"
NAME = str(PACK).replace(".", "_x_")
spec = importlib.util.spec_from_file_location(NAME, PACK / "__init__.py")
package = importlib.util.module_from_spec(spec)
sys.modules[NAME] = package
spec.loader.exec_module(package)
NODES = {node.__name__: node for node in asyncio.run(asyncio.run(package.comfy_entrypoint()).get_node_list())}


def part(name):
    return importlib.import_module(f"{NAME}.{name}")


hosts = part("host")
host = hosts.current_host()
GRAPH = hosts.Graph({"1": {"class_type": "X", "inputs": {}}}, {"workflow": {"nodes": []}})
FORMATS = [
    name
    for name in part("quant.formats").OFFERED
    if part("quant.formats").parse_recipe(name).format in comfy.quant_ops.QUANT_ALGOS
]
EIGHT = FORMATS[0]  # the best of 8 bits: int8_convrot, or float8_e4m3fn where ComfyUI knows no int8 yet
STORED_EIGHT = part("quant.formats").parse_recipe(EIGHT).format
# Of the output, for random weights in tiny models: what 8 bits and 4 bits may cost.
WORST = {
    "nvfp4": 0.6,
    "convrot_w4a4": 0.8,
    "asym_w4a8_int8": 0.6,
    "float8_e5m2": 0.35,
    "float8_e4m3fn": 0.25,
    "mxfp8": 0.25,
}
ROWS = sorted(file.stem for file in (BASE / "inputs").glob("*.safetensors"))
if ONLY:
    ROWS = [row for row in ROWS if row in ONLY]
RESULTS = {}


def formats(row):
    """All of them for three architectures; one of every kind for the others: they differ in layers only."""
    if row in ("flux_dev", "qwen_image", "prx_pixel"):
        return FORMATS
    return [name for name in FORMATS if name in ("int8_convrot", "float8_e4m3fn", "nvfp4", "convrot_w4a4")]


def load(row, precision="as stored", policy="card"):
    return host.load_diffusion_model(f"{row}.safetensors", precision=precision, policy=policy)


@functools.cache
def kept(row, precision="as stored"):
    """The model, loaded once for all checks of a row that leave it as it is. A LoRA of a clone is taken off again."""
    return load(row, precision)


@functools.cache
def kept_output(row, precision="as stored"):
    return output(kept(row, precision), row)


@functools.cache
def output_with_lora(row):
    return output(with_lora(kept(row)), row)


def forget():
    for function in (kept, kept_output, output_with_lora):
        function.cache_clear()


def output(patcher, row):
    comfy.model_management.load_models_gpu([patcher])
    return forward(patcher, row)


@torch.no_grad()
def forward(patcher, row):
    given = load_file(BASE / "inputs" / f"{row}.safetensors")
    inference = getattr(patcher.model, "get_dtype_inference", None)
    dtype = inference() if inference else patcher.model.manual_cast_dtype or patcher.model.get_dtype()
    given = {key: value if key.startswith("time") else value.to(dtype) for key, value in given.items()}
    if "num_tokens" in given:
        given["num_tokens"] = int(given["num_tokens"])
    return patcher.model.diffusion_model(**given, transformer_options={}).float()


def sampled(patcher, row):
    """Two steps of ComfyUI's sampler, with the conditions that its model base makes of the inputs."""
    given = load_file(BASE / "inputs" / f"{row}.safetensors")
    pooled = given.get("y", torch.zeros(1, 768))  # ComfyUI 0.8 asks for it where no layer of the model takes it
    extra = {"pooled_output": pooled, "guidance": 3.5}
    positive = [[given["context"], extra]]
    latent = torch.zeros_like(given["x"])
    noise = torch.randn(latent.shape, generator=torch.manual_seed(1))
    arguments = (2, 1.0, "euler", "simple", positive, positive, latent)
    return comfy.sample.sample(patcher, noise, *arguments, disable_pbar=True, seed=1).float()


def cosine(first, second):
    return float(torch.nn.functional.cosine_similarity(first.flatten(), second.flatten(), 0))


def error(value, reference):
    return float((value - reference).norm() / reference.norm())


def stored(patcher):
    state = patcher.model.diffusion_model.state_dict()
    return {key: part("bridge.quantized").stored_tensor(value) for key, value in state.items()}


def digest(patcher):
    whole = hashlib.sha256()
    for key, value in sorted(stored(patcher).items()):
        whole.update(key.encode())
        if value.numel():
            whole.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def same(first, second):
    assert first.keys() == second.keys(), sorted(first.keys() ^ second.keys())[:6]
    for key, value in first.items():
        other = second[key]
        assert value.dtype == other.dtype and value.shape == other.shape, (key, value.dtype, other.dtype)
        assert torch.equal(value.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), key


def quantized_layers(patcher):
    return [key for key in stored(patcher) if key.endswith(".comfy_quant")]


def saved(patcher, name, **options):
    """Save, put among the models under ``name``, and load with ComfyUI's own loader."""
    path = Path(host.save_diffusion_model(patcher, prefix=f"test/{name}", graph=GRAPH, **options).path)
    assert path.parent == BASE / "output" / "test"
    target = MODELS / f"{name}.safetensors"
    path.replace(target)
    return target, comfy.sd.load_diffusion_model(str(target))


def settings(patcher):
    return {key: value for key, value in patcher.model.model_config.unet_config.items() if key != "dtype"}


def lora(patcher, strength=0.1, seed=5):
    """Patches of rank 4 on every matrix, each ``strength`` of its weight's norm."""
    generator = torch.Generator().manual_seed(seed)
    patches = {}
    for key in patcher.model.state_dict():
        if not key.startswith("diffusion_model.") or not key.endswith(".weight"):
            continue
        backup = patcher.backup.get(key)  # another clone's patches may be in the model
        weight = comfy.utils.get_attr(patcher.model, key) if backup is None else backup.weight
        if weight.ndim != 2 or min(weight.shape) < 16:
            continue
        up = torch.randn(weight.shape[0], 4, generator=generator)
        down = torch.randn(4, weight.shape[1], generator=generator)
        norm = (weight.dequantize() if hasattr(weight, "_qdata") else weight).float().norm()
        scale = strength * norm
        patches[key] = ("diff", (up @ down * (scale / (up @ down).norm()),))
    return patches


def with_lora(patcher, strength=1.0):
    clone = patcher.clone()
    assert clone.add_patches(lora(patcher), strength)
    return clone
