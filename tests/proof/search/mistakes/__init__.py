"""The product's rules with one of them changed: the search must find what that does. None of it is in the product.

Where ``harness.mistakes`` plants the same one in the running product, it has the same name here.
"""

from search.mistakes import librdkafka, native
from search.mistakes.planting import MISTAKES, OWNER_AND_SETTLER, Mistake

__all__ = ["MISTAKES", "OWNER_AND_SETTLER", "Mistake", "librdkafka", "native"]
