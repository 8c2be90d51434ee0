"""Whether the tests see mistakes: `python -m tools.mutation` makes some and runs them.

In:  the repository. Out: docs/results/mutation.json, and the survivors on the terminal.
"""

from __future__ import annotations
