# `make` alone prints what there is to make.

PYTHON ?= python3
# Tests at a time: each worker has servers of its own, and mostly waits for them.
WORKERS ?= 7
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
SOURCE := .cache/source
SQLALCHEMY_OLDEST := 2.0.40
OLDEST := .cache/sqlalchemy-$(SQLALCHEMY_OLDEST)
# In front of the one that is installed: no second environment is needed.
WITH_OLDEST = PYTHONPATH=$(CURDIR)/$(OLDEST) $(PY) -m pytest -q -p no:cacheprovider \
	$(if $(THOROUGH),--thorough tests/conformance tests/integration/test_dual_writer.py tests/integration/test_dual_write_savepoints.py,\
		-m "not mariadb" tests/conformance/test_store.py tests/conformance/test_store_savepoints.py) \
	tests/migrations tests/unit/writing/test_sessions.py tests/unit/writing/test_sessions_joining.py tests/unit/asyncio/test_sessions.py

# The tests of `make quick`.
QUICK ?= tests/unit/protocol tests/unit/recovery tests/unit/test_clock.py tests/unit/test_errors.py tests/unit/test_waiting.py

# Every process that a test starts would compile the library, and every worker the tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo quick check test spent coverage pythons sqlalchemy-oldest model simulator lint types spark-versions bench bench-spark sizing chaos chaos-spark units tasks search faults scenarios controls reason brokers databases docs pictures screenshots orchestrators servers-up servers-down clean venv source jars mariadb archive

help: ## print this list
	@echo "usage: make <target> [PYTHON=python3.12]"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: venv jars ## a Spark job writes flights to real Kafka and PostgreSQL, is killed, recovers; both sides are compared
	$(PY) examples/demo.py

# By a name of its own: `make -n` runs every line in which it finds $(MAKE).
BESIDE = $(MAKE) --no-print-directory
# The unit tests only compute: one worker for each processor.
PROCESSORS := $(shell getconf _NPROCESSORS_ONLN)

# What changed since the last commit, and is still there.
CHANGED = $(shell { git diff --name-only --diff-filter=d HEAD -- '*.py'; git ls-files --others --exclude-standard -- '*.py'; } 2>/dev/null)
quick: $(READY) ## lint of what has changed, and the tests of the pure rules: those that find most in a second (ten seconds)
	@$(if $(CHANGED),$(VENV)/bin/ruff check $(CHANGED) && $(VENV)/bin/ruff format --check $(CHANGED))
	@$(PY) -m pytest -q -p no:cacheprovider --hypothesis-profile quick $(QUICK)

check: venv ## lint, types and the tests that need no server, side by side (a minute; two the first time)
	@$(BESIDE) lint types >.cache/lint.log 2>&1 & lint=$$!; trap 'kill $$lint' INT TERM; \
	$(PY) -m pytest -q -n $(PROCESSORS) --dist worksteal tests/unit; unit=$$?; \
	wait $$lint; lint=$$?; if [ $$lint = 0 ]; then tail -n 1 .cache/lint.log; else cat .cache/lint.log; fi; exit $$((unit + lint))

# At most that many failed tests run again: more of them have another cause than a busy machine.
FEW_FAILED = $(PY) -c 'import json, sys; sys.exit(len(json.load(open(".pytest_cache/v/cache/lastfailed"))) > 10)'
LAST_WORDS := $(CURDIR)/.cache/last-words.json
SPENT := $(CURDIR)/.cache/spent.json
# Compile the tests once, before the workers start; otherwise every worker compiles them.
test: venv mariadb $(OLDEST) ## all checks: lint, types, tests on real servers (eighteen minutes on two quiet cores; THOROUGH=1: every one of them)
	@echo "beside the tests: lint, types, and the tests with SQLAlchemy $(SQLALCHEMY_OLDEST)"; rm -f $(LAST_WORDS); \
	$(BESIDE) lint types >.cache/lint.log 2>&1 & lint=$$!; trap 'kill $$lint; exit 130' INT TERM; \
	$(BESIDE) archive & archive=$$!; $(PY) -m pytest -qq --collect-only >.cache/collected.log 2>&1; \
	wait $$archive || { archive=$$?; kill $$lint; exit $$archive; }; \
	$(WITH_OLDEST) >.cache/sqlalchemy-oldest.log 2>&1 & oldest=$$!; trap 'kill $$lint $$oldest' INT TERM; \
	DUALWRITE_LAST_WORDS=$(LAST_WORDS) $(PY) -m pytest -n $(WORKERS) --dist worksteal --spent=$(SPENT) $(if $(THOROUGH),--thorough); all=$$?; \
	if [ $$all = 1 ] && $(FEW_FAILED); then echo "what failed beside $(WORKERS) workers runs once more, alone:"; \
	DUALWRITE_LAST_WORDS=$(LAST_WORDS) $(PY) -m pytest -v --last-failed --last-failed-no-failures none $(if $(THOROUGH),--thorough); all=$$?; fi; \
	wait $$oldest; oldest=$$?; cat .cache/sqlalchemy-oldest.log; \
	wait $$lint; lint=$$?; cat .cache/lint.log; echo; \
	PYTHONPATH=tests/proof $(PY) -m harness.last_words $(LAST_WORDS); exit $$((all + oldest + lint))

