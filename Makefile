# Short names for what contributors and CI run; `make -k lint` reports every failure.
# The tools come from PATH: pip install -e '.[dev,megatron]'. `make test` needs no environment.

.PHONY: lint ruff mypy codespell shellcheck test-fast test nightly

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

nightly:
	scripts/test.sh --all
