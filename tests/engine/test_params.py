import math
import pickle

import pytest

from dejavu import InputError, SamplingParams


def test_default_is_greedy_without_any_processing() -> None:
    params = SamplingParams()
    assert params.greedy
    assert params.max_tokens is None
    assert params.stop_strings == ()
    assert params.logit_bias is None


def test_none_means_the_default() -> None:
    names = SamplingParams.__dataclass_fields__
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "warm"),
        ("top_k", -2),
        ("top_k", 2.0),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 5e-324),
        ("repetition_penalty", 101),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: 101}),
        ("logit_bias", [3]),
        ("seed", 2**64),
        ("seed", 1.0),
        ("stop", 7),
        ("stop", ["a", 7]),
        ("stop_token_ids", 7),
        ("stop_token_ids", ["7"]),
        ("stop_token_ids", [-7]),
        ("ignore_eos", 1),
    ],
)
def test_bad_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, ()),
        ("x", ("x",)),
        ("", ()),
        ([], ()),
        (["a", "", "b", "a"], ("a", "b")),
        (list("vwxyz"), tuple("vwxyz")),
    ],
)
def test_stop_forms(given: object, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop_strings == kept  # type: ignore[arg-type]


def test_logit_bias_forms() -> None:
    assert SamplingParams(logit_bias={}).logit_bias is None
    json_like = SamplingParams(logit_bias={"5": 100})  # type: ignore[dict-item]
    assert json_like == SamplingParams(logit_bias={5: 100.0})


def test_is_a_value() -> None:
    given = {7: 1.0}
    params = SamplingParams(temperature=1, top_k=-1, stop=["x"], logit_bias=given)
    given[8] = 1.0
    assert params.logit_bias == {7: 1.0}, "later changes of the argument do not get in"
    assert (params.temperature, params.top_k) == (1.0, 0)
    assert pickle.loads(pickle.dumps(params)) == params
    assert len({params, SamplingParams(temperature=1, stop="x", logit_bias={7: 1})}) == 1
    with pytest.raises(AttributeError):
        params.temperature = 2.0  # type: ignore[misc]