lint: venv source ## style, format and the direction of imports
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	cd $(SOURCE) && $(CURDIR)/$(VENV)/bin/lint-imports --config $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.import_linter_cache

types: venv source ## mypy, strict
	cd $(SOURCE) && $(CURDIR)/$(VENV)/bin/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p dualwrite -p simulator

# Python 3.11 runs a traced callback for ever if two threads that have used greenlets end at once: coverage needs a newer one. The
# threshold is that of this version.
COVERAGE_PYTHON ?= 3.12
COVERED_BY := .cache/python-$(COVERAGE_PYTHON)
coverage: venv $(COVERED_BY)/.ready ## branches of the library that the tests without servers run; fails below the threshold in pyproject.toml
	$(COVERED_BY)/bin/python -m pytest -q -p no:cacheprovider -n $(PROCESSORS) --dist worksteal --cov --cov-report= tests/unit tests/proof/model
	$(COVERED_BY)/bin/python -m coverage report --skip-covered --sort=cover

# Each in a virtual environment of its own, made once for each change of what it installs.
PYTHONS ?= 3.10 3.12 3.13 3.14
UNIT ?= tests/unit
# Of the integration tests, what a user chooses together with a Python: a framework, and asyncpg.
WITH_PYTHON = $(patsubst %,tests/integration/test_%.py,quickstart asyncpg django django_app fastapi asgi_dependencies faststream)
pythons: venv ## the unit tests, conformance on SQLite and through asyncpg, the frameworks and the quickstart with each other supported Python (PYTHONS="3.12 3.14"; UNIT= without the unit tests)
	@failed=; for version in $(PYTHONS); do \
		made=.cache/python-$$version; echo "Python $$version"; $(BESIDE) $$made/.ready || exit; \
		if [ ! -e $$made/.ready ]; then echo "left out"; continue; fi; \
		$(if $(UNIT),$$made/bin/python -m pytest -q -p no:cacheprovider -n $(PROCESSORS) --dist worksteal $(UNIT) &&) \
		$$made/bin/python -m pytest -q -p no:cacheprovider -m "not mariadb" -k "sqlite or asyncpg" tests/conformance && \
		$$made/bin/python -m pytest -q -p no:cacheprovider $(WITH_PYTHON) || failed="$$failed $$version"; \
	done; if [ -n "$$failed" ]; then echo "failed with Python$$failed"; exit 1; fi

