"""The file of ``dualwrite serve``: what it means, and errors that name the line and the key."""

import pytest

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.blocking import Deed
from dualwrite.protocol.supervision import Rule
from dualwrite.serving.configuration import line_of, parse_settings, read_settings

WHOLE = """
listen = "[::1]:9000"
interval_s = 5
settle_after_s = 90.5

[target.shop]
url_env = "SHOP"
schema = "kafka"
prefix = "order"
kafka_file = "kafka.properties"

[target.shop.kafka]
bootstrap.servers = "shop:9092"   # without quotes, a table in a table
"socket.timeout.ms" = 30000

[target.billing]
url = "sqlite:///billing.db"
settle_after_s = 600
send_waiting = false
kafka = { "bootstrap.servers" = "billing:9092", "client.id" = "the night watch" }
"""


def parsed(text, tmp_path, **environment):
    return parse_settings(text, "serve.toml", directory=tmp_path, environment=environment)


def test_every_key_reaches_its_target(tmp_path):
    (tmp_path / "kafka.properties").write_text(
        "# secret\nclient.dns.lookup = use_all_dns_ips\nbootstrap.servers=other:9092\n"
    )
    settings = parsed(WHOLE, tmp_path, SHOP="sqlite:///shop.db")
    assert (settings.host, settings.port, settings.interval_s, settings.lease_timeout_s) == ("::1", 9000, 5.0, 30.0)
    shop, billing = settings.targets
    assert (shop.name, shop.url, shop.schema, shop.prefix) == ("shop", "sqlite:///shop.db", "kafka", "order")
    assert shop.kafka == {
        "client.id": "dualwrite-serve",
        "client.dns.lookup": "use_all_dns_ips",
        "bootstrap.servers": "shop:9092",
        "socket.timeout.ms": 30000,
    }
    assert shop.rule == Rule(settle_after_s=90.5, sends_waiting=True)
    assert (billing.schema, billing.prefix, billing.timeout_s) == (None, "", 60.0)
    assert billing.kafka["client.id"] == "dualwrite-serve/the night watch"
    assert billing.rule == Rule(settle_after_s=600.0, sends_waiting=False)


def test_what_a_file_leaves_out_is_safe(tmp_path):
    settings = parsed('[target.a]\nurl = "sqlite:///a"\nkafka.bootstrap.servers = "a:1"', tmp_path)
    assert (settings.host, settings.port) == ("127.0.0.1", 8470)
    assert settings.targets[0].rule == Rule(settle_after_s=60.0)


TARGET = '[target.shop]\nurl = "sqlite:///shop.db"\nkafka.bootstrap.servers = "shop:9092"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("listen =\n", r"serve\.toml: Invalid value \(at line 1, column 9\)"),
        ("lissen = 'a:1'\n" + TARGET, r"serve\.toml, line 1: lissen: there is no such key \(did you mean listen\?\)"),
        (TARGET + "settle_afer_s = 5\n", r"line 4: target\.shop\.settle_afer_s: .*did you mean settle_after_s\?"),
        ("\nlisten = 'nowhere'\n" + TARGET, r"line 2: listen: 'nowhere' is no address"),
        ("listen = 'a:65536'\n" + TARGET, r"line 1: listen: 'a:65536' is no address"),
        ("interval_s = '5'\n" + TARGET, r"line 1: interval_s: this is no number \(give seconds, without quotes\)"),
        ("interval_s = true\n" + TARGET, r"line 1: interval_s: this is no number"),
        (
            TARGET + "settle_after_s = 0\n",
            r"line 4: target\.shop\.settle_after_s: 0 s cannot be used \(give more than 0",
        ),
        (TARGET + "timeout_s = nan\n", r"line 4: target\.shop\.timeout_s: nan s cannot be used"),
        (TARGET + "send_waiting = 1\n", r"line 4: target\.shop\.send_waiting: this is neither true nor false"),
        (TARGET + "schema = ''\n", r"line 4: target\.shop\.schema: this is no text, or an empty one"),
        (TARGET + "url_env = 'SHOP'\n", r"line 2: target\.shop\.url: there must be exactly one of url and url_env"),
        ("[target.shop]\n", r"line 1: target\.shop\.url: there must be exactly one"),
        ("[target.shop]\nurl_env = 'NONE'\n", r"line 2: target\.shop\.url_env: the environment variable NONE is empty"),
        ("[target.shop]\nurl = 'sqlite://'\n", r"line 1: target\.shop\.kafka: there are no bootstrap\.servers"),
        (TARGET + "kafka.transactional.id = 'a'\n", r"target\.shop\.kafka: .*transactional\.id"),
        (TARGET + "kafka_file = 'none'\n", r"line 4: target\.shop\.kafka_file: cannot read"),
        ("target = 5\n", r"line 1: target: this is no table"),
        (TARGET.replace("shop", "'a#b'", 1), r"target: 'a#b' cannot be the name of a target"),
        ("", r"serve\.toml: target: there is no target \(add a table \[target\.NAME\]"),
    ],
)
def test_an_error_names_the_line_and_the_key(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=message):
        parsed(text, tmp_path)


