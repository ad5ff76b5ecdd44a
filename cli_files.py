"""The command line of model files: convert, resolve, lora."""

from __future__ import annotations

import argparse

from .cli_quantize import _progress


class Convert:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("source", help="a file (safetensors, .pth, .bin, ...), a shard index, a diffusers folder")
        parser.add_argument(
            "destination", help="a .safetensors file for comfy (a new folder: all parts), a new folder for diffusers"
        )
        parser.add_argument("--to", choices=("comfy", "diffusers"), default="comfy", help="the layout to write")
        parser.add_argument(
            "--component",
            metavar="NAME",
            help="of a pipeline: transformer (default), text_encoder, vae, ...; all: every part of a pipeline or of an "
            "all-in-one checkpoint, into a new folder (as when destination is a folder)",
        )
        parser.add_argument("--architecture", metavar="NAME", help="a name from `nativedit archs`; default: recognise")
        parser.add_argument("--tokenizer", metavar="PATH", help="a text encoder's tokenizer, if it is not beside it")
        parser.add_argument(
            "--with",
            dest="parts",
            action="append",
            default=[],
            metavar="PREFIX=FILE",
            help="join into an all-in-one checkpoint; may be given several times, for text_encoders.NAME. and for vae.",
        )
        parser.add_argument("--quiet", action="store_true", help="no progress bar")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        from .checkpoints.components import join
        from .checkpoints.convert import convert

        with _progress(args.quiet) as progress:
            if args.parts:
                parts = {"model.diffusion_model.": args.source, **dict(_assignment(text) for text in args.parts)}
                report = join(parts, args.destination, progress=progress)
            else:
                report = convert(
                    args.source,
                    args.destination,
                    layout=args.to,
                    component=args.component,
                    architecture=args.architecture,
                    tokenizer=args.tokenizer,
                    progress=progress,
                )
        print(report)
        for note in report.notes:
            print(f"note: {note}")
        return 0


def _assignment(text: str) -> tuple[str, str]:
    prefix, equals, file = text.partition("=")
    if not equals:
        raise ValueError(f"--with {text}: PREFIX=FILE was expected")
    return (prefix if prefix.endswith(".") else prefix + "."), file


class Resolve:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        from .engine.command import DEFAULT_MODELS

        parser.add_argument("name", nargs="?", help="a file's name, a path under models/, or an architecture")
        parser.add_argument("--workflow", metavar="FILE.json", help="list every model file that a workflow names")
        parser.add_argument(
            "--models-dir",
            metavar="DIR",
            help=f"ComfyUI's models folder (default: {DEFAULT_MODELS})",
        )
        parser.add_argument("--folder", metavar="KIND", help="look among these only: diffusion_models, vae, loras, ...")
        parser.add_argument("--extra-paths", metavar="FILE.yaml", help="default: extra_model_paths.yaml beside models/")
        parser.add_argument(
            "--download", action="store_true", help="get it from its official address if it is not here"
        )

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        from .checkpoints.resolve import resolve
        from .checkpoints.workflow_files import MISSING, check_workflow

        if (args.name is None) == (args.workflow is None):
            raise ValueError("give a NAME, or a workflow with --workflow")
        models_dir = _models_dir(args.models_dir)
        if args.workflow is not None:
            answers = check_workflow(args.workflow, models_dir=models_dir, extra_paths=args.extra_paths)
            for answer in answers:
                print(answer)
            if not answers:
                print(f"{args.workflow} names no model file")
            return 1 if any(answer.state == MISSING for answer in answers) else 0
        found = resolve(
            args.name,
            models_dir=models_dir,
            folder=args.folder,
            extra_paths=args.extra_paths,
            download=args.download,
        )
        print(found.path)
        return 0


def _models_dir(given: str | None) -> str:
    if given is not None:
        return given
    from .engine.command import default_models_dirs

    folders = default_models_dirs()
    if not folders:
        raise ValueError("no models folder is known; name ComfyUI's models folder with --models-dir")
    return str(folders[0])


class Lora:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", help="a LoRA")
        parser.add_argument("--to", choices=("comfy", "diffusers"), help="whose layer names to write")
        parser.add_argument(
            "--output", metavar="FILE", help="default: beside it, with .comfy or .diffusers in its name"
        )
        parser.add_argument("--model", metavar="FILE", help="a checkpoint; its header tells how wide layers are")
        parser.add_argument("--into", metavar="FILE", help="bake the LoRA into this checkpoint instead; needs --output")
        parser.add_argument("--strength", type=float, default=1.0, help="with --into: the LoRA's strength (default 1)")
        parser.add_argument("--architecture", metavar="NAME", help="a name from `nativedit archs`; default: recognise")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        import os

        from .checkpoints.bake import bake_lora
        from .checkpoints.lora import convert_lora

        if (args.to is None) == (args.into is None):
            raise ValueError("give --to comfy, --to diffusers, or --into CHECKPOINT")
        if args.output is not None and not args.output.lower().endswith((".safetensors", ".sft")):
            raise ValueError(f"--output {args.output}: a safetensors file is written; give a name in .safetensors")
        if args.into is not None:
            if args.output is None:
                raise ValueError("--into needs --output, the file to write")
            report = bake_lora(
                args.file, args.into, args.output, strength=args.strength, architecture=args.architecture
            )
        else:
            stem = os.path.splitext(args.file)[0]
            output = args.output or f"{stem}.{args.to}.safetensors"
            report = convert_lora(args.file, output, layout=args.to, architecture=args.architecture, model=args.model)
        print(report)
        for note in report.notes:
            print(f"note: {note}")
        return 0
