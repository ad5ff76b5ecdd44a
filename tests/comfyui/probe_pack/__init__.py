"""A custom node pack for tests only: what other packs do to a model, and what became of it. Imports nothing of ours."""

import functools

import comfy.patcher_extension
import comfy.text_encoders.llama
import torch

# One of ComfyUI's own text encoders in a size that a test can write and read.
if hasattr(comfy.text_encoders.llama, "Qwen3_06BConfig"):
    comfy.text_encoders.llama.Qwen3_06BConfig = functools.partial(
        comfy.text_encoders.llama.Qwen3_06BConfig,
        num_hidden_layers=2,
        vocab_size=1024,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
    )

COUNTS = {}


def count(name):
    COUNTS[name] = COUNTS.get(name, 0) + 1


class ProbePatchModel:
    """Puts one of ComfyUI's hooks of each kind on a model; they count their calls and change nothing."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model):
        COUNTS.clear()
        model = model.clone()

        def replace(args, extra):
            count("block replace")
            assert {"img", "txt", "vec", "pe", "transformer_options"} <= set(args)
            return extra["original_block"](args)

        def block_patch(args):
            count("block patch")
            return {"img": args["img"]}

        def wrapper(executor, *args, **kwargs):
            count("wrapper")
            options = kwargs.get("transformer_options") or next(a for a in args if isinstance(a, dict))
            assert torch.is_tensor(args[0]) and "sigmas" in options
            return executor(*args, **kwargs)

        def attention(original, *args, **kwargs):
            count("attention override")
            options = kwargs["transformer_options"]
            COUNTS["blocks seen"] = max(COUNTS.get("blocks seen", 0), options["block_index"] + 1)
            COUNTS["total blocks"] = options["total_blocks"]
            return original(*args, **kwargs)

        model.set_model_patch_replace(replace, "dit", "single_block", 1)
        model.set_model_patch(block_patch, "single_block")
        model.add_wrapper(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, wrapper)
        model.model_options["transformer_options"]["optimized_attention_override"] = attention
        return (model,)


class ProbeCounts:
    """The counts so far, as text in the history; ``after`` only fixes the order."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"after": ("LATENT",)}}

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "report"
    CATEGORY = "test"

    def report(self, after):
        return {"ui": {"counts": [dict(COUNTS)]}}


class ProbeSigmas:
    """The sigmas of a schedule on this model."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"sigmas": ("SIGMAS",)}}

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "report"
    CATEGORY = "test"

    def report(self, sigmas):
        return {"ui": {"sigmas": sigmas.tolist()}}


class ProbeConditioning:
    """States and mask of a conditioning, saved whole."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"conditioning": ("CONDITIONING",)}}

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "report"
    CATEGORY = "test"

    def report(self, conditioning):
        states, extra = conditioning[0]
        mask = extra.get("attention_mask")
        return {"ui": {"states": states.tolist(), "mask": [] if mask is None else mask.tolist()}}


class ProbeNoiseAsText:
    """A conditioning of the widths that a model of ComfyUI's own takes, without its text encoders."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"width": ("INT", {"default": 32}), "pooled_width": ("INT", {"default": 32})}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, width, pooled_width):
        generator = torch.Generator().manual_seed(width)
        pooled = torch.randn(1, pooled_width, generator=generator)
        return ([[torch.randn(1, 5, width, generator=generator), {"pooled_output": pooled}]],)


NODE_CLASS_MAPPINGS = {
    cls.__name__: cls for cls in (ProbePatchModel, ProbeCounts, ProbeSigmas, ProbeConditioning, ProbeNoiseAsText)
}
