"""A window of a headless browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


DRIVER = shutil.which("chromedriver")


# Of each chart in view: the x values of its lines, by the name of the run.
READ_CHARTS = """
return [...document.querySelectorAll('.js-plotly-plot')].map(
    plot => Object.fromEntries(plot.data.filter(line => line.x).map(line => [line.name, [...line.x]])))
"""


class Page:
    """A browser's window; everything is waited for, but not for ever.

    Args:
        driver: selenium's.
        screenshots: a folder for them.
    """

    def __init__(self, driver: Any, screenshots: Path) -> None:
        self.driver = driver
        self._screenshots = screenshots

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """The first result of the condition that is true."""
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        wait = WebDriverWait(self.driver, 60, ignored_exceptions=[StaleElementReferenceException])
        return wait.until(lambda _: condition(), f"waited for {what}")

    def find(self, selector: str, text: str | None = None, number: int = 1) -> list[Any]:
        """The elements that a selector finds, with that text, once there are `number` of them."""

        def found() -> list[Any]:
            elements = self.driver.find_elements("css selector", selector)
            elements = [one for one in elements if text is None or one.text.strip() == text]
            return elements if len(elements) >= number else []

        return self.wait(found, f"{selector} {text or ''}")

    def click(self, selector: str, text: str | None = None) -> None:
        """Click the first such element wherever it is, in view or not, also while the page is drawn anew."""

        def clicked() -> bool:
            self.driver.execute_script("arguments[0].click()", self.find(selector, text)[0])
            return True

        self.wait(clicked, f"a click on {selector} {text or ''}")

    def charts(self) -> list[dict[str, list[float]]]:
        """The x values of the charts in view, by run."""
        return self.driver.execute_script(READ_CHARTS)

    def ends(self, chart: int) -> dict[str, float]:
        """The last x value of each line of a chart in view, by run, as far as it is drawn."""
        charts = self.charts()[chart : chart + 1]
        return {name: line[-1] for lines in charts for name, line in lines.items() if line}

    def choose_axis(self, name: str) -> None:
        """Choose the x axis of all charts: Step, Time (relative), or a metric."""
        from selenium.webdriver.common.keys import Keys

        self.find("[aria-label='Configure charts']")[0].click()
        if not name.startswith(("Step", "Time")):
            self.find("[role=menuitem]", "Metric")[0].send_keys(Keys.ARROW_RIGHT)
        self.click("[role=menuitemcheckbox]", name)
        self.driver.switch_to.active_element.send_keys(Keys.ESCAPE, Keys.ESCAPE)

    def keep(self, name: str) -> None:
        """Take a screenshot."""
        self.driver.save_screenshot(str(self._screenshots / f"{name}.png"))
