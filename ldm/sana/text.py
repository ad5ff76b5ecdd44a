"""Which of the text encoder's outputs Sana's transformer gets to see.

The instruction stands before every prompt and is read by the text encoder; the transformer sees the begin token and
what follows the instruction. Negative prompts have no instruction and are seen whole. Source: Sana (arXiv 2410.10629),
section 3.1, and diffusers' SanaPipeline 0.42.1.
"""

from __future__ import annotations

# Positions the transformer sees, begin token included.
CONTEXT_LENGTH = 300


def longest_prompt(instruction_length: int) -> int:
    """Tokens of instruction and prompt together, after which the end of the prompt is cut.

    instruction_length: tokens of the instruction alone, begin token included.
    """
    return instruction_length + CONTEXT_LENGTH - 2


def seen_positions(instruction_length: int, length: int) -> list[int]:
    """Positions, of ``length`` tokens without padding, that the transformer sees: the first, and all from the
    instruction's last token on (the last 299 of the sequence when it is padded to ``longest_prompt``).

    ``length`` counts instruction and prompt. Padding is masked in the reference; leaving it out changes nothing.
    """
    length = min(length, longest_prompt(instruction_length))
    return [0, *range(max(instruction_length - 1, 1), length)]
