"""Make the pictures of the README and the start page again, each for a light and a dark background.

    python docs/pictures/make.py             # both; two minutes, and needs chromium, chromedriver and selenium
    python docs/pictures/make.py terminal    # only the terminal, which needs none of these

Both show real runs, trained here in a temporary folder: a recipe on a terminal, and three learning rates that are
compared in the MLflow UI.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
RECIPE = ["experiment=digits_fast"]
RATES = "optimizer.lr=0.01,0.03,0.1"
LENGTH = "trainer.max_duration=12ep"

# Background, text, and the eight colors of a terminal: only the prompt has one.
COLORS = {
    "light": TerminalTheme((246, 248, 250), (31, 35, 40), [(31, 35, 40)] * 2 + [(26, 127, 55)] + [(89, 99, 110)] * 5),
    "dark": TerminalTheme(
        (22, 27, 34), (230, 237, 243), [(230, 237, 243)] * 2 + [(63, 185, 80)] + [(145, 152, 161)] * 5
    ),
}
DARK_MODE = "_mlflow_dark_mode_toggle_enabled"
PANELS = ("mlflow.assistant.chat_panel.close", "mlflow_header.toggle_sidebar_button")
METRIC = "^loss/train"
JOBS = "attributes.run_name LIKE 'lr%'"
WIDTH = 840  # of the chart, of as many columns as there are
LINES = ("#8250df", "#1f883d", "#db6d28")
# One entry for each curve in view that has been loaded.
CURVES = """
return [...document.querySelectorAll('.js-plotly-plot')].flatMap(
    plot => plot.data.filter(line => line.x && line.x.length > 1).map(line => line.x[line.x.length - 1]))
"""


def train(folder: Path, *arguments: str, **variables: str) -> str:
    """Run a command of the runner, and return what it prints."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "94", "MLFLOW_DISABLE_TELEMETRY": "true", **variables}
    command = [sys.executable, "-m", "runner", *arguments]
    return subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def draw_terminal(folder: Path) -> None:
    """Draw what a run prints."""
    lines = [line.rstrip() for line in train(folder, *RECIPE).splitlines()]
    text = Text.assemble(("$ ", "bold green"), (f"python -m runner {' '.join(RECIPE)}", "bold"), "\n")
    for line in lines:
        text.append(f"{line}\n", "bold" if line.startswith(("epoch  ", "metric  ")) else "")  # as on a terminal
    for name, theme in COLORS.items():
        console = Console(record=True, width=max(map(len, lines)) + 2, file=io.StringIO())
        console.print(text, end="")
        svg = console.export_svg(title="", theme=theme)
        svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # which would be fetched from elsewhere
        svg = svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace")
        (FOLDER / f"terminal-{name}.svg").write_text(re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE), encoding="utf-8")


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Serve the MLflow UI of a folder, and yield its address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/outputs/mlflow.db"]
    env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 15)
        process.wait()


@contextmanager
def browser() -> Iterator[Any]:
    """Open a window of a headless browser."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars", "window-size=1280,830"):
        options.add_argument(f"--{argument}")
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def find(driver: Any, selector: str) -> list[Any]:
    """Return the elements of a page that a selector finds."""
    return driver.find_elements("css selector", selector)


def wait(condition: Any, what: str, seconds: float = 60) -> Any:
    """Return what a condition gives, once it gives something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if found := condition():
                return found
        except Exception as error:  # the page is being drawn, or the server starts
            what = f"{what.partition(':')[0]}: {error}"
        time.sleep(0.2)
    raise TimeoutError(f"waited for {what}")


def draw_comparison(folder: Path) -> None:
    """Draw how the MLflow UI compares three learning rates."""
    import mlflow
    from selenium.webdriver import ActionChains

    train(folder, "-m", RATES, LENGTH, MLFLOW_EXPERIMENT_NAME="learning-rates")
    query = urlencode({"compareRunsMode": "CHART", "workflowType": "machine_learning", "searchFilter": JOBS})
    with mlflow_server(folder) as address:
        client = mlflow.MlflowClient(address)
        (experiment,) = wait(lambda: client.search_experiments(filter_string="name = 'learning-rates'"), "the server")
        runs = client.search_runs([experiment.experiment_id], JOBS, order_by=["attributes.start_time"])
        for run, color in zip(runs, LINES, strict=True):  # else by chance, and two may be alike
            client.set_tag(run.info.run_id, "mlflow.runColor", color)
        for name in COLORS:
            with browser() as driver:
                driver.get(address)
                dark = "true" if name == "dark" else "false"
                driver.execute_script("localStorage.setItem(arguments[0], arguments[1])", DARK_MODE, dark)
                driver.get("about:blank")
                driver.get(f"{address}/#/experiments/{experiment.experiment_id}/runs?{query}")
                for panel in PANELS:
                    button = wait(lambda panel=panel: find(driver, f"[data-component-id='{panel}']"), panel)[0]
                    driver.execute_script("arguments[0].click()", button)
                wait(lambda: find(driver, "input[placeholder='Search metric charts']"), "charts")[0].send_keys(METRIC)
                wait(lambda: len(driver.execute_script(CURVES)) >= len(runs), "curves")
                wait(lambda: len(find(driver, ".js-plotly-plot")) == 1, "the one chart that is left")
                time.sleep(2)  # until it stays as it is
                card = find(driver, ".react-resizable")[-1]
                width, height = card.size["width"], card.size["height"]
                mouse = ActionChains(driver).move_to_element_with_offset(card, width // 2 - 8, height // 2 - 8)
                mouse.click_and_hold().move_by_offset(WIDTH - width, 0).release().perform()
                ActionChains(driver).move_to_element(find(driver, "h1, h2")[0]).click().perform()
                time.sleep(3)  # until they are drawn, and the toolbar has faded
                driver.save_screenshot(str(FOLDER / f"compare-{name}.png"))


def main() -> None:
    """Make the pictures that are named, or all."""
    pictures = {"terminal": draw_terminal, "compare": draw_comparison}
    for name in sys.argv[1:] or pictures:
        with tempfile.TemporaryDirectory() as folder:
            pictures[name](Path(folder))


if __name__ == "__main__":
    main()
