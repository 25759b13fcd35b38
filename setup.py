"""Puts what lies beside the package into a wheel: gin/, evals/ and scripts/ become exgrpo_orlhf/project/.

An editable installation finds them in the checkout. Everything else is in pyproject.toml.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithProject(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        project = Path(self.build_lib, "exgrpo_orlhf", "project")
        shutil.rmtree(project, ignore_errors=True)  # of an earlier build
        for folder in ("gin", "evals", "scripts"):
            shutil.copytree(folder, project / folder, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithProject})
