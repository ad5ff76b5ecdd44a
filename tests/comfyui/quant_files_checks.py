"""Loading, quantizing, saving and reporting: checks of inside_quant.py."""

import json
import math
import os
import re
from pathlib import Path

import comfy.cli_args
import comfy.model_management
import comfy.quant_ops
import comfy.sd
import folder_paths
import torch
from quant_world import (
    BASE,
    EIGHT,
    FORMATS,
    GRAPH,
    MODELS,
    NODES,
    RESULTS,
    ROWS,
    STORED_EIGHT,
    WORST,
    digest,
    error,
    formats,
    host,
    kept,
    kept_output,
    load,
    output,
    part,
    quantized_layers,
    same,
    sampled,
    saved,
    settings,
    stored,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def check_every_architecture_loads_as_stored(row):
    ours, cores = load(row), comfy.sd.load_diffusion_model(str(MODELS / f"{row}.safetensors"))
    assert type(ours.model) is type(cores.model)
    value = output(ours, row)
    assert torch.isfinite(value).all()
    assert torch.equal(value, output(cores, row))


def check_quantizing_on_load_keeps_detection_and_most_of_the_output(row):
    plain, reference = kept(row), kept_output(row)
    found = {}
    for name in formats(row):
        model = kept(row, name)
        assert type(model.model) is type(plain.model) and settings(model) == settings(plain), name
        assert quantized_layers(model), name
        found[name] = error(kept_output(row, name), reference)
        assert 0 < found[name] < WORST.get(name, 0.1), found
        predicted = predicted_error(host.compare_models(plain, model).text)
        RESULTS.setdefault(f"error by prediction {row}", {})[name] = found[name] / predicted
        assert found[name] < predicted, (name, found[name], predicted)
    RESULTS[f"errors {row}"] = found


def predicted_error(text):
    """Of the output: the relative errors of all changed weights, added like independent ones."""
    levels = [float(level) for level in re.findall(r"^ *([\d.]+) dB  ", text, re.M)]
    assert levels
    return math.sqrt(sum(10 ** (-level / 10) for level in levels))


def check_quantizing_in_the_graph_is_quantizing_on_load(row):
    plain = kept(row)
    before = digest(plain)
    for name in FORMATS[:1] + FORMATS[-1:]:
        model = host.quantize_model(plain, precision=name)
        assert model.model is not plain.model and not model.patches
        if not any(value.dtype == torch.float32 and value.ndim == 2 for value in stored(plain).values()):
            same(stored(model), stored(kept(row, name)))
        assert settings(model) == settings(plain)
    assert digest(plain) == before, "the incoming model was changed"


def check_a_saved_model_reloads_in_cores_loader_with_the_same_output(row):
    for name in ["as stored", *formats(row)]:
        model = kept(row, name)
        target, again = saved(model, f"saved_{row}_{name.replace(' ', '_')}")
        assert torch.equal(output(again, row), kept_output(row, name)), name
        if name in ("as stored", EIGHT):
            latent = sampled(model, row)
            assert torch.isfinite(latent).all() and torch.equal(sampled(again, row), latent), name
        same({key: value.cpu() for key, value in stored(again).items()}, stored(model))
        target.unlink()


def check_the_same_file_comes_out_of_saving_twice(row):
    first, again = saved(kept(row, EIGHT), f"first_{row}")
    second, _ = saved(again, f"second_{row}")
    same(load_file(first), load_file(second))
    direct = BASE / "output" / f"direct_{row}.safetensors"
    part("checkpoints.quantize").quantize(MODELS / f"{row}.safetensors", direct, format=EIGHT)
    written, renamed = load_file(first), load_file(direct)
    # ComfyUI from 0.29 on renames the norms of FLUX's family while it loads them.
    if not any(key.endswith("key_norm.scale") for key in written):
        renamed = {re.sub(r"((_norm|\bnorms\.\d+)\.)scale$", r"\1weight", key): value for key, value in renamed.items()}
    assert written.keys() == renamed.keys(), sorted(written.keys() ^ renamed.keys())[:6]
    quantized = [key.removesuffix(".comfy_quant") for key in renamed if key.endswith(".comfy_quant")]
    codes = {key for key in renamed if key.rpartition(".")[0] in quantized and not key.endswith(".bias")}
    same({key: written[key] for key in codes}, {key: renamed[key] for key in codes})
    for file in (first, second, direct):
        file.unlink()


def check_comparing_shows_what_quantization_costs(row):
    plain, model = kept(row), kept(row, EIGHT)
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
    target, _ = saved(host.load_diffusion_model("with_header.safetensors", precision=EIGHT), "header")
    with safe_open(str(target), "pt") as file:
        header = file.metadata()
    assert header["foreign"] == "kept" and header["modelspec.author"] == "someone"
    assert json.loads(header["prompt"]) == GRAPH.prompt and json.loads(header["workflow"]) == GRAPH.extra["workflow"]
    record = json.loads(header["nativedit.quantization"])
    assert record["format"].startswith(STORED_EIGHT) and record["layers"]
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
    before = sorted((BASE / "output").rglob("*"))
    try:
        host.save_diffusion_model(model, prefix="%date:yyyy-MM-dd%/sub/a", graph=GRAPH)
    except part("files").FileError as error:
        assert "write %year%-%month%-%day%" in str(error), error
    else:
        raise AssertionError("a template that nobody fills in was accepted")
    assert sorted((BASE / "output").rglob("*")) == before
    (BASE / "output" / "a_file").write_text("")
    try:
        host.save_diffusion_model(model, prefix="a_file/x", graph=GRAPH)
    except part("files").FileError as error:
        assert "its folder can't be made" in str(error), error
    else:
        raise AssertionError("a file was taken for a folder")
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
        host.save_diffusion_model(model, prefix="cancelled", precision=EIGHT, graph=GRAPH)
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


def check_once_settings_of_quantizing_beside_a_float_are_refused_in_words():
    model = load(ROWS[0])
    for given, words in (({"rounding": "feedback"}, "quantizes nothing"), ({"min_sqnr": 30.0}, "bfloat16 is none")):
        for precision in ("bfloat16", "as stored"):
            if precision == "as stored" and "min_sqnr" in given:
                continue  # any format, then
            try:
                host.load_diffusion_model(f"{ROWS[0]}.safetensors", precision=precision, **given)
            except ValueError as problem:
                assert words in str(problem) and precision in str(problem), problem
            else:
                raise AssertionError(f"{given} did nothing to {precision}")
    try:
        host.save_diffusion_model(model, prefix="idle", precision="bfloat16", rounding="feedback", graph=GRAPH)
    except ValueError as problem:
        assert "bfloat16 quantizes nothing" in str(problem), problem
    else:
        raise AssertionError("rounding did nothing")


def check_once_a_policy_file_decides():
    row = ROWS[0]
    names = [key.removesuffix(".comfy_quant") for key in quantized_layers(load(row, EIGHT))]
    folder = Path(folder_paths.get_folder_paths("quantization_policies")[0])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "one.toml").write_text(f'[[layers]]\nmatch = "{names[0]}"\nformat = "keep"\n')
    folder_paths.filename_list_cache.clear()
    assert "one.toml" in host.list_files("quantization_policies")
    left = [key.removesuffix(".comfy_quant") for key in quantized_layers(load(row, EIGHT, "one.toml"))]
    assert sorted(left) == sorted(set(names) - {names[0]})
    kept = host.quantize_model(load(row), precision=EIGHT, keep=[names[0]])
    assert [key.removesuffix(".comfy_quant") for key in quantized_layers(kept)] == left
    try:
        host.quantize_model(load(row), precision=EIGHT, keep=["no.such.layer"])
    except ValueError as problem:
        assert "no.such.layer" in str(problem)
    else:
        raise AssertionError("a pattern without a match was accepted")


