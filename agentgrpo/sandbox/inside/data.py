"""What crosses between a session and a function of the host: JSON, of what comes back as it went.

None, bool, int, finite float, str, list and dict with str keys. Used inside sessions and by the
host.
"""

from json import JSONEncoder, loads
from typing import Any

_encode = JSONEncoder(allow_nan=False, separators=(",", ":")).encode
CAN = "what can be is None, bool, int, finite float, str, list and dict with str keys"


class EncodeError(ValueError):
    """It is not of the form above, or too large."""


def encode(value: Any, most: int) -> bytes:
    """The text of a value, of at most that many bytes."""
    try:
        text = _encode(value).encode()
        same = decode(text, most) == value
    except EncodeError:
        raise
    except (RecursionError, TypeError, ValueError) as error:
        raise EncodeError(f"{error}; {CAN}") from None
    if not same:
        raise EncodeError(f"a tuple, or a key that is no str; {CAN}")
    return text


def decode(text: bytes, most: int) -> Any:
    """The value of a text."""
    if len(text) > most:
        raise EncodeError(f"it has more than {most} bytes")
    try:
        value = loads(text)
        _encode(value)  # finite, and not too deep
    except Exception as error:  # whatever a text that is none makes of its parts
        raise EncodeError(f"{type(error).__name__}: {error}"[:200]) from None
    return value
