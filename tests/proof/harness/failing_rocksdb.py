"""An ``Rdict`` of which one write fails, as RocksDB's do: what its log holds of it shows only once it is open again."""


class Failing:
    """Fails the next write of at least so many entries. If it was written, the next start recovers it."""

    def __init__(self, db, *, written, entries=0):
        self._db = db
        self._written = written
        self._entries = entries
        self._failed = False
        self._in_the_log = None

    def __getattr__(self, name):
        return getattr(self._db, name)

    def write(self, batch, options):
        if self._failed or len(batch) < self._entries:
            return self._db.write(batch, options)
        self._failed = True
        if self._written:
            self._in_the_log = batch
        raise RuntimeError("IO error: While fdatasync: Input/output error")

    def close(self):
        if self._in_the_log is not None:
            self._db.write(self._in_the_log)
        self._db.close()
