"""The page in a real browser: it loads without an error or a request, and its controls do what they say."""

from __future__ import annotations

import json
import shutil

import pytest

from mergeway import Trunk

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need the Python package playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="the browser tests need chromium (Debian: apt-get install chromium)"),
]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def visit(browser):
    """Opens a page; at the end there must have been no error and no request but for the file itself."""
    opened, problems = [], []

    def go(path, width=1400, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        opened.append(context)
        page = context.new_page()
        page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: problems.append(str(e)))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else problems.append(r.url))
        page.goto(path.as_uri())
        page.wait_for_selector(".js-plotly-plot .main-svg")
        return page

    yield go
    for context in opened:
        context.close()
    assert problems == []


def drawn(page, chart: str) -> list[str]:
    """The names of the lines in a chart's drawing."""
    return page.evaluate(f"document.getElementById('{chart}').data.map(t => t.name).filter(Boolean)")


def number(page, selector: str) -> float:
    return float(page.inner_text(selector).replace("−", "-"))


def slide(page, selector: str, value: float) -> None:
    page.fill(selector, str(value))


def test_explorer_answers_at_once(visit, report, swept):
    page = visit(report(swept.path)[0])
    # At first the schedule of equal utilities: t = 1/3, two thirds of the way from t = 0 to the record at ½.
    assert number(page, "#t-schedule") == pytest.approx(1 / 3, abs=6e-4)
    at_third = [86 - 16 * 2 / 3, 80 - 6 * 2 / 3, 10 + 70 * 2 / 3]
    assert number(page, "#acc-schedule") == pytest.approx(sum(at_third) / 3, abs=0.06)
    # Means at 0, ½, 1: 58.67, 74.67, 47.33.
    assert (number(page, "#t-best"), number(page, "#acc-best")) == (0.5, 74.7)
    slide(page, "#time", 0.25)
    assert number(page, "#time-value") == 0.25
    shown = [float(text) for text in page.locator(".knob .meter").all_inner_texts()]
    assert shown == [78.0, 77.0, 45.0]
    assert number(page, "#acc-here") == pytest.approx(200 / 3, abs=0.06)
    # Utility 3 for the arrival: t = 3/5, and ACC_w at ½ is (70 + 74 + 3·80)/5, at 1 (20 + 30 + 3·92)/5.
    slide(page, "#w2", 3)
    assert number(page, "#t-schedule") == 0.6
    assert number(page, "#acc-best") == 76.8
    page.click("#go-schedule")
    assert number(page, "#time-value") == 0.6
    assert number(page, "#acc-here") == pytest.approx(0.8 * 76.8 + 0.2 * 65.2, abs=0.06)
    slide(page, "#w2", 0.05)
    assert number(page, "#t-best") == 0.0
    page.click("#reset")
    assert number(page, "#acc-best") == 74.7


def test_explorer_by_keyboard(visit, report, swept):
    page = visit(report(swept.path)[0])
    page.focus("#time")
    page.keyboard.press("Home")
    assert number(page, "#time-value") == 0.0
    assert number(page, "#acc-here") == pytest.approx(176 / 3, abs=0.06)
    page.keyboard.press("ArrowRight")
    assert number(page, "#time-value") == 0.005


def test_rules_are_toggled(visit, report, swept):
    page = visit(report(swept.path)[0])
    assert drawn(page, "acc-chart") == ["average", "ode"]
    page.uncheck("#rule-toggles input[value=average]")
    for chart in ("acc-chart", "bwt-chart"):
        assert drawn(page, chart) == ["ode"]
    assert drawn(page, "task-chart") == ["experts", "base", "ode"]
    page.focus("#rule-toggles input[value=average]")
    page.keyboard.press("Space")
    assert drawn(page, "acc-chart") == ["average", "ode"]
    page.click("#rule-toggles button >> text=none")
    assert drawn(page, "acc-chart") == []


def test_table_sorts(visit, report, swept):
    page = visit(report(swept.path)[0])
    names = page.locator("#headline tbody th")
    assert names.all_inner_texts() == ["ode", "average"]
    page.click("#headline thead button >> text=BWT")
    assert names.all_inner_texts() == ["ode", "average"]
    page.click("#headline thead button >> text=BWT")
    assert names.all_inner_texts() == ["average", "ode"]
    assert page.locator("#headline th[aria-sort=ascending]").inner_text() == "BWT"


def test_matrix_of_the_chosen_rule_and_order(visit, report, swept):
    page = visit(report(swept.path)[0])
    page.select_option("#matrix-rule", "average")
    page.select_option("#matrix-order", "1")
    cells = page.evaluate("document.getElementById('matrix-chart').data[0].z")
    assert cells == [[88.0, None, None], [75.0, 71.0, None], [64.0, 62.0, 70.0]]
    page.select_option("#matrix-order", "mean")
    assert page.evaluate("document.getElementById('matrix-chart').data[0].z[2]") == [62.0, 67.0, 68.0]


def test_losses_lie_under_the_drawn_bound(visit, report, swept):
    page = visit(report(swept.path)[0])
    page.select_option("#path-stream", "ode, order 1, 3 tasks")
    lines = page.evaluate("document.getElementById('loss-chart').data.map(t => [t.name, t.y])")
    by_name = {name: [y for y in ys if y is not None] for name, ys in lines if name}
    assert by_name["loss"] == [1.2, 1.1, 1.0] * 2
    # The loss of the target is lower than that of the start: the bound is the start's.
    assert by_name["bound on the loss"] == [1.2] * 6
    assert by_name["straight line"] == pytest.approx([1.2, 1.15, 1.1, 1.2, 1.2 - 0.2 / 6, 1.2 - 0.2 / 3])
    assert "held on 2 of 2" in page.inner_text("#path-facts")


