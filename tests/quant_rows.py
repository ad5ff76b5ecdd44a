"""Which checks of inside_quant.py are made of which architectures."""

# One that is ComfyUI's, one that is ours, one of video.
SOME = ("flux_dev", "prx_pixel", "wan21_t2v_14b")


def wanted(check: str, row: str) -> bool:
    """check_once_...: of none; check_some_...: of three; else of all."""
    return not check.startswith("check_once_") and (not check.startswith("check_some_") or row in SOME)
