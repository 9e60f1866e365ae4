"""The page in a real browser: drawing, size, keyboard, and no network access.

Skipped with a message if there is no Chromium; `make view-test` fails instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgrpo.inspect.view.collect import STREAMS, read_run
from agentgrpo.inspect.view.page import make_page
from tests.inspect.view.browser import Browser, find_browser
from tests.inspect.view.runs import ids, write_program, write_run

REMEDY = "no Chromium: apt-get install chromium-headless-shell, or set BROWSER_BINARY"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = find_browser()
    if binary is None:
        if os.environ.get("AGENTGRPO_REQUIRE_BROWSER") == "1":
            pytest.fail(REMEDY)
        pytest.skip(f"THE VIEWER WAS NOT TRIED IN A BROWSER: {REMEDY}")
    with Browser(binary, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    path = folder / "one.html"
    path.write_text(make_page([read_run(write_run(folder / "one"))]))
    return path


@pytest.fixture(scope="module")
def pair(folder: Path) -> Path:
    other = write_run(folder / "other", offset=0.5, temperature=0.7)
    path = folder / "pair.html"
    path.write_text(make_page([read_run(write_run(folder / "first")), read_run(other)]))
    return path


@pytest.fixture(autouse=True)
def quiet(browser: Browser) -> Iterator[None]:
    """Fail on console errors and on requests other than for the file."""
    browser.console.clear()
    browser.requested.clear()
    yield
    assert not browser.console
    assert all(address.startswith(("file:", "about:")) for address in browser.requested)


def texts(browser: Browser, selector: str) -> list[str]:
    """The texts of all elements of a selector."""
    contents: list[str] = browser.ask(
        f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)"
    )
    return contents


def shown(browser: Browser) -> Any:
    """The id of the shown rollout."""
    browser.wait("document.querySelector('.detail').dataset.shown !== undefined")
    return browser.ask("Number(document.querySelector('.detail').dataset.shown)")


def wait_shown(browser: Browser, rollout: int) -> None:
    browser.wait(f"document.querySelector('.detail')?.dataset.shown === '{rollout}'")


def test_graphs_are_drawn_from_the_metrics(browser: Browser, page: Path) -> None:
    browser.open(page)
    titles = texts(browser, ".chart h3")
    assert {"Reward", "Loss", "Gradient norm", "Seconds per step"} <= set(titles)
    assert browser.ask("document.querySelectorAll('.chart path').length") >= 5
    facts = texts(browser, ".fact")
    assert any("0.750" in f and "0.250 before" in f for f in facts)


def test_arrow_keys_move_the_crosshair(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.ask("document.querySelector('.chart svg').focus()")
    browser.press("ArrowRight")
    assert texts(browser, ".chart .reading")[0] == "after 0 steps: held out 0.250"
    browser.press("ArrowRight")
    assert "after 1 step: training 0.600" in texts(browser, ".chart .reading")[0]


def test_click_on_step_opens_its_rollouts(browser: Browser, page: Path) -> None:
    browser.open(page, "#steps")
    assert len(texts(browser, "tbody tr")) == 2
    browser.ask("document.querySelectorAll('tbody tr')[1].click()")
    browser.wait("document.querySelector('.count')?.textContent.startsWith('8 rollouts of 22')")
    browser.wait("document.querySelector('.detail .crumbs')?.textContent.includes('step 2')")


def test_rollout_is_shown_token_by_token(browser: Browser, page: Path) -> None:
    browser.open(page, "#rollouts/0/3")
    wait_shown(browser, 3)
    rollout = read_run(page.parent / "one").index["rollouts"][3]
    total = sum(length for _, _, length, _, _ in rollout["segments"])
    assert browser.ask("document.querySelectorAll('.toks span[data-k]').length") == total
    assert texts(browser, ".seg.sampled h4 b") == ["turn 1", "turn 2"]
    given = "".join(texts(browser, ".seg.given .toks span")).replace("·", "")
    assert "answered: 日本 <b>" in given
    colours = browser.ask(
        "['prompt', 'sampled', 'given'].map((name) => "
        "getComputedStyle(document.querySelector(`.seg.${name} .toks span`)).backgroundColor)"
    )
    assert len(set(colours)) == 3


def test_clicked_token_shows_its_probability(browser: Browser, page: Path) -> None:
    browser.open(page, "#rollouts/0/3")
    wait_shown(browser, 3)
    browser.ask("document.querySelector('.seg.sampled .toks span').click()")
    text = texts(browser, ".token")[0]
    assert "sampled by the policy" in text
    assert "logp -0.010" in text
    assert "p 0.990" in text
    browser.ask("document.querySelector('.seg.sampled .toks').focus()")
    browser.press("ArrowRight")
    assert texts(browser, ".toks span.now") != []
    assert texts(browser, ".token")[0] != text


def test_colour_modes_without_data_are_disabled(browser: Browser, page: Path) -> None:
    browser.open(page, "#rollouts/0/3")
    wait_shown(browser, 3)
    disabled = browser.ask(
        "[...document.querySelectorAll('.modes button:disabled')].map((b) => b.title)"
    )
    assert disabled == [
        "ratio: not recorded in this run",
        "entropy: not recorded in this run",
    ]
    browser.press("4")  # ratio
    assert texts(browser, ".modes button[aria-pressed=true]") == ["origin"]
    browser.press("3")
    assert texts(browser, ".modes button[aria-pressed=true]") == ["advantage"]
    tinted = "document.querySelector('.seg.sampled .toks span').style.background"
    assert "--bad-rgb" in browser.ask(tinted)
    browser.press("j")
    wait_shown(browser, 4)
    assert "--good-rgb" in browser.ask(tinted)


def test_keys_move_through_rollouts_and_groups(browser: Browser, page: Path) -> None:
    browser.open(page, "#rollouts/0/3")
    wait_shown(browser, 3)
    for key, expected in (("j", 4), ("j", 5), ("k", 4), ("]", 7), ("[", 6)):
        browser.press(key)
        wait_shown(browser, expected)
    assert browser.ask("location.hash") == "#rollouts/0/6"
    assert browser.ask("document.querySelectorAll('.row[aria-selected=true]').length") == 1


def test_search_finds_text_in_tokens(browser: Browser, page: Path) -> None:
    browser.open(page, "#rollouts")
    browser.press("/")
    assert browser.ask("document.activeElement.type") == "search"
    for key in "日本":
        browser.call("Input.insertText", text=key)
    browser.wait("document.querySelector('.count').textContent.startsWith('16 rollouts of 22')")
    browser.ask("app.lists[0].search.value = 'nowhere to be found', app.lists[0].lookUp(), 1")
    browser.wait("document.querySelector('.count').textContent.startsWith('0 rollouts')")


def test_filters_combine(browser: Browser, page: Path) -> None:
    browser.open(page, "#rollouts")
    count = "document.querySelector('.count').textContent.split(' ')[0]"
    for name, value, matches in (
        ("split", "train", 16),
        ("status", "completed", 12),
        ("high", "0.5", 8),
        ("high", "", 12),
        ("low", "1", 4),
    ):
        browser.ask(f"app.lists[0].set({name!r}, {value!r})")
        assert browser.ask(count) == str(matches)


def test_click_on_leaf_of_group_tree_shows_rollout(browser: Browser, page: Path) -> None:
    browser.open(page, "#rollouts/0/3")
    wait_shown(browser, 3)
    assert len(texts(browser, ".tree .leaf")) == 4
    browser.ask(
        "document.querySelectorAll('.tree .leaf')[2].dispatchEvent(new MouseEvent('click'))"
    )
    browser.wait("document.querySelector('.detail').dataset.shown !== '3'")
    assert 3 <= shown(browser) <= 6


def test_sampled_text_is_escaped(browser: Browser, page: Path) -> None:
    browser.open(page, "#rollouts/0/3")
    wait_shown(browser, 3)
    assert browser.ask("document.title") == "one · agentgrpo"
    assert browser.ask("document.querySelectorAll('#main script, #main b b').length") == 0
    assert "</script>" in texts(browser, ".detail h2")[0]


def test_token_with_html_is_escaped(browser: Browser, folder: Path) -> None:
    data = read_run(write_run(folder / "tags", steps=1))
    vocabulary = data.index["vocabulary"]
    vocabulary["shown"][vocabulary["ids"].index(int(ids("o")[0]))] = (
        "<img src='x' id=\"taken\">&lt;"
    )
    path = folder / "tags.html"
    path.write_text(make_page([data]))
    browser.open(path, "#rollouts/0/3")
    wait_shown(browser, 3)
    assert browser.ask("document.querySelectorAll('img').length") == 0
    assert "<img src='x' id=\"taken\">&lt;" in texts(browser, ".seg.sampled .toks span")


def test_recorded_ratios_entropies_and_branches_are_shown(browser: Browser, folder: Path) -> None:
    data = read_run(write_run(folder / "rich", steps=1, groups=1))
    num_ids, num_sampled = data.index["chunks"][1]
    streams = np.frombuffer(bytearray(data.chunks[1]), "<f4", offset=4 * num_ids)
    streams = streams.reshape(3, num_sampled).copy()
    streams[1], streams[2] = streams[0] + np.float32(0.1), 1.5
    data.chunks[1] = data.chunks[1][: 4 * num_ids] + streams.tobytes()
    data.index["recorded"] = list(STREAMS)
    child = data.index["rollouts"][4]
    prompt, turn = (segment[2] for segment in child["segments"][:2])
    ids = np.frombuffer(data.chunks[1], "<i4", num_ids)
    (_, ours, *_), (_, theirs, *_) = (data.index["rollouts"][i]["segments"][1] for i in (3, 4))
    same = int(np.argmax(ids[ours : ours + turn] != ids[theirs : theirs + turn]))
    child |= {"parent": 0, "forked_at": prompt + same}
    path = folder / "rich.html"
    path.write_text(make_page([data]))
    browser.open(path, "#rollouts/0/4")
    wait_shown(browser, 4)
    assert texts(browser, ".modes button:disabled") == []
    assert texts(browser, ".tree rect title") == ["branch of the sampler"]
    tinted = "document.querySelector('.seg.sampled .toks span').style.background"
    browser.press("4")
    assert "--good-rgb" in browser.ask(tinted), "a ratio above 1"
    browser.press("5")
    assert "--heat-rgb" in browser.ask(tinted)
    browser.ask("document.querySelector('.seg.sampled .toks span').click()")
    text = texts(browser, ".token")[0]
    assert "ratio 1.105" in text
    assert "entropy 1.500" in text


def test_two_runs_are_compared(browser: Browser, pair: Path) -> None:
    browser.open(pair, "#differences")
    tables = texts(browser, "table")
    assert tables[0] == "settingfirstotherrollout.temperature10.7"
    assert tables[1].startswith("taskfirstotherchangeanswer of firstanswer of other")
    assert "3 tasks: other earned more on 1, less on 0" in texts(browser, "section p")[0]
    browser.ask("document.querySelector('tbody tr[tabindex]').click()")
    browser.wait("document.querySelectorAll('.pair .detail[data-shown]').length === 2")
    browser.open(pair, "#graphs")
    assert texts(browser, ".chart .legend")[0].count("first") == 2


@pytest.fixture(scope="module")
def three(folder: Path) -> Path:
    """Three runs with two settings, whose rewards differ by 0.1."""
    runs = [
        read_run(write_run(folder / f"run{n}", temperature=heat, seed=n, offset=n / 10))
        for n, heat in enumerate((1.0, 1.0, 0.5))
    ]
    path = folder / "three.html"
    path.write_text(make_page(runs))
    return path


def test_page_fits_phone_width(browser: Browser, three: Path) -> None:
    """At 390 pixels nothing overflows, and wide tables scroll under their first column."""
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.call("Emulation.setDeviceMetricsOverride", **phone)
    try:
        for view in ("graphs", "steps", "rollouts", "differences", "settings"):
            browser.open(three, f"#{view}")
            assert browser.ask("document.documentElement.scrollWidth") == 390, view
            assert browser.ask("document.querySelector('main').scrollWidth") <= 390, view
        browser.open(three, "#steps")
        first, last = browser.ask(
            "(() => { const box = document.querySelector('.scroll'); box.scrollLeft = 1e6;"
            "const row = [...box.querySelectorAll('tbody tr:first-child td')];"
            "return [row[0], row.at(-1)].map((cell) => {"
            "  const { left, right, top, bottom } = cell.getBoundingClientRect();"
            "  const seen = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);"
            "  return [left >= 0 && right <= 390, seen === cell]; }); })()"
        )
        assert (first, last) == ([True, True], [True, True])
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_any_two_of_three_runs_are_compared(browser: Browser, three: Path) -> None:
    browser.open(three)
    legend = texts(browser, ".chart:first-child .legend > span")
    assert legend == [f"run{n} {kind}" for n in range(3) for kind in ("training", "held out")]
    browser.open(three, "#differences")
    head, heat, seed = texts(browser, "section:first-child tr")
    assert head == "settingrun0run1run2"
    assert (heat, seed) == ("rollout.temperature110.5", "seed012")
    assert "3 tasks: run1 earned more on 1" in texts(browser, "section p")[1]
    browser.ask("(() => { const e = document.querySelectorAll('section select')[1]; e.value = '2';"
                "e.dispatchEvent(new Event('change')); })()")  # fmt: skip
    assert "3 tasks: run2 earned more on 1" in texts(browser, "section p")[1]
    browser.ask("document.querySelector('tbody tr[tabindex]').click()")
    browser.wait("document.querySelectorAll('.pair .detail[data-shown]').length === 2")


@pytest.mark.parametrize("dark", [False, True])
def test_text_contrast_is_sufficient(
    folder: Path, page: Path, browser: Browser, dark: bool
) -> None:
    """At least 4.5 (WCAG AA) for text on its background."""
    browser.theme(dark=dark)
    browser.open(page, "#rollouts/0/3")
    wait_shown(browser, 3)
    worst = browser.ask(CONTRAST)
    browser.theme(dark=False)
    assert worst[0] >= 4.5, worst


CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => c.slice(0, 3).map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
  };
  const text = '.toks span:not(.nl), .row span, .fact *, h2, h4, .count, .mono, .pill, #tabs a';
  return [...document.querySelectorAll(text)].map((e) => {
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.className, e.textContent.slice(0, 20)];
  }).sort((x, y) => x[0] - y[0])[0];
})()"""


