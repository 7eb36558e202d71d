"""Streamed text: the deltas joined are the decoded text, and nothing shown is taken back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import byte_level, llama_style

from minibatch.detokenizer import CONTEXT_TOKENS, IncrementalDetokenizer, TextDecoder
from minibatch.errors import InvariantError
from minibatch.model.hub import resolve
from minibatch.tokenizer import Tokenizer

LLAMA = llama_style()
# Beside the 256 bytes: a word, pieces of characters, and a token that begins and ends inside one.
BYTES = byte_level([b" word", "你好".encode(), b"\xbd\xa0\xe4", b"\xf0\x9f", b"x\xe4"])


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_path(resolve("smollm2-135m-q4_1"))


FAMILIES = pytest.mark.parametrize("tokenizer", [LLAMA, BYTES], ids=["byte-fallback", "byte-level"])


def stream(
    tokenizer: TextDecoder, ids: Sequence[int], prompt: Sequence[int] = (), **knobs: bool
) -> list[str]:
    """One delta a token, and one for the end."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **knobs)
    deltas = []
    for token_id in ids:
        assert detokenizer.append(token_id) is None
        deltas.append(detokenizer.take_delta())
        assert detokenizer.text == "".join(deltas)
    detokenizer.finish()
    assert detokenizer.finished and detokenizer.stop_string is None
    return [*deltas, detokenizer.take_delta()]


def continuation(
    tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), skip: bool = True
) -> str:
    """The definition: what decoding everything has that decoding the prompt has not."""
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    return whole[len(tokenizer.decode(prompt, skip_special_tokens=skip)) :]


class Words:
    """A tokenizer whose tokens are given strings; counts the ids that it has decoded."""

    def __init__(self, *words: str, special: Sequence[int] = ()) -> None:
        self.words = words
        self.special_token_ids = frozenset(special)
        self.byte_token_ids: dict[int, int] = {}
        self.num_decoded = 0

    def id_to_token(self, token_id: int) -> str | None:
        return self.words[token_id] if token_id < len(self.words) else None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(token_ids)
        return "".join(self.words[i] for i in token_ids)


def run(
    words: Sequence[str], stop: Sequence[str], include: bool = False, min_tokens: int = 0
) -> tuple[list[str], IncrementalDetokenizer]:
    """Tokens 'a', 'b', ... with stop strings: the deltas until it ends."""
    detokenizer = IncrementalDetokenizer(
        Words(*words), stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    deltas = []
    for token_id in range(len(words)):
        hit = detokenizer.append(token_id)
        assert hit == detokenizer.stop_string
        deltas.append(detokenizer.take_delta())
        if hit is not None:
            assert detokenizer.finished
            break
    detokenizer.finish()
    return [*deltas, detokenizer.take_delta()], detokenizer


# ---- text from tokens ------------------------------------------------------------------------


def llama_ids(*tokens: str | int) -> list[int]:
    """Tokens by spelling, bytes by value."""
    by_token = {LLAMA.id_to_token(i): i for i in range(LLAMA.vocab_size)}
    return [3 + token if isinstance(token, int) else by_token[token] for token in tokens]


SIX_BYTES = list("é😀".encode())


def test_word_starts_survive() -> None:
    ids = llama_ids("▁I", "▁am", "▁testing")
    assert stream(LLAMA, ids) == ["I", " am", " testing", ""]
    assert stream(LLAMA, ids, prompt=LLAMA.encode("Hi")) == [" I", " am", " testing", ""]


def test_byte_fallback_characters_come_whole() -> None:
    ids = llama_ids("▁Hi", "▁there", *SIX_BYTES, "!")
    deltas = stream(LLAMA, ids)
    assert deltas == ["Hi", " there", *[""] * 6, "é😀!", ""]
    assert stream(LLAMA, ids[:-1])[-1] == "é😀"


def test_cut_by_max_tokens_after_byte_three_of_six() -> None:
    ids = llama_ids("▁Hi", "▁there", *SIX_BYTES[:3])
    assert "".join(stream(LLAMA, ids)) == LLAMA.decode(ids) == "Hi there" + "\ufffd" * 3
    ids = [*b"Hi there", *SIX_BYTES[:3]]
    deltas = stream(BYTES, ids)
    assert deltas[-3:] == ["é", "", "\ufffd"]
    assert "".join(deltas) == BYTES.decode(ids)


CHINESE_AND_EMOJI = "你好，世界。龘龘 👩‍👩‍👧‍👦🏳️‍🌈 café ½ end."


@FAMILIES
def test_chinese_and_emoji_stream_without_replacement_marks(tokenizer: Tokenizer) -> None:
    prompt, ids = tokenizer.encode("Hi"), tokenizer.encode(CHINESE_AND_EMOJI)
    deltas = stream(tokenizer, ids, prompt)
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) == continuation(tokenizer, ids, prompt)
    assert "".join(deltas).strip() == CHINESE_AND_EMOJI


