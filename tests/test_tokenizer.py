"""The tokenizer wrapper: BOS once, exact round trips, SmolLM2's own splitting of text."""

from __future__ import annotations

import subprocess
import sys
import unicodedata
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import LLAMA_TEMPLATE, byte_level, gpt2_spelling, llama_style

from minibatch.errors import CheckpointError, InvalidRequestError
from minibatch.model.gguf import GGUFFile
from minibatch.model.hub import resolve
from minibatch.tokenizer import ChatTemplateError, Tokenizer

HI = [{"role": "user", "content": "Hi"}]

# ---- BOS and chat templates ------------------------------------------------------------------


def test_bos_is_added_once() -> None:
    tokenizer = llama_style()
    plain = tokenizer.encode("Hi there")
    assert [tokenizer.id_to_token(i) for i in plain] == ["<s>", "▁Hi", "▁there"]
    with pytest.warns(UserWarning, match="already begins with '<s>'"):
        again = tokenizer.encode("<s>Hi there")
    assert again[0] == tokenizer.bos_token_id and again[1] != tokenizer.bos_token_id
    assert tokenizer.encode("") == [tokenizer.bos_token_id]


def test_one_bos_that_the_text_asks_for_twice_is_kept_twice() -> None:
    tokenizer = llama_style()
    with pytest.warns(UserWarning):
        ids = tokenizer.encode("<s><s>")
    assert ids == [1, 1]


def test_a_chat_has_one_bos_and_generate_after_render_too() -> None:
    tokenizer = llama_style()
    chat = tokenizer.apply_chat_template(HI)
    assert chat.count(1) == 1 and chat[0] == 1
    text = tokenizer.render_chat_template(HI)
    assert text == "<s>[user] Hi[assistant]"
    with pytest.warns(UserWarning):
        assert tokenizer.encode(text) == chat


def test_a_tokenizer_without_the_habit_adds_no_bos_and_does_not_warn() -> None:
    tokenizer = byte_level()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokenizer.encode("<end>ab") == [256, 97, 98]
    assert tokenizer.bos_token_id is None and tokenizer.eos_token_id == 256


def test_a_missing_template_says_what_to_do() -> None:
    tokenizer = llama_style(chat_template=None)
    assert tokenizer.chat_template is None
    with pytest.raises(ChatTemplateError, match=r"pass chat_template=.*generate\(\)") as raised:
        tokenizer.apply_chat_template(HI)
    assert isinstance(raised.value, InvalidRequestError)
    assert tokenizer.apply_chat_template(HI, chat_template=LLAMA_TEMPLATE)[0] == 1


@pytest.mark.parametrize("messages", [[], ["Hi"], [{"role": "user"}], [{"content": "x"}]])
def test_malformed_messages_are_refused(messages: list) -> None:
    with pytest.raises(ChatTemplateError, match="messages"):
        llama_style().apply_chat_template(messages)


def test_a_template_that_refuses_is_an_invalid_request() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        llama_style(template).apply_chat_template(HI)


def test_add_generation_prompt_can_be_left_out() -> None:
    tokenizer = llama_style()
    assert tokenizer.render_chat_template(HI, add_generation_prompt=False) == "<s>[user] Hi"


# ---- ids and text ----------------------------------------------------------------------------


def test_byte_and_special_tokens() -> None:
    llama = llama_style()
    assert llama.special_token_ids == {0, 1, 2}
    assert llama.byte_token_ids == {3 + byte: byte for byte in range(256)}
    assert byte_level().byte_token_ids == {}
    assert byte_level().special_token_ids == {256}
    assert byte_level().vocab_size == 257


def test_decode_leaves_spaces_alone_and_skips_what_it_should() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("a . b 's"), 256, 10**6]
    assert tokenizer.decode(ids) == "a . b 's"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a . b 's<end>"
    assert tokenizer.id_to_token(10**6) is None


def test_truncation_and_padding_of_training_are_off() -> None:
    backend = byte_level()._hf.backend_tokenizer
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert len(tokenizer.encode("abcdef")) == 6 and len(tokenizer.encode("a")) == 1


# ---- loading ---------------------------------------------------------------------------------


def test_a_saved_folder_loads_as_it_was(tmp_path: Path) -> None:
    original = llama_style()
    original._hf.save_pretrained(tmp_path)
    loaded = Tokenizer.from_path(tmp_path)
    for text in ["Hi there", "testing, é 😀", ""]:
        assert loaded.encode(text) == original.encode(text)
        assert loaded.decode(loaded.encode(text)) == text
    assert loaded.apply_chat_template(HI) == original.apply_chat_template(HI)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (1, 2)


