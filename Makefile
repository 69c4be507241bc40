# Short names for what contributors and CI run; `make -k lint` reports every failure.
# The tools come from PATH: pip install -e '.[dev,megatron]'. `make test` needs no environment.

.PHONY: lint ruff mypy codespell shellcheck test-fast test nightly docs reference

lint: ruff mypy codespell shellcheck

ruff:
	ruff check .
	ruff format --check .

mypy:
	mypy

codespell:
	codespell

shellcheck:
	shellcheck --external-sources scripts/*.sh scripts/slurm/* .ci/run

test-fast:
	pytest -m unit

test:
	scripts/test.sh

# First the run that has a limit of processor time: searches of the second are full.
nightly:
	scripts/test.sh --processor-budget=1800
	scripts/test.sh --all

# Docstrings and signatures as HTML, in build/api/index.html: pip install -e '.[docs]', and torch.
INTERNAL := __main__ launch integration runtime cpu prove commands checkpoints
docs:
	python -m pdoc --output-directory build/api \
		megatron_ext $(addprefix megatron_ext.,schedule offload moe plan view) \
		$(addprefix '!megatron_ext.,$(addsuffix ',$(INTERNAL)))


# The page that code writes: docs/reference/flags.md. Needs torch.
reference:
	python -m scripts.reference_pages
