"""`nativedit compare`: finds the two sides, runs them on the same inputs, reports."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch

from ..files.dtypes import parse_dtype
from .build import build_reference, cast
from .report import Report
from .sampling import compare_sampling
from .schedule import CardSigmas, compare_schedules
from .stages import LOW_PRECISION, PLAIN, compare_with_ours, compare_with_recording, compare_with_reference
from .subjects import Subject, open_subject
from .weights import compare_weights

__all__ = ["compare"]


@contextlib.contextmanager
def single_thread() -> Iterator[None]:
    """Sums of several threads differ in the last digits from run to run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@single_thread()
def compare(
    # An architecture's name, a checkpoint (file, shard index, diffusers folder) or a fixture's folder.
    first: str | os.PathLike,
    # The same; None = the published class.
    second: str | os.PathLike | None = None,
    *,
    stages: Sequence[str] = (),  # "*" = all
    dtype: str | torch.dtype = "float32",  # of the computation
    seed: int = 0,  # of random weights and inputs
    # With one of these two, whole runs are compared too.
    noise: torch.Tensor | None = None,  # [B, C, H, W]
    sigmas: Sequence[float] | None = None,
    card_sigmas: CardSigmas | None = None,  # see `compare_schedules`; None leaves schedules out
) -> Report:
    """Our module beside the published class, beside a recording or beside another checkpoint.

    A side is the name of an architecture, a checkpoint or the folder of a recording. The seed is that of random weights
    and inputs; with noise or sigmas, whole runs are compared too, and with the sigmas of a card its schedule.
    Two checkpoints are compared weight by weight, and stage by stage when stages are named. Raises FileError,
    FileNotFoundError, ValueError for names that are unknown or sides that do not belong together, and ImportError when
    the reference is not installed.
    """
    a, b = open_subject(first), None if second is None else open_subject(second)
    if b is not None and _random(a) != _random(b) and b.fixture is None:
        a, b = (b if _random(a) else a), None  # a name beside a file says no more than the file does
    if b is not None and a.card.module != b.card.module:
        raise ValueError(f"{a.text} is {a.card.title} and {b.text} is {b.card.title}: these have no stage in common")
    dtype, only = parse_dtype(dtype), tuple(stages)
    generator = torch.Generator().manual_seed(seed)
    report = Report(_title(a, b), _other_title(a, b), a.card, str(dtype).removeprefix("torch."), seed)
    if b is not None and a.path and b.path:
        report.weights = list(compare_weights(a.path, b.path))
        if not only:
            return report
    fixture = (b and b.fixture) or a.fixture
    if b is not None and b.fixture is not None:
        config = b.fixture.meta["config"]
        source = a if a.path or a.fixture else b
        ours = source.module(dtype, generator, config)
        report.stages = compare_with_recording(
            a.port,
            ours,
            b.fixture.recorded,
            b.fixture.group("inputs"),
            dtype=dtype,
            allowed=_allowed(b, dtype),
            only=only,
        )
        return report
    ours = a.module(dtype, generator, fixture and fixture.meta["config"])
    inputs = fixture.group("inputs") if fixture else a.port.inputs(_config(a), generator)
    if b is not None:
        other = b.module(dtype, generator, fixture and fixture.meta["config"])
        report.stages = compare_with_ours(a.port, ours, other, inputs, dtype=dtype, only=only)
        return report
    if a.port.reference is None:
        raise ValueError(
            f"{a.card.title} has no reference that can be imported; give a recording of it: "
            f"nativedit compare {a.text} FOLDER"
        )
    reference = build_reference(a.port, _config(a), _plain_weights(a, ours), dtype)
    report.stages = compare_with_reference(a.port, ours, reference, inputs, dtype=dtype, only=only)
    pipeline = a.port.pipelines.get(a.card.name)
    if pipeline is not None and card_sigmas is not None and a.fixture is None:
        report.schedule = compare_schedules(a.card, pipeline, card_sigmas)
    if noise is not None or sigmas is not None:
        report.sampling = _sampling(a, ours, reference, cast(inputs, dtype), noise, sigmas, card_sigmas, generator)
    return report


def _sampling(a: Subject, ours, reference, inputs, noise, sigmas, card_sigmas, generator):
    latent = inputs[a.port.latent]
    if noise is None:
        noise = torch.randn(latent.shape, generator=generator)
    batch, channels = latent.shape[0], latent.shape[1]
    if noise.ndim != latent.ndim or noise.shape[1] != channels or noise.shape[0] not in (1, batch):
        raise ValueError(
            f"the noise is {list(noise.shape)}; {a.card.title} wants [{batch} or 1, {channels}, height, width]"
        )
    noise = noise.float().expand(batch, *noise.shape[1:])
    size, own, steps = noise.shape[-2:], None, 4 if sigmas is None else len(sigmas) - 1
    if sigmas is None:
        if card_sigmas is None:
            raise ValueError("a run needs sigmas: none were given, and nothing says which the card's are")
        sigmas = card_sigmas(a.card, steps, *size)
    pipeline = a.port.pipelines.get(a.card.name)
    if pipeline is not None and pipeline.sigmas is not None:
        own = pipeline.sigmas(steps, *size)
    return compare_sampling(a.port, a.card, ours, reference, inputs, noise, sigmas, own_sigmas=own)


def _random(subject: Subject) -> bool:
    return subject.path is None and subject.fixture is None


def _config(subject: Subject):
    return subject.fixture.meta["config"] if subject.fixture else subject.config


def _title(a: Subject, b: Subject | None) -> str:
    if _random(a) and b is not None and b.fixture is not None:
        return f"{a.text} (the recording's weights)"
    return a.title


def _other_title(a: Subject, b: Subject | None) -> str:
    return (a.port.reference or "its reference") if b is None else b.title


def _plain_weights(a: Subject, ours: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = ours.state_dict()
    quantized = [key for key in state if key.endswith(".comfy_quant")]
    if quantized:
        raise ValueError(
            f"{a.text} is quantized ({len(quantized)} layers), which the reference can't load; compare it with its "
            f"original: nativedit compare {a.text} ORIGINAL --stages '*'"
        )
    return state


def _allowed(b: Subject, dtype: torch.dtype) -> float:
    """Recordings are float32: another dtype may cost twice what it cost the reference."""
    if dtype == torch.float32:
        return PLAIN
    cost = b.fixture.meta.get("bfloat16_vs_float32_rel_err") if dtype == torch.bfloat16 else None
    return 2 * cost if cost else LOW_PRECISION
