"""The site that ``make docs`` builds: no broken link, Markdown of each page, and every page on a telephone and in the dark."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from harness.places import ROOT

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PHONE = 360
# The theme hides what is too wide for the document: it is the column of the text that scrolls.
WIDEST = "return Math.max(document.documentElement.scrollWidth, document.querySelector('.content').scrollWidth)"
# At whole pixels, so that nothing of the page shows at its edges.
ALONE = "position: fixed; left: 0; top: 0; width: 320px; height: 240px; z-index: 9999; background: #808080"


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = set(), set()
        self.feed(text)

    def handle_starttag(self, _tag, attrs):
        for name, value in attrs:
            if name in {"href", "src"} and value:
                self.links.add(value)
            elif name == "id":
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("furo", reason="needs the extra 'docs'")
    made = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "-q",
        "-b",
        "html",
        "-d",
        made / "doctrees",
        ROOT / "docs",
        made / "html",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made / "html"


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
    """Chromium without a window and without a network."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: it is in the extra 'dev'")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("chromium")
    for argument in (
        *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}"),
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
