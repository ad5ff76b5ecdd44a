"""How a model wants its prompts: what a card says, and the ids that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .text_cleaning import CLEANERS
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """A model's habits with prompts, as data for its card.

    Padding means tokens that the model attends to, as if the user had written them. Padding that is masked changes
    nothing and is never made.
    """

    clean: Literal["none", "light", "full", "lower_strip"] = "none"  # see text_cleaning
    template: str = "{prompt}"  # the text around the prompt; other braces stand for themselves
    # Read by the text encoder before every prompt that is neither negative nor empty. The diffusion model sees the
    # begin token, and all from the instruction's last token on.
    instruction: str = ""
    max_length: int | None = None  # in tokens the model sees, begin and end included; the end of the text is cut
    bos: bool | None = None  # begin token; None: as the tokenizer does
    eos: bool | None = None
    min_tokens: int = 0  # padded up to that many
    pad_multiple: int = 1  # padded up to a multiple
    padding_side: Literal["left", "right"] = "right"
    pad_token: str | None = None  # None: the tokenizer's
    layers: tuple[int, ...] = (-1,)  # hidden states used, numbered as in LanguageModel.forward
    normed: bool = False  # those states after the final norm, which otherwise only the last one passes
    # What no text at all becomes: "encode" it like any other, or one state of "zeros" that the model attends to.
    empty: Literal["encode", "zeros"] = "encode"

    def __post_init__(self) -> None:
        if self.clean not in CLEANERS:
            raise ValueError(f"clean {self.clean!r} is unknown; known are {', '.join(CLEANERS)}")
        if "{prompt}" not in self.template:
            raise ValueError(f"template {self.template!r} has no {{prompt}} where the prompt goes")
        if self.padding_side not in ("left", "right"):
            raise ValueError(f"padding_side {self.padding_side!r} is neither 'left' nor 'right'")
        if self.empty not in ("encode", "zeros"):
            raise ValueError(f"empty {self.empty!r} is neither 'encode' nor 'zeros'")
        if self.instruction and (self.min_tokens or self.pad_multiple > 1):
            raise ValueError("a prompt with an instruction can't be padded: what is hidden would be counted")


def prompt_text(prompt: Prompt, text: str, instructed: bool = False) -> str:
    """The text the tokenizer gets: cleaned, set into the template, behind the instruction if there is to be one."""
    text = prompt.template.replace("{prompt}", CLEANERS[prompt.clean](text))
    return prompt.instruction + text if instructed else text


def is_instructed(prompt: Prompt, text: str, negative: bool = False) -> bool:
    """Whether the instruction stands before this prompt. An empty one is the usual negative prompt."""
    return bool(prompt.instruction) and not negative and bool(text.strip())


def instruction_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Begin token and instruction; [] for a model without one."""
    return tokenizer.encode(prompt.instruction, bos=prompt.bos, eos=False) if prompt.instruction else []


def encode_text(tokenizer: Tokenizer, prompt: Prompt, text: str, instructed: bool = False) -> list[int]:
    """Ids of one prompt, cut to the length that the model was trained with, without padding."""
    limit = prompt.max_length
    if instructed and limit is not None:
        limit += hidden_count(instruction_ids(tokenizer, prompt))
    return tokenizer.encode(prompt_text(prompt, text, instructed), bos=prompt.bos, eos=prompt.eos, max_length=limit)


def tokenize_prompt(tokenizer: Tokenizer, prompt: Prompt, text: str, negative: bool = False) -> list[int]:
    """Ids of one prompt, all of them attended to. May be empty: some tokenizers make nothing of "", some models want
    nothing made of it."""
    if prompt.empty == "zeros" and not text.strip():
        return []
    ids = encode_text(tokenizer, prompt, text, is_instructed(prompt, text, negative))
    return pad_prompt(tokenizer, prompt, ids)


def hidden_count(instruction: Sequence[int]) -> int:
    """Tokens of the instruction that the model does not see: all but the first and the last (see `Prompt`)."""
    return max(len(instruction) - 2, 0)


def seen_positions(instruction: Sequence[int], ids: Sequence[int]) -> list[int] | None:
    """Positions of the text encoder's states that the diffusion model sees; None for all of them.

    Given are the ids of an instruction and of a prompt. A prompt that was encoded behind the instruction begins with
    all of its tokens but the last, which may have merged with the prompt's first letters.
    """
    # Source: Sana (arXiv 2410.10629), section 3.1, and diffusers' SanaPipeline 0.42.1. See `instruction_ids`.
    hidden = hidden_count(instruction)
    if hidden == 0 or list(ids[: hidden + 1]) != list(instruction[: hidden + 1]):
        return None
    return [0, *range(hidden + 1, len(ids))]


def pad_prompt(tokenizer: Tokenizer, prompt: Prompt, ids: list[int]) -> list[int]:
    """`ids` with the padding that the model attends to. Raises ValueError if the pad token does not exist."""
    length = max(len(ids), prompt.min_tokens)
    length += -length % prompt.pad_multiple
    if length == len(ids):
        return ids
    pad_id = tokenizer.pad_id if prompt.pad_token is None else tokenizer.id_of(prompt.pad_token)
    if pad_id is None:
        raise ValueError(f"{tokenizer.source}: has no token {prompt.pad_token!r}, which pads this model's prompts")
    padding = [pad_id] * (length - len(ids))
    return padding + ids if prompt.padding_side == "left" else ids + padding