def test_no_error_shows_a_secret(tmp_path):
    (tmp_path / "kafka.properties").write_text("sasl.password=one\nhunter2\n")
    with pytest.raises(ConfigurationError, match="line 2 is not key=value") as caught:
        parsed(TARGET + "kafka_file = 'kafka.properties'\n", tmp_path)
    assert "hunter2" not in str(caught.value)
    settings = parsed(TARGET.replace("sqlite:///shop.db", "postgresql+psycopg://me:hunter2@db/shop"), tmp_path)
    assert "hunter2" not in repr(settings)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot read .*nowhere\.toml"):
        read_settings(tmp_path / "nowhere.toml")


def test_a_key_is_found_below_its_own_table():
    assert line_of(WHOLE, ("target", "billing"), "settle_after_s") == 18
    assert line_of(WHOLE, (), "settle_after_s") == 4
    assert line_of(WHOLE, ("target", "shop"), "kafka") == 12
    assert line_of(WHOLE, ("target", "shop", "kafka"), "bootstrap") == 13
    assert line_of(WHOLE, ("target", "billing"), "schema") == 16, "that of its table"
    assert line_of(WHOLE, (), "lease_timeout_s") is None


ACTIONS = "[actions]\nenabled = ['settle', 'drop']\n"


def test_nothing_can_be_done_on_the_page_unless_it_is_said_so(tmp_path):
    assert parsed(TARGET, tmp_path).actions is None
    by_token = parsed(TARGET + ACTIONS + "token_env = 'TOKEN'\n", tmp_path, TOKEN="0123456789abcdef").actions
    assert (by_token.enabled, by_token.token, by_token.user_header) == (
        {Deed.SETTLE, Deed.DROP},
        "0123456789abcdef",
        None,
    )
    assert "0123456789abcdef" not in repr(by_token)
    by_proxy = parsed(TARGET + ACTIONS + "user_header = 'X-User'\norigin = 'https://a.example'\n", tmp_path).actions
    assert (by_proxy.token, by_proxy.user_header, by_proxy.origin) == (None, "X-User", "https://a.example")
    assert [str(one) for one in by_proxy.trusted_proxies] == ["127.0.0.0/8", "::1/128"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("", r"line 5: actions\.enabled: there must be exactly one of a token and user_header"),
        ("token = 'x'", r"line 6: actions\.token: it is shorter than 16 characters"),
        ("token_env = 'NOT_SET'", r"line 6: actions\.token_env: the environment variable NOT_SET is empty or not set"),
        ("token = '0123456789abcdef'\ntoken_env = 'TOKEN'", r"actions\.token: there are both token and token_env"),
        ("token = '0123456789abcdef'\nuser_header = 'X'\norigin = 'https://a'", r"must be exactly one of"),
        ("user_header = 'X'", r"line 6: actions\.user_header: the proxy's own address is missing \(set origin"),
        ("user_header = 'X'\norigin = 'https://a/b'", r"line 7: actions\.origin: 'https://a/b' is no origin"),
        ("user_header = 'X'\norigin = 'https://a'\ntrusted_proxies = ['10.0.0.0/99']", r"actions\.trusted_proxies: "),
        ("user_header = 'X'\norigin = 'https://a'\ntrusted_proxies = '10.0.0.1'", r"this is no list of texts"),
        ("toke = 'x'", r"actions\.toke: there is no such key \(did you mean token\?\)"),
    ],
)
def test_an_error_in_the_actions_names_the_line_and_shows_no_token(tmp_path, more, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        parsed(TARGET + ACTIONS + more + "\n", tmp_path)
    assert "0123456789abcdef" not in str(caught.value)


def test_an_action_that_is_not_known_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"there is no action 'sing' \(the actions are settle, terminate"):
        parsed(TARGET + "[actions]\nenabled = ['sing']\n", tmp_path)
