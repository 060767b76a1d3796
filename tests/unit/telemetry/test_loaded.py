"""The default observer: OpenTelemetry's if the application has loaded it, which the package never does by itself."""

import subprocess
import sys

import pytest

from dualwrite import telemetry
from dualwrite.interfaces import NO_OBSERVER
from dualwrite.telemetry import observer


@pytest.fixture(autouse=True)
def forget():
    telemetry._global_telemetry.cache_clear()
    yield
    telemetry._global_telemetry.cache_clear()


def test_the_global_telemetry_observes_once_the_api_is_loaded():
    assert isinstance(telemetry.observer_if_loaded(), observer.Telemetry)
    assert telemetry.observer_if_loaded() is telemetry.observer_if_loaded()


def test_nothing_observes_before_and_a_writer_does_not_load_it():
    code = (
        "import sys; from dualwrite import DualWriter; "
        "writer = DualWriter('orders', kafka={'bootstrap.servers': 'x'}, database='sqlite://'); "
        "from dualwrite.interfaces import NO_OBSERVER; assert writer._observer is NO_OBSERVER; "
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_api_that_is_too_old_is_logged_and_nothing_observes(monkeypatch, caplog):
    def too_old(**_):
        raise TypeError("unexpected keyword argument 'explicit_bucket_boundaries_advisory'")

    monkeypatch.setattr(observer, "Telemetry", too_old)
    assert telemetry.observer_if_loaded() is NO_OBSERVER
    assert "dualwrite[telemetry]" in caplog.text
