"""`import dejavu` is cheap and silent, and offers what it says."""

import subprocess
import sys

import pytest

import dejavu
from dejavu import errors


def fresh(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_all_names_exist_and_every_error_is_among_them() -> None:
    for name in dejavu.__all__:
        assert getattr(dejavu, name) is not None
    assert set(errors.__all__) <= set(dejavu.__all__)
    assert set(dejavu.__all__) <= set(dir(dejavu))
    assert set(dejavu._HOMES) <= set(dejavu.__all__)
    assert sorted(set(dejavu.__all__)) == sorted(dejavu.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'LMM'"):
        dejavu.LMM  # noqa: B018
    assert not hasattr(dejavu, "transformers")


def test_import_is_light_and_silent() -> None:
    modules = (
        "import sys, dejavu; dejavu.SamplingParams; import dejavu.engine.scheduler;"
        "print(sorted({'torch', 'numpy', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert fresh(modules) == "[]\n"


def test_star_import_works() -> None:
    names: dict[str, object] = {}
    exec("from dejavu import *", names)
    assert set(dejavu.__all__) <= set(names)
