"""What a person sees who compares the runs of a sweep: the real MLflow server, opened in a headless browser."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
EPOCHS, BATCHES, SAMPLES = 40, 480, 48_000  # more batches than the 320 points that a chart asks for
RATES = ["0.01", "0.03", "0.1"]

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
        """What the condition gives when it gives something."""
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


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """A window of a headless browser; `RUNNER_SCREENSHOTS` names a folder to keep what it shows."""
    if BROWSER is None or DRIVER is None:
        pytest.skip("needs chromium and chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    screenshots = Path(os.environ.get("RUNNER_SCREENSHOTS", tmp_path / "screenshots"))
    screenshots.mkdir(parents=True, exist_ok=True)
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "window-size=1400,1300"):
        options.add_argument(f"--{argument}")
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.set_page_load_timeout(60)
        yield Page(driver, screenshots)
    finally:
        driver.quit()  # and with it the browser and its processes


@pytest.mark.slow
def test_a_sweep_is_compared_in_the_browser(page: Page, mlflow_server: Any, run_app: Any) -> None:
    experiment = f"learning-rates-{uuid.uuid4().hex[:4]}"
    tiny = ["model=mlp", "data.batch_size=100", "data.eval_batch_size=300", f"trainer.max_duration={EPOCHS}ep"]
    env = {"MLFLOW_TRACKING_URI": mlflow_server.uri, "MLFLOW_EXPERIMENT_NAME": experiment}
    run_app("-m", f"optimizer.lr={','.join(RATES)}", *tiny, env=env)
    [(number,)] = mlflow_server.query("select experiment_id from experiments where name = ?", experiment)
    runs = f"{mlflow_server.uri}/#/experiments/{number}/runs"
    names = {f"lr{rate}-mlp-digits" for rate in RATES}

    page.driver.get(f"{runs}?compareRunsMode=CHART")
    for panel in ("mlflow.assistant.chat_panel.close", "mlflow_header.toggle_sidebar_button"):
        page.click(f"[data-component-id='{panel}']")
    check_charts(page, names)

    page.driver.get(runs)
    check_comparison(page, names)


def check_charts(page: Page, names: set[str]) -> None:
    """The curves of the runs lie over one another, by batch, by time and by sample."""
    page.find("input[placeholder='Search metric charts']")[0].send_keys("^loss/")

    def drawn(chart: int, end: float, points: int) -> bool:
        charts = page.charts()
        lines = list(charts[chart].values()) if len(charts) == 2 and charts[chart].keys() == names else []
        return len(lines) == 3 and all(len(line) == points and line[-1] == end for line in lines)

    page.wait(lambda: drawn(0, BATCHES, EPOCHS) and drawn(1, BATCHES, 320), "curves by batch")
    page.keep("charts")
    page.choose_axis("time/sample")
    page.wait(lambda: drawn(1, SAMPLES, 320), "curves of training by sample")
    page.choose_axis("time/eval/sample")
    page.wait(lambda: drawn(0, SAMPLES, EPOCHS), "curves of evaluations by sample")
    page.keep("charts-by-sample")
    page.choose_axis("Time (relative)")
    page.wait(
        lambda: len(ends := page.ends(1)) == 3 and all(0 < end < 60 for end in ends.values()), "curves by seconds"
    )
    page.choose_axis("Step")
    page.wait(lambda: drawn(0, BATCHES, EPOCHS), "curves by batch again")


def check_comparison(page: Page, names: set[str]) -> None:
    """Of the runs that are ticked in the list, the comparison shows what differs, and metrics as curves."""
    for name in names:
        page.find(".ag-row a", name)
    page.keep("runs")
    for name in sorted(names):
        row = page.wait(lambda name=name: row_of(page, name), f"the row of {name}")
        page.click(f".ag-row[row-id='{row}'] input[aria-label^='Press Space to toggle row']")
    page.click("button", "Compare")

    page.find("h1,h2", "Comparing 3 Runs from 1 Experiment")
    page.click("[aria-label='Parameters - Show diff only']")
    page.wait(lambda: parameters(page) == [["optimizer.lr", *RATES]], "what differs, and nothing else")
    page.keep("parameters")
    page.click("a", "loss/train/total")
    page.wait(lambda: page.ends(0) == dict.fromkeys(names, BATCHES), "curves of the metric")
    page.keep("metric")


def row_of(page: Page, name: str) -> str | None:
    """The id of a run's row in the list of runs."""
    link = page.find(".ag-row a", name)[0]
    return link.find_element("xpath", "ancestor::*[@row-id][1]").get_attribute("row-id")


def parameters(page: Page) -> list[list[str]]:
    """The rows of the parameters' table of a comparison."""
    switch = page.find("[aria-label='Parameters - Show diff only']")[0]
    table = switch.find_element("xpath", "ancestor::*[.//table][1]//table")
    page.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", table)
    return [row.text.split() for row in table.find_elements("css selector", "tr")]
