"""Builds of wheels: native kernels for the x86-64 levels v3 and v4 where a C compiler is.

A wheel with kernels is for Linux on x86-64 and any Python 3 (py3-none-linux_x86_64); without them it is for every
system (py3-none-any), and its kernels are compiled at their first use.
"""

import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "src"))  # these modules import the standard library alone
from quire.kernels.native.build import CannotBuild  # noqa: E402
from quire.kernels.native.levels import make  # noqa: E402

PREBUILT = Path("quire", "kernels", "native", "prebuilt")


class BuildPackage(build_py):
    """Copies the package into an empty folder, and compiles its kernels there; an editable build does neither."""

    def run(self) -> None:
        """Build the package. An earlier build may have left modules that are gone."""
        if self.editable_mode:
            super().run()
            return
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        try:
            made = make(Path(self.build_lib) / PREBUILT)
            print("native kernels in the wheel:", ", ".join(path.name for path in made))
        except CannotBuild as reason:
            shutil.rmtree(Path(self.build_lib) / PREBUILT)
            print(f"no native kernels in the wheel, they are compiled at their first use: {reason}")


class BuildWheel(bdist_wheel):
    """Makes the wheel, with a tag that follows from what was built."""

    def run(self) -> None:
        """Build the package first: only then is it known whether there are kernels."""
        self.run_command("build")
        self.skip_build = True
        self.root_is_pure = not (Path(self.get_finalized_command("build").build_lib) / PREBUILT).exists()
        self.distribution.has_ext_modules = lambda: not self.root_is_pure  # where the package lies in the wheel
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Return Python, ABI and platform: the kernels are called through ctypes, so any Python 3 can."""
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildPackage, "bdist_wheel": BuildWheel})
