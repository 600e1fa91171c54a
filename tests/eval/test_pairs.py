"""The border between what is given and what is scored."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from dejavu.errors import InputError
from dejavu.eval.pairs import Pair, PairEncoder, cut, rolling

from .conftest import TEXT
from .tiny import small_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return small_tokenizer(TEXT)


@pytest.fixture(scope="module")
def encoder(tokenizer: PreTrainedTokenizerBase) -> PairEncoder:
    return PairEncoder(tokenizer)


@pytest.mark.parametrize(
    ("context", "continuation", "scored"),
    [
        ("the old", " king", " king"),
        ("the old ", "king", " king"),
        ("the old \n ", "king", " \n king"),
        ("", "the old", "the old"),
        (" ", "the old", " the old"),
        ("x", "", ""),
    ],
)
def test_spaces_go_to_the_continuation(
    encoder: PairEncoder, context: str, continuation: str, scored: str
) -> None:
    pair = encoder.pair(context, continuation)
    decode = encoder.tokenizer.decode
    assert decode(pair.continuation) == scored
    assert decode(pair.context, skip_special_tokens=True) == context.rstrip()
    assert pair.context[0] == 0, "the tokenizer begins every text with <s>"
    assert pair.fed == len(pair.context) + max(len(pair.continuation) - 1, 0)


def test_a_token_over_the_border_is_scored_alone(encoder: PairEncoder) -> None:
    """ "an|swer" is one token of "answer", so the cut at the context's length leaves nothing."""
    whole, begin = encoder.encode(" answer"), encoder.encode(" an")
    assert len(whole) == len(begin), "the premise"
    pair = encoder.pair(" an", "swer")
    assert pair.context == tuple(begin)
    assert encoder.tokenizer.decode(pair.continuation) == "swer"
    assert pair.continuation[0] != 0, "alone, but without a start token"


def test_an_empty_context_is_one_token(encoder: PairEncoder) -> None:
    assert encoder.pair("", "the").context == (0,)
    assert encoder.pair("", "<s>the").context == (0,)
    assert encoder.pair("", "<s>the").continuation == encoder.pair("", "the").continuation
    assert encoder.pair("<s>the", " old").context == encoder.pair("the", " old").context


def test_start_tokens_on_request(tokenizer: PreTrainedTokenizerBase) -> None:
    without = PairEncoder(tokenizer, add_special_tokens=False)
    assert (
        without.pair("the", " old").context
        == PairEncoder(tokenizer).pair("the", " old").context[1:]
    )
    tokenizer = small_tokenizer(TEXT)
    tokenizer.bos_token = None
    assert PairEncoder(tokenizer).prefix == tokenizer.eos_token_id
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="neither a start nor an end token"):
        PairEncoder(tokenizer)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 9, 23])
@pytest.mark.parametrize("window", [1, 3, 4, 30])
def test_rolling_scores_every_token_once(length: int, window: int) -> None:
    """The harness's own windows, if it is here; its rule in any case."""
    ids = list(range(100, 100 + length))
    pairs = list(rolling(ids, 7, window))
    assert [i for pair in pairs for i in pair.continuation] == ids
    text = [7, *ids]
    place = 0
    for pair in pairs:
        place += len(pair.continuation)
        assert pair.fed <= window
        read = pair.context + pair.continuation
        assert list(read) == text[place + 1 - len(read) : place + 1], "a stretch of the text"
    utils = pytest.importorskip("lm_eval.utils")
    theirs = [
        Pair(*map(tuple, utils.make_disjoint_window(each)))
        for each in utils.get_rolling_token_windows(ids, 7, window, 1)
    ]
    assert pairs == theirs


def test_cut_moves_the_border() -> None:
    pair = Pair(tuple(range(30)), (50, 51, 52, 53))
    assert cut(pair, 16) == Pair(tuple(range(17, 30)), (50, 51, 52, 53))
    assert cut(pair, 33) == pair
    assert cut(pair, 4) == Pair((29,), (50, 51, 52, 53))
    assert cut(pair, 3) is None