def test_what_is_no_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        Tokenizer.from_path(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="cannot load a tokenizer"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        Tokenizer.from_path(tmp_path / "model.gguf")


def test_importing_it_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import minibatch.tokenizer, minibatch.detokenizer, sys;"
        "sys.exit(bool({'torch', 'transformers', 'tokenizers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- SmolLM2, from its GGUF ------------------------------------------------------------------


class ReferenceBPE:
    """SmolLM2's tokenizer as its authors made it, in plain Python, from the GGUF's lists.

    Special tokens are cut out; then every digit (any character of Unicode's N categories) stands
    alone; then GPT-2's pattern; then merges by rank, within a piece.
    """

    PATTERN = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )

    def __init__(self, path: Path) -> None:
        metadata = GGUFFile(path).metadata
        tokens = metadata["tokenizer.ggml.tokens"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {
            tuple(merge.split(" ")): rank
            for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])
        }
        types = metadata["tokenizer.ggml.token_type"]
        self.special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
        self.spelling = gpt2_spelling()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in regex.split("(" + "|".join(map(regex.escape, self.special)) + ")", text):
            if part in self.special:
                ids.append(self.ids[part])
                continue
            for run in self.split_digits(part):
                for piece in self.PATTERN.findall(run):
                    ids += self.merge(piece)
        return ids

    @staticmethod
    def split_digits(text: str) -> list[str]:
        runs = [""]
        for character in text:
            if unicodedata.category(character).startswith("N"):
                runs += [character, ""]
            else:
                runs[-1] += character
        return [run for run in runs if run]

    def merge(self, piece: str) -> list[int]:
        parts = [self.spelling[byte] for byte in piece.encode()]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 10**9))
            if best not in self.ranks:
                break
            i, merged = 0, []
            while i < len(parts):
                width = 2 if tuple(parts[i : i + 2]) == best else 1
                merged.append("".join(parts[i : i + width]))
                i += width
            parts = merged
        return [self.ids[part] for part in parts if part in self.ids]


TEXTS = [
    "Hello world",
    "In 2024, 365 days; pi is 3.14159 and 1e10, x2 = 007",
    "a  12   34\t5\n6    7",
    "  two leading, two trailing  ",
    "\n\n\tline one\r\nline two \n   three\n\n\n",
    "def f(x):\n    if x >= 10:\n        return x**2  # square\n",
    "你好，世界！今天是2024年5月。",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 é ½ Ⅷ ٣",
    "don't we'll I'm they've 's 're",
    "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n",
    "",
    " ",
    "   ",
]


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    return resolve("smollm2-135m-q4_1")


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_path(smollm2_path)


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> ReferenceBPE:
    return ReferenceBPE(smollm2_path)


@pytest.mark.smollm2
@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_encodes_as_its_vocabulary_means(
    text: str, smollm2: Tokenizer, reference: ReferenceBPE
) -> None:
    ids = smollm2.encode(text)
    assert ids == reference.encode(text)
    assert smollm2.decode(ids, skip_special_tokens=False) == text


@pytest.mark.smollm2
@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("ab Zé你😀\u200d'st12½. ,!\n\t(_-"), max_size=40))
def test_smollm2_encodes_any_text_so(
    smollm2: Tokenizer, reference: ReferenceBPE, text: str
) -> None:
    ids = smollm2.encode(text)
    assert ids == reference.encode(text)
    assert smollm2.decode(ids) == text


@pytest.mark.smollm2
def test_smollm2_has_no_token_for_some_control_characters(smollm2: Tokenizer) -> None:
    """Its vocabulary lacks these bytes, and those that begin the unassigned planes 4 to 11."""
    missing = [c for c in map(chr, range(32)) if smollm2.decode(smollm2.encode(c)) != c]
    assert missing == ["\x04", "\x06", "\x13", "\x14", "\x16", "\x1d"]


@pytest.mark.smollm2
def test_smollm2_special_tokens_and_template(smollm2: Tokenizer) -> None:
    assert smollm2.encode("<|im_start|><|im_end|><|endoftext|>") == [1, 2, 0]
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert smollm2.special_token_ids == set(range(17))
    assert smollm2.vocab_size == 49152
    assert smollm2.render_chat_template(HI) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    own_system = [{"role": "system", "content": "Be brief."}, *HI]
    assert smollm2.render_chat_template(own_system, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )
    chat = smollm2.apply_chat_template(HI)
    assert chat[0] == 1 and chat[1] != 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is not in the habit of adding a BOS
        assert smollm2.encode(smollm2.render_chat_template(HI)) == chat
        assert smollm2.encode("<|im_start|><|im_start|>") == [1, 1]
