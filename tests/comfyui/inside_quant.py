"""Quantizing, saving and comparing models inside ComfyUI's Python; test_quant_inside.py makes a test of each check.

Run as `python inside_quant.py COMFYUI BASE FILE`. BASE/models/diffusion_models holds tiny models of ComfyUI's own
architectures, BASE/inputs their inputs; results go to FILE as JSON, {check: "" or the traceback}.
"""

import asyncio
import hashlib
import importlib
import importlib.util
import json
import math
import sys
import traceback
from pathlib import Path

COMFYUI, BASE, OUTPUT = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
ONLY = sys.argv[4:]
sys.argv = ["main.py", "--cpu", "--base-directory", str(BASE)]
sys.path.insert(0, str(COMFYUI))

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.cli_args  # noqa: E402
import comfy.model_management  # noqa: E402
import comfy.quant_ops  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import comfy_api.latest  # noqa: E402, F401
import folder_paths  # noqa: E402
import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

torch.set_num_threads(1)
# Weights in memory of their own: BLAS rounds by alignment, and a mapped file's weights lie where its header's length
# puts them.
comfy.utils.DISABLE_MMAP = True
folder_paths.set_output_directory(str(BASE / "output"))
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
    """All of them for one architecture of ComfyUI's and one of ours; one of every kind for the others."""
    if row in ("flux_dev", "prx_pixel"):
        return FORMATS
    return [name for name in FORMATS if name in ("int8_convrot", "float8_e4m3fn", "nvfp4")]


def load(row, precision="as stored", policy="card"):
    return host.load_diffusion_model(f"{row}.safetensors", precision=precision, policy=policy)


@torch.no_grad()
def output(patcher, row):
    comfy.model_management.load_models_gpu([patcher])
    given = load_file(BASE / "inputs" / f"{row}.safetensors")
    inference = getattr(patcher.model, "get_dtype_inference", None)
    dtype = inference() if inference else patcher.model.manual_cast_dtype or patcher.model.get_dtype()
    given = {key: value if key.startswith("time") else value.to(dtype) for key, value in given.items()}
    return patcher.model.diffusion_model(**given, transformer_options={}).float()


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
        weight = comfy.utils.get_attr(patcher.model, key)
        if weight.ndim != 2 or min(weight.shape) < 16:
            continue
        up = torch.randn(weight.shape[0], 4, generator=generator)
        down = torch.randn(4, weight.shape[1], generator=generator)
        scale = strength * weight.dequantize().float().norm() if hasattr(weight, "dequantize") else 0.0
        if not hasattr(weight, "_qdata"):
            scale = strength * weight.float().norm()
        patches[key] = ("diff", (up @ down * (scale / (up @ down).norm()),))
    return patches


def with_lora(patcher, strength=1.0):
    clone = patcher.clone()
    assert clone.add_patches(lora(patcher), strength)
    return clone


def check_every_architecture_loads_as_stored(row):
    ours, cores = load(row), comfy.sd.load_diffusion_model(str(MODELS / f"{row}.safetensors"))
    assert type(ours.model) is type(cores.model)
    value = output(ours, row)
    assert torch.isfinite(value).all()
    assert torch.equal(value, output(cores, row))


def check_quantizing_on_load_keeps_detection_and_most_of_the_output(row):
    plain = load(row)
    reference = output(plain, row)
    found = {}
    for name in formats(row):
        model = load(row, name)
        assert type(model.model) is type(plain.model) and settings(model) == settings(plain), name
        assert quantized_layers(model), name
        found[name] = error(output(model, row), reference)
        assert 0 < found[name] < WORST.get(name, 0.1), found
    RESULTS[f"errors {row}"] = found


def check_quantizing_in_the_graph_is_quantizing_on_load(row):
    plain = load(row)
    before = digest(plain)
    for name in FORMATS[:1] + FORMATS[-1:]:
        model = host.quantize_model(plain, precision=name)
        assert model.model is not plain.model and not model.patches
        if not any(value.dtype == torch.float32 and value.ndim == 2 for value in stored(plain).values()):
            same(stored(model), stored(load(row, name)))
        assert settings(model) == settings(plain)
    assert digest(plain) == before, "the incoming model was changed"


