"""Quantized, the demo model still draws what a prompt says. All formats and budgets: benchmarks/quantized_demo.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def benchmark(root: Path):
    """benchmarks/ and scripts/ are no packages and must not stay on sys.path for other tests."""
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("quantized_demo", root / "benchmarks" / "quantized_demo.py")
    module = sys.modules["quantized_demo"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


def test_int8_convrot_loses_no_picture(benchmark):
    exact, int8 = benchmark.rows(8, [{"format": "int8_convrot"}])

    assert exact.right >= 0.85
    assert int8.right == exact.right
    assert int8.error < 1.0 and int8.sqnr > 42  # of 255, and decibels
    assert int8.nbytes < 0.72 * exact.nbytes
