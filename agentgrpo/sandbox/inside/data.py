"""JSON between a session and a host function: only values that are equal after a round trip.

These are None, bool, int, finite float, str, list and dict with str keys. Used inside sessions and
by the host.
"""

from json import JSONEncoder, loads
from typing import Any

_encode = JSONEncoder(allow_nan=False, separators=(",", ":")).encode
EXPECTED = "expected None, bool, int, finite float, str, list or dict with str keys"


class EncodeError(ValueError):
    """A value or text does not have the form above, or is too large."""


def encode(value: Any, most: int) -> bytes:
    """Encode a value in at most that many bytes."""
    try:
        text = _encode(value).encode()
        same = decode(text, most) == value
    except EncodeError:
        raise
    except (RecursionError, TypeError, ValueError) as error:
        raise EncodeError(f"{error}; {EXPECTED}") from None
    if not same:
        raise EncodeError(f"a tuple, or a key that is not str; {EXPECTED}")
    return text


def decode(text: bytes, most: int) -> Any:
    """Decode a text of at most that many bytes."""
    if len(text) > most:
        raise EncodeError(f"it has more than {most} bytes")
    try:
        value = loads(text)
        _encode(value)  # raises for NaN, infinity and too deep nesting
    except Exception as error:  # a hostile text can cause many kinds
        raise EncodeError(f"{type(error).__name__}: {error}"[:200]) from None
    return value