def check_a_saved_model_reloads_in_cores_loader_with_the_same_output(row):
    for name in ["as stored", *formats(row)]:
        model = load(row, name)
        target, again = saved(model, f"saved_{row}_{name.replace(' ', '_')}")
        assert torch.equal(output(again, row), output(model, row)), name
        same({key: value.cpu() for key, value in stored(again).items()}, stored(model))
        target.unlink()


def check_the_same_file_comes_out_of_saving_twice(row):
    first, again = saved(load(row, FORMATS[0]), f"first_{row}")
    second, _ = saved(again, f"second_{row}")
    same(load_file(first), load_file(second))
    direct = BASE / "output" / f"direct_{row}.safetensors"
    part("checkpoints.quantize").quantize(MODELS / f"{row}.safetensors", direct, format=FORMATS[0])
    # ComfyUI renames the norms of FLUX's family while it loads them.
    renamed = {
        key.removesuffix("scale") + "weight" if key.endswith("_norm.scale") else key: value
        for key, value in load_file(direct).items()
    }
    written = load_file(first)
    assert written.keys() == renamed.keys()
    quantized = [key.removesuffix(".comfy_quant") for key in renamed if key.endswith(".comfy_quant")]
    codes = {key for key in renamed if key.rpartition(".")[0] in quantized and not key.endswith(".bias")}
    same({key: written[key] for key in codes}, {key: renamed[key] for key in codes})
    for file in (first, second, direct):
        file.unlink()


def check_a_baked_lora_is_the_lora_at_run_time(row):
    plain = load(row)
    patched = with_lora(plain)
    wanted = output(patched, row)
    target, again = saved(patched, f"baked_{row}")
    assert torch.equal(output(again, row), wanted)
    assert error(wanted, output(load(row), row)) > 1e-3
    target.unlink()


def check_a_lora_on_a_quantized_model_keeps_its_direction(row):
    for name in FORMATS[:2]:
        model = load(row, name)
        plain, change = output(model, row), output(with_lora(load(row)), row) - output(load(row), row)
        patched = with_lora(load(row, name))
        moved = output(patched, row) - plain
        cosine = float(torch.nn.functional.cosine_similarity(moved.flatten(), change.flatten(), 0))
        RESULTS.setdefault(f"cosine {row}", {})[name] = cosine
        assert cosine > 0.9, cosine
        file, _ = saved(with_lora(load(row, name), 0.0), f"zero_{row}")
        same(load_file(file), load_file(saved(load(row, name), f"none_{row}")[0]))


def check_orders_of_lora_quantize_and_save_agree(row):
    name = FORMATS[0]
    reference = output(with_lora(load(row)), row)
    quantized_then_lora = with_lora(host.quantize_model(load(row), precision=name))
    lora_then_quantized = host.quantize_model(with_lora(load(row)), precision=name)
    file, reloaded = saved(quantized_then_lora, f"order_{row}")
    found = [error(output(model, row), reference) for model in (quantized_then_lora, lora_then_quantized, reloaded)]
    RESULTS[f"orders {row}"] = found
    assert max(found) < 0.1, found
    assert quantized_layers(reloaded) == quantized_layers(quantized_then_lora)
    file.unlink()


def check_a_model_that_was_sampled_with_a_lora_is_saved_without_it(row):
    plain = load(row)
    before = digest(plain)
    output(with_lora(plain), row)  # ComfyUI leaves the patched weights in the model
    target, _ = saved(plain, f"after_{row}")
    again = comfy.sd.load_diffusion_model(str(target))
    assert digest(again) == before
    target.unlink()


def check_comparing_shows_what_quantization_costs(row):
    plain, model = load(row), load(row, FORMATS[0])
    found = host.compare_models(plain, model)
    assert found.image.ndim == 4 and found.image.shape[-1] == 3 and found.image.min() >= 0 and found.image.max() <= 1
    assert f"{len(quantized_layers(model))} differ" in found.text, found.text
    assert "0 differ; overall equal" in host.compare_models(plain, plain).text


