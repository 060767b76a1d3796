"""A writer whose groups a test makes."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

from dualwrite.protocol.lives import WriteState
from dualwrite.writing.transaction import Transaction


class Refused(Exception):
    """Raised by a unit."""


class Held:
    """A writer whose next group begins when all units are there."""

    def __init__(self, shop, writer):
        self.shop = shop
        self.writer = writer
        self.sizes = []
        writer._groups._grouped = self.sizes.append

    @contextmanager
    def together(self):
        """The units that are submitted here become one group."""
        may_go, begun = threading.Event(), threading.Event()

        def first(_):
            begun.set()
            may_go.wait(30)

        blocking = self.writer.submit(first, key="first of a test")
        begun.wait(30)
        yield
        may_go.set()
        blocking.exception(30)

    def put(self, number, *, error=None, key=None, result=None):
        def unit(tx):
            self.shop.put(tx, number)
            if error is not None:
                raise error
            return result

        return self.writer.submit(unit, key=number if key is None else key)


def transaction_of_nothing():
    """The transaction of a block without servers, whose units are its whole block."""
    return Transaction(SimpleNamespace(sending=SimpleNamespace(of_unit=False), state=WriteState.ABORTED))
