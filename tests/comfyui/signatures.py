"""Signatures of names in ComfyUI, asked in its own Python: `python signatures.py COMFYUI < names > signatures`."""

import importlib
import inspect
import json
import os
import sys

comfyui = sys.argv[1]
sys.argv = ["main.py", "--cpu"]
sys.path.insert(0, comfyui)
# ComfyUI writes to standard output while it starts.
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

MISSING = object()


def find(name):
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part, MISSING)
            if value is MISSING:
                return MISSING
        return value
    return MISSING


def describe(value):
    """None: no such name; a function's parameters; a class's constructor's; else the kind of value."""
    if value is MISSING:
        return None
    if inspect.isclass(value):
        return "class" if value.__init__ is object.__init__ else f"class{parameters(value.__init__)}"
    return parameters(value) if callable(value) else type(value).__name__


def parameters(function):
    """Names, kinds and the plain defaults; annotations and addresses of objects differ from run to run."""
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        plain = parameter.replace(annotation=inspect.Parameter.empty)
        if parameter.default is not inspect.Parameter.empty and not isinstance(
            parameter.default, (int, float, str, bool, list, dict, tuple, type(None))
        ):
            plain = plain.replace(default=f"<{type(parameter.default).__name__}>")
        shown.append(str(plain))
    return f"({', '.join(shown)})"


json.dump({name: describe(find(name)) for name in json.load(sys.stdin)}, answer)
answer.flush()
