"""An ``Rdict`` of which one write fails."""


class Failing:
    """Fails the next write of at least so many entries, after it was written or before."""

    def __init__(self, db, *, written, entries=0):
        self._db = db
        self._written = written
        self._entries = entries
        self._failed = False

    def __getattr__(self, name):
        return getattr(self._db, name)

    def write(self, batch, options):
        if self._failed or len(batch) < self._entries:
            return self._db.write(batch, options)
        self._failed = True
        if self._written:
            self._db.write(batch, options)
        raise RuntimeError("IO error: While fdatasync: Input/output error")
