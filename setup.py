"""Thin on purpose: everything but one step is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPatches(build_py):
    """Puts ``patches/`` into the built package, where ``megatron_ext.patching`` looks first.

    In the repository the folder lies beside the package, because it is for people too; setuptools
    has no setting for data from outside a package.
    """

    def run(self) -> None:
        """Build as always, then copy; an editable installation finds the folder where it is."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "megatron_ext" / "patches"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("patches", target)


setup(cmdclass={"build_py": BuildWithPatches})
