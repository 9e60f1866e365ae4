"""TagScanner against str-like find at every position, however the stream is cut up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgrpo._C import TagScanner

TEXT = st.lists(st.sampled_from(b"abc"), max_size=40).map(bytes)
TAGS = st.lists(
    st.lists(st.sampled_from(b"abc"), min_size=1, max_size=5).map(bytes),
    max_size=6,
    unique=True,
)


def slow_scan(tags: list[bytes], text: bytes) -> list[tuple[int, int]]:
    """(tag, end) for every occurrence, overlaps included: by end, then longest first."""
    hits = [
        (end, -len(tag), i)
        for i, tag in enumerate(tags)
        for end in range(1, len(text) + 1)
        if text[:end].endswith(tag)
    ]
    return [(i, end) for end, _, i in sorted(hits)]


@settings(max_examples=300, deadline=None)
@given(TAGS, st.lists(TEXT, min_size=1, max_size=8), st.data())
def test_finds_tags_inside_and_across_tokens(
    tags: list[bytes], vocabulary: list[bytes], data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=12))
    cut = data.draw(st.integers(0, len(ids)))
    scanner = TagScanner(tags, vocabulary)
    starts = np.cumsum([0] + [len(vocabulary[i]) for i in ids])
    state, before = scanner.scan_ids(np.array(ids[:cut], np.int32))
    _, after = scanner.scan_ids(np.array(ids[cut:], np.int32), state)
    found = [(tag, int(starts[token]) + end) for tag, token, end in before]
    found += [(tag, int(starts[cut + token]) + end) for tag, token, end in after]
    assert found == slow_scan(tags, b"".join(vocabulary[i] for i in ids))
    assert all(end > 0 for _, _, end in before + after)


def test_worked_example() -> None:
    """The end of </code> is in the middle of token 2; what follows it there is two bytes."""
    vocabulary = [b"x=1", b"</co", b"de>\n\n"]
    scanner = TagScanner([b"<code>", b"</code>"], vocabulary)
    state, matches = scanner.scan_ids(np.array([0, 1], np.int32))
    assert matches == []
    forked = state  # two rollouts go on from here
    assert scanner.scan_ids(np.array([2], np.int32), state)[1] == [(1, 0, 3)]
    assert scanner.scan_ids(np.array([0, 2], np.int32), forked)[1] == []


def test_characters_split_between_tokens() -> None:
    tag = "→stop".encode()
    scanner = TagScanner([tag], [tag[:1], tag[1:2], tag[2:]])
    assert scanner.scan_ids(np.array([0, 1, 2], np.int32))[1] == [(0, 2, len(tag) - 2)]


@pytest.mark.parametrize(
    ("tags", "vocabulary", "error", "message"),
    [
        ([b""], [], ValueError, r"tags\[0\] is empty"),
        ([b"a", b"b", b"a"], [], ValueError, r"tags\[2\] is a repetition"),
        (["a"], [], TypeError, r"tags\[0\]: expected bytes, got <class 'str'>"),
        ((b"a",), [], TypeError, "must be list, not tuple"),
        ([b"a"], [b"a", None], TypeError, r"vocabulary\[1\]: expected bytes"),
        ([b"a" * 2**20], [], ValueError, "tags: over 1048575 bytes in all"),
    ],
)
def test_bad_tags_are_refused(
    tags: list[bytes], vocabulary: list[bytes], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TagScanner(tags, vocabulary)


def test_bad_calls_are_refused() -> None:
    scanner = TagScanner([b"ab"], [b"a", b"b"])
    for state in (-1, 3):
        with pytest.raises(ValueError, match=f"state is {state}, not one that this scanner"):
            scanner.scan_ids(np.array([0], np.int32), state)
    for bad in (-1, 2):
        with pytest.raises(ValueError, match=rf"ids\[1\] is {bad}, not in the vocabulary of 2"):
            scanner.scan_ids(np.array([0, bad], np.int32))
    with pytest.raises(ValueError, match="ids: expected a contiguous 1-d int32 array"):
        scanner.scan_ids(np.array([0], np.int64))
    with pytest.raises(TypeError, match="ids: expected a 1-d int32 array, got <class 'str'>"):
        scanner.scan_ids("ab")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"scan_ids\(\) takes 1 or 2 arguments, got 0"):
        scanner.scan_ids()  # type: ignore[call-arg]
