"""The comfy_quant format: describe, read, write, decide, measure. See docs/quantization.md."""
