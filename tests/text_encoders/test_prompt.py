# ruff: noqa: RUF001 - the characters that look like others are what is tested
"""Prompts: cleaning compared with diffusers and ftfy, and the ids that follow from a card's habits."""

from __future__ import annotations

import html
import random

import ftfy
import pytest
import torch
from diffusers.pipelines.prx.pipeline_prx import TextPreprocessor
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Words
from tokenizers import models, pre_tokenizers

from nativedit.text_encoders import text_cleaning
from nativedit.text_encoders.language_model import LanguageModel
from nativedit.text_encoders.prompt import (
    Prompt,
    instruction_ids,
    pad_prompt,
    prompt_text,
    seen_positions,
    tokenize_prompt,
)
from nativedit.text_encoders.prompt_weights import read_prompt, weighted_tokens
from nativedit.text_encoders.text_cleaning import CLEANERS, plain_fix_text
from nativedit.text_encoders.tokenizer import Tokenizer

REFERENCE = TextPreprocessor()
# Each of these meets one rule of the cleaner or one repair.
PIECES = (
    """
a cat|T5-XXL|Straße|naïve|it's|AT&T|&quot;|&quot|&amp;|&amp;amp;|&EACUTE;|&eacute;|&#233;|&#x1F600;|&lt;tag&gt;|&notit;
“hi”|‘s|«so»|ﬁne|ﬅ|ŉ|ĳ|Ǆ|ｆｕｌｌ|＆ｌｔ；|<b>|<person>|http://x.com/a?b=c|www.foo.org|see foo.co/x_y|me@foo.com
@nick|漢字|㈱|㍿|—|--|_|-|a-b-c-d-e|a_b_c_d|...|.|''|'"|``|1.2.3.4|3:45 |\\n|#12|#1234|#12345|1234567|foo.png|.mp4
png images|(x)|[y]|{z}|~*~|½|©2024|jc6640|jc6640vc|6640vc231|j2d1a2a|free shipping|worldwide free shipping
download free|click for more|page 12|1920x1080|10×20|3.5х4|a,b|x/y|c :  d|+|%20|%41|.foo|,|;|:|!|?|\\|word
""".strip()
    .replace("\n", "|")
    .split("|")
)
PIECES += ["\u3000", "\r\n", "\r", "\n", "\u2028", "\x85", "\x93", "\x81", "\x00", "\x1b[31mred", "e\u0301", "\ufeff"]
PIECES += ["\u206b", "\ud83d\udca9", "\ud83d", " ", "  ", "\t", "\u00a0", '"', "'", "|"]
ORDINARY = [
    "A photo of a cat sitting on a windowsill, golden hour, 35mm",
    "“Portrait of an old man”, by Rembrandt — dramatic lighting… 8k",
    "Ein Bild von einer Brücke über die Limmat in Zürich",
    "猫が窓辺に座っている",
    "un café, s'il vous plaît; déjà vu",
    "text that says &quot;OPEN&quot; &amp; closed",
    "(masterpiece:1.2), best quality, 1girl, [blurry]",
    "ｗｉｄｅ letters and ﬁne ligatures, 3½ apples",
    "emoji 🙂👍🏽 and symbols ☃ ★",
    "multi\r\nline\rprompt",
]
fragments = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=8).map("".join)
any_text = settings(max_examples=200, deadline=None)


