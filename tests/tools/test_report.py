"""The report: plotly is in it, compressed; in a real browser every chart has its data, nothing is
fetched, and there are no errors."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hostile import VALUES
from oneloop.cli import main
from oneloop.tools.export.model_card import model_card
from oneloop.tools.report.page import report
from worlds import ROOT, run, train

pytestmark = pytest.mark.covers(
    "oneloop.tools.report.charts",
    "oneloop.tools.report.command",
    "oneloop.tools.report.example_pages",
    "oneloop.tools.report.page",
)

LOSS = "Loss (train: mean since the previous point)"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and shutil.which("chromedriver")), reason="needs chromium and chromedriver"
)

GPT = [
    "gpt",
    "--task.data",
    str(ROOT / "src/oneloop"),
    "--task.layers",
    "1",
    "--task.width",
    "16",
    "--task.heads",
    "2",
    "--task.block",
    "32",
    "--duration",
    "30",
    "--batch.size",
    "8",
    "--batch.micro",
    "4",
]
DIGITS = ["digits", "--duration", "30", "--batch.micro", "32", "--task.width", "8"]
COMMON = [
    "--log.every",
    "5",
    "--eval.every",
    "10",
    "--save.every",
    "10",
    "--ema.half_life",
    "10",
    "--track",
    "none",
]


def killed(words: list[str], step: int) -> None:
    """Train until metrics.jsonl has reached this step, then kill the run."""

    def wait() -> None:
        while True:
            with suppress(OSError, ValueError, IndexError):
                line = Path("other/metrics.jsonl").read_text().splitlines()[-1]
                if json.loads(line)["step"] >= step:
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.001)

    threading.Thread(target=wait, daemon=True).start()
    train(words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Train gpt and digits: one digits run undisturbed, and the same run killed five times."""
    folder = tmp_path_factory.mktemp("runs")
    run(train, [*GPT, *COMMON, "--run.dir", "gpt"], folder=folder).ok()
    run(train, [*DIGITS, *COMMON, "--run.dir", "digits"], folder=folder).ok()
    words = [*DIGITS, *COMMON, "--optimizer.lr", "1e-3", "--duration", "60", "--save.every", "5"]
    run(train, [*words, "--run.dir", "whole"], folder=folder).ok()
    for step in (15, 25, 35, 45, 55):
        world = run(killed, [*words, "--run.dir", "other"], step, folder=folder)
        assert world.codes == [-signal.SIGKILL], world.output
    run(train, [*words, "--run.dir", "other"], folder=folder).ok()
    return folder


@pytest.fixture
def browser(tmp_path) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def opened(browser, page: Path) -> list[dict]:
    """Return title and data of every chart, after a check for errors and fetched resources."""
    browser.get("about:blank")
    browser.get_log("performance")
    browser.get(page.as_uri())
    browser.set_script_timeout(30)
    browser.execute_async_script(
        "const done = arguments[0]; const look = () => "
        "[...document.querySelectorAll('.chart')].every("
        "one => one.querySelector('.main-svg')) ? done() : setTimeout(look, 50); look();"
    )
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith(("data:", "chrome://"))] == [page.as_uri()]
    return browser.execute_script(
        "return [...document.querySelectorAll('main > figure')].map(f => ({title: "
        "f.querySelector('h2').textContent, data:"
        " f.querySelector('.chart').data.map(t => ({name: t.name, x: [...t.x], y: [...t.y], "
        "counts: t.customdata}))}))"
    )


def logged(folder: Path, figure: str, weights: str | None = None) -> tuple[list, list]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [
        line for line in lines if figure in line and (weights is None or line["weights"] == weights)
    ]
    return [line["step"] for line in found], [line[figure] for line in found]


