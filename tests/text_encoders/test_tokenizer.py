"""Tokenizers against `transformers`, on vocabularies trained here; where they are looked for; what is said if not."""

from __future__ import annotations

import builtins
import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from nativedit.text_encoders.tokenizer import MissingTokenizer, Tokenizer

CORPUS = [
    "a red circle left of a blue square",
    "two green triangles on a white background",
    "The quick brown fox jumps over the lazy dog, again & again.",
    "Zürich, naïve café, 日本, 1234567890",
]
TEXTS = [
    "a red circle",
    "a big yellow square on a black background",
    "",
    " ",
    "  two  spaces and a\nline break\t",
    "Zürich ☃ 日本語 🙂",
    "<|endoftext|>written out<|im_start|>",
    "x" * 60,
    "ﬁne ½ “quotes”",
]


def train_bpe(post_processor: Any = None) -> tokenizers.Tokenizer:
    """A byte-level BPE like Qwen's: NFC, bytes, no begin token of its own."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "[gMASK]", "<sop>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = post_processor or processors.ByteLevel(trim_offsets=False)
    return tokenizer


def template(single: str, tokenizer: tokenizers.Tokenizer) -> Any:
    names = [part for part in single.split() if not part.startswith("$")]
    return processors.TemplateProcessing(single=single, special_tokens=[(n, tokenizer.token_to_id(n)) for n in names])


def train_sentencepiece(**options: Any) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 5), model_writer=out, minloglevel=2, hard_vocab_limit=False, **options
    )
    return out.getvalue()


@pytest.fixture(scope="module")
def bpe() -> tokenizers.Tokenizer:
    return train_bpe()


@pytest.fixture(scope="module")
def gemma_model() -> bytes:
    """A SentencePiece model made as Gemma's: BPE with byte fallback, spaces kept, no prefix."""
    return train_sentencepiece(
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
        **{"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"},
        user_defined_symbols=["<start_of_turn>"],
    )


def as_bytes(tokenizer: tokenizers.Tokenizer) -> bytes:
    return tokenizer.to_str().encode()


def ours(tokenizer: tokenizers.Tokenizer, **options: Any) -> Tokenizer:
    return Tokenizer(as_bytes(tokenizer), "tokenizer_json", options)


@pytest.mark.parametrize(
    "single", [None, "$A", "[gMASK] <sop> $A", "$A <|endoftext|>", "<sop> $A <|endoftext|>"], ids=str
)
@pytest.mark.parametrize("max_length", [None, 6])
def test_ids_are_those_of_the_fast_tokenizer(bpe: tokenizers.Tokenizer, single: str | None, max_length: int | None):
    tokenizer = train_bpe(template(single, bpe) if single else None)
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>")
    mine = ours(tokenizer)
    for text in TEXTS:
        expected = reference(text, truncation=max_length is not None, max_length=max_length)["input_ids"]
        assert mine.encode(text, max_length=max_length) == expected, text
        assert mine.decode(expected) == reference.decode(expected, skip_special_tokens=True)
    assert mine.pad_id == 0
    assert mine.size == len(reference)


def test_ids_are_those_of_a_published_folder(bpe: tokenizers.Tokenizer, tmp_path: Path):
    """`add_bos_token` in tokenizer_config.json changes nothing beside a tokenizer.json, there as here."""
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=train_bpe(template("<sop> $A", bpe)))
    reference.add_special_tokens({"pad_token": "[gMASK]", "eos_token": "<|endoftext|>"})
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for add_bos in (True, False):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": add_bos}))
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        mine = Tokenizer.from_path(tmp_path)
        for text in TEXTS:
            assert mine.encode(text) == reference(text)["input_ids"]
        assert mine.pad_id == reference.pad_token_id
        assert mine.eos_id == reference.eos_token_id


def test_padding_and_truncation_set_in_the_file_do_not_apply(bpe: tokenizers.Tokenizer):
    tokenizer = tokenizers.Tokenizer.from_str(bpe.to_str())
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(4)
    assert ours(tokenizer).encode(TEXTS[0]) == bpe.encode(TEXTS[0]).ids


