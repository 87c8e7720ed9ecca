"""The page in a browser: it renders, says nothing on the console, and clicks work, in light and dark.

Skipped where no Chromium is installed (Debian: `apt-get install chromium`).
"""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"),
    pytest.mark.slow,  # a browser starts in each
]

# Put at the end of the page: presses what a person would, and notes what is there then.
CLICKS = """
<script>
{
  const found = {};
  const all = (selector) => [...document.querySelectorAll(selector)];
  const press = (selector, type = "click") =>
    document.querySelector(selector).dispatchEvent(new MouseEvent(type, {bubbles: true}));
  found.boxes = all("#graph-svg .box").length;
  press("#graph-svg .box");
  found.chosen = all("#graph-svg .chosen").length;
  found.detail = document.getElementById("graph-detail").textContent;
  press("#graph-svg .box", "dblclick");
  press('[data-graph="unfold"]');
  found.unfolded = all("#graph-svg .op").length;
  press('[data-graph="fold"]');
  found.folded = all("#graph-svg .op").length;
  press('[data-graph="fit"]');
  const search = document.getElementById("graph-find");
  search.value = "square";
  search.dispatchEvent(new Event("input"));
  found.found = all("#graph-svg .found").length;
  const canvas = document.getElementById("timeline-canvas");
  const box = canvas.getBoundingClientRect();
  for (let x = 1; x < box.width && !found.event; x += 2) {
    const at = {bubbles: true, clientX: box.left + x, clientY: box.top + 48};
    canvas.dispatchEvent(new PointerEvent("pointerdown", at));
    canvas.dispatchEvent(new MouseEvent("click", at));
    found.event = document.getElementById("timeline-detail").textContent;
  }
  press('[data-zoom="in"]');
  canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: 1, cancelable: true}));
  const pen = canvas.getContext("2d");
  found.colours = new Set(new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size;
  found.theme = document.documentElement.dataset.theme;
  found.page = getComputedStyle(document.body).backgroundColor;
  press("#theme");
  found.other = getComputedStyle(document.body).backgroundColor;
  found.rows = Object.fromEntries(
    ["causes", "lines-table", "memoized-table", "divergences-table"].map((id) => [id, all(`#${id} tbody tr`).length]));
  found.rate = all("#rate-chart polyline").length;
  const choice = document.getElementById("function");
  found.functions = [...choice.options].map((option) => option.text);
  choice.value = String(choice.options.length - 1);
  choice.dispatchEvent(new Event("change"));
  found.second = document.getElementById("verdict-text").textContent;
  found.wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  document.documentElement.dataset.found = encodeURIComponent(JSON.stringify(found));
}
</script>
"""


def browsed(page, tmp_path, *options):
    """What the clicks have found on a page, in a browser that has nothing to say of it."""
    clicked = tmp_path / "clicked.html"
    clicked.write_text(page.read_text().replace("</body>", CLICKS + "</body>"))
    done = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--window-size=1200,900", "--virtual-time-budget=3000", "--enable-logging=stderr", "--v=0", *options,
         "--dump-dom", clicked.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not console
    assert 'data-ready="yes"' in done.stdout
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    from urllib.parse import unquote

    return json.loads(unquote(found[1]))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report of two functions; names and lines that would be trouble in HTML are among what it shows.

    It is shared, and so made outside of the fixture that lets no clock decide.
    """
    directory = tmp_path_factory.mktemp("report")

    @coexec.function(name="first <b>&amp;</b> </script>")
    def first(x, kind):
        y = tf.exp(x) * 2.0
        for _ in range(20):
            y = tf.tanh(y)
            y = y * 0.5
        if float(tf.reduce_sum(y)) < 1e9 and kind:
            y = tf.square(y)
        return y + 1.0

    second = coexec.function(lambda x: tf.exp(x) * 3.0, name="second")
    with testing.always_follow(), coexec.report(directory) as report:
        for n in range(12):
            first(tf.ones([3]), n == 6)
        for _ in range(3):
            second(tf.ones([3]))
    return report.page


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_renders_and_clicks_work(page, tmp_path, theme):
    options = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if theme == "dark" else []
    found = browsed(page, tmp_path, *options)
    assert found["theme"] == theme
    pages = ["rgb(255, 255, 255)", "rgb(18, 22, 28)"]
    assert [found["page"], found["other"]] == (pages if theme == "light" else pages[::-1])
    assert 3 <= found["boxes"] <= 8
    assert found["chosen"] == 1
    assert "Exp → float32[3]" in found["detail"]
    assert found["unfolded"] > 40
    assert found["folded"] == 0
    assert found["found"] == 1
    assert "first <b>&amp;</b> </script>" in found["event"]
    assert found["colours"] > 4
    assert found["rows"]["lines-table"] >= 2
    assert found["rows"]["causes"] >= 2
    assert found["rows"]["divergences-table"] == 1
    assert found["rate"] == 1
    assert {"first <b>&amp;</b> </script>", "second"} <= set(found["functions"])
    assert found["second"]
    assert not found["wide"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_screenshot_has_the_colours_of_its_theme(page, tmp_path, theme):
    """What a person sees: the page's ground nearly everywhere, and on it text, bars and boxes."""
    options = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if theme == "dark" else []
    subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--window-size=1200,900", "--virtual-time-budget=3000", f"--screenshot={tmp_path / 'seen.png'}", *options,
         page.as_uri()],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    pixels = tf.io.decode_png((tmp_path / "seen.png").read_bytes(), channels=3).numpy()
    assert pixels.shape == (900, 1200, 3)
    colours, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    assert colours[counts.argmax()].tolist() == ([255, 255, 255] if theme == "light" else [18, 22, 28])
    assert 0.3 < counts.max() / counts.sum() < 0.99
    assert len(colours) > 50


def test_a_report_of_nothing_renders(tmp_path):
    """With no function and no event."""
    from coexec.reporting.report import Report

    report = Report(tmp_path, list)
    report.close()
    text = report.page.read_text()
    assert "</body>" in text
    done = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--virtual-time-budget=3000", "--enable-logging=stderr", "--v=0", "--dump-dom", report.page.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert 'data-ready="yes"' in done.stdout
    assert "CONSOLE" not in done.stderr


def test_5000_operations_render(tmp_path):
    """Folded to few boxes, and all of them when they are unfolded."""
    from coexec.reporting.graph_blocks import drawn
    from coexec.reporting.report import Report
    from tests.coexec.reporting.test_graph_blocks import made_up

    step = coexec.function(tf.exp, name="step")
    for _ in range(3):
        step(tf.ones([2]))
    report = Report(tmp_path, lambda: [step._controller])
    data = report.data()
    data["functions"][0]["graph"] = drawn(made_up(range(5000)), [])
    report.data = lambda: data
    report.close()
    found = browsed(report.page, tmp_path)
    assert found["boxes"] < 100
    assert found["unfolded"] == 5000
