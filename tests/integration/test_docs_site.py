"""The site that ``make docs`` builds: no broken link, Markdown of each page, versions, and what a browser shows of it."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest
from harness.places import ROOT

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PHONE = 360
THIS, OLDER = version("dualwrite"), "0.0.9"
# The theme hides what is too wide for the document: it is the column of the text that scrolls.
WIDEST = "return Math.max(document.documentElement.scrollWidth, document.querySelector('.content').scrollWidth)"
# At whole pixels, so that nothing of the page shows at its edges.
ALONE = "position: fixed; left: 0; top: 0; width: 320px; height: 240px; z-index: 9999; background: #808080"


def loads(text):
    """What a style sheet, a script or a drawing names for a browser to load."""
    named = r"""(?:@import|\bimport|\bfrom|import\(|href=|\.src *=)\s*["'`]([^"'`]+)"""
    return {*re.findall(r"""url\(\s*["']?([^"')]+)""", text), *re.findall(named, text)}


class Page(HTMLParser):
    """The links and the anchors of a page, and what a browser loads to show it."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors, self.loaded = set(), set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in {"href", "src"} and value:
                self.links.add(value)
                if tag != "a":
                    self.loaded.add(value)
            elif name == "id":
                self.anchors.add(value)

    def handle_data(self, data):
        if self.lasttag in {"script", "style"}:
            self.loaded |= loads(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("furo", reason="needs the extra 'docs'")
    made = tmp_path_factory.mktemp("site")
    command = [sys.executable, ROOT / "docs" / "versions.py", made, "-W", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made / THIS


def html_pages(site):
    return [path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]


def test_every_link_of_the_site_leads_somewhere(site):
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in html_pages(site)}
    assert len(pages) > 40
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_the_site_loads_nothing_from_elsewhere(site):
    """No script, style, font or picture, neither of a page nor of a style sheet, a script or a drawing."""
    loaded = {path.name: Page(path.read_text(encoding="utf-8")).loaded for path in html_pages(site)}
    for path in [*site.rglob("*.css"), *site.rglob("*.svg"), *site.rglob("*.js")]:
        loaded[path.name] = loads(path.read_text(encoding="utf-8"))
    assert sum(map(len, loaded.values())) > 500
    elsewhere = {name: [one for one in found if re.match("https?:|//", one)] for name, found in loaded.items()}
    assert {name: found for name, found in elsewhere.items() if found} == {}


def test_every_page_is_there_as_markdown_with_links_that_lead_somewhere(site):
    overview = (site / "llms.txt").read_text(encoding="utf-8")
    assert re.findall("^## (.*)$", overview, re.MULTILINE) == ["Use", "Operate", "Understand", "Look up", "Runbooks"]
    listed = set(re.findall(r"\]\(([^)]+)\)", overview))
    sources = {
        path.relative_to(ROOT / "docs").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
        if "_build" not in path.parts
    }
    assert listed == sources - {"index.md"}
    for name in sources:
        text = re.sub(r"^```.*?^```$", "", (site / name).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        links = {link.partition("#")[0] for link in re.findall(r"\]\((?!https?:|#)([^)]+)\)", text)}
        assert {link for link in links if not (site / name).parent.joinpath(link).is_file()} == set(), name
        assert "eval-rst" not in text
    reference = (site / "reference.md").read_text(encoding="utf-8")
    assert "### dualwrite.DualWriter\n" in reference
    assert "#### dualwrite.DualWriter.transaction\n" in reference


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium without a window, and without a network but this machine."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: it is in the extra 'dev'")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("chromium")
    for argument in (
        *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"),
        *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={profile}"),
    ):
        options.add_argument(argument)
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    made.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": PHONE, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    )
    yield made
    made.quit()


def test_nobody_scrolls_sideways_on_a_telephone(site, browser):
    wide = {}
    for page in html_pages(site):
        browser.get(page.as_uri())
        width = browser.execute_script(WIDEST)
        if width > PHONE:
            wide[page.name] = width
    assert wide == {}


def test_the_pictures_follow_the_theme_that_a_reader_chooses(site, browser):
    browser.get((site / "index.html").as_uri())
    picture = browser.find_element("css selector", "img[src*=picture-dual-write]")
    seen = {}
    for theme in ("light", "dark"):
        browser.execute_script(
            "document.body.dataset.theme = arguments[0]; arguments[1].style = arguments[2]", theme, picture, ALONE
        )
        seen[theme] = picture.screenshot_as_png
    assert seen["light"] != seen["dark"]


# Versions, as an older release has left them in the same place


@pytest.fixture(scope="module")
def versions(site):
    """The site with an older version beside this one, in which there is no page on Spark."""
    older = site.parent / OLDER
    shutil.copytree(site, older)
    for page in html_pages(older):
        page.write_text(page.read_text("utf-8").replace(f'data-version="{THIS}"', f'data-version="{OLDER}"'), "utf-8")
    (older / "spark.html").unlink()
    runpy.run_path(str(ROOT / "docs" / "versions.py"))["list_versions"](site.parent)
    return site.parent


def test_the_site_lists_its_versions_and_begins_with_the_newest(versions):
    listed = json.loads((versions / "versions.json").read_text("utf-8"))
    assert [one["version"] for one in listed] == [THIS, OLDER]
    assert ["spark.html" in one["pages"] for one in listed] == [True, False]
    assert f'url={THIS}/index.html"' in (versions / "index.html").read_text("utf-8")
    assert f"({THIS}/llms.txt)" in (versions / "llms.txt").read_text("utf-8")


@contextmanager
def served(directory):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=directory)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(params=["file", "http"])
def address(request, versions):
    """Where a reader has the site from: a disk, or a server."""
    if request.param == "file":
        yield versions.as_uri()
    else:
        with served(versions) as found:
            yield found


def until(browser, condition):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 30).until(condition)


def test_the_menu_leads_to_the_same_page_of_another_version(address, browser):
    def choose(number):
        menu = "arguments[0].selectedIndex = arguments[1]; arguments[0].dispatchEvent(new Event('change'))"
        browser.execute_script(menu, browser.find_element("css selector", ".versions select"), number)

    def arrives(place):
        until(browser, lambda _: browser.current_url == f"{address}/{place}")
        until(browser, lambda _: browser.execute_script("return document.readyState") == "complete")

    browser.get(f"{address}/{THIS}/runbooks/loss.html")
    offered = [option.get_attribute("text") for option in browser.find_elements("css selector", ".versions option")]
    assert offered == [f"Version {THIS}, the newest", f"Version {OLDER}"]
    assert browser.find_elements("css selector", ".older-version") == []
    choose(1)
    arrives(f"{OLDER}/runbooks/loss.html")
    note = browser.find_element("css selector", ".older-version")
    assert note.text == f"This page is of version {OLDER}. Read the page of version {THIS}."
    note.find_element("css selector", "a").click()
    arrives(f"{THIS}/runbooks/loss.html")
    browser.get(f"{address}/{THIS}/spark.html")
    choose(1)
    arrives(f"{OLDER}/index.html")
    browser.get(f"{address}/index.html")
    arrives(f"{THIS}/index.html")


def test_a_page_that_stands_alone_says_its_version(site, browser, tmp_path):
    shutil.copytree(site, tmp_path / "alone")
    browser.get((tmp_path / "alone" / "index.html").as_uri())
    assert browser.find_element("css selector", ".versions").get_attribute("textContent").strip() == f"Version {THIS}"


@pytest.mark.parametrize(
    ("words", "page"),
    [("fencing", "safety.html"), ("outbox", "outbox.html"), ("flush_timeout_s", "configuration.html")],
)
def test_a_search_finds_the_page(address, browser, words, page):
    browser.get(f"{address}/{THIS}/search.html?q={words}")
    until(browser, lambda _: browser.find_elements("css selector", "#search-results .search-summary"))
    until(browser, lambda _: "Search finished" in browser.find_element("css selector", ".search-summary").text)
    found = [link.get_attribute("href") for link in browser.find_elements("css selector", "#search-results li a")]
    assert any(f"/{page}" in link for link in found), found


CONTRAST = """
const seen = (text) => (text.match(/[0-9.]+/g) || []).map(Number);
const light = (text) => {
  const [r, g, b] = seen(text).slice(0, 3).map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (one) => {
  for (let at = one; at; at = at.parentElement) {
    const color = getComputedStyle(at).backgroundColor;
    if (seen(color)[3] !== 0) return color;
  }
  return "rgb(255, 255, 255)";
};
const worst = {};
for (const one of document.querySelectorAll("article p, article a, article code, article span, article td, .versions select")) {
  if (!one.textContent.trim() || !one.getClientRects().length) continue;
  const [a, b] = [light(getComputedStyle(one).color), light(behind(one))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) worst[one.tagName + " " + one.textContent.slice(0, 20)] = ratio;
}
return [light(behind(document.querySelector("article"))), worst];
"""


@pytest.mark.parametrize("page", ["index", "spark", "quickstart", "reference"])
def test_text_can_be_read_in_the_light_and_in_the_dark(site, browser, page):
    """By the contrast that WCAG asks of text. Without a choice of the reader's, the theme is that of the system."""
    for scheme, is_dark in (("light", False), ("dark", True)):
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        browser.get((site / f"{page}.html").as_uri())
        ground, too_weak = browser.execute_script(CONTRAST)
        assert (ground < 0.2) == is_dark
        assert too_weak == {}


def test_the_front_page_answers_in_thirty_seconds(site, browser):
    """What it is, why one would want it, what it costs: at most 130 words, and the picture is there."""
    browser.get((site / "index.html").as_uri())
    words = 0
    for question in ("What is it?", "Why would I want it?", "What does it cost?"):
        [answer] = [one for one in browser.find_elements("css selector", "article p") if one.text.startswith(question)]
        words += len(answer.text.split())
    assert words <= 130
    picture = browser.find_element("css selector", "article img")
    assert browser.execute_script("return arguments[0].naturalWidth", picture) > 0