def gemma_reference(model: bytes) -> transformers.GemmaTokenizer:
    """transformers' Gemma tokenizer on the same pieces; a merge ranks by the piece it makes."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocabulary = {pieces.id_to_piece(i): i for i in range(pieces.get_piece_size())}
    merges = sorted(
        (vocabulary[piece], vocabulary[piece[:cut]], vocabulary[piece[cut:]], piece[:cut], piece[cut:])
        for piece in vocabulary
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    )
    reference = transformers.GemmaTokenizer(
        vocab=vocabulary, merges=[merge[3:] for merge in merges], add_bos_token=True
    )
    reference.add_tokens(["<start_of_turn>"], special_tokens=True)
    return reference


def test_ids_are_those_of_gemmas_tokenizer(gemma_model: bytes):
    reference = gemma_reference(gemma_model)
    mine = Tokenizer(gemma_model, "spiece_model")
    for text in [*TEXTS, "<start_of_turn>user a red fox"]:
        assert mine.encode(text) == reference(text)["input_ids"], text
        assert mine.encode(text, max_length=5) == reference(text, truncation=True, max_length=5)["input_ids"]
        assert mine.encode(text, bos=False) == reference(text, add_special_tokens=False)["input_ids"]
    assert (mine.bos_id, mine.eos_id, mine.pad_id) == (2, 1, 0)
    assert mine.decode(mine.encode("a red circle", eos=True)) == "a red circle"


def test_ids_are_those_of_a_sentencepiece_tokenizer(tmp_path: Path):
    model = train_sentencepiece(model_type="unigram", vocab_size=120)
    (tmp_path / "spiece.model").write_bytes(model)
    reference = transformers.BertGenerationTokenizer(str(tmp_path / "spiece.model"))
    mine = Tokenizer.from_path(tmp_path)
    for text in TEXTS:
        assert mine.encode(text, bos=False) == reference(text)["input_ids"], text


def test_a_sentencepiece_models_begin_and_end_follow_the_options(gemma_model: bytes):
    plain = Tokenizer(gemma_model, "spiece_model").encode("a red fox", bos=False)
    for add_bos in (True, False):
        for add_eos in (True, False):
            options = {"add_bos_token": add_bos, "add_eos_token": add_eos}
            tokenizer = Tokenizer(gemma_model, "spiece_model", options)
            assert tokenizer.encode("a red fox") == [2] * add_bos + plain + [1] * add_eos


def test_begin_and_end_can_be_asked_for(bpe: tokenizers.Tokenizer):
    tokenizer = ours(bpe, bos_token={"content": "<sop>"}, eos_token="<|endoftext|>")
    text = bpe.encode("a red fox").ids
    assert tokenizer.encode("a red fox", bos=True, eos=True) == [3, *text, 0]
    assert tokenizer.encode("a red fox", bos=True, eos=True, max_length=3) == [3, text[0], 0]
    assert tokenizer.encode("", bos=True) == [3]
    with pytest.raises(ValueError, match=r'has no bos token.*name it as "bos_token" in tokenizer_config\.json'):
        ours(bpe).encode("a", bos=True)


@pytest.mark.parametrize("kind", ["tokenizer_json", "spiece_model"])
def test_it_travels_with_the_weights(kind: str, bpe: tokenizers.Tokenizer, gemma_model: bytes):
    data = as_bytes(bpe) if kind == "tokenizer_json" else gemma_model
    options = {"pad_token": "<|im_start|>", "add_eos_token": True, "eos_token": {"content": "<eos>"}, "model": "x"}
    before = Tokenizer(data, kind, options)
    tensors = before.state_tensors()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.uint8}
    assert bytes(tensors[kind].tolist()) == data
    after = Tokenizer.from_state_dict({"text_encoder." + k: v for k, v in tensors.items()}, "x", "text_encoder.")
    assert after.options == {"pad_token": "<|im_start|>", "add_eos_token": True, "eos_token": "<eos>"}
    assert all(after.encode(text) == before.encode(text) for text in TEXTS)
    assert Tokenizer.from_state_dict({}, "x") is None


PLACES = [
    ("x.safetensors", "x.tokenizer.json"),
    ("x.safetensors", "x/tokenizer.json"),
    ("x.safetensors", "tokenizer.json"),
    ("x.safetensors", "tokenizer/tokenizer.json"),
    ("text_encoder/model.safetensors", "tokenizer/tokenizer.json"),
    ("text_encoder_2/model.safetensors", "tokenizer_2/tokenizer.json"),
    ("text_encoder/model-00001-of-00002.safetensors", "tokenizer/tokenizer.json"),
    ("text_encoder", "tokenizer/tokenizer.json"),
    ("text_encoder", "text_encoder/tokenizer.json"),
    ("text_encoder/model.safetensors", "text_encoder/tokenizer.json"),
]


@pytest.mark.parametrize(("checkpoint", "place"), PLACES)
def test_it_is_found_beside_the_checkpoint(checkpoint: str, place: str, bpe: tokenizers.Tokenizer, tmp_path: Path):
    (tmp_path / checkpoint).parent.mkdir(parents=True, exist_ok=True)
    if not checkpoint.endswith(".safetensors"):
        (tmp_path / checkpoint).mkdir()
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(as_bytes(bpe))
    file.with_name(file.name.replace("tokenizer.json", "tokenizer_config.json")).write_text(
        '{"pad_token": "<|im_start|>"}'
    )
    tokenizer = Tokenizer.find({}, tmp_path / checkpoint)
    assert tokenizer.encode("a red fox") == bpe.encode("a red fox").ids
    assert tokenizer.source == str(file)
    assert tokenizer.pad_id == 1


@pytest.mark.parametrize("name", ["x.tokenizer.model", "x.spiece.model", "x/tokenizer.model", "spiece.model"])
def test_sentencepiece_models_are_found_too(name: str, gemma_model: bytes, tmp_path: Path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(gemma_model)
    assert Tokenizer.find({}, tmp_path / "x.safetensors").encode("a") == [2, *sp_ids(gemma_model, "a")]


def sp_ids(model: bytes, text: str) -> list[int]:
    return sentencepiece.SentencePieceProcessor(model_proto=model).encode(text)


def test_the_tokenizer_inside_comes_first(bpe: tokenizers.Tokenizer, gemma_model: bytes, tmp_path: Path):
    (tmp_path / "x.tokenizer.json").write_bytes(as_bytes(bpe))
    inside = Tokenizer(gemma_model, "spiece_model").state_tensors()
    assert "x.safetensors: spiece_model" in Tokenizer.find(inside, tmp_path / "x.safetensors").source


def test_other_files_tokenizers_are_not_taken(bpe: tokenizers.Tokenizer, tmp_path: Path):
    folder = tmp_path / "text_encoders"
    folder.mkdir()
    (folder / "y.tokenizer.json").write_bytes(as_bytes(bpe))
    (tmp_path / "tokenizers").mkdir()
    (tmp_path / "tokenizers" / "tokenizer.json").write_bytes(as_bytes(bpe))
    with pytest.raises(MissingTokenizer):
        Tokenizer.find({}, folder / "x.safetensors")


def test_a_missing_tokenizer_is_one_error_that_says_what_to_put_where(tmp_path: Path):
    with pytest.raises(MissingTokenizer) as error:
        Tokenizer.find({}, tmp_path / "t5gemma.bf16.safetensors")
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 't5gemma.bf16.safetensors'}: this text encoder has no tokenizer")
    assert "tokenizer.json beside it as t5gemma.bf16.tokenizer.json" in message
    assert f"into a folder {tmp_path / 't5gemma.bf16'}" in message
    with pytest.raises(MissingTokenizer, match=r"put tokenizer\.json \(or tokenizer\.model\) into "):
        Tokenizer.find({}, tmp_path)


def test_the_place_the_error_names_is_searched(bpe: tokenizers.Tokenizer, tmp_path: Path):
    (tmp_path / "t5gemma.bf16.tokenizer.json").write_bytes(as_bytes(bpe))
    assert Tokenizer.find({}, tmp_path / "t5gemma.bf16.safetensors").encode("a red fox")


@pytest.mark.parametrize(("kind", "package"), [("tokenizer_json", "tokenizers"), ("spiece_model", "sentencepiece")])
def test_a_missing_package_is_named_when_it_is_needed(kind: str, package: str, monkeypatch: pytest.MonkeyPatch):
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == package:
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    tokenizer = Tokenizer(b"", kind, source="x.safetensors")
    with pytest.raises(ImportError, match=rf"x\.safetensors: .*pip install {package}"):
        tokenizer.encode("a")


@pytest.mark.parametrize("kind", ["tokenizer_json", "spiece_model"])
@pytest.mark.parametrize("data", [b"version https://git-lfs.github.com/spec/v1", b"\xff\xfe", b"{}"])
def test_a_file_of_another_kind_is_refused_by_name(kind: str, data: bytes):
    with pytest.raises(ValueError, match=r"^x\.bin: is no "):
        Tokenizer(data, kind, source="x.bin").encode("a")


def test_broken_options_are_refused_by_name(bpe: tokenizers.Tokenizer, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_bytes(as_bytes(bpe))
    for content, message in (("{", "is no JSON"), ("[]", "a JSON object was expected, found list")):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {message}"):
            Tokenizer.from_path(tmp_path)


def test_a_tokenizer_larger_than_the_model_is_refused(bpe: tokenizers.Tokenizer):
    tokenizer = ours(bpe)
    tokenizer.check_vocabulary(400, "x.safetensors")
    with pytest.raises(ValueError, match=r"x\.safetensors: the tokenizer from .* has \d+ tokens, the model 97 emb"):
        tokenizer.check_vocabulary(97, "x.safetensors")
