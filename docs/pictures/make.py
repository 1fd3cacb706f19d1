"""Make the pictures of README and docs from a real run: python docs/pictures/make.py

terminal.svg shows the output of `oneloop launch`, watch.svg that of `oneloop watch`. report.png is
the top of the page of `oneloop report` in Chromium (selenium and chromedriver are needed).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
WIDTH, HEIGHT = 1280, 900
SHORT = (
    "oneloop launch --config_file single digits --duration 8ep --eval.every 2ep --run.dir "
    "runs/short"
)
TYPED = "oneloop launch --config_file single digits"
WATCH = "oneloop watch runs/digits --once --metrics train/loss,eval/accuracy"


def printed(command: str, folder: str, *, colours: bool) -> Text:
    """Return a prompt, the command and its output."""
    words = [sys.executable, "-m", "oneloop", *command.split()[1:]]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "104", "LINES": "24"}
    environment |= {"FORCE_COLOR": "1"} if colours else {}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return Text.assemble(
        ("$ ", "green"), (f"{command}\n", "bold"), Text.from_ansi(done.stdout.rstrip())
    )


def terminal(text: Text, to: Path) -> None:
    """Save the text as a picture of a terminal."""
    console = Console(record=True, width=104, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(text)
    to.write_text(console.export_svg(title="oneloop"))


def browser(page: Path, to: Path) -> None:
    """Save the top of a page as a browser draws it."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for word in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={WIDTH},{HEIGHT}",
    ):
        options.add_argument(word)
    driver = webdriver.Chrome(options=options)
    try:
        driver.get(page.as_uri())
        time.sleep(3)  # until plotly has drawn the charts
        driver.save_screenshot(str(to))
    finally:
        driver.quit()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        terminal(printed(SHORT, folder, colours=False), HERE / "terminal.svg")
        printed(TYPED, folder, colours=False)
        terminal(printed(WATCH, folder, colours=True), HERE / "watch.svg")
        browser(Path(folder) / "runs" / "digits" / "report.html", HERE / "report.png")


if __name__ == "__main__":
    main()
