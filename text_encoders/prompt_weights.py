"""Weights in a prompt, as users of ComfyUI write them.

A pair of parentheses makes what is in it a tenth more important; a number behind a colon at the end of it sets the
weight; a backslash makes a parenthesis an ordinary one; brackets mean nothing.
"""
# "a (red:1.3) cube", "(cube)" for 1.1, "[plain] \(escaped\)". The syntax is measured against ComfyUI's parser.

from __future__ import annotations

import re

import torch

from .prompt import Prompt, encode_text, is_instructed, pad_prompt
from .tokenizer import Tokenizer

_OPEN, _CLOSE = "\0\2", "\0\1"  # escaped parentheses while the others are being read

LARGEST_WEIGHT = 65504.0

# Where ComfyUI's own encoders put the vectors of a file of models/embeddings: at the start or after a space, up to the
# next space or bracket; commas at the end are the prompt's.
_EMBEDDING = r"(?:^|(?<=\s))embedding:([^\s<\[,][^\s<\[]*?)(?=,*(?:[\s<\[]|$))\s*"


def read_prompt(text: str, weights: bool = True) -> tuple[list[tuple[str, float]], list[str]]:
    """(pieces with their weights, names of the embeddings that were left out of them).

    weights: False for a text whose parentheses are ordinary ones. "embedding:name" is left out as ComfyUI leaves out an
    embedding that does not exist: textual inversions are made for CLIP, and no word of the prompt.
    Raises ValueError for a weight that no picture comes of: not a number, or none that float16 holds.
    """
    left_out: list[str] = []

    def take(match: re.Match[str]) -> str:
        left_out.append(match[1])
        return ""

    pieces = parse_weights(text) if weights else [(text, 1.0)]
    pieces = [(re.sub(_EMBEDDING, take, piece), weight) for piece, weight in pieces]
    pieces = [(piece, weight) for piece, weight in pieces if piece]
    for piece, weight in pieces:
        if not abs(weight) <= LARGEST_WEIGHT:
            raise ValueError(
                f"the prompt gives {piece.strip()[:40]!r} a weight of {weight:g}, with which no picture can be "
                "computed; write one like (word:1.3)"
            )
    return pieces, left_out


def embeddings_left_out(names: list[str]) -> str:
    """What the user is told."""
    written = ", ".join(f"embedding:{name}" for name in names)
    return f"{written} is left out of the prompt: this text encoder takes no textual inversions, they are made for CLIP"


def parse_weights(text: str) -> list[tuple[str, float]]:
    """The text in pieces with their weights; joined, the pieces are the prompt without its weight marks."""
    text = text.replace("\\)", _CLOSE).replace("\\(", _OPEN)
    pieces = [(piece.replace(_CLOSE, ")").replace(_OPEN, "("), weight) for piece, weight in _weighted(text, 1.0)]
    return [(piece, weight) for piece, weight in pieces if piece]


def _weighted(text: str, weight: float) -> list[tuple[str, float]]:
    pieces = []
    for group in _groups(text):
        if len(group) < 2 or group[0] != "(" or group[-1] != ")":
            pieces.append((group, weight))
            continue
        inner, inner_weight = group[1:-1], weight * 1.1
        head, colon, tail = inner.rpartition(":")
        if colon and head:
            try:
                inner, inner_weight = head, float(tail)
            except ValueError:
                inner = group[1:-1]  # the colon was punctuation
        pieces += _weighted(inner, inner_weight)
    return pieces


def _groups(text: str) -> list[str]:
    """Cut before and after every outermost pair of parentheses; what is never closed stays as it is."""
    groups, current, depth = [], "", 0
    for char in text:
        if char == "(":
            if depth == 0 and current:
                groups.append(current)
                current = ""
            depth += 1
            current += char
        elif char == ")":
            depth -= 1
            current += char
            if depth == 0:
                groups.append(current)
                current = ""
        else:
            current += char
    return [*groups, current] if current else groups


def weighted_tokens(
    tokenizer: Tokenizer, prompt: Prompt, pieces: list[tuple[str, float]], negative: bool = False
) -> list[tuple[int, float]]:
    """Ids of the whole prompt with the weight of the piece that each comes from; template, instruction and padding
    weigh 1.

    The prompt is tokenized as one text, so a weight does not change how words are cut; a token across the edge of two
    pieces counts for the later one.
    """

    whole = "".join(piece for piece, _ in pieces)
    instructed = is_instructed(prompt, whole, negative)

    def encode(text: str) -> list[int]:
        return encode_text(tokenizer, prompt, text, instructed)

    ids = encode(whole)
    weights = [1.0] * len(ids)
    written = ""
    for piece, weight in pieces:
        start = _common(ids, encode(written)) if weight != 1.0 else 0
        written += piece
        if weight != 1.0:
            for index in range(start, _common(ids, encode(written))):
                weights[index] = weight
    padded = pad_prompt(tokenizer, prompt, ids)
    added = [1.0] * (len(padded) - len(ids))
    return list(zip(padded, added + weights if prompt.padding_side == "left" else weights + added, strict=True))


def _common(first: list[int], second: list[int]) -> int:
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def apply_weights(states: torch.Tensor, neutral: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Move each token's state away from (weight > 1) or towards (< 1) that of a text that says nothing.

    states, neutral: [B, L, C]; neutral: states of L padding tokens; weights: [L] or [B, L].
    """
    return neutral + (states - neutral) * weights.to(states)[..., None]