@pytest.mark.slow
def test_large_run_creates_few_elements(browser: Browser, folder: Path) -> None:
    """With 2,048 rollouts only visible rows and tokens are elements."""
    run = write_run(folder / "large", steps=16, groups=16, size=8, turns=3, turn_tokens=40)
    path = folder / "large.html"
    path.write_text(make_page([read_run(run)]))
    browser.open(path, "#rollouts")
    assert shown(browser) == 0
    assert browser.ask("app.lists[0].shown.length") == 2054
    assert browser.ask("app.runs[0]._unpacked.size") <= 2, "tokens of a step are unpacked on demand"
    elements = "document.querySelectorAll('*').length"
    assert browser.ask(elements) < 2000
    browser.ask("app.lists[0].viewport.scrollTop = 60000, 1")
    browser.wait("[...document.querySelectorAll('.row')].some((r) => r.ariaPosInSet > 1300)")
    assert browser.ask("document.querySelectorAll('.row').length") < 60
    browser.press("j")
    wait_shown(browser, 1)
    assert browser.ask(elements) < 2000


def test_conversations_of_program_are_side_by_side(browser: Browser, folder: Path) -> None:
    path = folder / "program.html"
    path.write_text(make_page([read_run(write_program(folder / "program"))]))
    browser.open(path, "#rollouts")
    shown(browser)
    heads = [f"conversation {number} of 3" for number in (1, 2, 3)]
    assert texts(browser, ".conversation h3") == heads
    text = texts(browser, ".conversation p")
    assert text[0] == "3 turns · starts on its own"
    assert text[1] == "1 turn · starts on its own"
    assert text[2] == "1 turn · continues after turn 1 of conversation 1"
    turns = texts(browser, ".conversation .sampled h4 b")
    assert turns == ["turn 1", "turn 4", "turn 5", "turn 2", "turn 3"]
    assert "program" in "".join(texts(browser, ".conversation .given h4"))
