"""What crosses between a session and a function of the host: JSON, exactly.

None, bool, int of 64 bits, finite float, str, list and dict with str keys, of exactly these types,
nested up to DEEPEST deep. A value has one text: ``decode()`` takes what ``encode()`` writes, and
nothing else. Used inside sessions and by the host.
"""

from json import JSONEncoder, loads
from typing import Any

DEEPEST = 32
SMALL = 1 << 63
_encode = JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":")).encode


class EncodeError(ValueError):
    """It is not of the form above, or too large."""


def encode(value: Any, most: int) -> bytes:
    """The text of a value, of at most that many bytes."""
    _require(value, DEEPEST, [most], most)
    text = _encode(value).encode()
    if len(text) > most:
        raise EncodeError(f"it has more than {most} bytes")
    return text


def decode(text: bytes, most: int) -> Any:
    """The value of a text that encode() has written."""
    if len(text) > most:
        raise EncodeError(f"it has more than {most} bytes")
    try:
        value = loads(text)
    except Exception as error:  # whatever a text that is none makes of its parts
        raise EncodeError(f"{type(error).__name__}: {error}"[:200]) from None
    if encode(value, most) != text:
        raise EncodeError("it is spelled otherwise")
    return value


def _require(value: Any, room: int, left: list[int], most: int) -> None:
    """That it is data. left: the parts that there may be, of which each takes a byte."""
    kind = type(value)
    left[0] -= 1
    if left[0] < 0:
        raise EncodeError(f"it has more than {most} bytes")
    if value is None or kind is bool:
        return
    if kind is int:
        if not -SMALL <= value < SMALL:
            raise EncodeError("an int of more than 64 bits")
    elif kind is float:
        if value - value != 0:
            raise EncodeError("a float that is not finite")
    elif kind is str:
        if len(value) > left[0]:
            raise EncodeError(f"it has more than {most} bytes")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise EncodeError("a str with half of a surrogate pair") from None
    elif kind is list or kind is dict:
        if room == 0:
            raise EncodeError(f"nested more than {DEEPEST} deep")
        if kind is dict and not all(type(key) is str for key in value):
            raise EncodeError("a dict with a key that is no str")
        for part in value if kind is list else [*value, *value.values()]:
            _require(part, room - 1, left, most)
    else:
        can = "None, bool, int, float, str, list and dict"
        raise EncodeError(f"a value of the type {kind.__name__}; what can be is {can}")
