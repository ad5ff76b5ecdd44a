"""Tokenizers that travel with the checkpoint: in the file as uint8 tensors, or as files beside it.

Two kinds are understood, by the names under which ComfyUI's files carry them: `tokenizer_json` (the `tokenizers`
library) and `spiece_model` (`sentencepiece`). Both libraries are imported when the first text is encoded.

What tokenizer.json leaves to tokenizer_config.json (which token pads, whether a begin token is added) is kept as a
third tensor, `tokenizer_config`, holding only the entries used here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

JSON_TENSOR, SPIECE_TENSOR, CONFIG_TENSOR = "tokenizer_json", "spiece_model", "tokenizer_config"
JSON_FILES = ("tokenizer.json",)
SPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
CONFIG_FILE = "tokenizer_config.json"
KEPT_OPTIONS = ("add_bos_token", "add_eos_token", "bos_token", "eos_token", "pad_token", "padding_side")


class MissingTokenizer(ValueError):
    """A text encoder came without its tokenizer; the message says what to put where."""


class Tokenizer:
    """Text to ids and back, as the model's published tokenizer does it.

    data: contents of tokenizer.json or of a SentencePiece model. kind: "tokenizer_json" or "spiece_model".
    options: entries of tokenizer_config.json. source: the file it came from, for messages.
    """

    def __init__(self, data: bytes, kind: str, options: Mapping[str, Any] | None = None, source: str = "tokenizer"):
        if kind not in (JSON_TENSOR, SPIECE_TENSOR):
            raise ValueError(f"{source}: tokenizer kind {kind!r} is unknown; known are {JSON_TENSOR}, {SPIECE_TENSOR}")
        self.source = source
        self.options = {key: _plain(value) for key, value in (options or {}).items() if key in KEPT_OPTIONS}
        self._data, self._kind = data, kind
        self._opened: _Json | _SentencePiece | None = None

    @property
    def _backend(self) -> _Json | _SentencePiece:
        if self._opened is None:
            backend = _Json if self._kind == JSON_TENSOR else _SentencePiece
            self._opened = backend(self._data, self.options, self.source)
        return self._opened

    def encode(
        self, text: str, *, bos: bool | None = None, eos: bool | None = None, max_length: int | None = None
    ) -> list[int]:
        """Ids of a text, special tokens written in it included as such; [] is possible for "".

        bos, eos: begin and end token added or not; None for the tokenizer's own habit. max_length: cut off the end of
        the text so that it fits with the added tokens. Raises ValueError if a token is wanted that does not exist.
        """
        before, after = self._added_tokens(bos, eos)
        ids = self._backend.encode(text)
        if max_length is not None:
            ids = ids[: max(0, max_length - len(before) - len(after))]
        return [*before, *ids, *after][:max_length]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens)

    def _added_tokens(self, bos: bool | None, eos: bool | None) -> tuple[list[int], list[int]]:
        before, after = self._backend.added_tokens()
        if bos is not None:
            before = [self._needed("bos", self.bos_id)] if bos else []
        if eos is not None:
            after = [self._needed("eos", self.eos_id)] if eos else []
        return before, after

    def _needed(self, name: str, token: int | None) -> int:
        if token is None:
            raise ValueError(
                f"{self.source}: has no {name} token, which this model's prompts need; "
                f'name it as "{name}_token" in {CONFIG_FILE} beside the tokenizer'
            )
        return token

    def id_of(self, token: str) -> int | None:
        """Id of one token by its name, None if there is no such token."""
        return self._backend.id_of(token)

    @property
    def bos_id(self) -> int | None:
        return self._special("bos_token")

    @property
    def eos_id(self) -> int | None:
        return self._special("eos_token")

    @property
    def pad_id(self) -> int:
        """Id to fill rows with: the pad token, else the end token, else 0 (masked tokens may be anything)."""
        for name in ("pad_token", "eos_token"):
            token = self._special(name)
            if token is not None:
                return token
        return 0

    def _special(self, name: str) -> int | None:
        token = self.options.get(name)
        return self._backend.id_of(token) if token is not None else self._backend.default_id(name)

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return self._backend.size()

    def check_vocabulary(self, rows: int, checkpoint: str) -> None:
        """Raises ValueError if the tokenizer can produce ids that a model with `rows` embeddings does not have."""
        if self.size > rows:
            raise ValueError(
                f"{checkpoint}: the tokenizer from {self.source} has {self.size} tokens, the model {rows} embeddings: "
                "they don't belong together. Replace the tokenizer by the one published with this model"
            )

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """uint8 tensors to save with the model; `from_state_dict` reads them back."""
        tensors = {self._kind: bytes_tensor(self._data)}
        if self.options:
            tensors[CONFIG_TENSOR] = bytes_tensor(json.dumps(self.options, ensure_ascii=False).encode())
        return tensors

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, torch.Tensor], source: str, prefix: str = "") -> Tokenizer | None:
        """The tokenizer inside a checkpoint, None if it has none. prefix: in front of the tensors' names."""
        options = {}
        if prefix + CONFIG_TENSOR in state_dict:
            options = _parse_json(tensor_bytes(state_dict[prefix + CONFIG_TENSOR]), f"{source}: {CONFIG_TENSOR}")
        for kind in (JSON_TENSOR, SPIECE_TENSOR):
            if prefix + kind in state_dict:
                return cls(tensor_bytes(state_dict[prefix + kind]), kind, options, f"{source}: {kind}")
        return None

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer | None:
        """From tokenizer.json or a SentencePiece model, or a folder with one; None if the folder has none.

        Raises FileNotFoundError if there is no such path.
        """
        path = Path(path)
        if path.is_dir():
            found = [path / name for name in (*JSON_FILES, *SPIECE_FILES) if (path / name).is_file()]
            return cls.from_path(found[0]) if found else None
        kind = JSON_TENSOR if path.suffix == ".json" else SPIECE_TENSOR
        return cls(path.read_bytes(), kind, _file_options(path), str(path))

    @classmethod
    def find(cls, state_dict: Mapping[str, torch.Tensor], checkpoint: str | Path, prefix: str = "") -> Tokenizer:
        """The tokenizer of a text encoder: inside the checkpoint, else beside it (see `beside`).

        checkpoint: the file, or the folder, the state dict was read from. Raises MissingTokenizer.
        """
        inside = cls.from_state_dict(state_dict, str(checkpoint), prefix) if state_dict else None
        if inside is not None:
            return inside
        for place in beside(checkpoint):
            tokenizer = cls.from_path(place) if place.exists() else None
            if tokenizer is not None:
                return tokenizer
        raise MissingTokenizer(missing_message(checkpoint))


