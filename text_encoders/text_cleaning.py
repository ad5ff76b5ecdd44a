"""What a pipeline does to a prompt before the tokenizer sees it.

Light cleaning repairs the text, resolves entities twice and removes outer blanks. Full cleaning was made for captions
scraped from the web: lower case, no addresses, names, file names, long numbers, ideographs or decoration; it damages
such text on purpose. The third way is lower case without outer blanks, and nothing else.
"""
# "light": PRXPixel, and PRX on request. "full": the cleaner of DeepFloyd IF, which PRX was trained with; its ideographs
# are those of CJK. "lower_strip": Sana.
# The rules are facts about published pipelines; tests compare with diffusers' `TextPreprocessor`.

from __future__ import annotations

import functools
import html
import re
import unicodedata
from collections.abc import Callable
from urllib.parse import unquote_plus


@functools.cache
def _ftfy() -> Callable[[str], str] | None:
    try:
        from ftfy import fix_text as repair
    except ImportError:  # ComfyUI does not install it
        return None
    return repair


def fix_text(text: str) -> str:
    """`ftfy.fix_text` where ftfy is installed, else the part of it that needs no guessing (see `plain_fix_text`)."""
    return (_ftfy() or plain_fix_text)(text)


_ENTITY = r"&#?[0-9A-Za-z]{1,24};"
_TERMINAL_ESCAPE = r"\x1b\[[\d;]*[a-zA-Z]"
_SURROGATE_PAIR = "[\ud800-\udbff][\udc00-\udfff]"
_SINGLE_SURROGATE = "[\ud800-\udfff]"
_LINE_BREAK = "\r\n|[\r\u2028\u2029\u0085]"


_CONTROL = dict.fromkeys(
    [
        *(*range(0x09), 0x0B, *range(0x0E, 0x20), 0x7F),
        *(*range(0x206A, 0x2070), 0xFEFF, *range(0xFFF9, 0xFFFD)),
    ]
)


def _replacements() -> dict[int, str]:
    """Per code point what `ftfy` puts in its place."""
    table: dict[int, str] = {}
    table.update(dict.fromkeys([0x02BC, *range(0x2018, 0x201C)], "'"))
    table.update(dict.fromkeys(range(0x201C, 0x2020), '"'))
    table[0x3000] = " "
    for code in range(0xFF01, 0xFFF0):  # half and full width forms
        wide = chr(code)
        if unicodedata.normalize("NFKC", wide) != wide:
            table[code] = unicodedata.normalize("NFKC", wide)
    for code in [0x132, 0x133, *range(0x1C4, 0x1CD), *range(0x1F1, 0x1F4), *range(0xFB00, 0xFB05), 0xFB06]:
        table[code] = unicodedata.normalize("NFKC", chr(code))  # ligatures and digraphs of Latin letters
    table[0x149] = "\u02bcn"  # NFKC would give the same
    table[0xFB05] = "\u017ft"  # NFKC would also modernise the long s
    for byte in range(0x80, 0xA0):  # C1 controls stand for Windows-1252's characters, where it has one
        if byte != 0x85:
            table[byte] = bytes([byte]).decode("cp1252", errors="ignore") or chr(byte)
    table[0x85] = "\u2026"
    return table


_REPLACEMENTS = _replacements()


def plain_fix_text(text: str) -> str:
    """What `ftfy.fix_text` 6 does to a text, without its repair of wrongly decoded UTF-8 (which is a guess).

    Entities that end in a semicolon (not from a line on that has a `<`), straight quotes, ligatures and width forms
    spelled out, `\\n` line breaks, no control characters, NFC; repeated until nothing changes.
    """
    lines, entities = [], True
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        entities = entities and "<" not in line
        lines.append(_fix_line(line, entities))
    return "".join(lines)


