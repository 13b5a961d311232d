"""Dataclasses whose fields are command-line options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from ringdance.errors import LaunchError
from ringdance.submit.options import add_options, check_options, from_arguments, option, pairs


@dataclass(frozen=True)
class Cake:
    layers: int = option("of sponge", 2, minimum=1)
    weight_limit: int | None = option("in grams", type=int)
    icing: str = option("on top", "sugar", choices=("sugar", "chocolate"))
    size: str = option("such as 20cm", "", pattern=r"\d+cm", form="give centimetres, such as 20cm")
    vegan: bool = option("without eggs", False)
    notes: Sequence[str] = option("for the baker", list, "-n", "--note")
    fruits: Mapping[str, str] = option(
        "and their colours", dict, convert=lambda texts: pairs("--fruits", texts)
    )
    guests: Sequence[str] = option("who eat it", (), "GUEST", nargs="*")
    oven: str = "gas"


def parse(*words: str) -> Cake:
    parser = argparse.ArgumentParser()
    add_options(parser, Cake)
    return from_arguments(Cake, parser.parse_args(words), oven="electric")


def test_an_object_from_a_command_line() -> None:
    assert parse() == Cake(oven="electric")
    words = "--layers 3 --weight-limit 900 --vegan -n a --note b --fruits lime=green ann bob"
    assert parse(*words.split()) == Cake(
        layers=3, weight_limit=900, vegan=True, notes=["a", "b"], fruits={"lime": "green"},
        guests=["ann", "bob"], oven="electric",
    )  # fmt: skip


def test_the_help_has_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert "--layers N            of sponge (default: 2)" in text
    assert "such as 20cm\n" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "--layers 0: must be at least 1"),
        ({"icing": "salt"}, "--icing salt: must be one of sugar, chocolate"),
        ({"size": "big"}, "--size big: give centimetres"),
    ],
)
def test_values_are_checked_wherever_they_come_from(change: dict[str, object], message: str) -> None:
    check_options(Cake())
    with pytest.raises(LaunchError, match=message):
        check_options(Cake(**change))


def test_pairs() -> None:
    assert pairs("-x", ["a=1=2", "b="]) == {"a": "1=2", "b": ""}
    for text in ("a", "=1"):
        with pytest.raises(LaunchError, match="NAME=VALUE"):
            pairs("-x", [text])
