"""Makes the pictures of README and docs anew, from a real run: python docs/pictures/make.py

terminal.svg is what `oneloop launch` prints, watch.svg what `oneloop watch` draws; report.png is the top of the page
that `oneloop report` writes, drawn by a browser (`pip install PySide6`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
WIDTH, HEIGHT = 1280, 900
SHORT = "oneloop launch --config_file single digits --duration 8ep --eval.every 2ep --run.dir runs/short"
TYPED = "oneloop launch --config_file single digits"
WATCH = "oneloop watch runs/digits --once --metrics train/loss,eval/accuracy"


def printed(command: str, folder: str, *, colours: bool) -> Text:
    """What a command prints, after the prompt."""
    words = [sys.executable, "-m", "oneloop", *command.split()[1:]]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "104", "LINES": "24"}
    environment |= {"FORCE_COLOR": "1"} if colours else {}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return Text.assemble(("$ ", "green"), (f"{command}\n", "bold"), Text.from_ansi(done.stdout.rstrip()))


def terminal(text: Text, to: Path) -> None:
    """The text as a terminal shows it."""
    console = Console(record=True, width=104, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(text)
    to.write_text(console.export_svg(title="oneloop"))


def browser(page: Path, to: Path) -> None:
    """The top of a page as a browser draws it; ends this process."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")
    os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu")
    from PySide6.QtCore import QTimer, QUrl
    from PySide6.QtWebEngineCore import QWebEngineSettings
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    application = QApplication([])
    view = QWebEngineView()
    view.settings().setAttribute(QWebEngineSettings.WebAttribute.ShowScrollBars, False)
    view.resize(WIDTH, HEIGHT)
    view.show()
    view.loadFinished.connect(
        lambda _: QTimer.singleShot(3000, lambda: application.exit(not view.grab().save(str(to))))
    )
    QTimer.singleShot(90_000, lambda: application.exit(2))
    view.load(QUrl.fromLocalFile(str(page)))
    code = application.exec()
    os._exit(code)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        terminal(printed(SHORT, folder, colours=False), HERE / "terminal.svg")
        printed(TYPED, folder, colours=False)
        terminal(printed(WATCH, folder, colours=True), HERE / "watch.svg")
        page = Path(folder) / "runs" / "digits" / "report.html"
        subprocess.run([sys.executable, __file__, str(page), str(HERE / "report.png")], check=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        browser(Path(sys.argv[1]), Path(sys.argv[2]))
    main()
