"""The training command in a shell or batch script, as far as it can be known without running it.

Assignments, arrays, functions, ``[ ... ]``, ``if``, ``case``, ``&&`` and ``||`` are followed. What
is not known becomes a mark in the text that holds it. A mark in what decides the run is an error;
one in a path, or in another value that is dropped anyway, is not. ``"$@"`` of a script whose
arguments nobody gave is none, as when it is started without.

bash itself is not asked, even restricted (``bash -r``) and without a PATH: it forks without end
where a script does, it has no word for an unknown value (an unset variable is an empty text, a file
that only the cluster has does not exist), and not every machine has one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .._megatron_flags import GPU, LAYOUT, OUTSIDE, PRECISION, REPLACED, kind_of
from .shell_text import (
    Statement,
    directives,
    is_script,
    slurm_variables,
    statements_of,
    without_documents,
    without_redirections,
)
from .shell_values import DOLLAR, MARK, Mark, Values, both, is_test

_DEEPEST = 20  # calls of functions
_LISTED = 3  # unknown values in an error
_WORD = (
    r"(?:\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
    r"|\$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|`[^`]*`|\$(?![({])|[^\s'\"\\$`])*"
)
_DECLARED = re.compile(r"^(?:export|local|declare|readonly|typeset)\s+(?:-\w+\s+)*")
_ASSIGNED = re.compile(rf"([A-Za-z_]\w*)(\+?)=(?:\((.*?)\)\s*$|({_WORD})(?:\s+|$))", re.S)
_FUNCTION = re.compile(r"(?:function\s+([\w-]+)\s*(?:\(\s*\))?|([\w-]+)\s*\(\s*\))\s*(\{.*)?", re.S)
_PATTERN = re.compile(r"\(?\s*([^()]*?)\s*\)\s*(.*)", re.S)
# Flags that one value follows which is dropped.
_ONE_VALUE = re.compile(
    r"--(?:save|load|split|[\w-]+-(?:path|dir|file|model|interval|iters|samples|name|project"
    r"|entity|exp|type|workers|step|format|pattern))$"
)
_DECIDING = ("--num-layers", "--micro-batch-size", "--global-batch-size")


class _Candidate(NamedTuple):
    line: int
    words: list[str]


class _Frame:
    """An ``if``, ``case`` or loop: which of its branches runs; None: not decided."""

    def __init__(self, kind: str, runs: bool | None, mode: bool | None = True) -> None:
        self.kind, self.runs, self.mode, self.word = kind, runs, mode, ""
        self.rest: bool | None = True  # no branch before this one was taken
        self.testing = kind in ("if", "while", "until")
        self.condition: bool | None = True
        self.pattern = kind == "case"

    def branch(self, condition: bool | None) -> None:
        self.mode = both(self.rest, condition)
        self.rest = both(self.rest, None if condition is None else not condition)


class _Ended(Exception):
    """The script, or with ``return`` its function, ends here."""


def words_of(
    text: str, environment: Mapping[str, str], arguments: Sequence[str] | None = None
) -> tuple[list[str], dict[str, int], tuple[str, ...]]:
    """The words of the command that runs a training script, the numbers of ``#SBATCH``, and what
    was assumed.

    Args:
        text: the script's.
        environment: variables that the script may use.
        arguments: the script's own; None: not known.

    Raises:
        ValueError: no command runs a training script, several do, or what decides the run is not
            known; with the line and what to do.
    """
    slurm = directives(text)
    script = _Script({**environment, **slurm_variables(slurm)}, arguments)
    with contextlib.suppress(_Ended):
        script.run(statements_of(without_documents(text)))
    words = script.command()
    return words, slurm, tuple(script.notes)


class _Script(Values):
    """Follows statements."""

    def __init__(self, environment: Mapping[str, str], arguments: Sequence[str] | None) -> None:
        super().__init__(environment, arguments)
        self._functions: dict[str, list[Statement]] = {}
        self._candidates: list[_Candidate] = []
        self._depth = 0
        self.notes: list[str] = []

    def run(self, statements: Sequence[Statement]) -> None:
        """Follow ``statements``."""
        frames: list[_Frame] = []
        status: bool | None = True  # of the statement before
        mode: bool | None
        at = 0
        while at < len(statements):
            statement = statements[at]
            text, self.line = statement.text, statement.line
            if (function := _FUNCTION.fullmatch(text)) and not text.startswith(("if ", "case ")):
                at = self._define(function, statements, at)
                continue
            at += 1
            runs: bool | None = True
            if statement.operator:
                runs = None if status is None else status is (statement.operator == "&&")
            text = self._control(text, runs, frames)
            if not text:
                continue
            mode = runs
            for frame in frames:
                mode = both(mode, both(frame.runs, True if frame.testing else frame.mode))
            if runs is False:
                continue
            status = self._statement(text, mode)
            if runs is None:
                status = None
            if frames and frames[-1].testing:
                frames[-1].condition = status if frames[-1].kind != "until" else None
            elif status is None and runs and not is_test(text.lstrip("! ")):
                # A command is taken to succeed; ``||`` says what to do if it may not.
                status = None if statements[at : at + 1] and statements[at][0] == "||" else True

    def _control(self, text: str, runs: bool | None, frames: list[_Frame]) -> str:
        """Follow the keywords that ``text`` begins with; returns what is left of it."""
        while text:
            top = frames[-1] if frames else _Frame("", True)
            if top.pattern and not text.startswith("esac"):
                if not (found := _PATTERN.fullmatch(text)):
                    return ""
                top.pattern = False
                top.branch(self.matches(top.word, found[1]))
                text = found[2]
                continue
            word, rest = [*text.split(None, 1), ""][:2]
            if word in ("if", "while", "until", "{"):
                frames.append(_Frame(word, runs))
            elif word in ("for", "select"):
                frames.append(_Frame(word, runs, None))
                self.poison(rest.split()[0] if rest else "", "a loop")
                return ""
            elif word == "case":
                frames.append(_Frame(word, runs))
                subject, _, rest = re.sub(r"\sin(\s|$)", "\0", rest, count=1).partition("\0")
                frames[-1].word = " ".join(self.expand(subject))
            elif word == "elif":
                top.testing = True
            elif word in ("then", "do"):
                if top.testing:
                    loop = top.kind != "if" and top.condition
                    top.branch(None if loop else top.condition)
                top.testing = False
            elif word == "else":
                top.mode = top.rest
            elif word == ";;":
                top.pattern = True
                return ""
            elif word in ("fi", "done", "esac", "}"):
                frames[-1:] = []
                return ""
            else:
                return text
            text = rest.strip()
        return ""

    def _define(self, found: re.Match[str], statements: Sequence[Statement], at: int) -> int:
        """Keep a function's statements; returns where they end."""
        body: list[Statement] = []
        depth = 0
        first = found[3] or ""
        if first:
            depth = 1
            if first[1:].strip():
                body.append(Statement("", first[1:].strip(), statements[at].line))
        at += 1
        while at < len(statements):
            one = statements[at]
            at += 1
            text = one.text
            depth += text.startswith("{") + (text.endswith("{") and len(text) > 1)
            depth -= text.startswith("}")
            if depth <= 0:
                break
            body.append(one)
        self._functions[found[1] or found[2]] = body
        return at

    def _statement(self, text: str, mode: bool | None) -> bool | None:
        """Follow a statement that runs (True), does not, or may; returns its status."""
        self.mode = mode
        if mode is False:
            return None
        if text.startswith("(") and text.endswith(")") and not text.startswith("(("):
            self._nested(statements_of(text[1:-1]), mode)
            return None
        if text.startswith(("((", "let ")):
            return self.count(text, mode)
        if text.startswith("! "):
            status = self._statement(text[2:].strip(), mode)
            return None if status is None else not status
        if is_test(text):
            return self.test(text)
        head = _DECLARED.match(text)
        rest, assignments = text[head.end() if head else 0 :], []
        declared, whole = bool(head), bool(head and re.search(r"\s-\w*i", head[0]))
        while found := _ASSIGNED.match(rest):
            assignments.append(found)
            rest = rest[found.end() :]
        alone = declared or not rest.strip()
        if assignments and (alone or rest.split()[0] in self._functions):
            for found in assignments:
                if whole:
                    self.poison(found[1], "arithmetic")
                else:
                    self._assign(found, mode)
            if alone:
                return True
        return self._run_command(rest, mode)

    def _run_command(self, text: str, mode: bool | None) -> bool | None:
        words = self.expand(text)
        for _ in range(3):  # as in ``bash -c "python train.py ..."``
            words = [
                one
                for word in words
                for one in (
                    self.expand(word.replace(DOLLAR, "$"))
                    if re.search(r"\.py\s|pretrain_gpt\s", word)
                    else [word]
                )
            ]
        name = words[0] if words else ""
        if name in ("exit", "return"):
            # A job that fails is not one to prove: what follows is.
            if mode is True and words[1:2] in ([], ["0"]):
                raise _Ended(name)
        elif name in self._functions:
            held, self.arguments = self.arguments, self.handed(words[1:])
            self._nested(self._functions[name], mode)
            self.arguments = held
        elif name == "eval":
            self._nested(statements_of(" ".join(words[1:]).replace(DOLLAR, "$")), mode)
        elif name in ("unset", "read", "mapfile", "readarray", "shift", "set") or (
            name == "printf" and words[1:2] == ["-v"]
        ):
            self._changed(name, words[1:], mode)
        elif name not in ("echo", "printf"):
            words = without_redirections(words)
            if any(is_script(word) for word in words):
                self._candidates.append(_Candidate(self.line, words))
        return True if name in ("true", ":") else False if name == "false" else None

    def _changed(self, name: str, words: list[str], mode: bool | None) -> None:
        """Follow a command of the shell that changes variables."""
        if name == "shift":
            number = int(words[0]) if words and words[0].isdigit() else 1
            known = self.arguments is not None and mode is True
            self.arguments = (self.arguments or [])[number:] if known else None
        elif name == "set":
            if "--" in words:
                given = self.handed(words[words.index("--") + 1 :])
                self.arguments = given if mode is True else None
        else:
            for one in words:
                if name == "unset" and mode is True:
                    self.variables.pop(one, None)
                elif re.fullmatch(r"\w+", one):
                    self.poison(one, f"`{name}`")

    def _nested(self, statements: Sequence[Statement], mode: bool | None) -> None:
        if self._depth >= _DEEPEST:
            raise ValueError(f"functions that call each other more than {_DEEPEST} deep")
        line, self._depth = self.line, self._depth + 1
        undecided = Statement("", "for _ in", line), Statement("", "done", line)
        try:
            self.run([undecided[0], *statements, undecided[1]] if mode is None else statements)
        except _Ended as end:
            if end.args[0] == "exit":
                raise
        finally:
            self.line, self._depth = line, self._depth - 1

    def _assign(self, found: re.Match[str], mode: bool | None) -> None:
        name, more, array, word = found.groups()
        own = self.expand((word if array is None else array).replace("\n", " "))
        if mode is None:
            new, old = " ".join(own).split(), " ".join(self.variables.get(name, [])).split()
            if not more and old and new[: len(old)] == old:
                new, more = new[len(old) :], "+"
            if not more or _decides(new):
                self.poison(name, "a branch that cannot be decided here")
            return
        own = own if array is not None else [" ".join(own)]
        if more and array is None and name in self.variables:
            own = [" ".join(self.variables[name]) + own[0]]
        elif more:
            own = self.variables.get(name, []) + own
        self.variables[name] = own

    def command(self) -> list[str]:
        """The words of the one training command."""
        found = self._candidates
        if not found:
            raise ValueError("no command in it runs a training script (a word that ends in .py)")
        training = [one for one in found if any(map(_is_of_training, one.words))]
        found = training or found[-1:]
        commands = [one.words for one in found]
        starts = [next(i for i, w in enumerate(words) if is_script(w)) for words in commands]
        flags = [words[at + 1 :] for words, at in zip(commands, starts, strict=True)]
        for one in flags:
            if any(map(self.is_all, one)):
                one[:] = [word for word in one if not self.is_all(word)]
                self.notes = ["no --from-args 'SCRIPT ARGUMENTS': \"$@\" is none"]
        if any(one != flags[0] for one in flags):
            lines = " and ".join(str(one.line) for one in found)
            raise ValueError(
                f"the commands on lines {lines} train: give the command line of one in place "
                "of the file"
            )
        if unknown := [self.marks[n] for n in _deciding_marks(flags[0])]:
            why = list(dict.fromkeys(mark.why for mark in unknown))
            more = f"; and {len(why) - _LISTED} more" * (len(why) > _LISTED)
            raise ValueError(
                f"{'; '.join(why[:_LISTED])}{more}. The command on line {found[0].line} needs it: "
                f"{_fixes(unknown)}give the command line itself in place of the file"
            )
        return [self.shown(word) for word in [*commands[0][: starts[0] + 1], *flags[0]]]