def check_once_every_model_of_comfyui_is_detected_the_same_after_quantization():
    """On the full key sets of published models, without a weight: formats that pack or pad change shapes."""
    quantize = part("bridge.quantize")
    memory, transform = part("files.memory"), part("checkpoints.transform")
    layouts = json.loads((BASE / "layouts.json").read_text())
    assert len(layouts) > 10
    problems, quantized = {}, 0
    for name, shapes in layouts.items():
        shapes = {key: tuple(shape) for key, shape in shapes.items()}
        known = quantize.cores_verdict(shapes)
        if known == "[]" or known.startswith("raises"):
            continue  # a part of a model that ComfyUI's loader of diffusion models does not take
        source = memory.TensorSource(name, {k: memory.Lazy(torch.bfloat16, v, None) for k, v in shapes.items()})
        for recipe in ("nvfp4", "convrot_w4a4"):
            if recipe not in comfy.quant_ops.QUANT_ALGOS:
                continue
            try:
                plan = transform.plan(source, recipe, detect=quantize.DetectedAs())
            except Exception as problem:
                problems[f"{name} {recipe}"] = repr(problem)[:300]
                continue
            names = set(shapes)
            stored = {key: shape for key, _, shape in plan.assembly.entries if key in names}
            if quantize.cores_verdict(stored) != known:
                problems[f"{name} {recipe}"] = "another model"
            quantized += bool(plan.report.quantized)
    RESULTS["layouts quantized"] = quantized
    assert not problems, problems
    assert quantized > 20


def check_once_the_header_says_what_the_file_is():
    row = ROWS[0]
    path = MODELS / "with_header.safetensors"
    tensors = load_file(MODELS / f"{row}.safetensors")
    save_file(tensors, path, {"foreign": "kept", "modelspec.author": "someone", "prompt": "old"})
    target, _ = saved(host.load_diffusion_model("with_header.safetensors", precision=FORMATS[0]), "header")
    with safe_open(str(target), "pt") as file:
        header = file.metadata()
    assert header["foreign"] == "kept" and header["modelspec.author"] == "someone"
    assert json.loads(header["prompt"]) == GRAPH.prompt and json.loads(header["workflow"]) == GRAPH.extra["workflow"]
    record = json.loads(header["nativedit.quantization"])
    assert record["format"].startswith("int8_tensorwise") and record["layers"]
    assert header["modelspec.architecture"]
    comfy.cli_args.args.disable_metadata = True
    target, _ = saved(load(row), "no_metadata")
    comfy.cli_args.args.disable_metadata = False
    with safe_open(str(target), "pt") as file:
        assert "prompt" not in file.metadata() and "workflow" not in file.metadata()


def check_once_names_stay_in_the_output_folder():
    row = ROWS[0]
    model = load(row)
    for bad in ("../outside", "/tmp/outside", "a/../../b", "con", "a\x00b", "C:\\x", ""):
        try:
            host.save_diffusion_model(model, prefix=bad, graph=GRAPH)
        except (ValueError, OSError, part("files").FileError):
            continue
        raise AssertionError(f"{bad!r} was accepted")
    first = host.save_diffusion_model(model, prefix="%year%/a", graph=GRAPH)
    second = host.save_diffusion_model(model, prefix="%year%/a", graph=GRAPH)
    assert first.path != second.path and "%" not in first.path
    assert first.shown["filename"] == "a_00001_.safetensors" and first.shown["subfolder"].isdigit()


def check_once_cancelling_leaves_nothing_behind():
    row = ROWS[0]
    model = load(row)
    before = sorted(str(path) for path in (BASE / "output").rglob("*"))
    comfy.model_management.interrupt_current_processing(True)
    try:
        host.save_diffusion_model(model, prefix="cancelled", precision=FORMATS[0], graph=GRAPH)
    except comfy.model_management.InterruptProcessingException:
        assert sorted(str(path) for path in (BASE / "output").rglob("*")) == before
        return
    raise AssertionError("it was not cancelled")


def check_once_quantized_files_are_not_quantized_again():
    row = ROWS[0]
    target, model = saved(load(row, "float8_e4m3fn"), "already")
    for action in (
        lambda: host.load_diffusion_model("already.safetensors", precision="nvfp4"),
        lambda: host.quantize_model(model, precision="nvfp4"),
    ):
        try:
            action()
        except part("files").FileError as problem:
            assert "is quantized already" in str(problem) and "float8_e4m3fn" in str(problem)
        else:
            raise AssertionError("it was quantized twice")
    same(stored(host.quantize_model(model, precision="float8_e4m3fn")), stored(model))
    target.unlink()


