"""The verdict on fleets: no incarnation of an id is decided under by two members."""

from chaos.fleets import Decision, shared


def decisions(*found):
    return [Decision(f"operation {number}", *one) for number, one in enumerate(found)]


def test_members_that_own_an_id_one_after_the_other_share_nothing():
    assert not shared(decisions(("f-0", 1, "A"), ("f-0", 1, "A"), ("f-0", 2, "B"), ("f-0", 3, "A"), ("f-1", 2, "A")))


def test_two_members_that_decide_under_one_incarnation_are_found():
    [found] = shared(decisions(("f-0", 1, "A"), ("f-0", 2, "B"), ("f-0", 2, "A"), ("f-1", 2, "A")))
    assert found["kind"] == "shared"
    assert found["subject"] == "f-0"
    assert "['A', 'B'] have decided under its incarnation 2" in found["detail"]