def check_once_a_changed_file_is_loaded_again():
    node = NODES["NativeDiTLoadDiffusionModel"]
    path = MODELS / "changing.safetensors"
    path.write_bytes((MODELS / f"{ROWS[0]}.safetensors").read_bytes())
    first = node.fingerprint_inputs(file="changing.safetensors", precision=EIGHT, policy="card")
    assert node.fingerprint_inputs(file="changing.safetensors", precision=EIGHT, policy="card") == first
    os.utime(path, ns=(1, 1))
    assert node.fingerprint_inputs(file="changing.safetensors", precision=EIGHT, policy="card") != first
    path.unlink()
    assert "missing" in node.fingerprint_inputs(file="changing.safetensors")


def check_once_inspecting_marks_what_is_wrong():
    row = ROWS[0]
    target, _ = saved(load(row, EIGHT), "inspected")
    found = host.inspect_checkpoint("diffusion_models/inspected.safetensors")
    assert STORED_EIGHT in found.text and "no problems" in found.text, found.text
    tensors = load_file(target)
    layer = next(key for key in tensors if key.endswith(".comfy_quant")).removesuffix(".comfy_quant")
    tensors[f"{layer}.comfy_quant"] = torch.tensor(list(b'{"format": "int5_magic"}'), dtype=torch.uint8)
    save_file(tensors, MODELS / "wrong.safetensors")
    wrong = host.inspect_checkpoint("diffusion_models/wrong.safetensors")
    assert "1 problem:" in wrong.text and layer in wrong.text and "int5_magic" in wrong.text, wrong.text
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


def check_once_a_model_without_its_weights_is_not_saved_as_zeros():
    model = load(ROWS[0])
    layer = next(m for m in model.model.diffusion_model.modules() if isinstance(m, torch.nn.Linear))
    layer.weight = torch.nn.Parameter(layer.weight.to("meta"), requires_grad=False)
    before = sorted(str(path) for path in (BASE / "output").rglob("*"))
    try:
        host.save_diffusion_model(model, prefix="hollow", graph=GRAPH)
    except (part("files").FileError, part("files").OutputError, ValueError) as problem:
        assert "weight" in str(problem), problem
    else:
        raise AssertionError("placeholders were saved")
    assert sorted(str(path) for path in (BASE / "output").rglob("*")) == before


def check_once_a_flag_of_float8_layers_is_kept():
    """Nothing measured the inputs of these layers, so they ask to be multiplied in full precision."""
    target, again = saved(load(ROWS[0], "float8_e4m3fn"), "flags")
    second, _ = saved(again, "flags_again")
    for file in (target, second):
        state = load_file(file)
        markers = [json.loads(bytes(v.tolist())) for key, v in state.items() if key.endswith(".comfy_quant")]
        assert markers and all(marker.get("full_precision_matrix_mult") is True for marker in markers)
        assert not any(
            value.dtype.itemsize == 1 and value.is_floating_point() for value in state.values() if value.ndim < 2
        )


def check_once_float8_norms_are_loaded_as_floats():
    state = load_file(MODELS / f"{ROWS[0]}.safetensors")
    small = [key for key, value in state.items() if value.ndim == 1]
    save_file(
        {**state, **{key: state[key].to(torch.float8_e4m3fn) for key in small}}, MODELS / "small_float8.safetensors"
    )
    model = host.load_diffusion_model("small_float8.safetensors")
    assert error(output(model, ROWS[0]), output(load(ROWS[0]), ROWS[0])) < 0.1
    tensors = stored(model)
    assert not any(value.dtype == torch.float8_e4m3fn for value in tensors.values())
