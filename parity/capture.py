"""Takes tensors out of a module while it runs: outputs and arguments of submodules, and what attention is given."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["Tap", "run_tapped"]

Tensors = dict[str, torch.Tensor]

QUERY, KEY, VALUE, MASK = "query", "key", "value", "mask"
_ATTENTION = (QUERY, KEY, VALUE, MASK)
_OUTPUT, _INPUT = "output", "input"


@dataclass(frozen=True)
class Tap:
    """Where a tensor is taken.

    module: a submodule's dotted name, "" = the module itself. what: "output"; "input" (``pick`` gets the arguments by
    name, the default takes the first); "query", "key", "value" (``[B, H, L, D]``) or "mask" of the scaled dot product
    attention that the submodule calls itself. pick: what is taken of a value that is not one tensor. join: makes one
    tensor of several calls; without it the first call counts.
    """

    module: str
    what: str = _OUTPUT
    pick: Callable[[Any], torch.Tensor] | None = None
    join: Callable[[list[torch.Tensor]], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if self.what not in (_OUTPUT, _INPUT, *_ATTENTION):
            raise ValueError(f"a tap takes output, input, {', '.join(_ATTENTION)} of a module, not {self.what!r}")


def run_tapped(module: torch.nn.Module, taps: Mapping[str, Tap], run: Callable[[], Any]) -> Tensors:
    """Runs ``run`` (which calls ``module``) without gradients; name -> tensor, in the order of execution.

    Tensors are copies on the CPU in their own dtype, so that in-place code behind a tap changes nothing. A tap that
    nothing went through is missing from the result. Raises AttributeError for a submodule that does not exist.
    """
    seen: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, value: Any) -> None:
        pick = taps[name].pick
        value = value if pick is None else pick(value)
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"stage {name}: {type(value).__name__} was taken, not a tensor; its tap needs a pick")
        seen.setdefault(name, []).append(value.detach().to("cpu", copy=True))

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        attention: dict[str, list[str]] = {}
        for name, tap in taps.items():
            target = module.get_submodule(tap.module)
            if tap.what == _OUTPUT:
                hook = target.register_forward_hook(lambda _module, _args, out, name=name: keep(name, out))
            elif tap.what == _INPUT:
                hook = target.register_forward_pre_hook(_arguments_to(keep, name, tap), with_kwargs=True)
            else:
                attention.setdefault(tap.module, []).append(name)
                continue
            stack.callback(hook.remove)
        if attention:
            stack.enter_context(_attention_calls(module, attention, taps, keep))
        run()
    return {name: values[0] if taps[name].join is None else taps[name].join(values) for name, values in seen.items()}


def _arguments_to(keep: Callable[[str, Any], None], name: str, tap: Tap) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        keep(name, arguments if tap.pick else next(iter(arguments.values())))

    return hook


class _Watch(TorchFunctionMode):
    """Sees every call of scaled_dot_product_attention, whoever makes it."""

    def __init__(self, report: Callable[[dict[str, torch.Tensor]], None]):
        super().__init__()
        self.report = report

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            given = dict(zip((QUERY, KEY, VALUE, MASK), args, strict=False))
            given |= {k: kwargs[k] for k in (QUERY, KEY, VALUE) if k in kwargs}
            mask = kwargs.get("attn_mask", given.get(MASK))
            self.report({**given, MASK: may_attend(mask, given[QUERY], given[KEY], kwargs.get("is_causal", False))})
        return func(*args, **kwargs)


def may_attend(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """True where a query may attend to a key: the same for boolean masks, for additive ones and for none.

    A large negative value masks, for models add one of several such values.
    """
    # [B, 1, L_q, L_k]; B and the heads may be 1 or more. Models add -10000, float16's lowest, or minus infinity.
    allowed = torch.ones(1, 1, query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
    if causal:
        allowed = allowed.tril()
    if mask is not None:
        allowed = allowed & (mask if mask.dtype == torch.bool else mask > -5000)
    return allowed


@contextlib.contextmanager
def _attention_calls(
    module: torch.nn.Module, names: Mapping[str, list[str]], taps: Mapping[str, Tap], keep: Callable[[str, Any], None]
) -> Iterator[None]:
    """Reports each attention call to the innermost of the named submodules that is running."""
    running: list[str] = []

    def report(given: dict[str, torch.Tensor]) -> None:
        for name in names[running[-1]] if running else ():
            keep(name, given[taps[name].what])

    with contextlib.ExitStack() as stack:
        for path in names:
            target = module.get_submodule(path)
            for hook in (
                target.register_forward_pre_hook(lambda *_, path=path: running.append(path)),
                target.register_forward_hook(lambda *_: (running.pop(), None)[1]),
            ):
                stack.callback(hook.remove)
        stack.enter_context(_Watch(report))
        yield
