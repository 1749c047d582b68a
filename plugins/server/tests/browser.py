"""A headless Chromium driven over its DevTools protocol; needs the browser alone."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VARIABLE = "SPECDEC_TEST_CHROMIUM"
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--remote-debugging-port=0",
)
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), " ": (32, " ")}
PATIENCE = 90.0
"""Seconds that a condition may take; machines that test are busy."""


def find_chromium() -> str | None:
    """The browser's path; None where there is none."""
    given = os.environ.get(VARIABLE)
    return given or next((path for name in NAMES if (path := shutil.which(name))), None)


class PageError(AssertionError):
    """The page did not do what was expected, or a script failed in it."""


class Browser:
    """One page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last = 0
        self.requests: list[str] = []
        """Addresses that the page asked for."""
        self.problems: deque[str] = deque(maxlen=50)
        """Uncaught exceptions, and what the console was told as an error."""

    async def listen(self) -> None:
        """Take messages until the connection ends."""
        async for message in self._socket:
            content = json.loads(message.data)
            if "id" in content:
                self._answers.pop(content["id"]).set_result(content)
            else:
                self._note(content["method"], content["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol."""
        self._last += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[self._last] = answer
        await self._socket.send_json({"id": self._last, "method": method, "params": params})
        content = await asyncio.wait_for(answer, PATIENCE)
        if "error" in content:
            raise PageError(f"{method}: {content['error']['message']}")
        result: dict[str, Any] = content["result"]
        return result

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise PageError(f"{script}: {result['exceptionDetails']['exception']['description']}")
        return result["result"].get("value")

    async def wait(self, script: str) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if await self.run(f"Boolean({script})"):
                return
            await asyncio.sleep(0.02)
        raise PageError(f"never true: {script}\n{await self.run('document.body.innerText')}\n{list(self.problems)}")

    async def open(self, url: str) -> None:
        """Go to an address and wait until the page stands."""
        await self.call("Page.navigate", url=url)
        await self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    async def type(self, text: str) -> None:
        """Enter text where the focus is."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        code, text = KEYS[key]
        common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        common["modifiers"] = 8 if shift else 0
        await self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def tab_to(self, name: str) -> list[str]:
        """Press Tab until the element with the id ``name`` has the focus; the ids on the way."""
        passed: list[str] = []
        for _ in range(30):
            await self.press("Tab")
            passed.append(await self.run("document.activeElement.id || document.activeElement.tagName"))
            if passed[-1] == name:
                return passed
        raise PageError(f"Tab does not lead to {name!r}: {passed}")

    async def look(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Set the size of the window and the colour scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)

    async def picture(self, file: Path) -> None:
        """Save what is seen as PNG."""
        result = await self.call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(result["data"]))


@asynccontextmanager
async def open_browser(executable: str, folder: Path) -> AsyncIterator[Browser]:
    """Start a browser with an empty profile in ``folder`` and end it afterwards."""
    process = await asyncio.create_subprocess_exec(
        executable, *OPTIONS, f"--user-data-dir={folder}", "about:blank", stderr=asyncio.subprocess.DEVNULL
    )
    try:
        port = await _port(folder, process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                pages = [target for target in await response.json() if target["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                browser = Browser(socket)
                listening = asyncio.create_task(browser.listen())
                for domain in ("Page", "Runtime", "Network", "Log"):
                    await browser.call(f"{domain}.enable")
                yield browser
                with suppress(PageError, TimeoutError, ConnectionError):
                    await browser.call("Browser.close")
                listening.cancel()
    finally:
        with suppress(ProcessLookupError):
            if process.returncode is None:
                process.terminate()
        await process.wait()


async def _port(folder: Path, process: asyncio.subprocess.Process) -> int:
    """The port that the browser has written into its profile."""
    file = folder / "DevToolsActivePort"
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if process.returncode is not None:
            raise PageError(f"the browser ended with {process.returncode}")
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        await asyncio.sleep(0.05)
    raise PageError("the browser did not start")