def check(charts: list[dict], folder: Path, *, quality: str, tokens: bool) -> None:
    by_title = {
        chart["title"]: {trace["name"]: trace for trace in chart["data"]} for chart in charts
    }
    expected = {
        (LOSS, "train/loss"): ("train/loss", None),
        (LOSS, "eval/loss"): ("eval/loss", "raw"),
        (LOSS, "eval/loss (ema)"): ("eval/loss", "ema"),
        ("Learning rate", "lr"): ("train/lr", None),
        ("Gradient norm, before clipping", "grad_norm"): ("train/grad_norm", None),
        (quality.replace("_", " ").capitalize(), f"eval/{quality} (ema)"): (
            f"eval/{quality}",
            "ema",
        ),
        ("Gradient noise scale, in samples", "noise_scale"): ("train/noise_scale", None),
        ("Shares of the time between log lines", "data"): ("share/data", None),
        ("Peak memory in GiB (on a GPU its own, else RAM)", "peak_gib"): ("memory/peak_gib", None),
    }
    if tokens:
        expected["Tokens per second", "tokens_per_second"] = ("speed/tokens_per_second", None)
    for (title, name), (figure, weights) in expected.items():
        steps, values = logged(folder, figure, weights)
        trace = by_title[title][name]
        assert steps and trace["x"] == steps and trace["y"] == pytest.approx(values), (title, name)


def test_the_page_holds_plotly_compressed_and_allows_its_code(tmp_path, monkeypatch):
    source = Path(find_spec("plotly").submodule_search_locations[0], "package_data/plotly.min.js")
    code = source.read_bytes()
    digest = base64.b64encode(hashlib.sha256(code).digest()).decode()
    written = tmp_path / "cache"
    (tmp_path / "file").touch()
    cannot_be_written = tmp_path / "file" / "cache"

    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')

    # The second page takes plotly from the cache.
    for cache in (written, written, cannot_be_written):
        monkeypatch.setenv("ONELOOP_CACHE", str(cache))
        page = report([tmp_path])
        packed = re.search('<script type="application/gzip" id="plotly">(.*?)</script>', page)[1]
        assert gzip.decompress(base64.b64decode(packed, validate=True)) == code
        assert f"script-src 'sha256-{digest}' 'sha256-" in page
        assert len(page) < len(code) / 2
    assert len(list(written.iterdir())) == 1


@needs_chromium
def test_every_chart_has_its_data(folder, browser):
    check(
        opened(browser, folder / "digits" / "report.html"),
        folder / "digits",
        quality="accuracy",
        tokens=False,
    )
    text = browser.execute_script("return document.body.innerText")
    assert "done" in text and "--task.width 8" in text and "noise scale: " in text
    check(
        opened(browser, folder / "gpt" / "report.html"),
        folder / "gpt",
        quality="bits_per_byte",
        tokens=True,
    )


@needs_chromium
def test_a_run_that_was_killed_five_times_is_one_curve(folder, browser):
    charts = opened(browser, folder / "other" / "report.html")
    traces = {trace["name"]: trace for trace in charts[0]["data"]}
    steps, losses = logged(folder / "whole", "train/loss")
    assert traces["train/loss"]["x"] == steps == list(range(5, 65, 5))
    assert traces["train/loss"]["y"] == losses, "the curve is not that of the run left alone"
    text = browser.execute_script("return document.body.textContent")
    assert "resume 5" in text and "save 12" in text


@needs_chromium
def test_samples_mistakes_and_confusion_are_on_the_page(folder, browser):
    charts = {
        chart["title"]: chart["data"]
        for chart in opened(browser, folder / "digits" / "report.html")
    }
    examples = json.loads((folder / "digits" / "examples.json").read_text())
    (matrix,) = charts["Confusion of the validation set: rows are the true classes"]
    assert (
        matrix["counts"] == examples["matrices"]["confusion"]["counts"]
        and matrix["x"] == examples["matrices"]["confusion"]["columns"]
    )
    pictures = browser.execute_script(
        "return [...document.querySelectorAll('.samples img')].map(i => [i.alt, i.clientWidth])"
    )
    assert len(pictures) == 16 and all(width >= 160 for _, width in pictures)
    worst = next(one for one in examples["samples"] if one["worst"])
    assert (
        f"sample {worst['index']}: image, is {worst['target']}, predicted {worst['prediction']}"
        in [alt for alt, _ in pictures]
    )
    opened(browser, folder / "gpt" / "report.html")
    text = browser.execute_script("return document.body.innerText")
    assert (
        "Generated texts, at step 30" in text
        and "Validation samples with the largest losses, at step 30" in text
    )
    shaded = browser.execute_script(
        "return [...document.querySelectorAll('.samples pre span[style]')].length"
    )
    assert shaded > 50 and len(browser.find_elements("css selector", ".samples mark")) == 8


