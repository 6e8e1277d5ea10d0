# make demo    watch and disturb a live training job on this host (root; about 3 minutes after the first set-up)
# make test    lint, then every test (root for those that need the kernel)
# make lint    ruff, mypy, import-linter, promtool, and whether the API keeps what was released
# make bench   the measurements of docs/performance, printed as tables
# make install put the daemon, its unit and its user on this host, under PREFIX
# make proto   generate the Python of api/node.proto
# make clean   remove what these targets made
#
# demo, test, lint and bench first run tools/setup.sh: it installs what is missing and says so.
SHELL := /bin/sh
PYTHON := .venv/bin/python
PREFIX ?= /opt/singularityd
BINDIR ?= /usr/local/bin
UNITDIR ?= /etc/systemd/system

.PHONY: demo test lint bench install proto clean setup-demo setup-test
.DEFAULT_GOAL := test

setup-demo setup-test:
	@tools/setup.sh $(@:setup-%=%)

demo: setup-demo
	@$(PYTHON) demo/run.py

test: lint
	$(PYTHON) -m pytest tests

lint: setup-test
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	.venv/bin/lint-imports --no-logo
	promtool check metrics < tests/data/metrics.golden
	$(PYTHON) tools/compat.py

bench: setup-test
	$(PYTHON) -m bench

proto: setup-test
	$(PYTHON) tools/proto.py

install:
	python3 -m venv $(PREFIX)/venv
	$(PREFIX)/venv/bin/python -m pip install --quiet .
	install -d $(BINDIR) $(UNITDIR) /etc/sysusers.d /etc/tmpfiles.d
	ln -sf $(PREFIX)/venv/bin/singularityd $(PREFIX)/venv/bin/singularityctl $(BINDIR)/
	install -m 644 systemd/singularityd.sysusers /etc/sysusers.d/singularityd.conf
	install -m 644 systemd/singularityd.tmpfiles /etc/tmpfiles.d/singularityd.conf
	sed 's|/opt/singularityd|$(PREFIX)|g' systemd/singularityd.service > $(UNITDIR)/singularityd.service
	systemd-sysusers /etc/sysusers.d/singularityd.conf
	systemd-tmpfiles --create /etc/tmpfiles.d/singularityd.conf
	if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
	@echo 'Installed. Needed at run time: python3-bpfcc and kernel headers (singularityctl doctor tells). Start: systemctl enable --now singularityd'

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