def pieces(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    gaps = ["", " ", ""]
    return ["".join(draw.choice(PIECES) + draw.choice(gaps) for _ in range(draw.randint(0, 8))) for _ in range(count)]


@given(fragments)
@any_text
def test_cleaning_is_the_references_on_any_text(text: str):
    assert CLEANERS["full"](text) == REFERENCE.clean_text(text)
    assert CLEANERS["light"](text) == REFERENCE.basic_clean(text)


def test_cleaning_is_the_references_on_captions():
    for text in [*ORDINARY, *pieces(0, 2000)]:
        assert CLEANERS["full"](text) == REFERENCE.clean_text(text), text
        assert CLEANERS["light"](text) == REFERENCE.basic_clean(text), text


@given(fragments)
@any_text
def test_repair_without_ftfy_equals_ftfy_except_for_wrongly_decoded_text(text: str):
    assert plain_fix_text(text) == ftfy.fix_text(text, fix_encoding=False)


def test_repair_without_ftfy_equals_ftfy_on_every_entity_and_alphabet():
    characters = [chr(code) for code in (*range(0x3100), *range(0xD7F0, 0x10010))]
    entities = [f"a&{name} b" for key in html.entities.html5 for name in (key, key.upper(), key.rstrip(";"))]
    for text in [*characters, *entities, *pieces(1, 2000)]:
        assert plain_fix_text(text) == ftfy.fix_text(text, fix_encoding=False), text


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_prompts_are_cleaned_alike_without_ftfy(text: str, monkeypatch: pytest.MonkeyPatch):
    with_ftfy = {name: clean(text) for name, clean in CLEANERS.items()}
    monkeypatch.setattr(text_cleaning, "_ftfy", lambda: None)
    assert {name: clean(text) for name, clean in CLEANERS.items()} == with_ftfy


def test_full_cleaning_lowers_case_and_drops_what_captions_from_the_web_have():
    assert CLEANERS["full"]("A Cat @nick http://x.com (HD) IMG_1234.png") == "a cat hd"
    assert CLEANERS["light"]("  A Cat &amp;amp; dog ") == "A Cat & dog"
    assert CLEANERS["none"]("  A Cat ") == "  A Cat "


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    names = ["<pad>", "<eos>", "<bos>", "a", "red", "cat", "User", ":"]
    tokenizer = Words(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<bos>"])
    options = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    return Tokenizer(tokenizer.to_str().encode(), "tokenizer_json", options)


def test_a_prompt_is_cleaned_set_into_its_template_and_tokenized(words: Tokenizer):
    prompt = Prompt(clean="full", template="User: {prompt}<eos>", bos=True)
    assert prompt_text(prompt, "A RED  cat ") == "User: a red cat<eos>"
    assert tokenize_prompt(words, prompt, "A RED  cat ") == [2, 6, 7, 3, 4, 5, 1]


def test_braces_in_a_prompt_or_template_stand_for_themselves():
    assert prompt_text(Prompt(template='{"x": "{prompt}"}'), "a {prompt} {0}") == '{"x": "a {prompt} {0}"}'


def test_long_prompts_are_cut_at_the_end_and_keep_their_end_token(words: Tokenizer):
    assert tokenize_prompt(words, Prompt(max_length=3, eos=True), "a red cat") == [3, 4, 1]


def test_padding_that_the_model_attends_to(words: Tokenizer):
    assert tokenize_prompt(words, Prompt(pad_multiple=4), "a") == [3, 0, 0, 0]
    assert tokenize_prompt(words, Prompt(pad_multiple=4, padding_side="left"), "a") == [0, 0, 0, 3]
    assert tokenize_prompt(words, Prompt(pad_multiple=4), "") == []
    assert tokenize_prompt(words, Prompt(min_tokens=2, pad_multiple=4, pad_token="<eos>"), "") == [1] * 4
    assert pad_prompt(words, Prompt(pad_multiple=3), [5, 5, 5]) == [5, 5, 5]
    with pytest.raises(ValueError, match="has no token '<none>', which pads"):
        tokenize_prompt(words, Prompt(min_tokens=2, pad_token="<none>"), "")


def test_an_empty_prompt_may_have_no_tokens_and_goes_through_the_model(words: Tokenizer):
    ids = torch.tensor([tokenize_prompt(words, Prompt(), "")], dtype=torch.long)
    model = LanguageModel(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    assert model(ids, torch.ones_like(ids).bool()).shape == (1, 0, 8)


@pytest.mark.parametrize(
    ("habits", "message"),
    [
        ({"clean": "hard"}, "clean 'hard' is unknown; known are none, light, full"),
        ({"template": "x"}, "template 'x' has no {prompt} where the prompt goes"),
        ({"padding_side": "both"}, "padding_side 'both' is neither"),
    ],
)
def test_a_wrong_habit_is_named(habits: dict[str, str], message: str):
    with pytest.raises(ValueError, match=message):
        Prompt(**habits)


INSTRUCTED = Prompt(instruction="describe it well : ", clean="lower_strip", max_length=5, bos=True)


def instructed_tokenizer() -> Tokenizer:
    vocabulary = {
        word: i for i, word in enumerate(["<unk>", "<bos>", "describe", "it", "well", ":", "a", "red", "cube"])
    }
    words = Words(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(words.to_str().encode(), "tokenizer_json", {"bos_token": "<bos>"})


def test_an_instruction_stands_before_prompts_but_not_before_negative_and_empty_ones():
    tokenizer = instructed_tokenizer()

    assert tokenize_prompt(tokenizer, INSTRUCTED, " A red ") == [1, 2, 3, 4, 5, 6, 7]
    assert tokenize_prompt(tokenizer, INSTRUCTED, "A red", negative=True) == [1, 6, 7]
    assert tokenize_prompt(tokenizer, INSTRUCTED, "  ") == [1]


def test_the_model_sees_the_begin_token_and_all_from_the_instructions_last_token_on():
    instruction = instruction_ids(instructed_tokenizer(), INSTRUCTED)

    assert instruction == [1, 2, 3, 4, 5]
    assert seen_positions(instruction, [1, 2, 3, 4, 5, 6, 7]) == [0, 4, 5, 6]
    assert seen_positions(instruction, [1, 2, 3, 4, 8]) == [0, 4]  # the last token may have merged with the prompt
    assert seen_positions(instruction, [1, 6, 7]) is None
    assert seen_positions([], [1, 2, 3, 4, 5, 6]) is None


def test_the_longest_prompt_is_counted_without_what_is_hidden():
    tokenizer = instructed_tokenizer()
    ids = tokenize_prompt(tokenizer, INSTRUCTED, "a red cube " * 5)

    assert len(seen_positions(instruction_ids(tokenizer, INSTRUCTED), ids)) == INSTRUCTED.max_length
    assert len(tokenize_prompt(tokenizer, INSTRUCTED, "a red cube " * 5, negative=True)) == INSTRUCTED.max_length


def test_weights_in_an_instructed_prompt_leave_the_instruction_alone():
    row = weighted_tokens(instructed_tokenizer(), INSTRUCTED, [("A red", 1.5), (" cube", 1.0)])

    assert row == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 1.0), (6, 1.5), (7, 1.5), (8, 1.0)][: len(row)]
    assert len(row) == 8


def test_an_instructed_prompt_that_would_be_padded_is_refused():
    with pytest.raises(ValueError, match="can't be padded"):
        Prompt(instruction="describe it : ", pad_multiple=16)


@pytest.mark.parametrize(
    ("text", "pieces", "names"),
    [
        ("embedding:bad-hands", [], ["bad-hands"]),
        ("a embedding:one, red (embedding:two cube:1.3)", [("a , red ", 1.0), ("cube", 1.3)], ["one", "two"]),
        ("a my_embedding:x and an embedding: of", [("a my_embedding:x and an embedding: of", 1.0)], []),
    ],
)
def test_textual_inversions_are_no_words_of_the_prompt(text: str, pieces: list, names: list[str]):
    assert read_prompt(text) == (pieces, names)


@pytest.mark.parametrize(
    ("text", "weight"),
    [("a (red:inf) cube", "inf"), ("a (red:1e999) cube", "inf"), ("a (red:-inf) cube", "-inf"),
     ("a (red:nan) cube", "nan"), ("a (red:1e5) cube", "100000")],
)  # fmt: skip
def test_a_weight_that_no_picture_comes_of_is_refused(text: str, weight: str):
    """ComfyUI reads these as numbers too, and its own models then give a black picture."""
    with pytest.raises(ValueError, match=f"gives 'red' a weight of {weight}, with which .* write one like"):
        read_prompt(text)
    assert read_prompt(text, weights=False) == ([(text, 1.0)], [])


def test_a_prompt_without_weights_keeps_its_parentheses_and_has_no_textual_inversions_either():
    assert read_prompt("(a embedding:one cube:1.2)", weights=False) == ([("(a cube:1.2)", 1.0)], ["one"])