@needs_chromium
def test_charts_can_be_drawn_by_samples_and_time(folder, browser):
    opened(browser, folder / "digits" / "report.html")
    lines = [
        json.loads(line) for line in (folder / "digits/metrics.jsonl").read_text().splitlines()
    ]
    lines = [line for line in lines if "train/loss" in line]
    seen = (
        "const chart = document.querySelector('.chart'); "
        "return [[...chart.data[0].x], chart.layout.xaxis.title.text]"
    )
    for axis, key, title in (
        ("samples", "samples", "samples trained on"),
        ("time", "time", "time in seconds"),
        ("step", "step", "step"),
    ):
        browser.find_element("css selector", f"[name=axis][value={axis}]").click()
        time.sleep(0.5)
        found, shown = browser.execute_script(seen)
        assert shown == title and found == pytest.approx([line[key] for line in lines], abs=1e-3)


@needs_chromium
@pytest.mark.parametrize("width", [1200, 400])
def test_pictures_come_first_and_every_part_is_wide_enough(tmp_path, browser, width):
    from oneloop.tools.report.examples import Examples, plain

    torch.manual_seed(0)
    examples = Examples()
    whole = {"image": torch.rand(1, 8, 8), "target": "3", "prediction": "3"}
    mask = torch.ones(12, 12, dtype=torch.int64)
    parts = {"image": torch.rand(3, 12, 12), "target": mask, "prediction": torch.rand(12, 12)}
    examples.samples = [
        {"index": 0, "worst": False, "loss": None, **plain(whole)},
        {"index": 1, "worst": True, "loss": 1.0, **plain(parts)},
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "examples.json").write_text(json.dumps(examples.as_json(1)))
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "run"), "--to", str(page)]) == 0
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    opened(browser, page)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('.samples img')].map("
        "i => [i.clientWidth, i.getBoundingClientRect().bottom])"
    )
    assert len(drawn) == 4 and min(size for size, _ in drawn) >= 160
    chart = "return document.querySelector('.chart').getBoundingClientRect().top"
    assert max(bottom for _, bottom in drawn) < browser.execute_script(chart)
    names = browser.execute_script(
        "return [...document.querySelectorAll('.parts figcaption')].map(one => one.textContent)"
    )
    assert names == ["image", "target", "prediction"]


