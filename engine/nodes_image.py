"""Pictures, as ComfyUI's nodes of the same names."""

from __future__ import annotations

import random
import string

import torch

from .declare import engine_host, io
from .pictures import file_digest, input_file, read_picture, save_pictures
from .scale import IMAGE_METHODS, resize

LARGEST = 16384


class SaveImage(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SaveImage",
            inputs=[io.Image.Input("images"), io.String.Input("filename_prefix", default="ComfyUI")],
            outputs=[io.Image.Output()],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, images, filename_prefix="ComfyUI"):
        folder, hidden = engine_host().output_dir, cls.hidden
        saved = save_pictures(images, folder, filename_prefix, hidden.prompt, hidden.extra_pnginfo)
        return io.NodeOutput(images, ui={"images": saved})


class PreviewImage(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="PreviewImage",
            inputs=[io.Image.Input("images")],
            outputs=[io.Image.Output()],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, images):
        prefix = "ComfyUI_temp_" + "".join(random.choices(string.ascii_lowercase, k=5))
        folder, hidden = engine_host().temp_dir, cls.hidden
        saved = save_pictures(
            images, folder, prefix, hidden.prompt, hidden.extra_pnginfo, kind="temp", compress_level=1
        )
        return io.NodeOutput(images, ui={"images": saved})


class LoadImage(io.ComfyNode):
    """A file of the input folder; its transparency, if it has one, is the mask."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LoadImage",
            inputs=[io.String.Input("image")],
            outputs=[io.Image.Output(), io.Mask.Output()],
        )

    @classmethod
    def validate_inputs(cls, image):
        return input_file(engine_host(), image)[1] or True

    @classmethod
    def fingerprint_inputs(cls, image):
        return file_digest(input_file(engine_host(), image)[0])

    @classmethod
    def execute(cls, image):
        return io.NodeOutput(*read_picture(input_file(engine_host(), image)[0]))


class ImageScale(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ImageScale",
            inputs=[
                io.Image.Input("image"),
                io.Combo.Input("upscale_method", options=IMAGE_METHODS),
                io.Int.Input("width", default=512, min=0, max=LARGEST, step=1),
                io.Int.Input("height", default=512, min=0, max=LARGEST, step=1),
                io.Combo.Input("crop", options=["disabled", "center"]),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image, upscale_method, width, height, crop):
        if not width and not height:
            return io.NodeOutput(image)
        width = width or max(1, round(image.shape[2] * height / image.shape[1]))
        height = height or max(1, round(image.shape[1] * width / image.shape[2]))
        scaled = resize(image.movedim(-1, 1), width, height, upscale_method, crop == "center")
        return io.NodeOutput(scaled.movedim(1, -1))


class ImageScaleBy(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ImageScaleBy",
            inputs=[
                io.Image.Input("image"),
                io.Combo.Input("upscale_method", options=IMAGE_METHODS),
                io.Float.Input("scale_by", default=1.0, min=0.01, max=8.0, step=0.01),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image, upscale_method, scale_by):
        width, height = round(image.shape[2] * scale_by), round(image.shape[1] * scale_by)
        return io.NodeOutput(resize(image.movedim(-1, 1), width, height, upscale_method).movedim(1, -1))


class ImageInvert(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="ImageInvert", inputs=[io.Image.Input("image")], outputs=[io.Image.Output()])

    @classmethod
    def execute(cls, image):
        return io.NodeOutput(1.0 - image)


class SolidMask(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SolidMask",
            inputs=[
                io.Float.Input("value", default=1.0, min=0.0, max=1.0, step=0.01),
                io.Int.Input("width", default=512, min=1, max=LARGEST, step=1),
                io.Int.Input("height", default=512, min=1, max=LARGEST, step=1),
            ],
            outputs=[io.Mask.Output()],
        )

    @classmethod
    def execute(cls, value, width, height):
        return io.NodeOutput(torch.full((1, height, width), value))


class InvertMask(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="InvertMask", inputs=[io.Mask.Input("mask")], outputs=[io.Mask.Output()])

    @classmethod
    def execute(cls, mask):
        return io.NodeOutput(1.0 - mask)


class MaskToImage(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="MaskToImage", inputs=[io.Mask.Input("mask")], outputs=[io.Image.Output()])

    @classmethod
    def execute(cls, mask):
        return io.NodeOutput(mask.reshape(-1, *mask.shape[-2:], 1).expand(-1, -1, -1, 3))


NODES = [SaveImage, PreviewImage, LoadImage, ImageScale, ImageScaleBy, ImageInvert, SolidMask, InvertMask, MaskToImage]
