"""quant.ops: when the stored format multiplies, and what moving and casting a quantized layer does to it."""

from __future__ import annotations

import pytest
import torch
from quant_goldens import quant_goldens, same_bytes
from support import rel_err

from nativedit.quant.formats import FORMATS, parse_recipe
from nativedit.quant.kitchen import quantize_matrix, tensor_scale
from nativedit.quant.markers import encode_marker
from nativedit.quant.ops import ComfyUIOps, DequantizedOps, QuantOps

pytestmark = pytest.mark.usefixtures("single_thread")

N, K = 96, 256
INTEGER = ["int8_tensorwise", "int8_convrot", "convrot_w4a4", "asym_w4a8_int8"]


def linear(ops, name: str, **marker) -> torch.nn.Module:
    recipe = parse_recipe(name)
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    tensors = quantize_matrix(weight, recipe, scale=tensor_scale(recipe, weight.abs().amax()))
    state = {**tensors, "comfy_quant": encode_marker({**recipe.marker(), **marker}), "bias": torch.zeros(N)}
    module = ops.Linear(K, N, device="meta")
    module.load_state_dict(state, strict=True, assign=True)
    return module


@pytest.mark.parametrize("name", [*FORMATS, "int8_convrot"])
def test_the_format_multiplies_only_where_the_device_is_fast_at_it(monkeypatch, name):
    needed = FORMATS[parse_recipe(name).format].fast_capability
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    layers = {ops: linear(ops, name) for ops in (QuantOps, ComfyUIOps, DequantizedOps)}
    assert not layers[QuantOps]._uses_format(cpu) and not layers[DequantizedOps]._uses_format(cpu)
    assert layers[ComfyUIOps]._uses_format(cpu) == (name in INTEGER)
    for capability in ((7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, value=capability: value)
        assert layers[QuantOps]._uses_format(cuda) == (capability >= needed)
        assert not layers[DequantizedOps]._uses_format(cuda)
        guarded = linear(QuantOps, name, full_precision_matrix_mult=True)
        # Integer formats ignore the flag, in ComfyUI too.
        assert guarded._uses_format(cuda) == (capability >= needed and name in INTEGER)


FLOAT8 = [golden for golden in quant_goldens() if golden.name.startswith(("float8", "legacy", "header"))]


@pytest.mark.parametrize("golden", FLOAT8, ids=str)
def test_float8_products_are_comfyuis(golden, monkeypatch):
    """torch multiplies float8 on a CPU as well, so the fast path can be held against ComfyUI's recorded product."""
    from nativedit.files import open_source
    from nativedit.quant.reader import canonical_state_dict

    with open_source(golden.path) as source:
        state = canonical_state_dict(source, prefix=golden.prefix)
    for name, recorded in golden.group("y_quant").items():
        own = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
        shape = golden.expect[f"dequant.{name}.weight"].shape
        module = ComfyUIOps.Linear(shape[1], shape[0], bias="bias" in own, device="meta")
        module.load_state_dict(own, strict=True, assign=True)
        module.requires_grad_(False)
        full = module.quantization.recipe.full_precision
        monkeypatch.setattr(type(module), "_uses_format", lambda self, device, full=full: not full)
        value = module(golden.expect[f"x.{shape[1]}"])
        assert rel_err(value, recorded) < 2e-3, name


@pytest.mark.parametrize("name", [*FORMATS, "int8_convrot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_format_computes_in_the_inputs_dtype(name, dtype):
    module = linear(DequantizedOps, name)
    x = torch.randn(2, 3, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    value = module(x)
    assert value.dtype == dtype and value.shape == (2, 3, N)
    assert rel_err(value.detach(), x.float() @ module.dequantized(torch.float32).T) < 0.01


@pytest.mark.parametrize("name", [*FORMATS, "int8_convrot"])
@pytest.mark.parametrize(
    "change", [lambda m: m.to(torch.float16), lambda m: m.half(), lambda m: m.to("meta"), lambda m: m.float()]
)
def test_casting_a_model_leaves_codes_and_scales_alone(name, change):
    module = linear(QuantOps, name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    changed = change(torch.nn.Sequential(module))[0]
    for key, value in changed.state_dict().items():
        if key != "bias":
            assert value.dtype == before[key].dtype
        if value.device.type != "meta" and key != "bias":
            assert same_bytes(value, before[key])


@pytest.mark.parametrize("ops", [QuantOps, ComfyUIOps, DequantizedOps])
def test_plain_weights_load_in_all_namespaces(ops):
    weight = torch.randn(N, K).to(torch.bfloat16)
    module = ops.Linear(K, N, bias=False, device="meta")
    module.load_state_dict({"weight": weight}, strict=True, assign=True)
    x = torch.randn(4, K)
    assert module.quantization is None
    assert torch.equal(module(x), torch.nn.functional.linear(x, weight.float()))


def test_a_missing_weight_is_reported_by_torch_as_usual():
    module = QuantOps.Linear(K, N, bias=False)
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({}, strict=True)


@pytest.mark.parametrize("name", ["int8_convrot", "nvfp4", "float8_e4m3fn"])
def test_a_quantized_linear_compiles_without_graph_breaks(name):
    module = linear(DequantizedOps, name)
    x = torch.randn(2, K, dtype=torch.bfloat16)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert rel_err(compiled(x).detach(), module(x).detach()) < 1e-6


@pytest.mark.parametrize("name", ["float8_e4m3fn", "nvfp4", "mxfp8", "int8_tensorwise", "convrot_w4a4"])
def test_a_bank_equals_its_experts(name):
    recipe = parse_recipe(name)
    weights = torch.randn(3, N, K, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    parts = [quantize_matrix(w, recipe, scale=tensor_scale(recipe, w.abs().amax())) for w in weights]
    stack = {
        suffix: torch.stack(
            [part[suffix].view(torch.uint8) if part[suffix].element_size() == 1 else part[suffix] for part in parts]
        ).view(parts[0][suffix].dtype)
        for suffix in parts[0]
    }
    bank = QuantOps.MoEExperts(3, K, N, bias=False, device="meta")
    bank.load_state_dict({**stack, "comfy_quant": encode_marker(recipe.marker(3))}, strict=True, assign=True)
    x = torch.randn(3, 5, K, generator=torch.Generator().manual_seed(3))
    together = bank(x)
    for index in range(3):
        assert rel_err(bank.expert_linear(x[index], index), together[index]) < 1e-5
        assert torch.equal(bank.expert_weight(index, torch.float32), bank.dequantized(torch.float32)[index])
