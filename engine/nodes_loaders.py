"""Loaders, as ComfyUI's nodes of the same names."""

from __future__ import annotations

from ..host import AS_STORED
from .autoencoder import PIXEL_SPACE
from .declare import engine_host, io
from .model_folders import FileList

WEIGHT_DTYPES = {
    "default": AS_STORED,
    "fp8_e4m3fn": "float8_e4m3fn",
    "fp8_e4m3fn_fast": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


class UNETLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="UNETLoader",
            inputs=[
                io.Combo.Input("unet_name", options=engine_host().list_files("diffusion_models")),
                io.Combo.Input("weight_dtype", options=list(WEIGHT_DTYPES), default="default"),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, unet_name, weight_dtype):
        return io.NodeOutput(
            engine_host().load_diffusion_model(unet_name, precision=WEIGHT_DTYPES[weight_dtype]),
        )


class CLIPLoader(io.ComfyNode):
    """``type`` chooses among core's models; which of ours reads the file, its header and its shapes say."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="CLIPLoader",
            inputs=[
                io.Combo.Input("clip_name", options=engine_host().list_files("text_encoders")),
                io.String.Input("type", default="stable_diffusion"),
                io.Combo.Input("device", options=["default", "cpu"], default="default", optional=True),
            ],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(cls, clip_name, type="stable_diffusion", device="default"):
        return io.NodeOutput(engine_host().load_text_encoder(clip_name))


class VAELoader(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        files = engine_host().list_files("vae")
        return io.Schema(
            node_id="VAELoader",
            inputs=[io.Combo.Input("vae_name", options=FileList([*files, PIXEL_SPACE], files.folder))],
            outputs=[io.Vae.Output()],
        )

    @classmethod
    def execute(cls, vae_name):
        return io.NodeOutput(engine_host().load_vae(vae_name))


def _strength(name: str):
    return io.Float.Input(name, default=1.0, min=-100.0, max=100.0, step=0.01)


class LoraLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LoraLoader",
            inputs=[
                io.Model.Input("model"),
                io.Clip.Input("clip"),
                io.Combo.Input("lora_name", options=engine_host().list_files("loras")),
                _strength("strength_model"),
                _strength("strength_clip"),
            ],
            outputs=[io.Model.Output(), io.Clip.Output()],
        )

    @classmethod
    def execute(cls, model, clip, lora_name, strength_model, strength_clip):
        return io.NodeOutput(*engine_host().apply_lora(model, clip, lora_name, strength_model, strength_clip))


class LoraLoaderModelOnly(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LoraLoaderModelOnly",
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input("lora_name", options=engine_host().list_files("loras")),
                _strength("strength_model"),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, lora_name, strength_model):
        return io.NodeOutput(engine_host().apply_lora(model, None, lora_name, strength_model, 0.0)[0])


NODES = [UNETLoader, CLIPLoader, VAELoader, LoraLoader, LoraLoaderModelOnly]
