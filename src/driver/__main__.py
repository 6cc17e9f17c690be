# SPDX-License-Identifier: Apache-2.0
"""``python -m driver`` is the ``dracpu`` command."""

import sys

from driver.cli import main

sys.exit(main())