def check_once_a_policy_file_decides():
    row = ROWS[0]
    names = [key.removesuffix(".comfy_quant") for key in quantized_layers(load(row, FORMATS[0]))]
    folder = Path(folder_paths.get_folder_paths("quantization_policies")[0])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "one.toml").write_text(f'[[layers]]\nmatch = "{names[0]}"\nformat = "keep"\n')
    folder_paths.filename_list_cache.clear()
    assert "one.toml" in host.list_files("quantization_policies")
    left = [key.removesuffix(".comfy_quant") for key in quantized_layers(load(row, FORMATS[0], "one.toml"))]
    assert sorted(left) == sorted(set(names) - {names[0]})
    kept = host.quantize_model(load(row), precision=FORMATS[0], keep=[names[0]])
    assert [key.removesuffix(".comfy_quant") for key in quantized_layers(kept)] == left
    try:
        host.quantize_model(load(row), precision=FORMATS[0], keep=["no.such.layer"])
    except ValueError as problem:
        assert "no.such.layer" in str(problem)
    else:
        raise AssertionError("a pattern without a match was accepted")


def check_once_a_changed_file_is_loaded_again():
    node = NODES["NativeDiTLoadDiffusionModel"]
    path = MODELS / "changing.safetensors"
    path.write_bytes((MODELS / f"{ROWS[0]}.safetensors").read_bytes())
    first = node.fingerprint_inputs(file="changing.safetensors", precision="int8_convrot", policy="card")
    assert node.fingerprint_inputs(file="changing.safetensors", precision="int8_convrot", policy="card") == first
    import os

    os.utime(path, ns=(1, 1))
    assert node.fingerprint_inputs(file="changing.safetensors", precision="int8_convrot", policy="card") != first
    path.unlink()
    assert "missing" in node.fingerprint_inputs(file="changing.safetensors")


def check_once_inspecting_marks_what_is_wrong():
    row = ROWS[0]
    target, _ = saved(load(row, FORMATS[0]), "inspected")
    found = host.inspect_checkpoint("diffusion_models/inspected.safetensors")
    assert "int8_tensorwise" in found.text and "no problems" in found.text, found.text
    tensors = load_file(target)
    layer = next(key for key in tensors if key.endswith(".comfy_quant")).removesuffix(".comfy_quant")
    tensors[f"{layer}.comfy_quant"] = torch.tensor(list(b'{"format": "int5_magic"}'), dtype=torch.uint8)
    save_file(tensors, MODELS / "wrong.safetensors")
    wrong = host.inspect_checkpoint("diffusion_models/wrong.safetensors")
    assert "1 problems" in wrong.text and layer in wrong.text and "int5_magic" in wrong.text, wrong.text
    red = (wrong.image[..., 0] > 0.9) & (wrong.image[..., 1] < 0.4)
    assert red.any() and not ((found.image[..., 0] > 0.9) & (found.image[..., 1] < 0.4)).any()
    RESULTS["pictures"] = [list(found.image.shape), list(wrong.image.shape)]
    try:
        host.load_diffusion_model("wrong.safetensors")
    except part("files").FileError as problem:
        assert "int5_magic" in str(problem) and layer in str(problem)
    else:
        raise AssertionError("a layer of an unknown format was loaded")


def check_once_repairing_makes_a_file_that_core_loads():
    row = ROWS[0]
    target, model = saved(load(row, "float8_e4m3fn"), "sound")
    bare = {key: value for key, value in load_file(target).items() if not key.endswith(".comfy_quant")}
    save_file(bare, MODELS / "bare.safetensors")
    fixed = Path(host.repair_checkpoint("diffusion_models/bare.safetensors", prefix="repaired/x").path)
    again = comfy.sd.load_diffusion_model(str(fixed))
    assert math.isclose(error(output(again, row), output(model, row)), 0.0, abs_tol=1e-6)
    assert error(output(host.load_diffusion_model("bare.safetensors"), row), output(model, row)) < 1e-6


def main():
    results = {}
    for name, check in list(globals().items()):
        if name.startswith("check_once_"):
            results[name] = run(check)
        elif name.startswith("check_"):
            for row in ROWS:
                results[f"{name}[{row}]"] = run(check, row)
    OUTPUT.write_text(json.dumps({"checks": results, "values": RESULTS}))


def run(check, *arguments):
    try:
        check(*arguments)
    except Exception:
        return traceback.format_exc()[-3000:]
    return ""


main()
