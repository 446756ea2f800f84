"""The site of docs/: pages fit on a phone, and the search puts the right page first."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from browser import Page, window

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (1400, 400)
# Elements beyond the right edge of the window, except in tables and code blocks, which scroll.
TOO_WIDE = """
const width = document.documentElement.clientWidth
const wide = [...document.querySelectorAll('.md-content *')].filter(element =>
    element.getBoundingClientRect().right > width + 1 && !element.closest('pre, .md-typeset__table'))
return [document.documentElement.scrollWidth > width, wide.map(element => element.outerHTML.slice(0, 99))]
"""
FIRST = {
    "gradient accumulation": "questions.html#it-runs-out-of-memory-how-do-i-use-gradient-accumulation",
    "csv": "csv.html",
    "early stopping": "questions.html#how-do-i-stop-when-it-no-longer-improves-early-stopping",
    "multi gpu": "distributed.html",
    "resume": "resume.html",
    "best checkpoint": "questions.html#how-do-i-keep-the-best-checkpoint",
}


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without logging requests."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """Build and serve the site; the value is its address and its pages."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        if find_spec(module) is None:
            pytest.skip("needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html") if path.stem != "404")
    yield f"http://127.0.0.1:{server.server_port}", pages
    server.shutdown()
    server.server_close()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with window(tmp_path) as page:
        yield page


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_the_window(page: Page, site: tuple[str, list[str]], width: int):
    address, pages = site
    assert "index.html" in pages
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    for name in pages:
        page.driver.get(f"{address}/{name}")
        page.find("article h1")
        assert page.driver.execute_script(TOO_WIDE) == [False, []], name


@pytest.mark.slow
@pytest.mark.parametrize("words", FIRST)
def test_a_search_finds_the_right_page_first(page: Page, site: tuple[str, list[str]], words: str):
    page.driver.get(f"{site[0]}/index.html?q={quote(words)}")
    page.find(".md-search-result__item", number=2)
    links = [link.get_attribute("href") for link in page.find(".md-search-result__item a")[:2]]  # a page, a section
    assert any(link.partition("?")[0].endswith(f"/{FIRST[words]}") or f"/{FIRST[words]}?" in link for link in links)