@needs_chromium
def test_it_can_be_used_with_the_keyboard_alone(folder, browser):
    from selenium.webdriver.common.keys import Keys

    opened(browser, folder / "digits" / "report.html")
    browser.find_element("css selector", "body").send_keys(Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("class") == "skip"
    browser.switch_to.active_element.send_keys(Keys.TAB)
    switch = browser.switch_to.active_element
    assert switch.get_attribute("value") == "step"
    switch.send_keys(Keys.ARROW_RIGHT)
    assert browser.switch_to.active_element.get_attribute("value") == "samples"
    browser.switch_to.active_element.send_keys(Keys.TAB)
    first = browser.switch_to.active_element
    assert first.tag_name == "summary"
    first.send_keys(Keys.ENTER)
    assert browser.execute_script("return document.querySelector('figure details').open")


@needs_chromium
def test_two_runs_are_laid_over_one_another(folder, browser, capsys):
    page = folder / "both.html"
    assert main(["report", str(folder / "digits"), str(folder / "other"), "--to", str(page)]) == 0
    charts = {chart["title"]: chart["data"] for chart in opened(browser, page)}
    expected = {
        LOSS: ("train/loss", "train/loss", None),
        "Learning rate": ("train/lr", "lr", None),
        "Gradient norm, before clipping": ("train/grad_norm", "grad_norm", None),
        "Accuracy": ("eval/accuracy", "eval/accuracy (ema)", "ema"),
        "Macro f1": ("eval/macro_f1", "eval/macro_f1", "raw"),
        "Samples per second": ("train/samples_per_second", "samples_per_second", None),
        "Update relative to weights (at the peak learning rate usually about 0.001)": (
            "train/update_ratio",
            "update_ratio",
            None,
        ),
        "Gradient noise scale, in samples": ("train/noise_scale", "noise_scale", None),
        "Peak memory in GiB (on a GPU its own, else RAM)": ("memory/peak_gib", "peak_gib", None),
    }
    for name in ("digits", "other"):
        for title, (figure, trace, weights) in expected.items():
            drawn = next(one for one in charts[title] if one["name"] == f"{name} {trace}")
            steps, values = logged(folder / name, figure, weights)
            assert steps and drawn["x"] == steps and drawn["y"] == pytest.approx(values), (
                name,
                title,
            )
        titles = (
            f"Shares of the time between log lines: {name}",
            f"Confusion of the validation set: rows are the true classes: {name}",
        )
        assert all(title in charts for title in titles)
    text = browser.execute_script("return document.body.innerText")
    assert (
        "optimizer.lr" in text
        and "0.003" in text
        and "0.001" in text
        and "Keys that differ: " in text
    )


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False)])
def test_it_reads_on_any_screen(folder, browser, width, dark):
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]},
    )
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    assert (
        main(
            [
                "report",
                str(folder / "digits"),
                str(folder / "other"),
                "--to",
                str(folder / "both.html"),
            ]
        )
        == 0
    )
    for page in (
        folder / "both.html",
        folder / "gpt" / "report.html",
        folder / "digits" / "report.html",
    ):
        opened(browser, page)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        plots = (
            "return [...document.querySelectorAll('.chart')].map(chart => "
            "chart._fullLayout._size.h)"
        )
        assert min(browser.execute_script(plots)) > 120  # the legend leaves enough room
    ground, ink = browser.execute_script(
        "const s = getComputedStyle(document.body), rgb = t => t.match(/\\d+/g).slice(0, 3)"
        ".reduce((a, b) => a + +b, 0); return [rgb(s.backgroundColor), rgb(s.color)]"
    )
    assert (ground < 150 and ink > 600) if dark else (ground > 700 and ink < 200)
    axis = browser.execute_script(
        "return getComputedStyle(document.querySelector('.xtick text')).fill"
    )
    assert (sum(int(part) for part in axis[4:-1].split(",")[:3]) > 500) == dark
    for chart in browser.find_elements("css selector", ".chart"):
        assert chart.get_attribute("aria-label").startswith("Chart: ")
    assert len(browser.find_elements("css selector", "figure details table")) == len(
        browser.find_elements("css selector", ".chart")
    )


def test_charts_of_one_and_two_points_can_be_read(tmp_path):
    from oneloop.tools.report.page import charts, read_record

    lines = [{"step": step, "train/loss": 1.0 / step, "train/lr": 3e-3} for step in (2, 4, 6)]
    lines += [{"step": 6, "eval/accuracy": 0.9, "weights": "raw"}, {"step": 4, "event": "save"}]
    lines += [{"step": step, "memory/peak_gib": value} for step, value in ((4, 0.5), (6, 0.7))]
    lines += [
        {"step": step, "share/data": share} for step, share in ((2, 0.5), (4, "nan"), (6, 0.25))
    ]
    lines += [{"step": 5, "event": "resume"}, {"step": 6, "event": "save"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = {chart["title"]: chart for chart in charts([read_record(tmp_path)])}
    (shares,) = drawn.pop("Shares of the time between log lines")["data"]
    assert shares["y"] == [0.5, None, 0.25]
    assert list(drawn) == [
        LOSS,
        "Accuracy (1 point)",
        "Peak memory in GiB (on a GPU its own, else RAM) (2 points)",
    ]
    low, high = drawn["Accuracy (1 point)"]["layout"]["yaxis"]["range"]
    assert low < 0.9 < high and high - low < 0.5
    page = report([tmp_path])
    assert f"Events of {tmp_path.name}: save 2, resume 1" in page
    assert "<dt>learning rate</dt><dd>0.003</dd>" in page


def test_what_is_no_run_is_reported(tmp_path, capsys):
    for words, expected_text in (
        (["report", str(tmp_path)], "holds no run"),
        (["report"], "arguments are required: RUN"),
        (["report", "a", "--tu", "b"], "unrecognized arguments: --tu"),
    ):
        assert main(words) == 2
        assert expected_text in capsys.readouterr().err


def test_names_cannot_run_code_in_the_page(tmp_path):
    folder = tmp_path / "<script>alert(1)<"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "train/loss": 2.0}\n{"step": 2, "train/loss": "nan"}\n'
    )
    (folder / "recipe.yaml").write_text("task: {name: '</script><script>alert(2)</script>'}\n")
    page = report([folder])
    assert "<script>alert" not in page


