"""Makes other inputs of one: values, structure and bytes, from what has broken readers before."""

from __future__ import annotations

import json
import random
from typing import Any

# Each has a history: rounding, overflow, memory, recursion, dates and types that compare equal.
NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 2**31, 2**63, 2**64, 10**9, 10**12, 10**30, 10**308, 10**400),
    *(0.0, -0.0, 0.5, 1e-9, 1e-300, 5e-324, 1e300, 1.7e308, 2.0, 1.5),
    *(float("inf"), float("-inf"), float("nan"), True, False, None),
)
TEXTS: tuple[str, ...] = (
    *(
        "",
        " ",
        "0",
        "1",
        "-1",
        "1e9",
        "1e999999999",
        "1e-999999999",
        "1e9_999_999",
        "1/0",
        "1/3",
        "0x10",
        "1_0",
    ),
    *("nan", "inf", "-inf", "NaN", "None", "true", "9" * 30, "9" * 5000, "1" + "0" * 400),
    *("F0.0", "F0.1", "BW0.0", "B1.1", "W0.0", "SEND_F0.0", "RECV_F1.0", "OFFLOAD0.0", "RELOAD0.1"),
    *("F999999999999.0", "F0.99999999999999999999", "F-1.0", "f0.0", "F0.0\n", "F٣.1", "ＢＷ0.0"),
    *("\x00", "\x1b[2J", "a\nb", "\u202e", "\ud800", "é" * 40, "x" * 3000, "../../x", "/dev/zero"),
    *("__import__('os').system('true')", "{0.__class__}", "%s%n", "$(true)", "!!python/object"),
    *("loop", "vee", "1f1b", "fully_sharded_model_space"),
    *(
        "t*999999999",
        "((t*99999)*99999)*99999",
        "40GiB",
        "1e308TiB",
        "1,1,1",
        "1,1,1,1,1",
        "0.5,0.5",
    ),
)
_BYTES = (b"\x00", b"\xff", b"\xef\xbb\xbf", b"\n", b"\r", b",", b'"', b"[", b"]", b"{", b"}", b"-")


def mutated(data: bytes, rng: random.Random) -> bytes:
    """``data`` with a few changes; of JSON mostly its values and structure, else its bytes."""
    if rng.random() < 0.75:
        # A trace is JSON in several lines, and in several parts.
        lines = data.split(b"\n")
        at = rng.randrange(len(lines))
        try:
            value = json.loads(lines[at])
        except (ValueError, RecursionError):
            pass
        else:
            if isinstance(value, dict | list):
                for _ in range(1 + (rng.random() < 0.3) * rng.randrange(4)):
                    value = _changed(value, rng)
                lines[at] = json.dumps(value).encode("utf-8", "replace")
                return b"\n".join(lines)
    for _ in range(1 + rng.randrange(3)):
        data = _edited(data, rng)
    return data


def _changed(value: Any, rng: random.Random) -> Any:
    """``value`` with one node changed; it is used up."""
    at, steps = value, []
    while isinstance(at, dict | list) and at and (not steps or rng.random() < 0.8):
        key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
        steps.append((at, key))
        at = at[key]
    if not steps or rng.random() < 0.02:
        return _leaf(rng)
    holder, key = steps[-1]
    kind = rng.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), at)
    elif kind == 2 and isinstance(holder, list):
        other = rng.randrange(len(holder))
        holder[key], holder[other] = holder[other], at
    elif kind == 3:
        holder[key] = [at] if rng.random() < 0.5 else {"x": at}
    elif kind == 4 and isinstance(holder, dict):
        holder[rng.choice(TEXTS)] = holder.pop(key)
    elif kind == 5 and isinstance(at, int | float) and not isinstance(at, bool):
        factor = rng.choice((-1, 2, 10, 1000, 10**9) if isinstance(at, int) else (-1, 0.5, 1e9))
        holder[key] = at * factor + rng.choice((0, 1, -1))
    else:
        holder[key] = _leaf(rng)
    return value


def _leaf(rng: random.Random) -> Any:
    kind = rng.randrange(12)
    if kind < 5:
        return rng.choice(NUMBERS)
    if kind < 9:
        return rng.choice(TEXTS)
    if kind == 9:
        return [rng.choice(NUMBERS) for _ in range(rng.randrange(5))]
    if kind == 10:
        return {rng.choice(TEXTS): rng.choice(NUMBERS)}
    nested: Any = []
    for _ in range(rng.choice((3, 50, 400))):
        nested = [nested]
    return nested


def _edited(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((0, 1, 1, 2, 8, 40)))
    kind = rng.randrange(9)
    if kind == 0:
        return data[:at] + data[end:]
    if kind == 1:
        return data[:at] + data[at:end] * rng.choice((2, 3, 50)) + data[end:]
    if kind == 2:
        return data[:at] + rng.choice(_BYTES) + data[end:]
    if kind == 3:
        return data[:at] + bytes(rng.randrange(256) for _ in range(end - at)) + data[end:]
    if kind == 4:
        return data[:at]
    if kind == 5:
        return data[:at] + str(rng.choice(NUMBERS)).encode() + data[end:]
    if kind == 6:
        return data[:at] + rng.choice((b"[", b'{"a":', b"(", b"1,")) * rng.choice((1, 30, 100_000))
    if kind == 7 and end > at:
        return data[:at] + data[end:] + data[at:end]
    return data[:at] + rng.choice(TEXTS).encode("utf-8", "surrogatepass") + data[end:]
