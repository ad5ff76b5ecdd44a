"""LoRA, sampling and the memory manager on quantized models: checks of inside_quant.py."""

import comfy.lora
import comfy.model_base
import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from quant_world import (
    EIGHT,
    FORMATS,
    MODELS,
    RESULTS,
    ROWS,
    cosine,
    digest,
    error,
    formats,
    forward,
    host,
    kept,
    kept_output,
    load,
    lora,
    output,
    output_with_lora,
    part,
    quantized_layers,
    same,
    saved,
    stored,
    with_lora,
)
from safetensors.torch import load_file

CPU = torch.device("cpu")
# The direction of a LoRA's change that a layer of 8 bits keeps at least: float8 rounds small steps away.
KEPT = 0.98 if EIGHT.startswith("int8") else 0.8


def check_a_baked_lora_is_the_lora_at_run_time(row):
    wanted = output_with_lora(row)
    target, again = saved(with_lora(kept(row)), f"baked_{row}")
    assert torch.equal(output(again, row), wanted)
    assert error(wanted, kept_output(row)) > 1e-3
    target.unlink()


def check_a_lora_on_a_quantized_model_keeps_its_direction(row):
    change = output_with_lora(row) - kept_output(row)
    found = RESULTS.setdefault(f"cosine of a LoRA {row}", {})
    for name in formats(row):
        moved = output(with_lora(kept(row, name)), row) - kept_output(row, name)
        found[name] = cosine(moved, change)
    assert all(value > 0.98 for name, value in found.items() if name.startswith("int8")), found
    assert all(value > 0.3 for value in found.values()), found


def check_some_a_lora_of_strength_0_changes_no_bit(row):
    for name in (EIGHT, formats(row)[-1]):
        file, _ = saved(with_lora(kept(row, name), 0.0), f"zero_{row}")
        other, _ = saved(kept(row, name), f"none_{row}")
        same(load_file(file), load_file(other))
        file.unlink()
        other.unlink()


def check_some_orders_of_lora_quantize_and_save_agree(row):
    reference = output_with_lora(row)
    quantized_then_lora = with_lora(host.quantize_model(kept(row), precision=EIGHT))
    lora_then_quantized = host.quantize_model(with_lora(kept(row)), precision=EIGHT)
    _, quantize_lora_save = saved(quantized_then_lora, f"order_1_{row}")
    _, lora_quantize_save = saved(lora_then_quantized, f"order_2_{row}")
    _, lora_save_quantize = saved(with_lora(kept(row)), f"order_3_{row}", precision=EIGHT)
    _, quantize_save = saved(kept(row, EIGHT), f"order_4_{row}")
    orders = {
        "quantize, LoRA": quantized_then_lora,
        "LoRA, quantize": lora_then_quantized,
        "quantize, LoRA, save": quantize_lora_save,
        "LoRA, quantize, save": lora_quantize_save,
        "LoRA, save quantized": lora_save_quantize,
        "quantize, save, LoRA": with_lora(quantize_save),
    }
    found = {name: error(output(model, row), reference) for name, model in orders.items()}
    RESULTS[f"orders {row}"] = found
    assert max(found.values()) < (0.1 if EIGHT.startswith("int8") else 0.25), found
    assert quantized_layers(quantize_lora_save) == quantized_layers(quantized_then_lora)
    same(stored(lora_quantize_save), stored(lora_save_quantize))
    for number in range(1, 5):
        (MODELS / f"order_{number}_{row}.safetensors").unlink()


def check_some_a_model_that_was_sampled_with_a_lora_is_saved_without_it(row):
    plain = load(row)
    before = digest(plain)
    output(with_lora(plain), row)  # ComfyUI leaves the patched weights in the model
    target, _ = saved(plain, f"after_{row}")
    again = comfy.sd.load_diffusion_model(str(target))
    assert digest(again) == before
    target.unlink()


def check_some_taking_a_lora_off_reads_no_file_and_gives_the_old_bits(row):
    name = EIGHT if row != "z_image" else "float8_e4m3fn"
    copy = MODELS / f"gone_{row}.safetensors"
    copy.write_bytes((MODELS / f"{row}.safetensors").read_bytes())
    plain = host.load_diffusion_model(copy.name, precision=name)
    copy.unlink()  # whoever wants it again fails
    before, value = digest(plain), output(plain, row)
    patched = with_lora(plain)
    assert error(output(patched, row), value) > 1e-3
    assert torch.equal(output(plain, row), value)
    assert digest(plain) == before
    patched.detach()
    assert digest(plain) == before and torch.equal(output(plain.clone(), row), value)


