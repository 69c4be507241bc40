"""What the words of a shell script stand for, as far as it can be known without running it.

What is not known becomes a mark in the text that holds it.
"""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

MOST_WORDS = 5000
_MOST_CHARACTERS = 1 << 20
OPEN, CLOSE, DOLLAR = "\ue000", "\ue001", "\ue002"
MARK = re.compile(f"{OPEN}(\\d+){CLOSE}")
_VARIABLE = re.compile(
    r"\$\{(\w+|[@*#])(?:\[[@*]\])?(?:(:?[-=?+])([^${}]*))?\}|\$([A-Za-z_]\w*|[\d@*#])"
)
_EDITED = re.compile(
    r"\$\{(?:#(\w+)(?:\[[@*]\])?|(\w+)(?:\[(\d+|[@*])\])?(?:(##?|%%?|//?|\^\^?|,,?|:)([^{}$]*))?)\}"
)
_OTHERS = re.compile(r"\$\{[^{}]*\}|\$\([^()]*\)|`[^`]*`|<\([^()]*\)")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_COUNTED = re.compile(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)|(?:\+\+|--)([A-Za-z_]\w*)")
_SET = re.compile(r"([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)\s*(.+)", re.S)
_QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'|\\\$", re.S)
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}

_COMPARED: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class Mark(NamedTuple):
    text: str  # that stands in the script
    why: str  # it is not known
    variable: str = ""  # that nothing has set
    argument: bool = False  # one of the script's
    all: bool = False  # of the script's


