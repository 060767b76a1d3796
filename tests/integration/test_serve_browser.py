"""The page of ``dualwrite serve`` in a real browser: without JavaScript, on a telephone, in the dark, and an action through it.

``make screenshots`` writes what it sees into docs/images.
"""

import base64
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.checker import Case
from harness.patience import wait_until
from harness.service import replicas, serve_file
from sqlalchemy import text

from dualwrite.stores.sql.operators import History

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SCREENSHOTS = os.environ.get("DUALWRITE_SCREENSHOTS")
TOKEN = "a token of sixteen and more"

pytestmark = [
    pytest.mark.parametrize("url", ["postgresql"], indirect=True),
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="needs Chromium: apt-get install chromium chromium-driver"
    ),
]


@pytest.fixture
def browser(tmp_path):
    """Chromium without a window, and with JavaScript off."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: it is in the extra 'dev'")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={tmp_path / 'chromium'}")
    options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    made.get("data:text/html,<title>off</title><script>document.title='on'</script>")
    assert made.title == "off", "JavaScript is not off"
    yield made
    made.quit()


def shows(browser, width, height, *, dark=False, phone=False):
    """Give the browser another screen."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone},
    )
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})


def width_of(browser):
    return browser.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]["width"]


def keep(browser, name):
    """Keep a picture for the documentation, if that is asked for."""
    if SCREENSHOTS:
        Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
        size = browser.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 800), "scale": 1}
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        (Path(SCREENSHOTS) / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


def find(browser, selector):
    return browser.find_element("css selector", selector)


def background(browser):
    return find(browser, "body").value_of_css_property("background-color")


@pytest.fixture
def name():
    """Of the writer that has died."""
    return "orders"


@pytest.fixture
def page(tmp_path, kafka, url, engine, dualwrite_topic, browser, name):
    """The page of a service over a database in which a writer has died, and messages were refused."""
    case = Case(tmp_path, kafka, url, dualwrite_topic, transactional_id=name)
    case.run(failpoint="write.decided:2", killed=True)
    with engine.begin() as connection:
        for number in (3, 4, 9):
            connection.execute(
                text(
                    "INSERT INTO dualwrite_outbox_aside (seq, writer, transactional_id, topic, topic_partition, value, reason) "
                    "VALUES (:number, 'bills', 'bills', 'bills', 0, 'v', 'the message is too large: 1,204,312 bytes')"
                ),
                {"number": number},
            )
    more = f"""
    [actions]
    enabled = ["settle", "terminate", "acknowledge", "replay", "drop"]
    token = "{TOKEN}"
    """
    with ExitStack() as later:
        replica = replicas(later)(serve_file(tmp_path, kafka, url, more, settle_after_s=600, interval_s=2))
        wait_until(lambda: "orders" in replica.get("/")[1], otherwise=lambda: replica.log)
        wait_until(lambda: replica.target()["findings"], otherwise=lambda: replica.log)
        yield replica
        assert replica.end() == 0


def fill(browser, reason):
    find(browser, "#reason").send_keys(reason)
    find(browser, "#user").send_keys("anna")
    find(browser, "#token").send_keys(TOKEN)


def test_an_action_through_the_page_on_every_screen(page, browser, engine):
    shows(browser, 1280, 900)
    browser.get(page.address)
    assert "⚠ dualwrite" in browser.title
    light = background(browser)
    shows(browser, 360, 740, phone=True, dark=True)
    browser.get(page.address)
    assert width_of(browser) <= 360, "nobody scrolls sideways on a telephone"
    assert background(browser) != light
    keep(browser, "serve-phone-dark")

    browser.execute_script("window.asked = true")
    wait_until(lambda: not browser.execute_script("return window.asked"), 60)  # it has loaded itself again

    find(browser, 'a[href*="/terminate"][href*="orders"]').click()
    wait_until(lambda: width_of(browser) <= 360, 60)  # wider while it loads
    assert "THE DATABASE HAS DECIDED THIS TRANSACTION" in browser.page_source
    keep(browser, "serve-terminate-phone")
    shows(browser, 1280, 900)
    browser.back()
    browser.get(page.address)
    find(browser, 'a[href*="/drop"]').click()
    assert browser.find_elements("css selector", "meta[http-equiv=refresh]") == [], "somebody is filling it in"
    fill(browser, "too large for any consumer, ticket 4711")
    keep(browser, "serve-action")
    find(browser, "button").click()
    wait_until(lambda: "done: 3 messages deleted" in browser.page_source, otherwise=lambda: browser.page_source)
    [record] = [one for one in History(engine).last("", limit=9) if one.intent.actor == "anna"]
    assert record.intent.reason == "too large for any consumer, ticket 4711"

    page.looks_again()
    browser.get(page.address)
    newest = browser.find_elements("css selector", "table")[-1].find_element("css selector", "tbody tr")
    assert "too large for any consumer" in newest.text
    keep(browser, "serve-page")


@pytest.mark.parametrize("name", ["orders" + "a" * 200])
def test_a_long_name_makes_no_page_wider_than_a_telephone(page, browser):
    shows(browser, 360, 740, phone=True)
    browser.get(page.address)
    assert width_of(browser) <= 360
    find(browser, 'a[href*="/terminate"][href*="aaaa"]').click()
    wait_until(lambda: width_of(browser) <= 360, 60, otherwise=lambda: wide(browser))
    fill(browser, "its host is gone: " + "h" * 200)
    find(browser, "input[type=checkbox]").click()
    find(browser, "button").click()
    wait_until(lambda: "done: " in browser.page_source, otherwise=lambda: browser.page_source)
    wait_until(lambda: width_of(browser) <= 360, 60, otherwise=lambda: wide(browser))
    page.looks_again()
    browser.get(page.address)
    assert width_of(browser) <= 360


def wide(browser):
    """What is wider than a telephone."""
    return browser.execute_script(
        "return [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > 361)"
        ".map(e => e.outerHTML.slice(0, 80) + e.getBoundingClientRect().right)"
    )