def test_a_replacement_mark_that_was_meant_is_shown() -> None:
    deltas = stream(BYTES, BYTES.encode("a\ufffdb\ufffd"))
    assert "".join(deltas) == "a\ufffdb\ufffd"
    assert deltas[-1] == "\ufffd"  # held to the end: it might have been half a character


def test_characters_come_although_no_token_ends_with_one() -> None:
    straddling = 256 + 2  # BD A0 E4: the end of one 你 and the beginning of the next
    ids = [0xE4] + [straddling] * 50 + [0xBD, 0xA0]
    deltas = stream(BYTES, ids)
    assert deltas[1:51] == ["你"] * 50
    assert "".join(deltas) == "你" * 51


def test_special_and_unknown_tokens() -> None:
    ids = [*b"ab", 256 + 5, *b"c", 10**6, *b"d"]
    assert "".join(stream(BYTES, ids)) == "abcd"
    assert "".join(stream(BYTES, ids, skip_special_tokens=False)) == "ab<end>cd"
    # Hidden tokens are no context: the space of a word after many of them is kept.
    ids = llama_ids("▁Hi", *["<s>"] * 20, "▁there") + [10**6] * 20 + llama_ids("▁am")
    assert "".join(stream(LLAMA, ids)) == "Hi there am"


def test_the_prompts_end_is_no_output() -> None:
    assert stream(Words("a\ufffd", "", "x"), [1, 2], prompt=[0]) == ["", "x", ""]
    # One run of bytes through the end of the prompt, longer than the context.
    prompt, ids = LLAMA.encode("😀😀"), llama_ids(*"龘".encode(), "!")
    assert "".join(stream(LLAMA, ids, prompt)) == "龘!"


prompts = st.sampled_from(["", "Hi", "The end", "龘", "a 😀", "testing ", "你好"])


@FAMILIES
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_deltas_joined_are_the_decoded_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    vocab = st.integers(0, tokenizer.vocab_size - 1).map(lambda i: [i])
    text = st.text(max_size=8).map(lambda t: tokenizer.encode(t)[-12:])
    ids = [*chain(*data.draw(st.lists(st.one_of(vocab, text), max_size=30)))]
    prompt = tokenizer.encode(data.draw(prompts))
    skip = data.draw(st.booleans())
    deltas = stream(tokenizer, ids, prompt, skip_special_tokens=skip)
    assert "".join(deltas) == continuation(tokenizer, ids, prompt, skip)


@pytest.mark.smollm2
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_smollm2_deltas_joined_are_the_decoded_text(
    smollm2: Tokenizer, data: st.DataObject
) -> None:
    text = st.text(max_size=10).map(smollm2.encode)
    vocab = st.integers(0, smollm2.vocab_size - 1).map(lambda i: [i])
    ids = [*chain(*data.draw(st.lists(st.one_of(vocab, text), max_size=30)))]
    prompt = smollm2.encode(data.draw(prompts))
    assert "".join(stream(smollm2, ids, prompt)) == continuation(smollm2, ids, prompt)


@pytest.mark.smollm2
def test_smollm2_streams_a_chat(smollm2: Tokenizer) -> None:
    prompt = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}])
    ids = [*smollm2.encode(CHINESE_AND_EMOJI), 2]
    deltas = stream(smollm2, ids, prompt)
    assert "".join(deltas) == CHINESE_AND_EMOJI
    assert "\ufffd" not in "".join(deltas)
    assert stream(smollm2, ids, prompt, skip_special_tokens=False)[-2] == "<|im_end|>"


