r"""Find the option of a multiple-choice question that an answer names.

    D    (D)    **D**    D) its text    Answer: d    The answer is D.    \boxed{\text{D}}

or the option's text. An answer names one option or none: a list of several options names none. If
an answer makes two statements (`The answer is A. No, the answer is B.`), the last one counts. Three
different statements name none.
"""

from __future__ import annotations

import re

from agentgrpo.rewards.answers import accepted_answers, has_open_box
from agentgrpo.types import Task

NAME = r"([A-Z]|\d\d?)"
OPTION_START = re.compile(rf"(?<![^\s(\[*_]){NAME}(?:[)\]]|[.:](?=[\s*_]|$))")
"""The start of an option in a question: `A)`, `(A)`, `A.`, `1:`"""
LABEL = re.compile(rf"(?i:{NAME})(?!['\u2019]?\w)")
AFTER = re.compile(
    r"[\s*_$}>\"`'\u2019]*(?:$|[)\]},.:;!(<\u3001-\uff5e]|[-\u2013\u2014=]\s)|\s(?:is|because|since)\b"
)
"""What may follow a label. A letter before another word is not a label: `A cat`."""
AFTER_LOWER_CASE = re.compile(r"[\s*_$})\].:,;!'\u2019]*$|[)\]]")
"""What may follow a lower-case label."""
ANOTHER_LABEL = re.compile(
    rf"(?:[\s*_$)\]}},.:;/&|(\[-]|\b(?:and|or|option|choice)\b)*{NAME}"
    rf"(?=[\s*_$)\]}}]*(?:$|[,.:;/&|()\]-]|(?:and|or)\b|{NAME}\b))"
)
"""Another label after the first one, in a list."""
CUE = re.compile(
    r"\bans(?:wer)?\b(?: (?:to|for|of)\b[^.:\n]{0,80}?(?= is\b))?"
    r"(?: (?:is|(?:would|must|should) be))?|\b(?:choos(?:e|ing)|select|pick)\b|\\boxed\s*(?=\{)"
    r"|\b(?:correct|right|best) (?:option|choice|letter)(?: is)?"
    r"|\u7b54\u6848[\u662f\u4e3a\u9009]*",  # the answer is, in Chinese
    re.IGNORECASE,
)
OPENING = re.compile(
    r"(?:\\(?:text|math)\w*|<answer>|[\W_]|\b(?:option|choice|letter|selected|so|thus|hence"
    r"|therefore|it(?:['\u2019]s| is| must be)|i (?:think|believe|say)"
    r"|i(?:['\u2019]d| would) (?:go with|say))\b)*",
    re.IGNORECASE,
)
"""What may precede a label."""
DENIAL = re.compile(
    r"\s*(?:is|ca|can|must)?(?:n['\u2019]t|\s*not)\b[^\n]{0,80}?"
    r"(?:\b(?:but|rather|instead|it(?:['\u2019]s| is))\b\s*)+",
    re.IGNORECASE,
)
"""A rejected option before the chosen one: `not A, it is D`."""


def options_of(task: Task) -> dict[str, str]:
    """The options in a question by label: A, B, ..., else 1, 2, ... or 0, 1, ..."""
    question = "\n".join(str(message.get("content")) for message in task.messages)
    runs: list[list[re.Match[str]]] = []
    for mark in OPTION_START.finditer(question):
        for run in runs:
            last = run[-1][1]
            if mark[1] == (str(int(last) + 1) if last.isdigit() else chr(ord(last) + 1)):
                run.append(mark)
        runs += [[mark]] * (mark[1] in ("A", "0", "1"))
    run = max(runs, key=lambda run: (run[0][1] == "A", len(run), run[0].start()), default=[])
    ends = [*(mark.start() for mark in run[1:]), len(question)] * (len(run) > 1)
    texts = {m[1]: question[m.end() : end].strip() for m, end in zip(run, ends, strict=False)}
    return {label: text.partition("\n")[0] for label, text in texts.items()}


def chosen_option(answer: str, options: dict[str, str]) -> str | None:
    """The label of the option that an answer names. None: it names none or lists several."""
    if has_open_box(answer):
        return None
    labels = [label for part in CUE.split(answer)[1:] if (label := _label(part, options))]
    if not labels:  # no cue such as "answer": the first or the last line must name it
        lines = [_label(line, options) for line in answer.strip().split("\n")]
        last = lines[0] or lines[-1]
        labels = [label for label in [*lines, last] if label] if last else []
    return labels[-1] if labels and len({*labels}) < 3 else None


def _label(text: str, options: dict[str, str]) -> str | None:
    text = OPENING.sub("", DENIAL.sub("", text, count=1), count=1).partition("\n")[0]
    as_text = [label for label, option in options.items() if _bare(option) == _bare(text) != ""]
    if len(as_text) == 1 and _bare(text).upper() not in options:
        return as_text[0]
    if (match := LABEL.match(text)) is None:
        return None
    label, rest = match[1].upper(), text[match.end() :]
    if _bare(rest) == _bare(options.get(label, "")) != "":  # an option's text may be a letter, too
        return label
    is_list = (
        ANOTHER_LABEL.match(rest) or len({mark[1] for mark in OPTION_START.finditer(text)}) > 2
    )
    ends = (AFTER_LOWER_CASE if match[1].islower() else AFTER).match(rest)
    return label if ends and not is_list else None


def _bare(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .:()[]*_`$}\"'")


def expected_choices(task: Task) -> list[str]:
    """The label that each accepted answer names. Raises ValueError if one names none."""
    options, labels = options_of(task), []
    for text in accepted_answers(task):
        label = chosen_option(text, options)
        if label is None or label not in (options or "ABCDEFGHIJKLMNOPQRSTUVWXYZ"):
            raise ValueError(
                f"task {task.id}: reward.kind = 'choice' expects the label of an option, got the "
                f"answer {text!r:.80}; the question shows {', '.join(options) or 'no options'}. "
                "Remedy: show the options in the question as `A) ...`, with the answer's labels"
            )
        labels.append(label)
    return labels