EVIL = (
    "</script><img src=x onerror=\"window.ran='{0}'\"><script>window.ran='{0}'</script>"
    "<a href=\"javascript:window.ran='{0}'\">{0}</a>"
)


PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGA"
    "WjR9awAAAABJRU5ErkJggg=="
)


def hostile(folder: Path) -> None:
    """Write a run folder with code in every string, and with values of wrong types next to them."""
    folder.mkdir()

    def evil(what: str) -> str:
        return EVIL.format(what)

    lines = [
        {
            "step": step,
            "event": evil("event"),
            "why": evil("why"),
            "ids": [evil("ids"), step],
            evil("key"): evil("value"),
        }
        for step in (1, 2)
    ]
    lines += [
        {"step": step, "event": kind, "why": evil("why")}
        for step in (1, 2)
        for kind in ("save", "resume", "skip")
    ]
    for step in (1, 2, 3):
        lines.append(
            {
                "step": step,
                "train/loss": 1.0 / step,
                f"train/{evil('figure')}": 2.0,
                "share/data": 0.5,
            }
        )
        lines.append(
            {
                "step": step,
                "eval/loss": 0.5,
                f"eval/{evil('metric')}": 1.0,
                "weights": evil("weights"),
            }
        )
        lines.append(
            {
                "step": step,
                f"{evil('set')}/loss": 1.0,
                "weights": "raw",
                "train/lr": evil("lr"),
                "x/y": [1],
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sample = {
        "index": evil("index"),
        "worst": False,
        "loss": evil("loss"),
        "target": evil("target"),
    }
    sample |= {
        "prediction": evil("prediction"),
        "confidence": evil("confidence"),
        "right": evil("right"),
    }
    samples = [
        {**sample, "parts": {"image": evil("image")}},
        {**sample, "parts": {"image": "https://example.com/a.png"}},
        {
            **sample,
            "parts": {"image": "data:image/svg+xml,<svg onload=alert(1)>"},
            "worst": evil("worst"),
        },
        {**sample, "tokens": [[evil("token"), evil("loss")], [1], evil("tokens")]},
        {**sample, "text": evil("text")},
        {**sample, "parts": {evil("part"): evil("picture"), evil("more"): PIXEL}, "worst": True},
        {**sample, "parts": evil("parts"), "worst": True},
        {**sample, "prompt": evil("prompt"), "continuation": evil("continuation")},
        evil("sample"),
    ]
    classes = [evil("class"), "b"]
    confusion = {"rows": classes, "columns": classes, "counts": [[1, 2], [3, 4]]}
    rows = {"rows": [evil("row"), "b"], "columns": [evil("column")], "counts": [[1], [2]]}
    matrices = {evil("matrix"): rows, "confusion": confusion}
    (folder / "examples.json").write_text(
        json.dumps(
            {
                "step": evil("step"),
                "samples": samples,
                "matrices": matrices,
            }
        )
    )
    best = {"metric": evil("metric"), "value": evil("value"), "step": evil("step")}
    summary = {
        "exit_reason": evil("reason"),
        "step": evil("step"),
        "seconds": evil("seconds"),
        "best": best,
    }
    summary |= {f"eval/{evil('summary')}": 1.0, "goodput": {"about": evil("goodput")}}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "recipe.yaml").write_text(
        json.dumps({"task": {"name": evil("task"), evil("option"): evil("set")}})
    )
    about = {
        "command": [evil("a"), evil("b")],
        "accelerate": {"ACCELERATE_MIXED_PRECISION": evil("bf16")},
    }
    (folder / "environment.json").write_text(
        json.dumps({**about, "processes": evil("processes"), evil("k"): evil("v")})
    )


class Structure(HTMLParser):
    """The elements of a page with the names of their attributes, and its texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self.texts += [value or "" for name, value in attrs if name not in ("href", "style")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("text", [text for text in VALUES if isinstance(text, str)] + [EVIL])
def test_a_text_in_any_field_is_shown_as_text(tmp_path, monkeypatch, text):
    """The page has the elements of a harmless one, whatever text its fields hold."""
    pages = []
    for number, written in enumerate(("harmless", text)):
        monkeypatch.setattr(f"{__name__}.EVIL", f"{written}{{0}}" if written != EVIL else EVIL)
        folder = tmp_path / str(number) / "run"
        folder.parent.mkdir()
        hostile(folder)
        pages.append(Structure(report([folder])))
    assert pages[1].elements == pages[0].elements
    shown = "".join(pages[1].texts)
    for field in ("why", "figure", "reason", "task", "target", "class", "a", "k", "prompt"):
        assert written.format(field) in shown or f"{written}{field}" in shown, field


def test_a_model_card_shows_texts_as_text(tmp_path):
    hostile(tmp_path / "run")
    environment = {"inputs": {f"train set, {EVIL}": EVIL}, "versions": {"torch": EVIL}}
    (tmp_path / "run" / "environment.json").write_text(json.dumps(environment))
    recipe = {"task": {"name": "sft", "model": EVIL, "data": EVIL}}
    (tmp_path / "run" / "recipe.yaml").write_text(json.dumps(recipe))
    about = {"weights": EVIL, "base": {"place": EVIL, EVIL: EVIL}}
    card = model_card(tmp_path / "run", EVIL, about, licence=EVIL, language_model=True)

    # Only the head, which is YAML, and the blocks of code have it as it is.
    head, body = card.split("---\n", 2)[1:]
    assert yaml.safe_load(head)["license"] == EVIL
    prose = re.sub(r"```.*?```", "", body, flags=re.DOTALL)
    assert "<" not in prose and html.unescape(prose).count(EVIL) >= 8
    block = body.partition("```yaml\n")[2].removesuffix("```\n")
    assert yaml.safe_load(block)["task"] == recipe["task"]


@needs_chromium
def test_no_script_of_a_hostile_folder_runs(tmp_path, browser):
    folders = [tmp_path / "evil", tmp_path / "<b onmouseover=alert(1)>"]
    for folder in folders:
        hostile(folder)
    for words in ([str(folders[0])], list(map(str, folders))):
        page = tmp_path / "page.html"
        assert main(["report", *words, "--to", str(page)]) == 0
        charts = opened(browser, page)  # nothing fetched, no error on the console
        assert len(charts) > 5
        browser.execute_script(
            "document.querySelectorAll('details').forEach(one => one.open = true)"
        )
        assert browser.execute_script("return window.ran") is None
        assert browser.execute_script("return document.querySelectorAll('script').length") == 3
        assert (
            browser.execute_script(
                "return document.querySelectorAll('[onerror], [onload], [onmouseover]').length"
            )
            == 0
        )
        links = browser.execute_script(
            "return [...document.querySelectorAll('a')].map("
            "a => a.getAttribute('href') || a.getAttribute('xlink:href'))"
        )
        assert not [link for link in links if link and "javascript" in link]


@needs_chromium
def test_a_script_that_came_into_the_page_would_not_run(tmp_path, browser):
    """The second protection: if a string were not escaped, the page's content policy would still
    block the script."""
    hostile(tmp_path / "evil")
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "evil"), "--to", str(page)]) == 0
    page.write_text(page.read_text().replace("</main>", "<script>window.ran = 1</script></main>"))
    browser.get(page.as_uri())
    assert browser.execute_script("return window.ran") is None
    assert any(
        "Content Security Policy" in entry["message"] for entry in browser.get_log("browser")
    )
