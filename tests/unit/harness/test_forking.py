import os

from harness.forking import processes


def tell(link):
    link.send(os.environ.get("OF_THE_TEST"))


def heard():
    context = processes()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=tell, args=(there,))
    process.start()
    told = here.recv() if here.poll(60) else "nothing"
    process.join()
    return told


def test_a_forked_process_has_the_environment_of_its_maker(monkeypatch):
    monkeypatch.delenv("OF_THE_TEST", raising=False)
    assert heard() is None
    monkeypatch.setenv("OF_THE_TEST", "set")
    assert heard() == "set"
    monkeypatch.delenv("OF_THE_TEST")
    assert heard() is None
