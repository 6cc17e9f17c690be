# SPDX-License-Identifier: Apache-2.0
"""Another package that uses fastcpu's C interface, built against the installed wheel."""

from Cython.Build import cythonize
from setuptools import setup

setup(name="consumer", ext_modules=cythonize("consumer.pyx", quiet=True))