.cache/python-%/.ready: pyproject.toml constraints.txt
	@python=; for one in python$* $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$*.*/bin/python; do \
		if [ "$$($$one -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = $* ]; then python=$$one; break; fi; \
	done; \
	python=$${python:-$$(PYTHONPATH=tests/proof $(PY) -m harness.other_python $*)}; \
	if [ -z "$$python" ]; then echo "Python $* is not on this machine"; exit; fi; \
	$$python -m venv --clear $(@D) && \
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' && touch $@

spent: venv ## where the processor time of the last `make test` went, by file and by test
	@PYTHONPATH=tests/proof $(PY) -m harness.spent $(SPENT)

sqlalchemy-oldest: venv archive $(OLDEST) ## the store, migrations and sessions with the oldest supported SQLAlchemy (a minute; THOROUGH=1: every store, and dual writes)
	$(WITH_OLDEST)

# Both need other versions of what constraints.txt names.
ORCHESTRATORS := apache-airflow==3.3.2 dagster==1.13.29
orchestrators: venv ## the recipes for Airflow and Dagster, each in a virtual environment of its own (ten minutes the first time)
	@for package in $(ORCHESTRATORS); do \
		name=$${package%==*}; made=.cache/$${name#apache-}; \
		if [ "$$(cat $$made/.ready 2>/dev/null)" != $$package ]; then \
			$(PYTHON) -m venv --clear $$made && \
			$$made/bin/python -m pip install --quiet --disable-pip-version-check $$package "psycopg[binary]" -e . && \
			echo $$package >$$made/.ready || exit; \
		fi; \
	done
	@AIRFLOW_HOME=$(CURDIR)/.cache/airflow-home AIRFLOW__CORE__LOAD_EXAMPLES=False .cache/airflow/bin/airflow db migrate >.cache/airflow.log 2>&1 || \
		{ tail -n 20 .cache/airflow.log; exit 1; }
	$(PY) -m pytest -q -p no:cacheprovider tests/integration/test_orchestrators.py

$(OLDEST): $(READY)
	@rm -rf $(OLDEST) && $(PY) -m pip install --quiet --no-deps --disable-pip-version-check --target $(OLDEST) \
		SQLAlchemy==$(SQLALCHEMY_OLDEST) && touch $(OLDEST)

simulator: venv jars ## hold the simulated broker against a real one, at length (DEPTH=5 RANDOM=2000 SEED=1; VERSION=2: only transactions of version 2; KAFKA=4.4.0: only that broker)
	cd tests/proof && $(CURDIR)/$(PY) -m harness.compare_brokers --depth $(or $(DEPTH),5) --random $(or $(RANDOM),2000) --seed $(or $(SEED),1) \
		$(if $(VERSION),--version $(VERSION)) $(if $(KAFKA),--kafka $(KAFKA))

# The newest of each minor version that Maven serves whole. KAFKA_ONLY takes other tests.
KAFKA_VERSIONS ?= 4.0.2 4.1.2 4.2.2 4.3.1
brokers: venv jars ## both engines, KIP-939, the requests, dual writes and recovery on each other version of Apache Kafka, KAFKA-20734 on 4.3.1 (half an hour)
	$(PY) -m pytest -q -p no:cacheprovider --thorough tests/integration/test_kafka_versions.py
	@for version in $(KAFKA_VERSIONS); do \
		echo "Apache Kafka $$version"; DUALWRITE_KAFKA_VERSION=$$version $(PY) -m pytest -q -p no:cacheprovider \
		$(if $(ONLY),$(ONLY),tests/conformance/test_engines.py tests/conformance/test_kip_939.py tests/integration/test_native_settling.py \
			$$([ $$version != 4.3.1 ] || echo tests/integration/test_forgotten_markers.py)) || exit 1; \
	done

# Each fetched once by Maven; the usual ones, PostgreSQL 18 and MariaDB 11.4, run in `make test`.
DATABASES ?= postgresql-13 postgresql-14 postgresql-15 postgresql-16 postgresql-17 mariadb-10.11
databases: venv jars mariadb ## the conformance tests without Kafka on each other version of PostgreSQL and MariaDB (ten minutes; THOROUGH=1: with Kafka)
	@for server in $(DATABASES); do \
		echo "$$server"; PYTHONPATH=tests/proof $(PY) -m harness.other_databases $$server -q -p no:cacheprovider \
		$(if $(THOROUGH),,-m "not kafka") $(if $(ONLY),$(ONLY),tests/conformance) || failed="$$failed $$server"; \
	done; if [ -n "$$failed" ]; then echo "failed on$$failed"; exit 1; fi

# The newest of each minor version that is supported. (Older ones leave sockets to the garbage collector, which is no failure.)
SPARK_VERSIONS ?= 4.0.5 4.1.4 4.2.1 4.3.0
spark-versions: venv jars ## the tests of the sinks with every supported PySpark, each in a virtual environment of its own (an hour)
	@for version in $(SPARK_VERSIONS); do \
		echo "PySpark $$version"; made=$(CURDIR)/.cache/spark-$$version; \
		$(PYTHON) -m venv --clear $$made && \
		sed "s/^pyspark==.*/pyspark==$$version/" constraints.txt >$$made/constraints.txt && \
		$$made/bin/python -m pip install --quiet --disable-pip-version-check -c $$made/constraints.txt -e '.[dev]' && \
		$$made/bin/python -m pytest -n $(WORKERS) --dist worksteal -W ignore::pytest.PytestUnraisableExceptionWarning $(if $(ONLY),$(ONLY),tests/integration/test_spark_*.py) || exit 1; \
	done

bench: venv jars ## the figures of docs/benchmarks.md, interleaved (half an hour; ONLY=latency one part; SMALL=1 only tries everything once)
	PYTHONPATH=tests/proof $(PY) -m benchmarks $(if $(SMALL),--small) $(foreach part,$(ONLY),--only $(part))

bench-spark: venv jars ## the figures of Spark in docs/benchmarks.md, interleaved (hours; SMALL=1 only tries everything once)
	PYTHONPATH=tests/proof $(PY) -m benchmarks.spark $(if $(SMALL),--small) $(foreach part,$(ONLY),--only $(part)) \
		$(if $(ROUNDS),--rounds $(ROUNDS))

sizing: venv jars ## the arithmetic and the measurement of docs/sizing.md (10 minutes)
	PYTHONPATH=tests/proof $(PY) -m benchmarks.sizing $(if $(COUNTS),--counts $(COUNTS))

# How many processes are killed, what draws the plan, how many sets of servers work at once, with how many brokers each.
N ?= 500
SEED ?= 1
ARENAS ?= 1
BROKERS ?= 1
chaos: archive ## kill processes and servers and compare both sides: make chaos N=500 SEED=1 BROKERS=3 ENGINE=native OUTAGES=1 CONSUMERS=300 STATE=1000 or DATABASE=rocksdb (N=10000 on one broker: about an hour)
	cd tests/proof && $(CURDIR)/$(PY) -m chaos --kills $(N) --seed $(SEED) --arenas $(ARENAS) --brokers $(BROKERS) $(if $(DATABASE),--database $(DATABASE)) $(if $(OUTAGES),--outages) $(if $(CONSUMERS),--consumers $(CONSUMERS)) $(if $(STATE),--state $(STATE)) $(if $(ENGINE),--engine $(ENGINE)) $(if $(MISTAKE),--mistake $(MISTAKE))

chaos-spark: archive ## kill Spark's workers, deciding processes and drivers in every way of the sink: make chaos-spark N=500 SEED=1 (half an hour)
	cd tests/proof && $(CURDIR)/$(PY) -m chaos.spark --kills $(N) --seed $(SEED) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(ONLY),--only '$(ONLY)') $(if $(MISTAKE),--mistake $(MISTAKE)) $(if $(KEEP),--keep)

units: archive ## kill writers of units, and look at what readers see: make units N=300 SEED=1 ENGINE=native (five minutes)
	cd tests/proof && $(CURDIR)/$(PY) -m chaos.units --kills $(N) --seed $(SEED) $(if $(ENGINE),--engine $(ENGINE)) $(if $(MISTAKE),--mistake $(MISTAKE)) $(if $(KEEP),--keep)

search: venv ## every interleaving within bounds, by the product's own decisions; writes docs/proof-search.md (an hour; WALKS=100000 SEED=0 JOBS=1: random ways beyond them)
	cd tests/proof && $(CURDIR)/$(PY) -m $(if $(WALKS),search.waiting.walks --ways $(WALKS) --seed $(SEED) --jobs $(or $(JOBS),1),search $(ONLY) $(if $(MINUTES),--minutes $(MINUTES)))

# In the order of their seeds; MISTAKE=name plants one.
model: venv ## random schedules of crashes and faults on the simulator: make model N=1000000 SEED=0 JOBS=1 (40 minutes); UNITS=4000: of units
	$(if $(UNITS),UNIT_SCHEDULES=$(UNITS) $(PY) -m pytest --thorough -n $(or $(JOBS),1) -rP --show-capture=stdout -k many_schedules tests/unit/units,cd tests/proof && $(CURDIR)/$(PY) -m model --schedules $(N) --seed $(SEED) --jobs $(or $(JOBS),1) \
		$(if $(MISTAKE),--mistake $(MISTAKE)) --results $(CURDIR)/.cache/model/seed-$(SEED)$(if $(MISTAKE),-$(MISTAKE)).json)

tasks: venv ## random schedules of the tasks of an event loop, cancelled anywhere, on SQLite: make tasks N=10000 SEED=0 (20 minutes; KEEP=1 for the page)
	cd tests/proof && $(CURDIR)/$(PY) -m model.tasks --schedules $(N) --seed $(SEED) $(if $(MISTAKE),--mistake $(MISTAKE)) $(if $(KEEP),--keep)

SEEDS ?= 2
LATE ?= 10
faults: venv jars ## lose, delay, repeat and cut every request at every stage: make faults SEEDS=2 ENGINE=native (SEEDS=20 LATE=110: an hour)
	cd tests/proof && $(CURDIR)/$(PY) -m faults --seeds $(SEEDS) --late $(LATE) $(if $(ENGINE),--engine $(ENGINE)) $(if $(LOG),--log $(abspath $(LOG)))

scenarios: venv jars ## every scenario of tests/scenarios through both engines, on real servers (a quarter of an hour)
	$(PY) -m pytest --thorough tests/scenarios

controls: archive ## plant protocol mistakes in the product: the checks must catch every one (forty minutes)
	cd tests/proof && $(CURDIR)/$(PY) -m controls

reason: venv jars ## the table of docs/why.md: other ways to write to both sides, killed at each of their steps: make reason RUNS=25 SEED=1 (twenty minutes)
	cd tests/proof && $(CURDIR)/$(PY) -m controls.reason --runs $(or $(RUNS),25) --seed $(SEED)

SITE ?= docs/_build/site
docs: venv ## the documentation, into docs/_build/site/<version> beside other versions (SITE=directory), with Markdown of each page and llms.txt
	$(PY) docs/versions.py $(SITE) -W --keep-going

pictures: venv ## the drawings of the documentation, by docs/pictures.py (the state diagrams with Graphviz)
	$(PY) docs/pictures.py

screenshots: venv ## the pictures of the page in docs/serve.md, taken in a headless Chromium (a minute)
	DUALWRITE_SCREENSHOTS=$(CURDIR)/docs/images $(PY) -m pytest -q -p no:cacheprovider tests/integration/test_serve_browser.py

servers-up: venv ## start Kafka and PostgreSQL in the background and print the environment: eval "$(make -s servers-up)"
	@$(PY) -m dualwrite.testing.servers up

servers-down: venv ## stop what servers-up started, and delete its data
	@$(PY) -m dualwrite.testing.servers down

clean: ## delete everything that was made, the virtual environment too
	@if [ -x $(PY) ] && [ -f .cache/servers/state.json ]; then $(PY) -m dualwrite.testing.servers down; fi
	rm -rf $(VENV) .cache build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis \
		.coverage docs/_build spark-warehouse metastore_db derby.log
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "making $(VENV) with all dependencies (Spark and Sphinx too), once" >&2
	$(PYTHON) -m venv --clear $(VENV) >&2
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' >&2
	@mkdir -p .cache && touch $(READY)

# The source tree as it is imported: sinks and migrations stand beside dualwrite, and are installed below it.
source:
	@rm -rf $(SOURCE) && mkdir -p $(SOURCE)/dualwrite/sinks
	@ln -s $(CURDIR)/dualwrite/* $(CURDIR)/migrations $(SOURCE)/dualwrite/
	@ln -s $(filter-out %/spark_discovery,$(wildcard $(CURDIR)/sinks/*)) $(SOURCE)/dualwrite/sinks/
	@ln -s $(CURDIR)/sinks/spark_discovery $(SOURCE)/pyspark_dualwrite
	@ln -s $(CURDIR)/tests/proof/simulator $(SOURCE)/simulator

# Brokers and Spark start with half the work from then on.
archive: jars
	@cd tests/proof && $(CURDIR)/$(PY) -m harness.class_archive && $(CURDIR)/$(PY) -m harness.spark_archive

jars: venv
	@$(PY) -c 'from dualwrite.testing.servers.embedded import kafka_jars; kafka_jars()'

# Where Maven serves it; elsewhere its tests need an installed one.
mariadb: venv
	@$(PY) -c 'from dualwrite.testing.servers.databases import fetched_mariadb, is_fetched; is_fetched() and fetched_mariadb()'
