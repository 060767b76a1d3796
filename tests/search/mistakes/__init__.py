"""The product's rules with one of them changed: the search must find what that does. None of it is in the product."""

from search.mistakes.librdkafka import *  # noqa: F403
