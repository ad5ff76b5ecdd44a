"""The command line. ComfyUI's own Python can run it too, hence it needs nothing but the standard library and tqdm."""
# python path/to/the/pack COMMAND

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from . import __version__

__all__ = ["main"]

# name -> (help, dotted path of a class with add_arguments(parser) and run(args) -> exit code). The module is imported
# when its command is called.
COMMANDS: dict[str, tuple[str, str]] = {
    "archs": ("list the architectures that are known", ".cli:Archs"),
    "inspect": ("say what a model file holds, from its header alone", ".cli:Inspect"),
    "quantize": ("quantize a model file for ComfyUI", ".cli_quantize:Quantize"),
    "calibrate": ("run a workflow and keep what its model's layers are given", ".engine.calibrate:Calibrate"),
    "dequantize": ("undo the quantization of a file", ".cli_quantize:Dequantize"),
    "repair": ("write a quantized file in the form that ComfyUI loads", ".cli_quantize:Repair"),
    "compare-reports": ("compare what two quantizations of a model decided", ".cli_report:CompareReports"),
    "compare": ("compare two implementations stage by stage", ".cli_compare:Compare"),
    "convert": ("write a model in ComfyUI's or in diffusers' layout", ".cli_files:Convert"),
    "resolve": ("find the file that a name means, or those of a workflow", ".cli_files:Resolve"),
    "lora": ("rename a LoRA's layers for ComfyUI or diffusers, or bake it in", ".cli_files:Lora"),
    "doctor": ("say which formats this machine makes and multiplies", ".cli_doctor:Doctor"),
    "run": ("run a workflow exported from ComfyUI", ".engine.command:Run"),
}

USER_ERROR, INTERRUPTED = 2, 130


class Archs:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        from .supported_models import architectures

        cards = architectures()
        if args.json:
            fields = ("name", "title", "license", "repositories", "text_encoders", "autoencoder", "latent_format")
            print(json.dumps([{name: vars(card)[name] for name in fields} for card in cards], indent=2))
            return 0
        width = max((len(card.name) for card in cards), default=0)
        for card in cards:
            note = "" if card.module else "  (ComfyUI's own)"
            print(f"{card.name:<{width}}  {card.title}{note}  {' '.join(card.repositories)}".rstrip())
        return 0


class Inspect:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", help="a safetensors file, a shard index or a diffusers folder")
        parser.add_argument("--json", action="store_true", help="print JSON")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        import dataclasses

        from .checkpoints.info import inspect

        info = inspect(args.file)
        if args.json:
            print(json.dumps(dataclasses.asdict(info), indent=2, default=str))
            return 0
        print(f"file          {info.path}")
        print(f"kind          {info.title}")
        print(f"architecture  {info.architecture or 'not recognised'}")
        if info.layout:
            print(f"layout        {info.layout}")
        if info.prefix:
            print(f"prefix        {info.prefix}")
        print(f"weights       {info.parameters:,} in {info.tensors} tensors, {_size(info.nbytes)}")
        print(f"stored as     {', '.join(f'{name} ({count})' for name, count in sorted(info.dtypes.items()))}")
        if info.quantization.is_quantized:
            counts = ", ".join(f"{count} x {recipe}" for recipe, count in info.quantization.counts.items())
            needs = f"; needs ComfyUI {info.quantization.comfyui}" if info.quantization.comfyui else ""
            print(f"quantized     {counts or 'no layer that can be read'}{needs}")
        for problem in info.quantization.problems:
            print(f"  problem: {problem}")
        for key, value in info.config.items():
            print(f"  {key} = {value}")
        return 0


def _size(nbytes: int) -> str:
    size, unit = float(nbytes), "bytes"
    for larger in ("KB", "MB", "GB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.1f} {unit}" if unit != "bytes" else f"{nbytes} bytes"


def _command(dotted: str):
    module, _, name = dotted.partition(":")
    return vars(import_module(module, __package__))[name]


def _parser(called: str | None) -> argparse.ArgumentParser:
    """The parser, with the arguments of the one command that is called."""
    parser = argparse.ArgumentParser(
        prog="nativedit",
        description="Diffusion transformers beside ComfyUI's own, their files, and workflows without a screen.",
    )
    parser.add_argument("--version", action="version", version=f"nativedit {__version__}")
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (text, dotted) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".")
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if name == called:
            _command(dotted).add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 2 for an error (one message on standard error), 130 when interrupted, 143 when told to end."""
    if argv is None:
        return _as_the_program()
    return _called_with(list(argv))


def _as_the_program() -> int:
    """Modules stay to the end: searching them for garbage, while torch is imported and again on the way out, takes more
    than a third of the time that a short command needs."""
    gc.disable()
    try:
        return _called_with(sys.argv[1:], imported=_keep_what_is_imported)
    finally:
        gc.freeze()


def _keep_what_is_imported() -> None:
    gc.freeze()
    gc.enable()


def _called_with(argv: list[str], imported: Callable[[], None] = lambda: None) -> int:
    _never_fail_to_print()
    called = next((word for word in argv if not word.startswith("-")), None)
    parser = _parser(called)
    imported()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return USER_ERROR
    try:
        with _ending_is_an_interrupt():
            code = _command(COMMANDS[args.command][1]).run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as error:
        print("nativedit: interrupted", file=sys.stderr)
        return 128 + error.args[0] if error.args else INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output (head, less) has seen enough; the interpreter must not complain at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.debug:
            raise
        print(f"nativedit: error: {_message(error)}", file=sys.stderr)
        return USER_ERROR


@contextmanager
def _ending_is_an_interrupt() -> Iterator[None]:
    """Who ends us, or closes our terminal, finds no half files either: both come as a KeyboardInterrupt with the
    signal's number. What is ignored (nohup) stays ignored."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    wanted = [number for number in (signal.SIGTERM, vars(signal).get("SIGHUP")) if number is not None]
    if threading.current_thread() is not threading.main_thread():
        wanted = []  # only the main thread may say what happens
    ours = [number for number in wanted if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _message(error: Exception) -> str:
    """What the error says; for one that is no message to users, also its kind and how to see more."""
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith(__package__):
        return f"this needs the package {error.name.split('.')[0]}: pip install {error.name.split('.')[0]}"
    if isinstance(error, FileNotFoundError) and error.filename and not error.filename2:
        return f"{error.filename}: no such file or folder"
    told = isinstance(error, (ValueError, OSError, ImportError)) or type(error).__module__.startswith(__package__)
    if told and str(error):
        return str(error)
    return f"{type(error).__name__}: {error} (run with --debug to see where it came from)"


def _never_fail_to_print() -> None:
    """A console in cp1252 can't show every character of a prompt or a path: show ? instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
