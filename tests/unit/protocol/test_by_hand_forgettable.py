"""Which ids may be forgotten: over every combination of facts."""

import itertools

from dualwrite.protocol.blocking import Facts, by_writer, reason_to_keep, reasons_to_keep

DAY_S = 86400.0
OLD = Facts(untouched_for_s=40 * DAY_S)


def test_only_an_id_that_is_old_settled_free_and_told_may_go():
    flags = list(itertools.product([False, True], repeat=3))
    for age_s, (unsettled, leased, untold) in itertools.product([0.0, 29 * DAY_S, 30 * DAY_S, 400 * DAY_S], flags):
        facts = Facts(age_s, unsettled=unsettled, leased=leased, has_open_incident=untold)
        may_go = age_s >= 30 * DAY_S and not (unsettled or leased or untold)
        assert (reason_to_keep(facts, 30 * DAY_S) is None) is may_go
    assert "recover" in reason_to_keep(Facts(0, unsettled=True, leased=True, has_open_incident=True), DAY_S)


def test_the_ids_of_one_writer_stay_together():
    young = Facts(untouched_for_s=0)
    facts = {"orders": OLD, "orders#1": young, "orders#2": OLD, "orders-old": OLD, "other": OLD, "other#1": OLD}
    kept = reasons_to_keep(facts, 30 * DAY_S)
    assert set(kept) == {"orders", "orders#1", "orders#2"}
    assert kept["orders#1"].startswith("used")
    assert kept["orders"] == kept["orders#2"] == "another id of its writer stays"
    assert by_writer(facts.keys() - kept.keys()) == {"orders-old": ["orders-old"], "other": ["other", "other#1"]}
