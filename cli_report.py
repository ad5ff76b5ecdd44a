"""The command line of reports on quantization: what `quantize --report` writes, and compare-reports."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any


def save_report(path: str, data: Mapping[str, Any]) -> None:
    """As data, as a page or as a picture, by the ending of its name. Raises ValueError for another ending."""
    from .checkpoints.quant_report import write_report
    from .checkpoints.report_html import html_of_report

    write_report(data, path, html_of_report, _picture)


def _picture(data: Mapping[str, Any]) -> bytes:
    from .checkpoints.report_picture import picture_of_report
    from .engine.drawn_text import png, rasterise

    return png(picture_of_report(data, rasterise))


class CompareReports:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("first", metavar="A.json", help="a report that quantize --report wrote")
        parser.add_argument("second", metavar="B.json", help="another one, of the same model")
        parser.add_argument("--report", metavar="FILE", help="write it as .html, .png or .json too")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        from .checkpoints.quant_report import read_report, report_kind, write_report
        from .checkpoints.report_comparison import compare_reports
        from .checkpoints.report_html import html_of_reports
        from .checkpoints.report_picture import picture_of_reports
        from .files.paths import refuse_same_file

        if args.report is not None:
            report_kind(args.report)
            refuse_same_file(args.report, [args.first, args.second])
        first, second = read_report(args.first), read_report(args.second)
        found = compare_reports(first, second)
        print(found.text())
        if args.report is not None:

            def picture(data: Mapping[str, Any]) -> bytes:
                from .engine.drawn_text import png, rasterise

                return png(picture_of_reports(first, second, rasterise))

            write_report(found.data(), args.report, lambda data: html_of_reports(first, second), picture)
        return 0
