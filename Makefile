# Targets for people: `make quickstart`, `make test`, `make gpu`. Everything is installed into .venv.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STOCK  ?= .venv-pillow
FRAMEWORKS ?= .venv-frameworks
SIMD   ?= yes
TWO    := --numprocesses 2 --dist worksteal

.PHONY: quickstart notebook test test-pillow test-frameworks gpu lint wheel clean

# Pillow-SIMD in the place of Pillow, by `pillow_install_command`: both provide the package PIL. It comes last,
# because pip puts Pillow back whenever it installs something that asks for it.
define PILLOW_SIMD
@put() { \
	line=$$($(BIN)/python -c "from precache.packages import pillow_install_command; print(pillow_install_command('$$1'))") \
		&& sh -c "$$line" >$(VENV)/$$1.log 2>&1; \
}; \
if test "$(SIMD)" = no; then put pillow && echo "Pillow is installed, as SIMD=no asks for."; \
elif put pillow-simd && $(BIN)/python -c '$(IS_SIMD)' 2>>$(VENV)/pillow-simd.log; \
then echo "Pillow-SIMD is installed: it resizes faster than Pillow. 'make SIMD=no' installs Pillow instead."; \
	lost=$$($(BIN)/python -c '$(KINDS_LOST)'); \
	test -z "$$lost" || echo "It was compiled without the headers for $$lost: programs run with $(BIN)/python cannot open these." \
		"On Debian and Ubuntu, 'sudo apt-get install $$($(BIN)/python -c '$(HEADERS)' "$$lost") && make -B $(VENV)/.installed'" \
		"repairs that (AVIF needs libavif 1.0 or newer); 'make -B SIMD=no $(VENV)/.installed' installs Pillow instead."; \
	$(BIN)/python -m precache --version; \
else put pillow \
	&& echo "Pillow is installed: Pillow-SIMD, which resizes faster, cannot be compiled here. It needs a C compiler" \
		"and the headers of libjpeg and zlib; $(VENV)/pillow-simd.log says what is missing."; \
fi
endef
KINDS_LOST := from precache.pictures import kinds; print(", ".join(kinds.kinds_not_built_in()))
HEADERS := import sys; PACKAGES = {"AVIF": "libavif-dev", "JPEG2000": "libopenjp2-7-dev", \
	"compressed TIFF": "libtiff-dev", "WEBP": "libwebp-dev"}; \
	print(*[package for kind, package in PACKAGES.items() if kind in sys.argv[1]])
IS_SIMD := from PIL import Image; Image.new("RGB", (9, 9)).resize((5, 5), 2); \
	from precache.pictures import kinds; assert kinds.pillow_is_simd(), kinds.decoder_versions()

# Set up once; again when the dependencies change.
$(VENV)/.installed: pyproject.toml
	@echo "setting up $(VENV): some 3 GB to download, a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[all]'
	$(PILLOW_SIMD)
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[all,test]'
	$(PILLOW_SIMD)
	touch $@

# An environment in front of all that .venv holds: nothing that is there is installed twice.
define LAID_OVER
$(PYTHON) -m venv $(1)
$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	> "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
endef

$(STOCK)/.installed: $(VENV)/.installed-test
	$(call LAID_OVER,$(STOCK))
	$(STOCK)/bin/python -m pip install --quiet --no-deps 'pillow>=10.1'
	$(STOCK)/bin/python -c 'from precache.pictures import kinds; assert not kinds.pillow_is_simd(), kinds.decoder_versions()'
	touch $@

# timm and Hugging Face's datasets. pip puts Pillow in front of Pillow-SIMD, so it goes again.
$(FRAMEWORKS)/.installed: $(VENV)/.installed-test
	$(call LAID_OVER,$(FRAMEWORKS))
	$(FRAMEWORKS)/bin/python -m pip install --quiet --editable '.[frameworks]'
	$(FRAMEWORKS)/bin/python -m pip uninstall --quiet --yes pillow
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/bench quickstart

NOTEBOOK := bench/caltech256.ipynb

# Runs the notebook on the pictures in data/raw, which torchvision downloads if need be, and saves it with its outputs;
# as it was where a cell fails.
notebook: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[all,notebook]'
	$(PILLOW_SIMD)
	$(BIN)/jupyter nbconvert --to notebook --execute --stdin --stdout --ExecutePreprocessor.record_timing=False \
		<$(NOTEBOOK) >$(NOTEBOOK).partial && mv $(NOTEBOOK).partial $(NOTEBOOK) \
		|| { rm -f $(NOTEBOOK).partial; exit 1; }

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(TWO)

OF_PIXELS := tests/precache/pictures tests/precache/conversion/test_convert.py tests/precache/conversion/test_copied.py \
	tests/precache/test_formats.py tests/precache/test_pillow.py \
	tests/loaders/test_backends.py tests/loaders/test_skipping.py tests/test_realdata.py

# The tests that look at pixels, again under stock Pillow; where that is what .venv has, `make test` has done it.
test-pillow: $(VENV)/.installed-test
	@if $(BIN)/python -c '$(IS_SIMD)' 2>/dev/null; \
	then $(MAKE) --no-print-directory $(STOCK)/.installed \
		&& $(STOCK)/bin/python -m pytest $(TWO) $(OF_PIXELS); \
	else echo "SKIPPED: $(VENV) has stock Pillow already, so 'make test' covers it"; fi

# The tests that need timm or Hugging Face's datasets, which `make test` skips.
test-frameworks: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python -m pytest $(TWO) tests/loaders/examples tests/loaders/test_frameworks.py tests/precache/sources/test_hf.py tests/precache/sources/test_sources.py

# On a machine with an NVIDIA GPU: all that is to be measured there, or STEPS="resnet50 vit". Once .venv is set up it
# needs no network.
gpu: $(VENV)/.installed-test
	PYTHON=$(BIN)/python bash bench/gpu.sh $(STEPS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/loaders/typed_calls.py

# dist/precache-VERSION-py3-none-any.whl, for `pip install 'WHEEL[bench]'` anywhere. Setuptools would put into it what an
# earlier build has left in build/.
wheel:
	rm -rf build
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	rm -rf build

clean:
	rm -rf $(VENV) $(STOCK) $(FRAMEWORKS) build dist *.egg-info data/quickstart