def test_histograms_hold_every_step(visit, report, swept):
    page = visit(report(swept.path)[0])
    chart = page.evaluate("(({x, y}) => ({x, y}))(document.getElementById('gamma-chart').data[0])")
    steps = sorted(zip(chart["x"], chart["y"], strict=True))
    assert [t for t, _ in steps] == pytest.approx([0.0] * 4 + [1 / 6] * 2 + [0.25] * 2)
    assert [gamma for _, gamma in steps] == [1.0] * 4 + [0.5] * 4


@pytest.mark.parametrize("width", [400, 700])
def test_narrow_window_does_not_scroll_sideways(visit, report, swept, width):
    page = visit(report(swept.path)[0], width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert number(page, "#acc-best") == 74.7


def test_dark_and_light(visit, report, swept):
    page = visit(report(swept.path)[0], scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "document.getElementById('acc-chart').layout.font.color"
    dark = page.evaluate(ground), page.evaluate(ink)
    page.click("#theme")
    light = page.evaluate(ground), page.evaluate(ink)
    assert brightness(dark[0]) < 60 < 180 < brightness(light[0])
    assert brightness(dark[1]) > 180 > 60 > brightness(light[1])
    page.emulate_media(media="print")
    assert brightness(page.evaluate(ground)) == 255


CONTRASTS = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = rgb(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const low = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const owner = node.parentElement;
    if (!node.data.trim() || !owner.checkVisibility() || owner.closest("script, noscript, .heatmaplayer, .hm, .skip")) continue;
    const style = getComputedStyle(owner);
    const ink = rgb(owner.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(ink), light(ground(owner))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push(`${node.data.trim()}: ${ratio.toFixed(2)}`);
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_can_be_read(visit, report, swept, scheme):
    """Text against its ground, by the ratio of WCAG 2 for normal text."""
    assert visit(report(swept.path)[0], scheme=scheme).evaluate(CONTRASTS) == []


@pytest.mark.parametrize("width", [390, 1400])
def test_long_names_of_rules_leave_the_accuracy_in_sight(visit, report, swept, width):
    for file in ("run.json", "folds.jsonl", "timings.jsonl", "sweep.json"):
        path = swept.path / file
        path.write_text(path.read_text().replace('"ode', '"ode:guidance=0.2:task_norm=0.5:step=0.01'))
    page = visit(report(swept.path)[0], width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.locator("#headline tbody tr:first-child td:nth-child(2)").bounding_box()
    assert box["x"] + box["width"] <= width


def test_the_command_of_the_chosen_time(visit, report, swept):
    """A trunk that folds the arrival in with this weight stops at t = w/Σw."""
    page = visit(report(swept.path)[0])
    slide(page, "#w0", 2)
    slide(page, "#time", 0.4)
    words = page.inner_text("#command").split()
    assert words[:5] == ["mergeway", "add", "TRUNK", "ARRIVAL", "--task"] and words[5] == "cats"
    weight = float(words[words.index("--weight") + 1])
    assert weight / (2 + 1 + weight) == pytest.approx(0.4)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy")
    assert page.evaluate("navigator.clipboard.readText()") == page.inner_text("#command")
    for time, said in ((0, "leave the arrival out"), (1, "deploy the arrival itself")):
        slide(page, "#time", time)
        assert said in page.inner_text("#command")


def brightness(colour: str) -> float:
    """Of 'rgb(r, g, b)', from 0 to 255."""
    return sum(float(part) for part in colour[4:-1].split(",")) / 3


def test_run_without_sweep_and_trajectories(visit, report, written):
    rows = [r for r in written.rows if r["key"].startswith("average")]
    (written.path / "folds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    page = visit(report(written.path)[0])
    assert drawn(page, "acc-chart") == ["average"]
    assert page.locator("#explorer .note").is_visible()
    assert page.locator("#paths .note").is_visible()


def test_trunk_page_without_trajectories_has_no_certificates(report, stream, tmp_path):
    files = stream(2)
    trunk = Trunk.create(tmp_path / "trunk", files.base, "average")
    trunk.add(files.arrivals[0])
    text = report(trunk.path)[0].read_text()
    assert 'id="journal"' in text and 'id="paths"' not in text and 'href="#paths"' not in text


def test_trunk_page(visit, report, stream, tmp_path):
    files = stream(3)
    trunk = Trunk.create(tmp_path / "trunk", files.base, "ode", keep=9)
    for path in files.arrivals:
        trunk.add(path, objective=lambda params: sum((p**2).sum() for p in params.values()))
    out, data = report(trunk.path)
    page = visit(out, width=400)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.locator(".timeline li").count() == 4
    assert page.evaluate("document.getElementById('drift-chart').data[0].y") == [d["norm"] for d in data["drift"]]
    assert page.evaluate("document.getElementById('cosine-chart').data[0].z") == data["cosines"]
    assert drawn(page, "loss-chart") == ["straight line", "bound on the loss", "loss"]
    assert page.evaluate(CONTRASTS) == []
    page.click("#theme")
    assert page.evaluate(CONTRASTS) == []


def test_accuracies_of_a_trunk_are_within_percents(visit, report, vision, tmp_path):
    """A course that stands still is not blown up, and no axis goes past 100 %."""
    trunk = Trunk.create(tmp_path / "trunk", vision.base, "average")
    trunk.add(vision.task("ants").expert, "ants", check={"ants": f"{vision.path}#ants"})
    out, data = report(trunk.path)
    [judged] = [row["scores"]["ants"] for row in data["judged"]]
    low, high = visit(out).evaluate("document.getElementById('accuracy-chart').layout.yaxis.range")
    assert 0 <= low <= judged <= high <= 100 and high - low >= 5