# ---- cost ------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["ab ", "c"], ["\ufffd"], ["x\ufffd", "y"], ["", "z"]])
def test_the_cost_of_a_token_does_not_grow(words: list[str]) -> None:
    tokenizer = Words(*words)
    detokenizer = IncrementalDetokenizer(tokenizer, [0] * 10_000, stop=("c" * 20,))
    assert tokenizer.num_decoded <= CONTEXT_TOKENS
    for i in range(3000):
        tokenizer.num_decoded = 0
        detokenizer.append(i % len(words))
        assert tokenizer.num_decoded <= 3 * CONTEXT_TOKENS + 1


# ---- stop strings ----------------------------------------------------------------------------


def test_a_stop_string_inside_a_token() -> None:
    deltas, detokenizer = run(["ABC", "DEF", "G"], ["DE"])
    assert (deltas, detokenizer.stop_string) == (["ABC", "", ""], "DE")
    deltas, _ = run(["ABC", "DEF", "G"], ["DE"], include=True)
    assert "".join(deltas) == "ABCDE"


def test_a_stop_string_across_tokens() -> None:
    deltas, detokenizer = run(["a", "b", "c"], ["bc"])
    assert (deltas, detokenizer.stop_string) == (["a", "", "", ""], "bc")


def test_held_text_is_released() -> None:
    assert run(["b", "x"], ["bc"])[0] == ["", "bx", ""]
    assert run(["a", "b"], ["bc"])[0] == ["a", "", "b"]  # by the end
    assert run(["ab", "ab", "ac"], ["abac"])[0] == ["", "ab", "", ""]  # only what must be held


def test_the_stop_string_completed_first_wins() -> None:
    for stops in (["bcd", "c"], ["c", "bcd"]):
        deltas, detokenizer = run(["abcd"], stops)
        assert ("".join(deltas), detokenizer.stop_string) == ("ab", "c")
    deltas, detokenizer = run(["abcd"], ["cd", "bcd"])  # together: the longest
    assert ("".join(deltas), detokenizer.stop_string) == ("a", "bcd")


def test_min_tokens_lets_stop_strings_pass() -> None:
    words = ["ab", "ab", "a", "b", "ab"]
    for min_tokens, expected in [(0, ""), (1, "ab"), (2, "abab"), (3, "abab"), (4, "ababab")]:
        deltas, detokenizer = run(words, ["ab"], min_tokens=min_tokens)
        assert ("".join(deltas), detokenizer.stop_string) == (expected, "ab")
    deltas, detokenizer = run(words, ["ab"], min_tokens=5)
    assert ("".join(deltas), detokenizer.stop_string) == ("abababab", None)


def test_a_stop_string_inside_a_run_of_bytes_is_found_at_once() -> None:
    detokenizer = IncrementalDetokenizer(LLAMA, stop=("é",))
    ids = llama_ids("▁Hi", *"龘é".encode())
    assert [detokenizer.append(i) for i in ids] == [None] * 5 + ["é"]
    assert detokenizer.text == "Hi龘"
    detokenizer = IncrementalDetokenizer(LLAMA, stop=("é",))
    ids = llama_ids(0xE4, "▁Hi", *"é".encode())  # a broken run before
    assert [detokenizer.append(i) for i in ids] == [None] * 3 + ["é"]


def test_nothing_may_follow_the_end() -> None:
    _, detokenizer = run(["a"], ["a"])
    detokenizer.finish()
    assert detokenizer.take_delta() == ""
    with pytest.raises(InvariantError, match="has ended"):
        detokenizer.append(0)


letters = st.text("abc", max_size=4)


@settings(max_examples=500, deadline=None)
@given(
    words=st.lists(letters, max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_stop_strings_by_definition(
    words: list[str], stop: list[str], include: bool, min_tokens: int
) -> None:
    """Character by character: the first end of a stop string after ``min_tokens`` tokens."""
    text, unchecked = "".join(words), len("".join(words[:min_tokens]))
    expected, hit = text, None
    for end in range(unchecked + 1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            hit = max(complete, key=len)
            expected = text[: end if include else end - len(hit)]
            break
    deltas, detokenizer = run(words, stop, include, min_tokens)
    assert ("".join(deltas), detokenizer.stop_string) == (expected, hit)

    # Until the end all is shown but the longest beginning of a stop string.
    num_tokens = len(deltas) - 1 - (hit is not None)
    for i in range(num_tokens):
        so_far = "".join(words[: i + 1])
        held = max((n for s in stop for n in range(len(s)) if so_far.endswith(s[:n])), default=0)
        assert "".join(deltas[: i + 1]) == so_far[: len(so_far) - held]
