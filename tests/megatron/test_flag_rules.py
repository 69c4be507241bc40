"""What every flag of ours says of its value and of other flags, through both doors."""

from __future__ import annotations

import argparse
import re
import string
from collections.abc import Iterator

import pytest

from megatron_ext._input import attribute
from megatron_ext.integration.errors import ConfigError
from megatron_ext.integration.feature import Flag
from megatron_ext.integration.features import FEATURES
from megatron_ext.integration.flags import (
    FLAGS,
    add_arguments,
    in_options,
    option,
    parsed,
    require_rules,
    wanted,
)
from megatron_ext.integration.install import RULES as OF_COMMAND_LINES
from megatron_ext.integration.layout import RULES as OF_LAYOUTS
from megatron_ext.integration.library import RULES as OF_LIBRARIES
from megatron_ext.integration.rules import VERBS, Rule

BY_NAME = {flag.name: flag for flag in FLAGS}


def value_of(flag: Flag) -> str:
    """One that the flag takes, and that asks for something."""
    if flag.choices:
        return flag.choices[-1]
    if flag.least is not None:
        return str(flag.least + 1)
    return "2" if flag.kind in (int, float) else "some"


def words_of(flag: Flag, value: str | None = None) -> list[str]:
    return [flag.name] if flag.switch else [flag.name, value or value_of(flag)]


def with_needs(flag: Flag) -> list[str]:
    """The words of ``flag``, and of what it needs."""
    words = words_of(flag)
    if not flag.alone and flag.name != "--pp-schedule":
        words = ["--pp-schedule", "zb-h1", *words]
    if flag.needs is not None:
        name, values = next(iter(flag.needs.any_of.items()))
        words += words_of(BY_NAME[name], *values[:1])
    return words


def broken() -> Iterator[tuple[str, list[str], str]]:
    """(rule, a command line that does not keep it, a part of its sentence)."""
    for flag in FLAGS:
        whole = with_needs(flag)
        if flag.choices:
            wrong = [*whole, *words_of(flag, "odd")]
            yield f"{flag.name} one of", wrong, f"{flag.name} must be one of {flag.choices[0]}, "
        if flag.least is not None:
            less = [*whole, *words_of(flag, str(flag.least - 1))]
            yield f"{flag.name} least", less, f"{flag.name} must be {flag.least} or more, got "
        if whole[:1] == ["--pp-schedule"] and flag.name != "--pp-schedule":
            alone = f"{flag.name} needs --pp-schedule; add it or drop {flag.name}"
            yield f"{flag.name} schedule", words_of(flag), alone
        if flag.needs is not None:
            words = [w for w in whole if w not in flag.needs.any_of]
            given = words[: words.index(flag.name) + 1 + (not flag.switch)]
            text = f" needs {flag.needs.text}; add it, or drop {flag.name}"
            yield f"{flag.name} needs", given, text
            off = next((n for n in flag.needs.any_of if "off" in BY_NAME[n].choices), None)
            if off is not None:
                yield f"{flag.name} off", [*given, off, "off"], text
            if flag.needs.idle is not None:
                idle = [next(iter(flag.needs.any_of)), str(flag.needs.idle)]
                yield f"{flag.name} off", ["--pp-schedule", "zb-h1", *given, *idle], text
        if flag.excludes is not None:
            other = BY_NAME[flag.excludes[0]]
            yield f"{flag.name} excludes", [*whole, *words_of(other)], f" and {other.name} "


BROKEN = list(broken())


def test_every_kind_of_rule_is_there() -> None:
    kinds = {rule.split(" ", 1)[1] for rule, _, _ in BROKEN}
    assert kinds == {"one of", "least", "schedule", "needs", "off", "excludes"}


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_what_a_flag_needs_is_enough(flag: Flag) -> None:
    args = add_arguments(argparse.ArgumentParser()).parse_args(with_needs(flag))
    require_rules(args)  # type: ignore[arg-type]
    assert wanted(with_needs(flag))


@pytest.mark.parametrize(("words", "text"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_command_line_is_refused(words: list[str], text: str) -> None:
    args = add_arguments(argparse.ArgumentParser()).parse_args(words)
    with pytest.raises(ConfigError) as error:
        require_rules(args)  # type: ignore[arg-type]
    assert text in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("words", "text"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_library_is_refused_in_its_words(words: list[str], text: str) -> None:
    """Or told that a flag cannot be used there at all."""
    args = add_arguments(argparse.ArgumentParser()).parse_args(words)
    given = ((option(flag), flag.of(args)) for flag in FLAGS)  # type: ignore[arg-type]
    options = {name: value for name, value in given if value is not None}
    with pytest.raises(ConfigError) as error, in_options():
        require_rules(parsed(options), library=True)  # type: ignore[arg-type]
    said = str(error.value)
    assert "--" not in said.replace("--flags", "") or "cannot be used here" in said, said
    for flag in sorted(FLAGS, key=lambda flag: -len(flag.name)):
        text = text.replace(flag.name, option(flag))
    assert text in said or "cannot be used here" in said


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS if flag.not_in_library], ids=lambda flag: flag.name
)
def test_what_a_library_cannot_use(flag: Flag) -> None:
    words, value = with_needs(flag), ""
    if flag.not_in_library_as is not None:
        args = add_arguments(argparse.ArgumentParser()).parse_args(words)
        args.pp_profile_steps = 2
        require_rules(args, library=True)  # type: ignore[arg-type]
        value = f" {flag.not_in_library_as[0]}"
        words += words_of(flag, value.strip())
    args = add_arguments(argparse.ArgumentParser()).parse_args(words)
    with pytest.raises(ConfigError, match=f"^{flag.name}{value} cannot be used here: "):
        require_rules(args, library=True)  # type: ignore[arg-type]


def test_rules_name_flags_that_exist() -> None:
    for flag in FLAGS:
        names = list(flag.needs.any_of) if flag.needs is not None else []
        names += [flag.excludes[0]] if flag.excludes is not None else []
        for name in names:
            assert name in BY_NAME and attribute(name) == BY_NAME[name].attribute, flag.name


@pytest.mark.parametrize(
    "rule",
    [
        *{
            *OF_LAYOUTS,
            *OF_COMMAND_LINES,
            *OF_LIBRARIES,
            *(rule for f in FEATURES for rule in f.rules),
        }
    ],
    ids=lambda rule: rule.rule,
)
def test_rules_make_sentences_of_one_style(rule: Rule) -> None:
    """Subject, one verb, object, what was found or why, and what to do, with all facts in it."""
    verbs = [verb for verb in VERBS if f" {verb} " in rule.rule]
    assert len(verbs) == 1 and all(rule[:3])
    names = {name for _, name, *_ in string.Formatter().parse(rule.text) if name}
    rule.require(True)
    with pytest.raises(ConfigError) as error:
        rule.require(False, **{name: f"<{name}>" for name in names})
    text, joined = str(error.value), ": " if verbs == ["does not support"] else ", but "
    assert re.fullmatch(rf".+ {verbs[0]} .+{joined}.+; .+[^.]", text) and "{" not in text
    assert all(f"<{name}>" in text for name in names)
