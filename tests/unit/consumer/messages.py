"""Messages as confluent-kafka's consumer gives them."""


class Read:
    """A message that was read."""

    def __init__(self, offset, value=None, *, key=None, topic="input", partition=0, headers=None):
        self._offset = offset
        self._value = str(offset).encode() if value is None else value
        self._key = key
        self._topic = topic
        self._partition = partition
        self._headers = headers

    def topic(self):
        return self._topic

    def partition(self):
        return self._partition

    def offset(self):
        return self._offset

    def value(self):
        return self._value

    def error(self):
        return None

    def key(self):
        return self._key

    def set_key(self, key):
        self._key = key

    def set_value(self, value):
        self._value = value

    def headers(self):
        return self._headers


def read(count, begin=0, **kwargs):
    """Messages with these offsets."""
    return [Read(number, **kwargs) for number in range(begin, begin + count)]
