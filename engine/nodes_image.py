"""Pictures, as ComfyUI's nodes of the same names."""

from __future__ import annotations

from .declare import engine_host, io
from .pictures import save_pictures


class SaveImage(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SaveImage",
            inputs=[io.Image.Input("images"), io.String.Input("filename_prefix", default="ComfyUI")],
            outputs=[],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, images, filename_prefix="ComfyUI"):
        saved = save_pictures(
            images, engine_host().output_dir, filename_prefix, cls.hidden.prompt, cls.hidden.extra_pnginfo
        )
        return io.NodeOutput(ui={"images": saved})


NODES = [SaveImage]
