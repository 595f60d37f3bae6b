# Targets for people: `make quickstart`, `make test`, `make gpu`. Everything is installed into .venv.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SIMD   ?= .venv-simd
TWO    := --numprocesses 2 --dist worksteal

.PHONY: quickstart test test-simd gpu lint clean

# Set up once; again when the dependencies change.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dali,gpu]'
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dali,gpu,test]'
	touch $@

# Pillow-SIMD, in front of all that .venv holds: nothing else is installed twice.
$(SIMD)/.installed: $(VENV)/.installed-test
	$(PYTHON) -m venv $(SIMD)
	$(SIMD)/bin/python -m pip install --quiet --no-deps pillow-simd
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(SIMD)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	$(SIMD)/bin/python -c 'from precache import codecs; assert codecs.pillow_is_simd(), codecs.made_by()'
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/bench quickstart

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(TWO)

# The tests that look at pixels. Skipped where Pillow-SIMD cannot be compiled; any other failure fails.
test-simd: $(VENV)/.installed-test
	@if $(MAKE) --no-print-directory $(SIMD)/.installed; \
	then $(SIMD)/bin/python -m pytest $(TWO) tests/precache tests/loaders/test_backends.py tests/loaders/test_skipping.py tests/test_realdata.py; \
	else echo "SKIPPED: Pillow-SIMD cannot be installed here; it needs a C compiler and the headers of libjpeg and zlib"; fi

# On a machine with an NVIDIA GPU: all that is to be measured there. Once .venv is set up it needs no network.
gpu: $(VENV)/.installed-test
	$(BIN)/bench evidence

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(SIMD) build *.egg-info data/quickstart
