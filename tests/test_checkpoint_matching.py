"""Patterns of a config are matched against thousands of names: none of them may take for ever."""

import re

import pytest

from mxq.checkpoint.matching import Listing, compiled
from mxq.errors import MxqError


@pytest.mark.parametrize(
    "pattern",
    [
        *(r".*mtp\..*", r".*mlp.gate$", r"model\.layers\.\d+\.mlp\.(gate|up)_proj", r".*?(self_attn|mlp)\..*_proj$"),
        *(r"(?:model\.)?layers\.\d+\.mlp\.experts\..*", r"layers\.(?:[0-9]|[1-3][0-9])\.mlp.*", r"\(a*\)b*[*+?()]+x"),
    ],
)
def test_patterns_as_tools_write_them_are_taken(pattern: str) -> None:
    assert compiled(pattern, "x") == re.compile(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(.*)*(.*)*x",
        "(a|.)*(.|b)*Z",
        ".*" * 12 + "Z",
        "(a+)+$",
        "((a|b)c)+$",
        "([ab]+){30}$",
        "a?" * 30 + "a" * 30,
        "(?:(a)|aa)*$",
    ],
)
def test_patterns_that_could_be_matched_for_ever_are_refused(pattern: str) -> None:
    with pytest.raises(MxqError, match="could take for ever"):
        Listing([f"re:{pattern}"], "config.json")


@pytest.mark.parametrize(
    "pattern", ["(" * 3000 + ")" * 3000, "a{99999999999999999999}", "("], ids=["deep", "large", "open"]
)
def test_patterns_that_are_none(pattern: str) -> None:
    with pytest.raises(MxqError, match="is not a regular expression") as error:
        Listing([f"re:{pattern}"], "config.json")
    assert len(error.value.message) < 1000
