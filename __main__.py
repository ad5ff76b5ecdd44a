"""`python -m nativedit ...`, and `python path/to/the/pack ...` with ComfyUI's own Python."""

import importlib.util
import os
import sys


def _load_pack() -> None:
    """Imports the folder this file is in as `nativedit`, and takes it off sys.path, where Python puts a folder that it
    runs: its `nodes` would hide ComfyUI's."""
    folder = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.getcwd()) != folder]
    spec = importlib.util.spec_from_file_location(
        "nativedit", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["nativedit"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    if not __package__:
        _load_pack()
        __package__ = "nativedit"
    from .cli import main

    sys.exit(main())
