"""What the two sides of the jail say to each other, described once for all that is Python.

The host imports it; the zygote and the interpreters inside load the same file (load.py), so it uses
the standard library alone. node.js and csrc/sandbox*.[ch] speak the same, in their own words:
tests/sandbox/inside/test_wire.py holds them equal.

A frame, request or answer, is ``length:u32, number:u32, count:u32, (length:u32, bytes) * count``,
little endian; the first length does not count itself. The first field names the kind. No JSON, no
pickle: nothing to recurse into.

    run CODE (NAME VALUE)*    run a cell, these environment variables set for its duration
    cell CODE (NAME VALUE)*   the same, as a notebook does where there is one (notebook.py)
    env (NAME VALUE)*         set environment variables permanently
    console                   from now on both streams are one, as on a terminal
    push LINE                 a line typed at the interactive prompt
    put TEXT                  a part of a question of exchange.py
    ask TEXT                  its last part: answer it, with the first part of an answer
    get                       the next part of that answer; "more" says that there is another
    tools ASKED TOLD (NAME TEXT)*  functions of the host (host.py): bytes of arguments and answers
    returned DATA             after a "call": what it came to (data.py); the step goes on
    raised NAME TEXT          the same, an exception

    call NAME DATA            the step calls a function of the host, and waits
    ok | more | error NAME VALUE TRACEBACK | exit CODE, each with "value" TEXT, "results" JSON or
    "piece" DATA, if there is such
"""

from struct import Struct

U32, HEAD = Struct("<I"), Struct("<II")
unpack_u32, pack_u32 = U32.unpack_from, U32.pack
unpack_head, pack_head = HEAD.unpack_from, HEAD.pack

REPORT = Struct("<Iiiiqq")
"""struct sandbox_report: kind, value, detail, unused, max_rss_kib, cpu_us."""
REPORT_READY, REPORT_EXIT, REPORT_FAILED = 1, 2, 3
ORDER = Struct("<II")
"""struct sandbox_order: arguments, environment variables."""
MODE_USERNS, MODE_ROOT, MODE_BARE = 0, 1, 2
SETUP_STEPS = {
    "CLONE": "cloning into new namespaces",
    "USERS": "mapping its user",
    "CGROUP": "entering its control group",
    "MOUNTS": "mounting its private directories",
    "PROC": "mounting its /proc",
    "NETWORK": "setting up its network and host name",
    "LIMITS": "setting resource limits",
    "PRIVILEGES": "dropping privileges",
    "FORK": "forking a process",
    "STREAMS": "arranging its descriptors",
    "FILTER": "installing the system call filter",
    "EXEC": "running the program",
    "IMAGE": "mounting its image",
}
"""enum sandbox_setup_step, in order: what a report of kind FAILED names by its value."""


class Malformed(Exception):
    """A frame is not of the form above."""


def encode(number: int, fields: list[bytes]) -> bytes:
    """A frame."""
    parts = [b"", pack_head(number, len(fields))]
    for field in fields:
        parts += (pack_u32(len(field)), field)
    parts[0] = pack_u32(sum(map(len, parts)))
    return b"".join(parts)


def decode(frame: bytes, at: int = 0, most: int = 2**32) -> tuple[int, list[bytes]]:
    """Number and fields of a frame whose first length ends at that place.

    Raises:
        Malformed: the lengths do not add up, or there are more fields than that.
    """
    end = len(frame)
    if at + 8 > end:
        raise Malformed("truncated")
    number, count = unpack_head(frame, at)
    if count > most:  # of what comes from inside none is made before that is known
        raise Malformed(f"{count} fields")
    fields: list[bytes] = []
    at += 8
    while count:
        if at + 4 > end:
            raise Malformed("truncated")
        stop = at + 4 + unpack_u32(frame, at)[0]
        if stop > end:
            raise Malformed("truncated")
        fields.append(frame[at + 4 : stop])
        at = stop
        count -= 1
    if at != end or not fields:
        raise Malformed("trailing bytes" if fields else "no fields")
    return number, fields
