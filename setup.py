"""Puts what lies beside the package into a wheel: gin/, evals/ and scripts/ become exgrpo_orlhf/project/.

An editable installation finds them in the checkout. Everything else is in pyproject.toml.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithProject(build_py):
    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        package = Path(self.build_lib, "exgrpo_orlhf")
        shutil.rmtree(package, ignore_errors=True)  # an earlier build may hold modules that are gone
        super().run()
        for folder in ("gin", "evals", "scripts"):
            shutil.copytree(folder, package / "project" / folder, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithProject})