def _fix_line(line: str, entities: bool) -> str:
    while True:
        before = line
        if entities:
            line = re.sub(_ENTITY, _resolve_entity, line)
        line = line.translate(_REPLACEMENTS)
        line = re.sub(_LINE_BREAK, "\n", line)
        line = re.sub(_SURROGATE_PAIR, _join_surrogates, line)
        line = re.sub(_SINGLE_SURROGATE, "\ufffd", line)
        line = re.sub(_TERMINAL_ESCAPE, "", line).translate(_CONTROL)
        line = unicodedata.normalize("NFC", line)
        if line == before:
            return line


def _resolve_entity(match: re.Match[str]) -> str:
    entity = match[0]
    if entity[1:] in html.entities.html5:
        return html.entities.html5[entity[1:]]
    if entity.startswith("&#"):
        character = html.unescape(entity)
        return entity if ";" in character else character
    # Captions in capitals: &EACUTE; is É, as far as HTML gives the capitals no meaning of their own.
    lower = html.entities.html5.get(entity[1:].lower()) if entity.isupper() else None
    return entity if lower is None or html.unescape(entity) != entity else lower.upper()


def _join_surrogates(match: re.Match[str]) -> str:
    return match[0].encode("utf-16", "surrogatepass").decode("utf-16")


def light(text: str) -> str:
    return html.unescape(html.unescape(fix_text(text))).strip()


# Web addresses.
_WITH_A_SCHEME = r"(?:https?|www):(?:/{1,3}|[a-zA-Z0-9%])"
_DOMAINS = "com|co|ru|net|org|edu|gov|it"
_WITH_A_DOMAIN = rf"[a-zA-Z0-9.\-]+\.(?:{_DOMAINS})[\w/\-]*\b/?(?!@)"
_FILE_TYPES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_DASHES = (
    "\u002d\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0\ufe31\ufe32\ufe58"
    "\ufe63\uff0d"
).replace("\u002d", r"\-", 1)

# (pattern, replacement), applied in this order to the text in lower case.
_BEFORE_REPAIR = [
    ("<person>", "person"),
    (rf"\b(?:{_WITH_A_SCHEME}|{_WITH_A_DOMAIN})", ""),
    (r"@\w+\b", ""),
    ("[\u31c0-\u9fff]+", ""),  # CJK strokes up to the ideographs
    (f"[{_DASHES}]+", "-"),
    ("[`\u00b4\u00ab\u00bb\u00a8]", '"'),
    ("&quot;?", ""),
    ("&amp", ""),
    (r"\d{1,3}(?:\.\d{1,3}){3}", " "),  # IP addresses
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.(?:{_FILE_TYPES})", ""),
    ("[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    ("[#\u00ae\u2022\u00a9\u2122&@\u00b7\u00ba\u00bd\u00be\u00bf\u00a1\u00a7~()\\[\\]{}|\\\\/*]+", " "),
    (r"\s+\.\s+", " "),
]
_AFTER_REPAIR = [
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # article numbers and the like
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_FILE_TYPES})(\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    ("\\b\\d+\\.?\\d*[x\u0445\u00d7]\\d+\\.?\\d*\\b", ""),  # 1920x1080, with any of three crosses
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
    # The reference means to strip here and drops the result: the next four see outer blanks.
    (r"^[\"']([\w\W]+)[\"']$", r"\1"),
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
]


def _apply(rules: list[tuple[str, str]], text: str) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


def full(text: str) -> str:
    text = _apply(_BEFORE_REPAIR, unquote_plus(text).strip().lower())
    if text.count("-") + text.count("_") > 3:  # this-is-my-cute-cat
        text = re.sub("[-_]", " ", text)
    return _apply(_AFTER_REPAIR, light(text)).strip()


def _unchanged(text: str) -> str:
    return text


def lower_strip(text: str) -> str:
    return text.lower().strip()


CLEANERS: dict[str, Callable[[str], str]] = {
    "none": _unchanged,
    "light": light,
    "full": full,
    "lower_strip": lower_strip,
}
