"""The page at ``/`` in a real browser: by keyboard, light and dark, on a phone, and when things go wrong."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from specdec.testing.oracles import SlowProposer, WrongProposer, use_proposer

from .browser import VARIABLE, Browser, find_chromium, open_browser
from .test_disconnects import request_bytes

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason=f"needs Chromium on PATH, or its path in {VARIABLE}"),
]
KEY = {"Authorization": "Bearer secret"}
QUESTION = "the quick brown fox jumps over the lazy dog the quick brown fox jumps"
CONTRAST = """(() => {
  const probe = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const parts = (colour) => {
    probe.clearRect(0, 0, 1, 1); probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data];
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((v) => v / 255)
      .map((v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = (element) => {
    const colour = parts(getComputedStyle(element).backgroundColor);
    return colour[3] || !element.parentElement ? colour : behind(element.parentElement);
  };
  const result = {};
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.getClientRects().length || element.disabled) continue;
    const [front, back] = [light(parts(getComputedStyle(element).color)), light(behind(element))];
    const ratio = (Math.max(front, back) + .05) / (Math.min(front, back) + .05);
    const name = element.tagName + '#' + element.id + '.' + element.className;
    result[name] = Math.min(ratio, result[name] ?? 99);
  }
  return result;
})()"""


@contextmanager
def full_queue(server: Any) -> Iterator[None]:
    """One request runs and one waits."""
    body = {"prompt": "the", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with ExitStack() as connections:
        for number in (1, 2):
            address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
            connection = connections.enter_context(closing(socket.create_connection(address)))
            connection.sendall(request_bytes("/v1/completions", body, KEY))
            while (stats := server.llm.stats()).num_running + stats.num_waiting < number:
                time.sleep(0.005)
        yield


@pytest.fixture
def browse(tmp_path: Path) -> Callable[[Callable[[Browser], Awaitable[None]]], None]:
    """Runs a coroutine function with a browser, and fails when the page had errors that it does not expect."""

    def run(steps: Callable[[Browser], Awaitable[None]], *, errors: bool = False) -> None:
        async def session() -> None:
            assert CHROMIUM is not None
            async with open_browser(CHROMIUM, tmp_path / "profile") as browser:
                await browser.look(1280, 800)
                await steps(browser)
                assert errors or not browser.problems, list(browser.problems)

        asyncio.run(session())

    return run


async def ask(browser: Browser, text: str = QUESTION) -> None:
    """Open question, by keyboard; the page has put the focus there."""
    await browser.wait("document.activeElement === at('prompt')")
    await browser.type(text)
    await browser.press("Enter")


async def answered(browser: Browser) -> None:
    await browser.wait("document.querySelector('.facts') && !running")


def test_a_conversation_by_keyboard(running, browse):
    async def steps(browser: Browser) -> None:
        await browser.open(running.url + "/")
        await browser.wait("at('model').textContent.includes('ngram, 4 draft tokens')")
        assert await browser.run("at('compare').disabled")
        await ask(browser)
        await answered(browser)
        origins = "[...new Set([...document.querySelectorAll('.token')].map((token) => token.classList[1]))]"
        found = await browser.run(origins)
        assert {"o0", "recovered", "own"} <= set(found)
        shown = await browser.run("document.querySelector('.message.assistant > div').textContent")
        assert shown == await browser.run("conversation[1].content") == await browser.run("at('spoken').textContent")
        named = await browser.run("[...document.querySelectorAll('#legend li')].map((item) => item.textContent).join()")
        for word in ("accepted from the draft", "recovered", "bonus", "no draft"):
            assert word in named
        # the legend's colours are those of the tokens
        for name in found:
            same = "getComputedStyle(document.querySelector('{} .{}')).backgroundColor"
            assert await browser.run(same.format("#messages", name)) == await browser.run(same.format("#legend", name))
        assert await browser.run("document.querySelectorAll('#bars .bar').length") == 4
        assert "position 0: " in await browser.run("at('bars').getAttribute('aria-label')")
        assert await browser.run("at('stages').textContent.match(/propose[0-9.]+ ms/) !== null")
        assert await browser.run("at('stages').textContent.includes('NaN')") is False
        assert await browser.tab_to("compare") == ["send", "compare"]
        await browser.press("Enter")
        await browser.wait("/^[0-9.]+×$/.test(at('speedup').textContent) && !at('speedup').hidden")
        assert "times. The text is the same." in await browser.run("at('comparison').textContent")
        await browser.wait("document.activeElement === at('compare')")
        assert {url.split("/")[2] for url in browser.requests} == {running.url.removeprefix("http://")}

    browse(steps)


def test_tokens_come_while_the_answer_is_made_and_escape_stops_it(model, serving, browse):
    slow = use_proposer(SlowProposer(WrongProposer(5), 0.05))
    slow["speculative_config"]["speculation"] = "always"

    async def steps(browser: Browser) -> None:
        await browser.open(server.url + "/")
        await ask(browser)
        await browser.wait("document.querySelectorAll('.token').length > 5")
        assert await browser.run("Boolean(running) && at('send').disabled && !at('stop').disabled")
        await browser.wait("document.querySelectorAll('#bars .bar, #bars p').length && at('stages').textContent")
        await browser.press("Escape")
        await browser.wait("!running")
        assert await browser.run("at('status').textContent") == "stopped"
        assert await browser.run("document.querySelector('.facts').textContent") == "stopped"
        assert await browser.run("document.activeElement.id") == "prompt"
        await asyncio.to_thread(server.wait_until_idle)

    with serving(model, proposer_time_budget=0, **slow) as server:
        browse(steps)


@pytest.mark.parametrize("dark", [False, True])
def test_everything_can_be_read(running, browse, dark):
    """Text against what is behind it: at least 4.5 to 1, as WCAG's level AA asks."""

    async def steps(browser: Browser) -> None:
        await browser.look(1280, 800, dark=dark)
        await browser.open(running.url + "/")
        await ask(browser)
        await answered(browser)
        await browser.run("at('settings-button').click(), at('error').textContent = 'wrong'")
        ratios: dict[str, float] = await browser.run(CONTRAST)
        assert len(ratios) > 20
        assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}
        back = await browser.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, back[4:-1].split(","))) < 200) == dark

    browse(steps)


