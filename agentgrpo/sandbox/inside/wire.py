"""The protocol between the host and the processes inside the jail.

The host imports this file; the zygote and the interpreters inside load the same file (load.py), so
it uses only the standard library. node.js and csrc/sandbox*.[ch] implement the same protocol;
tests/sandbox/inside/test_wire.py checks that they agree.

A frame, request or answer, is ``length:u32, number:u32, count:u32, (length:u32, bytes) * count``,
little endian; the first length does not count itself. The first field is the kind. No JSON and no
pickle: a hostile frame cannot cause recursion.

Requests:

    run CODE (NAME VALUE)*    run a cell, with these environment variables during the cell
    cell CODE (NAME VALUE)*   the same, in a notebook if there is one (notebook.py)
    env (NAME VALUE)*         set environment variables permanently
    console                   join both streams, as on a terminal
    push LINE                 type a line at the interactive prompt
    put TEXT                  a part of a question of exchange.py
    ask TEXT                  its last part; the answer has the first part of the reply
    get                       the next part of the reply; "more" means that another follows
    tools ARGUMENTS ANSWER (NAME TEXT)*
                              define host functions (host.py); maximum bytes of a call's arguments
                              and of its answer
    returned DATA             the value of a "call" (data.py); the step goes on
    raised NAME TEXT          the exception of a "call"; the step goes on

Answers:

    call NAME DATA            the step calls a host function and waits
    ok | more | error NAME VALUE TRACEBACK | exit CODE
                              each optionally with "value" TEXT, "results" JSON or "piece" DATA
"""

from struct import Struct

U32, HEAD = Struct("<I"), Struct("<II")
unpack_u32, pack_u32 = U32.unpack_from, U32.pack
unpack_head, pack_head = HEAD.unpack_from, HEAD.pack

REPORT = Struct("<Iiiiq")
"""struct sandbox_report: kind, value, detail, unused, cpu_us."""
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
"""enum sandbox_setup_step, in order: the value of a report of kind FAILED is an index."""


class Malformed(Exception):
    """A frame or an answer does not have the required form."""


def encode(number: int, fields: list[bytes]) -> bytes:
    parts = [b"", pack_head(number, len(fields))]
    for field in fields:
        parts += (pack_u32(len(field)), field)
    parts[0] = pack_u32(sum(map(len, parts)))
    return b"".join(parts)


def decode(frame: bytes, at: int = 0, most: int = 2**32) -> tuple[int, list[bytes]]:
    """Decode number and fields of a frame. at is the end of its first length.

    Raises:
        Malformed: the lengths do not add up, or there are more than most fields.
    """
    end = len(frame)
    if at + 8 > end:
        raise Malformed("truncated")
    number, count = unpack_head(frame, at)
    if count > most:  # checked before any field is allocated: the frame may be hostile
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