class Values:
    """Variables of a script, and the words of its texts.

    Args:
        environment: variables that are set.
        arguments: of the script; None: not known.

    Attributes:
        arguments: of the script, or of the function that runs.
        line: that is followed now.
        mode: True if it runs, None if that is not known.
        marks: for what is not known, by their numbers.
    """

    def __init__(self, environment: Mapping[str, str], arguments: Sequence[str] | None) -> None:
        self.arguments = None if arguments is None else list(arguments)
        self.line = 0
        self.mode: bool | None = True
        self.marks: list[Mark] = []
        self.variables = {name: [value] for name, value in environment.items()}
        self._unset: set[int] = set()  # marks of variables that nothing has set

    def mark(self, text: str, why: str, variable: str = "", argument: bool = False) -> str:
        """A mark for ``text``."""
        why = f"line {self.line}: {self.shown(why)}"
        self.marks.append(Mark(self.shown(text), why, variable, argument))
        return f"{OPEN}{len(self.marks) - 1}{CLOSE}"

    def shown(self, text: str) -> str:
        """The text as the script has it."""
        return MARK.sub(lambda m: self.marks[int(m[1])].text, text).replace(DOLLAR, "$")

    def poison(self, name: str, where: str) -> None:
        """Hold that a variable is not known."""
        if re.fullmatch(r"[A-Za-z_]\w*", name):
            self.variables[name] = [self.mark(f"${name}", f"{name} is set in {where}")]

    def _value(self, match: re.Match[str]) -> str:
        name = match[1] or match[4]
        operator, default = match[2] or "", match[3] or ""
        if name.isdigit() or name in "@*#":
            known = self._argument(name)
        else:
            known = " ".join(self.variables[name]) if name in self.variables else None
        if "+" in operator and not (known and MARK.search(known)):
            return default if known or (known is not None and operator == "+") else ""
        if known is not None and not (operator.startswith(":") and not known):
            return known
        if "=" in operator:
            self.variables[name] = [default]
            if self.mode is None:
                self.poison(name, "a branch that cannot be decided here")
        if "-" in operator or "=" in operator:
            return default
        if name.isdigit() or name in "@*#":
            mark = self._unknown_argument(name)
            self.marks[-1] = self.marks[-1]._replace(all=name in "@*")
            return mark
        mark = self.mark(f"${name}", f"{name} is not set in the script", name)
        self._unset.add(len(self.marks) - 1)
        return mark

    def _unknown_argument(self, name: str) -> str:
        why = f"${name}: the arguments of the script are not known"
        return self.mark(f"${name}", why, argument=True)

    def is_all(self, word: str) -> bool:
        """True for a word that is ``$@`` of a script whose arguments are not known."""
        found = MARK.fullmatch(word)
        return bool(found and self.marks[int(found[1])].all)

    def handed(self, words: list[str]) -> list[str] | None:
        """The arguments of a function: those of the script where it gets ``"$@"`` alone."""
        if len(words) == 1 and self.is_all(words[0]):
            return None
        # Of several, which is which is not known.
        return [self._unknown_argument("@") if self.is_all(word) else word for word in words]

    def _argument(self, name: str) -> str | None:
        if name == "0":
            return "script"
        if self.arguments is None:
            return None
        if name == "#":
            return str(len(self.arguments))
        if name.isdigit():
            return self.arguments[int(name) - 1] if int(name) <= len(self.arguments) else ""
        return " ".join(map(shlex.quote, self.arguments))

    def expand(self, text: str) -> list[str]:
        """The words of a text, variables replaced, marks for what is not known."""
        text = _QUOTED.sub(lambda m: m[0] if m[0][0] == '"' else _hidden(m[0]), text)
        # ``"${A[@]}"`` is as many words as the array has.
        text = re.sub(r'"\$\{(\w+)\[@\]\}"', self._array, text)
        text = re.sub(r'"(\$@|\$\{@\})"', r"\1", text)
        text = re.sub(r"\$\(pwd\)|`pwd`", "${PWD}", text)
        before = ""
        while text != before:
            before, text = text, _VARIABLE.sub(self._value, text)
            text = _ARITHMETIC.sub(self._arithmetic, text)
            if text == before:
                text = _EDITED.sub(self._edited, text)
            if text == before:
                text = _OTHERS.sub(lambda m: self.mark(m[0], f"{m[0]} is not evaluated"), text)
            if len(text) > _MOST_CHARACTERS:
                raise ValueError(f"a command of more than {_MOST_CHARACTERS} characters")
        try:
            words = shlex.split(text)
        except ValueError:
            words = text.split()
        if len(words) > MOST_WORDS:
            raise ValueError(f"a command of more than {MOST_WORDS} words")
        return words

    def _array(self, match: re.Match[str]) -> str:
        if match[1] not in self.variables:
            return match[0][1:-1]
        return " ".join(map(shlex.quote, self.variables[match[1]]))

    def _edited(self, match: re.Match[str]) -> str:
        """``${#X}``, ``${A[1]}``, ``${X%.json}`` and the like, where it is known."""
        length, name, index, operator, operand = match.groups()
        known = self.variables.get(length or name)
        if known is None or MARK.search(" ".join(known)):
            return match[0]
        if length:
            return str(len(known) if match[0].endswith("]}") else len(known[0] if known else ""))
        if index is not None and index not in "@*":
            known = known[int(index) : int(index) + 1]
        if operator == ":":
            found = re.fullmatch(r"\s*(\d+)(?::\s*(\d+))?\s*", operand)
            if not found:
                return match[0]
            first = int(found[1])
            part = slice(first, None if found[2] is None else first + int(found[2]))
            if index is not None and index in "@*":
                return " ".join(known[part])
            return " ".join(known)[part]
        edited = [_edit(word, operator or "", operand or "") for word in known]
        return " ".join(edited)

    def _arithmetic(self, match: re.Match[str]) -> str:
        def known(name: re.Match[str]) -> str:
            return " ".join(self.variables.get(name[0], [name[0]]))

        text = re.sub(r"[A-Za-z_]\w*", known, match[1])
        try:
            return str(_number(ast.parse(text.strip(), mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
            marks = [self.marks[int(number)] for number in MARK.findall(text)]
            if not marks:
                return self.mark(match[0], f"{match[0]} is not evaluated")
            self.marks.append(marks[0]._replace(text=self.shown(match[0])))
            return f"{OPEN}{len(self.marks) - 1}{CLOSE}"

    def count(self, text: str, mode: bool | None) -> bool | None:
        """Follow ``((...))`` or ``let``; true where its value is not 0."""
        inner = text[2:].removesuffix("))") if text.startswith("((") else text[4:]
        found = _SET.fullmatch(inner.strip().strip("'\""))
        changed = [before or after for before, after in _COUNTED.findall(text)]
        if changed and (found is None or len(changed) > 1 or mode is not True):
            for name in changed:
                self.poison(name, "arithmetic")
            return None
        value = inner if found is None else found[3]
        if found is not None and found[2]:
            value = f"{found[1]} {found[2]} ({value})"
        words = self.expand(f"$(({value}))")
        known = len(words) == 1 and re.fullmatch(r"-?\d+", words[0]) is not None
        if found is not None:
            self.variables[found[1]] = words
        return words != ["0"] if known else None

    def matches(self, word: str, patterns: str) -> bool | None:
        """Does a ``case`` take the branch of these patterns?"""
        given = [one.strip().strip("'\"") for one in patterns.split("|")]
        if "*" in given:
            return True
        if MARK.search(word):
            return None
        return any(fnmatch.fnmatchcase(word, one) for one in given)

    def test(self, text: str) -> bool | None:
        """The value of ``[ ... ]``; None: not known."""
        inner = re.sub(r"^(?:\[\[?|test)\s+|\s*\]\]?$", "", text)
        if re.search(r"\s(?:&&|\|\||-a|-o)\s", inner):
            parts = re.split(r"\s(&&|\|\||-a|-o)\s", inner)
            value = self.test(f"[ {parts[0]} ]")
            for operator, part in zip(parts[1::2], parts[2::2], strict=False):
                other = self.test(f"[ {part} ]")
                if operator in ("&&", "-a"):
                    value = both(value, other)
                else:
                    value = True if value or other else None if None in (value, other) else False
            return value
        words = self.expand(inner)
        if words[:1] == ["!"]:
            value = self.test(f"[ {inner.lstrip()[1:].strip()} ]")
            return None if value is None else not value
        unset = re.match(r"(-z|-n)\s+|(?=\S+$)", inner)
        if unset and len(words) <= 2:
            operand = words[-1] if words and words[-1] not in ("-z", "-n") else ""
            marks = [int(number) for number in MARK.findall(operand)]
            if any(mark not in self._unset for mark in marks):
                return None
            return (not MARK.sub("", operand)) is (unset[1] == "-z")
        if len(words) != 3 or MARK.search(" ".join(words)):
            return None
        return _compare(*words)


def _edit(word: str, operator: str, operand: str) -> str:
    """A word as an operator of ``${X...}`` changes it."""
    if operator[:1] in ("#", "%"):
        sizes = range(len(word) + 1)
        for size in sizes if len(operator) == 1 else reversed(sizes):
            start = operator[0] == "#"
            part = word[:size] if start else word[len(word) - size :]
            if fnmatch.fnmatchcase(part, operand):
                return word[size:] if start else word[: len(word) - size]
    elif operator[:1] == "/":
        old, _, new = operand.partition("/")
        pattern = fnmatch.translate(old).replace(r"\Z", "")
        return re.sub(pattern, lambda _: new, word, count=operator == "/") if old else word
    elif operator[:1] in ("^", ","):
        change = str.upper if operator[0] == "^" else str.lower
        return change(word) if len(operator) == 2 else change(word[:1]) + word[1:]
    return word


def both(a: bool | None, b: bool | None) -> bool | None:
    """And; None: not known."""
    if a is False or b is False:
        return False
    return None if a is None or b is None else True


def _hidden(text: str) -> str:
    return text.replace("$", DOLLAR) if text[0] == "'" else DOLLAR


def is_test(text: str) -> bool:
    return bool(re.match(r"(\[\[?|test|let)\s|\(\(", text))


def _compare(a: str, operator: str, b: str) -> bool | None:
    if operator in ("=", "=="):
        return fnmatch.fnmatchcase(a, b)
    if operator == "=~" and not re.search(r"[()\\]", b):  # which may take for ever
        with contextlib.suppress(re.error):
            return re.search(b, a) is not None
    if operator == "!=":
        return not fnmatch.fnmatchcase(a, b)
    signs = {"-eq": (0,), "-ne": (-1, 1), "-lt": (-1,), "-le": (-1, 0), "-gt": (1,), "-ge": (0, 1)}
    if operator in signs and re.fullmatch(r"-?\d+", a) and re.fullmatch(r"-?\d+", b):
        return (int(a) > int(b)) - (int(a) < int(b)) in signs[operator]
    return None


def _number(node: ast.expr) -> int:
    """The value of whole numbers with + - * / % or one comparison between them."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        a, b = _number(node.left), _number(node.right)
        # The shell rounds to zero, Python down.
        if type(node.op) in (ast.Add, ast.Sub, ast.Mult) or (a >= 0 and b > 0):
            return _OPERATORS[type(node.op)](a, b)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        return int(_COMPARED[type(node.ops[0])](_number(node.left), _number(node.comparators[0])))
    raise ValueError("other arithmetic")