def beside(checkpoint: str | Path) -> list[Path]:
    """Where a checkpoint's tokenizer may lie, best first.

    For x.safetensors: x.tokenizer.json (or another known name after `x.`), a folder x/, the files themselves and a
    folder tokenizer/ in the same place; and for a folder text_encoder_2/ of a published pipeline also tokenizer_2/
    beside it.
    """
    checkpoint = Path(checkpoint)
    names = (*JSON_FILES, *SPIECE_FILES)
    if checkpoint.is_dir():
        folder, places = checkpoint, []
    else:
        folder, stem = checkpoint.parent, checkpoint.stem
        places = [folder / f"{stem}.{name}" for name in names] + [folder / stem]
    places += [folder, folder / "tokenizer"]
    if folder.name.startswith("text_encoder"):
        # A models folder is called text_encoders; the `s` is no number.
        number = folder.name.removeprefix("text_encoder")
        if number == "" or number.startswith("_"):
            places.append(folder.parent / f"tokenizer{number}")
    return places


def missing_message(checkpoint: str | Path) -> str:
    checkpoint = Path(checkpoint)
    if checkpoint.is_dir():
        where = f"put tokenizer.json (or tokenizer.model) into {checkpoint}"
    else:
        where = (
            f"put the model's tokenizer.json beside it as {checkpoint.with_suffix('').name}.tokenizer.json "
            f"(a SentencePiece model as {checkpoint.with_suffix('').name}.tokenizer.model), "
            f"or its tokenizer files into a folder {checkpoint.with_suffix('')}"
        )
    return (
        f"{checkpoint}: this text encoder has no tokenizer: neither a `{JSON_TENSOR}` or `{SPIECE_TENSOR}` tensor "
        f"inside, nor a file beside it. To use it, {where}. The tokenizer is published with the model, "
        "in the folder `tokenizer` of its repository"
    )


