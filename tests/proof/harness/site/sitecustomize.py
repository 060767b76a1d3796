"""Python imports this at its start, in the processes that Spark's JVMs of the tests start: it takes half their work from them.

They import the installed PySpark, which is compiled. Spark puts its archive of the sources before it, which each process would
compile for itself, in a second. And what they all need is imported by those that fork the others. A planted mistake is planted
there, too: the processes that plan and decide import nothing of the tests.
"""

import gc
import os
import sys

sys.path[:] = [entry for entry in sys.path if not entry.endswith("pyspark.zip")]

_FORKS = ["-m", "pyspark.daemon"]
_NEEDS_LITTLE = "pyspark.sql.worker.lookup_data_sources"
if sys.orig_argv[-3:-1] == _FORKS and sys.orig_argv[-1] != _NEEDS_LITTLE:
    import dualwrite.sinks.spark  # noqa: F401 - imported for the workers

    if os.environ.get("DUALWRITE_MISTAKE"):  # examples run without the harness
        from harness.planting import plant_from_environment

        plant_from_environment()
    # They need not look through the modules for garbage, nor copy their pages.
    gc.freeze()
