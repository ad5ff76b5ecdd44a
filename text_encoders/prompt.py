"""How a model wants its prompts: what a card says, and the ids that follow from it."""

from __future__ import annotations

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

    clean: Literal["none", "light", "full"] = "none"  # see text_cleaning
    template: str = "{prompt}"  # the text around the prompt; other braces stand for themselves
    max_length: int | None = None  # in tokens, begin and end included; the end of the text is cut
    bos: bool | None = None  # begin token; None: as the tokenizer does
    eos: bool | None = None
    min_tokens: int = 0  # padded up to that many
    pad_multiple: int = 1  # padded up to a multiple
    padding_side: Literal["left", "right"] = "right"
    pad_token: str | None = None  # None: the tokenizer's
    layers: tuple[int, ...] = (-1,)  # hidden states used, numbered as in LanguageModel.forward

    def __post_init__(self) -> None:
        if self.clean not in CLEANERS:
            raise ValueError(f"clean {self.clean!r} is unknown; known are {', '.join(CLEANERS)}")
        if "{prompt}" not in self.template:
            raise ValueError(f"template {self.template!r} has no {{prompt}} where the prompt goes")
        if self.padding_side not in ("left", "right"):
            raise ValueError(f"padding_side {self.padding_side!r} is neither 'left' nor 'right'")


def prompt_text(prompt: Prompt, text: str) -> str:
    """The text the tokenizer gets: cleaned, then set into the template."""
    return prompt.template.replace("{prompt}", CLEANERS[prompt.clean](text))


def tokenize_prompt(tokenizer: Tokenizer, prompt: Prompt, text: str) -> list[int]:
    """Ids of one prompt, all of them attended to. May be empty: some tokenizers make nothing of ""."""
    ids = tokenizer.encode(prompt_text(prompt, text), bos=prompt.bos, eos=prompt.eos, max_length=prompt.max_length)
    return pad_prompt(tokenizer, prompt, ids)


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