class _Json:
    """The `tokenizers` library on the contents of a tokenizer.json."""

    def __init__(self, data: bytes, options: Mapping[str, Any], source: str):
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(f"{source}: reading this tokenizer needs tokenizers: pip install tokenizers") from error
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception, and UnicodeDecodeError is one of several
            raise ValueError(f"{source}: is no tokenizer.json that tokenizers can read: {error}") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def added_tokens(self) -> tuple[list[int], list[int]]:
        """What the post-processor puts before and after a text.

        `add_bos_token` in tokenizer_config.json is not asked: with a tokenizer.json, transformers ignores it too.
        """
        added = self.tokenizer.encode("", add_special_tokens=True).ids
        if not added:
            return [], []
        # Only a text that has tokens shows which of the added ones come before it.
        for text in ("a", *self.tokenizer.get_vocab(with_added_tokens=False)):
            marked = self.tokenizer.encode(text, add_special_tokens=True).special_tokens_mask
            if 0 in marked:
                return added[: marked.index(0)], added[marked.index(0) :]
        return added, []

    def id_of(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)

    def default_id(self, name: str) -> int | None:
        return None  # tokenizer.json does not say which token begins, ends or pads

    def size(self) -> int:
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


class _SentencePiece:
    """The `sentencepiece` library on the contents of a SentencePiece model."""

    def __init__(self, data: bytes, options: Mapping[str, Any], source: str):
        try:
            import sentencepiece
        except ImportError as error:
            raise ImportError(
                f"{source}: reading this tokenizer needs sentencepiece: pip install sentencepiece"
            ) from error
        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=data)
        except RuntimeError as error:
            raise ValueError(f"{source}: is no SentencePiece model: {error}") from error
        self.options = options

    def encode(self, text: str) -> list[int]:
        return self.processor.encode(text, add_bos=False, add_eos=False)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        kept = [i for i in ids if not (skip_special_tokens and self.processor.is_control(i))]
        return self.processor.decode(kept)

    def added_tokens(self) -> tuple[list[int], list[int]]:
        # Models of this kind begin with the begin token and don't end with the end token unless told otherwise.
        before = [self.processor.bos_id()] if self.options.get("add_bos_token", True) else []
        after = [self.processor.eos_id()] if self.options.get("add_eos_token", False) else []
        return [i for i in before if i >= 0], [i for i in after if i >= 0]

    def id_of(self, token: str) -> int | None:
        found = self.processor.piece_to_id(token)
        return found if self.processor.id_to_piece(found) == token else None

    def default_id(self, name: str) -> int | None:
        found = {
            "bos_token": self.processor.bos_id,
            "eos_token": self.processor.eos_id,
            "pad_token": self.processor.pad_id,
        }[name]()
        return found if found >= 0 else None

    def size(self) -> int:
        return self.processor.get_piece_size()


def bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def _file_options(path: Path) -> dict[str, Any]:
    """Entries of the tokenizer_config.json and special_tokens_map.json that belong to a tokenizer file."""
    stem = path.name
    for name in (*JSON_FILES, *SPIECE_FILES):
        stem = stem.removesuffix(name)  # "x." of x.tokenizer.json, or nothing
    options: dict[str, Any] = {}
    for name in ("special_tokens_map.json", CONFIG_FILE):
        file = path.with_name(stem + name)
        if file.is_file():
            options.update(_parse_json(file.read_bytes(), str(file)))
    return options


def _parse_json(data: bytes, source: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{source}: is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source}: a JSON object was expected, found {type(value).__name__}")
    return value


def _plain(value: Any) -> Any:
    """A special token is a string, or an object that has it as `content`."""
    return value.get("content") if isinstance(value, Mapping) else value
