"""How many features a quantized layer of Nucleus-Image with 1344 inputs should be rotated over.

1344 is 21 * 64, so the usual 256 is not possible. Error of the layer's output, in thousandths, as ComfyUI
multiplies (activations rounded too, to 8 or 4 bits) and with the weights alone rounded, which is what banks of experts
get. Weights: Gaussian, or heavy-tailed (Student's t, 3 degrees of freedom); activations: silu(gate) * value of two
Gaussians, as in front of these layers, without and with one channel in a hundred 20 times as large.
Run: python benchmarks/nucleus_rotation.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nativedit.quant.formats import parse_recipe
from nativedit.quant.kitchen import as_quantized_tensor, dequantize_matrix, quantize_matrix, tensor_scale

ROWS, COLUMNS, TOKENS = 512, 1344, 512
RECIPES = (
    "int8_tensorwise:scale=row",
    "int8_tensorwise:convrot=16",
    "int8_tensorwise:convrot=64",
    "convrot_w4a4:convrot=4",
    "convrot_w4a4:convrot=16",
    "convrot_w4a4:convrot=64",
    "asym_w4a8_int8:convrot=16",
    "asym_w4a8_int8:convrot=64",
)


def weights(kind: str) -> torch.Tensor:
    if kind == "Gaussian":
        return torch.randn(ROWS, COLUMNS).to(torch.bfloat16)
    return torch.distributions.StudentT(3.0).sample((ROWS, COLUMNS)).to(torch.bfloat16)


def activations(outliers: bool) -> torch.Tensor:
    x = F.silu(torch.randn(TOKENS, COLUMNS)) * torch.randn(TOKENS, COLUMNS)
    if outliers:
        x[:, torch.randperm(COLUMNS)[: COLUMNS // 100]] *= 20
    return x


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return 1000 * float((out - exact).norm() / exact.norm())


def main() -> None:
    torch.manual_seed(0)
    cases = [(kind, outliers) for kind in ("Gaussian", "heavy-tailed") for outliers in (False, True)]
    print("| stored as | " + " | ".join(f"{kind}{', outliers' if few else ''}" for kind, few in cases) + " |")
    print("|---|" + "---|" * len(cases))
    data = [(weights(kind), activations(outliers)) for kind, outliers in cases]
    for name in RECIPES:
        recipe, cells = parse_recipe(name), []
        for weight, x in data:
            stored = quantize_matrix(weight, recipe, scale=tensor_scale(recipe, weight.abs().amax()))
            exact = x @ weight.float().t()
            weights_only = x @ dequantize_matrix(stored, recipe, torch.float32).t()
            both = F.linear(x, as_quantized_tensor(stored, recipe, (ROWS, COLUMNS), torch.float32))
            cells.append(f"{error(both, exact):.1f} / {error(weights_only, exact):.1f}")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
