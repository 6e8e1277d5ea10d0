# make demo    watch and disturb a live training job on this host (root; about 3 minutes after the first set-up)
# make test    lint, then every test (root for those that need the kernel)
# make lint    ruff, mypy, import-linter, promtool, and whether the API keeps what was released
# make bench   the measurements of docs/performance, printed as tables
# make install put the daemon, its unit, user, settings, manual pages and completions on this host (PREFIX), or below DESTDIR for a package
# make proto   generate the Python of api/node.proto
# make clean   remove what these targets made
#
# demo, test, lint and bench first run tools/setup.sh: it installs what is missing and says so.
SHELL := /bin/sh
PYTHON := .venv/bin/python
PREFIX ?= /opt/singularityd
BINDIR ?= /usr/local/bin
DATADIR ?= /usr/local/share
MANDIR ?= $(DATADIR)/man
CONFDIR ?= /etc/singularityd
UNITDIR ?= /etc/systemd/system
SYSUSERSDIR ?= /etc/sysusers.d
TMPFILESDIR ?= /etc/tmpfiles.d
INSTALL_PYTHON ?= $(DESTDIR)$(PREFIX)/venv/bin/python

.PHONY: demo test lint bench install install-venv install-files proto clean setup-demo setup-test
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

# DESTDIR is the root of a package that is being made; then nothing of this host is touched.
install: install-venv install-files
ifeq ($(DESTDIR),)
	systemd-sysusers $(SYSUSERSDIR)/singularityd.conf
	systemd-tmpfiles --create $(TMPFILESDIR)/singularityd.conf
	if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
	@echo 'Installed. Needed at run time: python3-bpfcc and kernel headers (singularityctl doctor tells). Start: systemctl enable --now singularityd'
endif

# Scripts name their interpreter by its path, which is without DESTDIR where they run.
install-venv:
	python3 -m venv $(DESTDIR)$(PREFIX)/venv
	$(DESTDIR)$(PREFIX)/venv/bin/python -m pip install --quiet .
ifneq ($(DESTDIR),)
	grep -rlI '$(DESTDIR)' $(DESTDIR)$(PREFIX)/venv/bin $(DESTDIR)$(PREFIX)/venv/pyvenv.cfg | xargs -r sed -i 's|$(DESTDIR)||g'
endif

# config.toml is the administrator's once it is there; the defaults of a later release are in the examples.
install-files:
	rm -rf build/manual
	$(INSTALL_PYTHON) tools/manual.py build/manual
	install -d $(DESTDIR)$(BINDIR) $(DESTDIR)$(CONFDIR)/conf.d
	ln -sfn $(PREFIX)/venv/bin/singularityd $(DESTDIR)$(BINDIR)/singularityd
	ln -sfn $(PREFIX)/venv/bin/singularityctl $(DESTDIR)$(BINDIR)/singularityctl
	install -D -m 644 systemd/singularityd.sysusers $(DESTDIR)$(SYSUSERSDIR)/singularityd.conf
	install -D -m 644 systemd/singularityd.tmpfiles $(DESTDIR)$(TMPFILESDIR)/singularityd.conf
	install -D -m 644 systemd/singularityd.service $(DESTDIR)$(UNITDIR)/singularityd.service
	sed -i 's|/opt/singularityd|$(PREFIX)|g' $(DESTDIR)$(UNITDIR)/singularityd.service
	test -e $(DESTDIR)$(CONFDIR)/config.toml || install -m 644 systemd/config.toml $(DESTDIR)$(CONFDIR)/config.toml
	install -d $(DESTDIR)$(DATADIR)/doc/singularityd/examples
	install -m 644 systemd/examples/* systemd/config.toml $(DESTDIR)$(DATADIR)/doc/singularityd/examples
	for section in 1 5 8; do install -d $(DESTDIR)$(MANDIR)/man$$section \
	    && install -m 644 build/manual/man$$section/* $(DESTDIR)$(MANDIR)/man$$section || exit 1; done
	install -d $(DESTDIR)$(DATADIR)/bash-completion/completions $(DESTDIR)$(DATADIR)/zsh/site-functions $(DESTDIR)$(DATADIR)/fish/vendor_completions.d
	install -m 644 build/manual/bash/* $(DESTDIR)$(DATADIR)/bash-completion/completions
	install -m 644 build/manual/zsh/* $(DESTDIR)$(DATADIR)/zsh/site-functions
	install -m 644 build/manual/fish/* $(DESTDIR)$(DATADIR)/fish/vendor_completions.d

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
