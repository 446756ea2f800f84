"""A window of a headless browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


DRIVER = shutil.which("chromedriver")


# Returns, for each chart on the page, the x values of its lines by the name of the run.
READ_CHARTS = """
return [...document.querySelectorAll('.js-plotly-plot')].map(
    plot => Object.fromEntries(plot.data.filter(line => line.x).map(line => [line.name, [...line.x]])))
"""


class Page:
    """A browser window, whose methods wait for up to a minute until the page shows what they need.

    Args:
        driver: selenium's driver of the browser.
        screenshots: the folder for screenshots.
    """

    def __init__(self, driver: Any, screenshots: Path) -> None:
        self.driver = driver
        self._screenshots = screenshots

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """Call the condition until its result is true, and return that result; `what` names it in the error."""
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        wait = WebDriverWait(self.driver, 60, ignored_exceptions=[StaleElementReferenceException])
        return wait.until(lambda _: condition(), f"waited for {what}")

    def find(self, selector: str, text: str | None = None, number: int = 1) -> list[Any]:
        """Return the elements that match a CSS selector and have this text, once there are at least `number`."""

        def matches() -> list[Any]:
            elements = self.driver.find_elements("css selector", selector)
            elements = [element for element in elements if text is None or element.text.strip() == text]
            return elements if len(elements) >= number else []

        return self.wait(matches, f"{selector} {text or ''}")

    def click(self, selector: str, text: str | None = None) -> None:
        """Click the first element that matches, even if it is out of view or the page is being redrawn."""

        def click_first() -> bool:
            self.driver.execute_script("arguments[0].click()", self.find(selector, text)[0])
            return True

        self.wait(click_first, f"a click on {selector} {text or ''}")

    def charts(self) -> list[dict[str, list[float]]]:
        """Return the x values of each chart on the page, by run."""
        return self.driver.execute_script(READ_CHARTS)

    def ends(self, chart: int) -> dict[str, float]:
        """Return the last x value of each line of a chart, by run; lines without points yet are left out."""
        charts = self.charts()[chart : chart + 1]
        return {name: line[-1] for lines in charts for name, line in lines.items() if line}

    def choose_axis(self, name: str) -> None:
        """Select the x axis of all charts: Step, Time (relative), or a metric."""
        from selenium.webdriver.common.keys import Keys

        self.find("[aria-label='Configure charts']")[0].click()
        if not name.startswith(("Step", "Time")):
            self.find("[role=menuitem]", "Metric")[0].send_keys(Keys.ARROW_RIGHT)
        self.click("[role=menuitemcheckbox]", name)
        self.driver.switch_to.active_element.send_keys(Keys.ESCAPE, Keys.ESCAPE)

    def keep(self, name: str) -> None:
        """Take a screenshot."""
        self.driver.save_screenshot(str(self._screenshots / f"{name}.png"))


@contextmanager
def window(screenshots: Path) -> Iterator[Page]:
    """Open a window of a headless browser; skip the test if chromium, chromedriver or selenium is missing."""
    if BROWSER is None or DRIVER is None:
        pytest.skip("needs chromium and chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "window-size=1400,1300"):
        options.add_argument(f"--{argument}")
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.set_page_load_timeout(60)
        yield Page(driver, screenshots)
    finally:
        driver.quit()  # this also ends the browser and its processes