def check_a_lora_reaches_every_quantized_layer_wherever_it_is(row):
    """All of the model loaded, and half of it left where it was."""
    change = output_with_lora(row) - kept_output(row)
    value = kept_output(row, EIGHT)
    codes = {key: tensor.clone() for key, tensor in stored(load(row, EIGHT)).items()}
    full = with_lora(load(row, EIGHT))
    moved = output(full, row) - value
    now = stored(full)
    for key in full.patches:
        own = key.removeprefix("diffusion_model.")
        assert not torch.equal(now[own], codes[own]), own
    partial = with_lora(load(row, EIGHT))
    partial.patch_model(device_to=CPU, lowvram_model_memory=partial.model_size() // 2)
    assert partial.model.model_lowvram and partial.lowvram_patch_counter() > 0
    halves = forward(partial, row) - value
    RESULTS.setdefault("offloaded", {})[row] = [cosine(moved, change), cosine(halves, change)]
    assert cosine(halves, change) > KEPT, (cosine(halves, change), cosine(moved, change))
    partial.detach()


def check_some_a_lora_on_weights_cast_to_float8_is_added_in_floats(row):
    """No scale, no marker: what ComfyUI's own loader makes of "fp8_e4m3fn"."""

    def cast():
        path = str(MODELS / f"{row}.safetensors")
        return comfy.sd.load_diffusion_model(path, model_options={"dtype": torch.float8_e4m3fn})

    change = output_with_lora(row) - kept_output(row)
    moved = output(with_lora(cast()), row) - output(cast(), row)
    RESULTS.setdefault("float8 cast", {})[row] = cosine(moved, change)
    assert cosine(moved, change) > 0.8, cosine(moved, change)
    target, again = saved(with_lora(cast()), f"cast_{row}")
    assert torch.equal(output(again, row), output(with_lora(cast()), row))
    target.unlink()


def check_once_cores_loader_after_ours_passes_by_our_code():
    row = ROWS[0]
    path = str(MODELS / f"{row}.safetensors")
    before = output(with_lora(comfy.sd.load_diffusion_model(path)), row)
    output(with_lora(load(row, EIGHT)), row)
    transform, calls = part("checkpoints.transform"), []
    real = transform.plan
    transform.plan = lambda *args, **kwargs: calls.append(args)
    try:
        after = output(with_lora(comfy.sd.load_diffusion_model(path)), row)
    finally:
        transform.plan = real
    assert torch.equal(before, after) and not calls


def check_once_a_pack_around_cores_saving_is_no_hindrance():
    row = ROWS[0]
    calls = []
    naming, writing = comfy.model_base.BaseModel.state_dict_for_saving, comfy.utils.save_torch_file

    def wrapped(self, *args, **kwargs):
        calls.append("naming")
        return {**naming(self, *args, **kwargs), "model.diffusion_model.foreign_note": torch.ones(3)}

    comfy.model_base.BaseModel.state_dict_for_saving = wrapped
    comfy.utils.save_torch_file = lambda *args, **kwargs: calls.append("writing")
    try:
        for name in ("as stored", EIGHT):
            model = with_lora(load(row, name))
            file, _ = saved(model, f"foreign_{row}")
            state = load_file(file)
            assert torch.equal(state.pop("foreign_note"), torch.ones(3))
            comfy.model_base.BaseModel.state_dict_for_saving = naming
            other, _ = saved(with_lora(load(row, name)), f"plain_{row}")
            comfy.model_base.BaseModel.state_dict_for_saving = wrapped
            same(state, load_file(other))
    finally:
        comfy.model_base.BaseModel.state_dict_for_saving = naming
        comfy.utils.save_torch_file = writing
    assert set(calls) == {"naming"}


def check_once_patches_that_do_not_fit_are_counted():
    row = ROWS[0]
    model = load(row)
    patches = lora(model)
    first = next(iter(patches))
    patches[first] = ("diff", (torch.ones(3, 5),))
    model = model.clone()
    model.add_patches(patches, 1.0)
    found = host.save_diffusion_model(model, prefix="test/misfit", graph=part("host").Graph(None, None))
    assert f"{len(patches) - 1} of {len(patches)} patched weights" in found.text, found.text
    assert first.removeprefix("diffusion_model.") in found.text


def check_once_a_copy_for_another_gpu_has_the_same_codes():
    """ComfyUI makes it with the recipe that the loader left on the model."""
    row = ROWS[0]
    if not hasattr(load(row), "deepclone_multigpu"):
        return
    baked = host.quantize_model(with_lora(load(row)), precision=EIGHT)
    for model in (load(row), load(row, EIGHT), baked, host.quantize_model(load(row), precision=FORMATS[-1])):
        wanted = digest(model)
        assert digest(model.deepclone_multigpu(new_load_device=CPU)) == wanted
        assert digest(model) == wanted


def check_once_a_quantized_model_knows_the_file_it_is_from():
    """Its name says which variant it is, and its header's other entries go along."""
    files = part("bridge.sample").file_of
    for row in (ROWS[0], "prx_pixel"):
        model = load(row)
        if files(model.clone()) is None:  # ComfyUI 0.8 does not remember the files of its own models
            continue
        quantized = host.quantize_model(model, precision=EIGHT)
        assert files(quantized) == files(model) and files(model).endswith(f"{row}.safetensors")
        again = host.quantize_model(quantized.clone(), precision=EIGHT)
        assert files(again) == files(model)
        if hasattr(model, "deepclone_multigpu"):
            assert files(again.deepclone_multigpu(new_load_device=CPU)) == files(model)


def check_once_a_chain_of_six_merges_is_saved_as_it_runs():
    row = ROWS[0]
    merged, other = load(row), with_lora(load(row))
    for step in range(6):
        again = merged.clone()
        for key, patch in other.get_key_patches("diffusion_model.").items():
            again.add_patches({key: patch}, 0.1 * (step + 1), 1.0 - 0.1 * (step + 1))
        merged = again
    target, again = saved(merged, f"merged_{row}")
    assert torch.equal(output(again, row), output(merged, row))
    assert not torch.equal(output(again, row), output(load(row), row))
    target.unlink()
