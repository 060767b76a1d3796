"""Which settings of a RocksDB are refused, each as RocksDB itself writes it down."""

import pytest

from dualwrite.errors import ConfigurationError
from dualwrite.stores.keyed.rocksdb import RocksDatabase, parse, refusals

rocksdict = pytest.importorskip("rocksdict", reason="the extra 'rocksdb' is not installed")

OURS = "kafka_transaction_state"


def options(**settings):
    made = rocksdict.Options(raw_mode=True)
    for name, value in settings.items():
        getattr(made, name)(value)
    return made


def refused(db):
    with RocksDatabase(db) as database, pytest.raises(ConfigurationError) as caught:
        database.check()
    return str(caught.value)


def test_the_defaults_can_decide(tmp_path):
    db = rocksdict.Rdict(str(tmp_path / "db"))
    RocksDatabase(db).check()
    assert set(rocksdict.Rdict.list_cf(str(tmp_path / "db"))) == {"default", OURS, "dualwrite_incident"}


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("set_paranoid_checks", False, "damaged log"),
        ("set_wal_recovery_mode", "skip_any_corrupted_record", "skips damaged records"),
    ],
)
def test_a_setting_that_may_lose_decisions_is_refused(tmp_path, setting, value, words):
    given = getattr(rocksdict.DBRecoveryMode, value)() if isinstance(value, str) else value
    assert words in refused(rocksdict.Rdict(str(tmp_path / "db"), options(**{setting: given})))


@pytest.mark.parametrize("mode", ["point_in_time", "tolerate_corrupted_tail_records", "absolute_consistency"])
def test_other_modes_of_recovery_are_the_users_choice(tmp_path, mode):
    chosen = getattr(rocksdict.DBRecoveryMode, mode)()
    RocksDatabase(rocksdict.Rdict(str(tmp_path / "db"), options(set_wal_recovery_mode=chosen))).check()


def test_a_time_to_live_is_refused(tmp_path):
    db = rocksdict.Rdict(str(tmp_path / "db"), access_type=rocksdict.AccessType.with_ttl(3600))
    assert "with_ttl" in refused(db)


def test_a_family_of_ours_that_forgets_is_refused(tmp_path):
    db = rocksdict.Rdict(str(tmp_path / "db"), options())
    db.create_column_family(OURS, options(set_compaction_style=rocksdict.DBCompactionStyle.fifo()))
    assert "FIFO compaction deletes" in refused(db)


def test_families_of_the_users_own_may_forget(tmp_path):
    db = rocksdict.Rdict(str(tmp_path / "db"), options())
    db.create_column_family("recent", options(set_compaction_style=rocksdict.DBCompactionStyle.fifo()))
    RocksDatabase(db).check()


def test_a_database_that_is_open_for_reading_alone_is_refused(tmp_path):
    rocksdict.Rdict(str(tmp_path / "db")).close()
    db = rocksdict.Rdict(str(tmp_path / "db"), access_type=rocksdict.AccessType.read_only())
    assert "not open for writing" in refused(db)


def test_the_newest_settings_count(tmp_path):
    db = rocksdict.Rdict(str(tmp_path / "db"), options(set_paranoid_checks=False))
    db.close()
    db = rocksdict.Rdict(str(tmp_path / "db"), options())
    RocksDatabase(db).check()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("manual_wal_flush=true", "process's memory"),
        ("avoid_flush_during_recovery=true", "never synced"),
        ("best_efforts_recovery=true", "older state"),
    ],
)
def test_settings_that_rocksdict_does_not_offer_are_refused_too(line, words):
    text = f'# RocksDB\n[Version]\n  rocksdb_version=9.8.4\n\n[DBOptions]\n  {line}\n\n[CFOptions "default"]\n  ttl=1\n'
    [(what, advice)] = refusals(parse(text), [OURS])
    assert words in what
    assert advice


def test_sections_are_told_apart():
    text = '[DBOptions]\n  a=1\n[CFOptions "b c"]\n  a=2=3\n[TableOptions/BlockBasedTable "b c"]\n  a=4\n'
    sections = parse(text)
    assert (sections["DBOptions"], sections["CFOptions b c"]) == ({"a": "1"}, {"a": "2=3"})