def test_on_a_phone_nothing_is_cut_off(running, browse):
    async def steps(browser: Browser) -> None:
        await browser.look(360, 740, phone=True)
        await browser.open(running.url + "/")
        await browser.wait("at('model').textContent.includes('tiny')")
        await browser.run("at('settings-button').click(), at('prompt').focus()")
        await ask(browser)
        await answered(browser)
        assert await browser.run("document.documentElement.scrollWidth") <= 360
        # a space at the end of a line may hang over its edge
        ends = "[...document.querySelectorAll('body *:not(.token)')].map((e) => e.getBoundingClientRect().right)"
        assert max(await browser.run(ends)) <= 361
        place = await browser.run("at('send').getBoundingClientRect().toJSON()")
        assert 0 < place["top"] < place["bottom"] <= 740  # what one asks with stays in view

    browse(steps)


MARKUP = "<img src=x onerror='window.run = 1'><script>window.run = 2</script>"


def test_any_text_is_shown_as_it_is(running, browse):
    """Markup stays text, what is written from the right stands there, and a long message shows whole while typed."""

    async def steps(browser: Browser) -> None:
        await browser.open(running.url + "/")
        assert await browser.run("at('numbers').closest('section').getClientRects().length") == 0  # nothing to say yet
        await browser.run("at('prompt').focus(), window.low = at('prompt').offsetHeight")
        await browser.type("\u05e9\u05dc\u05d5\u05dd\n" + MARKUP + "\none line more" * 5)
        assert (
            await browser.run("at('prompt').offsetHeight > 2 * low && getComputedStyle(at('prompt')).direction")
            == "rtl"
        )
        await browser.press("Enter")
        await answered(browser)
        assert MARKUP in await browser.run("document.querySelector('.message.user').textContent")
        assert await browser.run("document.querySelectorAll('#messages :is(img, script)').length") == 0
        assert await browser.run("window.run ?? 0") == 0
        assert await browser.run("getComputedStyle(document.querySelector('.message.user > div')).direction") == "rtl"
        assert (
            await browser.run("getComputedStyle(document.querySelector('.message.assistant > div')).direction") == "ltr"
        )
        assert await browser.run("at('numbers').closest('section').getClientRects().length") == 1

    browse(steps)


def test_a_key_that_no_header_can_hold_is_told_as_such(running, browse):
    async def steps(browser: Browser) -> None:
        await browser.open(running.url + "/")
        await browser.wait("at('model').textContent.includes('tiny')")
        await browser.run("at('settings-button').click(), at('key').focus()")
        await browser.type("\u043a\u043b\u044e\u0447")
        await browser.run("at('prompt').focus()")
        await browser.wait("at('error').textContent.includes('a character that no key has')")

    browse(steps)


def test_errors_are_told(model, serving, browse):
    """A wrong key, a full queue, a server that is gone: in words, as an alert, and the question is not lost."""
    slow = use_proposer(SlowProposer(WrongProposer(5), 0.05))
    slow["speculative_config"]["speculation"] = "always"
    settings = {"max_num_seqs": 1, "max_waiting_requests": 1, "proposer_time_budget": 0, **slow}

    async def steps(browser: Browser) -> None:
        await browser.open(server.url + "/")
        await browser.wait("at('error').textContent.includes('no valid API key')")
        assert await browser.run("at('error').getAttribute('role')") == "alert"
        assert await browser.run("at('settings').hidden") is False
        await browser.run("at('key').focus()")
        await browser.type("secret")
        await browser.run("at('prompt').focus()")  # leaving the field is the change
        await browser.wait("at('model').textContent.includes('tiny') && !at('error').textContent")
        with full_queue(server):
            await ask(browser)
            await browser.wait("at('error').textContent.includes('try again in 3 s')")
            assert await browser.run("at('prompt').value") == QUESTION
            assert await browser.run("document.querySelectorAll('.message').length") == 0
        await asyncio.to_thread(server.wait_until_idle)
        await browser.press("Enter")
        await browser.wait("document.querySelectorAll('.token').length > 3")
        assert await browser.run("at('error').textContent") == ""
        server.server.should_exit = server.server.force_exit = True
        await browser.wait("at('error').textContent.includes('broke before the answer was complete')")
        await browser.type("again")
        await browser.press("Enter")
        await browser.wait("at('error').textContent.includes('Is it still running?')")
        assert await browser.run("at('prompt').value") == "again"

    with serving(model, {"api_key": ("secret",), "retry_after": 3}, **settings) as server:
        browse(steps, errors=True)
