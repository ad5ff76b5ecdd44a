"""The checks that every port of a diffusion transformer must pass, written once.

A ``Port`` says how to run ours and the reference on the same inputs; each architecture's test file fills one in and
calls the checks. Bounds: the float32 floor of two correct implementations is about 1e-6, so ours may be
``max(2e-6, 3 x noise)`` away from the reference, noise being what float32 itself costs the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from support import Golden, rel_err

from nativedit.parity.build import build_ours, cast, randomise
from nativedit.parity.capture import Tap, run_tapped

Inputs = Mapping[str, torch.Tensor]

FLOOR = 2e-6
STAGE = 1e-5


@dataclass(frozen=True)
class Port:
    """ours, reference: classes taking the same configuration; run_ours(module, inputs), run_reference(module, inputs):
    one forward pass on a golden's inputs, returning the output; stages: recorded stage -> name of our submodule whose
    output it is; reshape: recorded stage -> how our submodule's output becomes the recorded form."""

    ours: type
    reference: type | None
    run_ours: Callable[[torch.nn.Module, Inputs], torch.Tensor]
    run_reference: Callable[[torch.nn.Module, Inputs], torch.Tensor] | None
    stages: Mapping[str, str] = field(default_factory=dict)
    reshape: Mapping[str, Callable[[Any], torch.Tensor]] = field(default_factory=dict)

    def build(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], dtype=torch.float32):
        return build_ours(self.ours, config, weights, dtype)

    def build_reference(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], dtype=torch.float32):
        module = self.reference(**config)
        module.load_state_dict(weights, strict=True)
        return module.to(dtype).requires_grad_(False).eval()


def bound(noise: float | None) -> float:
    return max(FLOOR, 3 * (noise or 0.0))


def check_golden(port: Port, golden: Golden) -> None:
    """Our output against the recording, and strictly against the reference run beside it.

    The recordings come from another processor. Where a model takes sinusoids of large arguments, the last bit of exp()
    differs between processors and the reference itself is off its own recording by more than the bound; then ours may
    be as far from the recording as the reference is here, times two.
    """
    inputs, recorded = golden.group("inputs"), golden.io["output"]
    limit = bound(golden.meta.get("float32_vs_float64_rel_err"))
    ours = port.run_ours(port.build(golden.config, golden.weights), inputs)
    assert ours.shape == recorded.shape and ours.dtype == recorded.dtype
    if port.reference is None:
        assert rel_err(ours, recorded) <= limit
        return
    reference = port.run_reference(port.build_reference(golden.config, golden.weights), inputs)
    assert rel_err(ours, reference) <= limit
    assert rel_err(ours, recorded) <= max(limit, 2 * rel_err(reference, recorded))


def check_stages(port: Port, golden: Golden) -> None:
    """Every recorded stage that is the output of one of our submodules."""
    module = port.build(golden.config, golden.weights)
    taps = {
        stage: Tap(name, pick=port.reshape.get(stage))
        for stage, name in port.stages.items()
        if "stages." + stage in golden.io
    }
    captured = run_tapped(module, taps, lambda: port.run_ours(module, golden.group("inputs")))
    assert captured, "the fixture records none of the stages this test knows"
    for stage, value in captured.items():
        assert rel_err(value, golden.io["stages." + stage]) <= STAGE, stage


def check_invariance(port: Port, golden: Golden, parent: Golden) -> None:
    """Sample 0 alone and without padding gives row 0 of the batch: nothing leaks between rows or from padding."""
    ours = port.run_ours(port.build(golden.config, golden.weights), golden.group("inputs"))
    together = port.run_ours(port.build(parent.config, parent.weights), parent.group("inputs"))
    assert rel_err(ours[0], together[0]) <= 1e-5
    assert rel_err(ours[0], parent.io["output"][0]) <= 1e-5


def check_bfloat16(port: Port, golden: Golden) -> None:
    """bfloat16 loses no more than twice what it costs the reference."""
    inputs = cast(golden.group("inputs"), torch.bfloat16)
    ours = port.run_ours(port.build(golden.config, golden.weights, torch.bfloat16), inputs)
    assert ours.dtype == torch.bfloat16
    assert rel_err(ours, golden.io["output"]) <= 2 * golden.meta["bfloat16_vs_float32_rel_err"]


def check_random(port: Port, config: Mapping[str, Any], inputs: Inputs, seed: int = 0) -> None:
    """A fresh random configuration beside the live reference; noise is measured against its own float64 run."""
    torch.manual_seed(seed)
    reference = port.reference(**config).eval()
    randomise(reference)
    weights = {k: v.detach().clone() for k, v in reference.state_dict().items()}
    with torch.no_grad():
        expected = port.run_reference(reference, inputs)
        exact = port.run_reference(
            reference.double(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        )
    ours = port.run_ours(port.build(config, weights), inputs)
    assert rel_err(ours, expected) <= bound(rel_err(expected, exact))


def check_compiles(port: Port, golden: Golden) -> None:
    """One graph, no break."""
    module = port.build(golden.config, golden.weights)
    inputs = golden.group("inputs")
    expected = port.run_ours(module, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert rel_err(port.run_ours(compiled, inputs), expected) <= 1e-5


def check_checkpointing(port: Port, golden: Golden) -> None:
    """Gradient checkpointing gives the same gradients, and really recomputes blocks."""
    gradients, calls = [], []
    for enabled in (False, True):
        module = port.build(golden.config, golden.weights).requires_grad_(True)
        module.enable_gradient_checkpointing(enabled)
        count = [0]
        repeated = [m for m in module.modules() if type(m).__name__ in module.repeated_blocks]
        for block in repeated:
            block.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        port.run_ours(module, golden.group("inputs")).square().mean().backward()
        gradients.append({k: p.grad for k, p in module.named_parameters() if p.grad is not None})
        calls.append(count[0])
    assert calls[1] == 2 * calls[0] > 0
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=1e-4, atol=1e-6)