def _fixes(marks: Sequence[Mark]) -> str:
    """What to do about unknown values, but for giving the command line itself."""
    names = list(dict.fromkeys(mark.variable for mark in marks if mark.variable))
    fixes = ""
    if names:
        fixes = f"set {', '.join(names)} in the environment ({names[0]}=... megatron-ext ...), or "
    if any(mark.argument for mark in marks):
        fixes += "give the script's arguments (--from-args 'SCRIPT ARGUMENTS'), or "
    return fixes


def _name(word: str) -> str:
    return word.partition("=")[0]


def _is_of_training(word: str) -> bool:
    name = _name(word)
    return name in _DECIDING or kind_of(name) == LAYOUT


def _spare(name: str) -> bool:
    """True for a flag that does not decide what is proven."""
    return name in REPLACED or kind_of(name) in (OUTSIDE, GPU, PRECISION)


def _decides(words: Sequence[str]) -> bool:
    """False where all flags are such that are dropped, with their values."""
    flags = [_name(word) for word in words if word.startswith("--")]
    return not flags or not all(map(_spare, flags)) or bool(_deciding_marks(words))


def _deciding_marks(words: Sequence[str]) -> list[int]:
    """The unknown values among flags that decide the run."""
    found = []
    flag, values = "", 0
    for word in words:
        if word.startswith("--"):
            flag, values = _name(word), 0
        else:
            values += 1
        marks = [int(number) for number in MARK.findall(word)]
        # More than a mark: a path, say. A mark alone may stand for several flags, so it has to be
        # the one value of its flag.
        part = bool(MARK.sub("", word))
        one = values == 1 and (flag in REPLACED or bool(_ONE_VALUE.match(flag)))
        if marks and not (_spare(flag) and (part or one)):
            found += marks
    return found
